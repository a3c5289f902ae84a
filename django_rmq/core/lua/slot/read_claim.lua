-- Read the state of a consumer's newest claim, and the rows of a sealed one: the same however often it is read.
-- Changes nothing.
--
-- KEYS[1] claim       ZSET  member -> score it was taken with
-- KEYS[2] claims      HASH  Spark consumer -> "number state ms"
-- KEYS[3] claim_body  HASH  member -> envelope
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim; 0: whichever is the newest
-- ARGV[3] offset NUMBER  rank to begin at
-- ARGV[4] limit NUMBER   0: look at its state only
-- ARGV[5] now
--
-- Returns {state, number, size, {member, score, ...}, {envelope, ...}}
--         state: open | sealed | acked | lost | returned | none; size and rows of another claim are never returned

-- check: types
limit = math.min(limit, 1000)
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
newest, state = tonumber(newest) or 0, state or 'none'
if number > 0 and number ~= newest then return { 'none', newest, 0, {}, {} } end -- rule: read_of_another
if state ~= 'open' and state ~= 'sealed' then return { state, newest, 0, {}, {} } end -- rule: read_of_the_lost
local rows, envelopes = {}, {}
-- rule: read_of_the_open
if state == 'sealed' and limit > 0 then rows = redis.call('ZRANGE', claim, offset, offset + limit - 1, 'WITHSCORES') end
if #rows > 0 and redis.call('HLEN', claim_body) > 0 then
  local members = {}
  for i = 1, #rows, 2 do
    members[#members + 1] = rows[i]
  end
  envelopes = redis.call('HMGET', claim_body, unpack(members))
end
return { state, newest, redis.call('ZCARD', claim), rows, envelopes }
