-- Delete the messages of a sealed claim, because Spark has recorded the batch that read it.
--
-- KEYS[1] store       ZSET  member -> due ms, or priority
-- KEYS[2] prepare     ZSET  member -> seconds*1000 + retries left
-- KEYS[3] failures    HASH  member -> last failure
-- KEYS[4] stats       HASH  counter -> n
-- KEYS[5] control     HASH  field -> value
-- KEYS[6] retry       ZSET  member -> ms + retries/1024
-- KEYS[7] claimants   ZSET  Spark consumer -> ms when its lease ends
-- KEYS[8] claim       ZSET  member -> score it was taken with
-- KEYS[9] claims      HASH  Spark consumer -> "number state ms"
-- KEYS[10] claim_body HASH  member -> envelope
--
-- ARGV[1] channel
-- ARGV[2] room NUMBER    others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] kind
-- ARGV[4] consumer
-- ARGV[5] number NUMBER  of the claim
-- ARGV[6] limit NUMBER   messages at most, if the failures of each have to be deleted
-- ARGV[7] now
--
-- Returns {word, left in the claim}   word: ok (ask again while something is left) | open (not sealed: give it back)
--                                         | stale (the claim is lost, or was never there)

-- check: types
limit = math.min(limit, 1000)
local sleeping_until = redis.call('HGET', control, 'sleeping_until')
-- include: _now
-- include: _ledger
-- include: _wake
-- include: _tidy
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
local newest, state = newest_claim(consumer)
local left = 0
if number ~= newest or not (state == 'open' or state == 'sealed' or state == 'acked') then -- rule: ack_of_the_lost
  count('stale')
  keep_counts()
  return { 'stale', 0 }
end
if state == 'open' then return { 'open', redis.call('ZCARD', claim) } end -- rule: ack_without_a_seal
if redis.call('ZSCORE', claimants, consumer) then
  if state == 'sealed' then note_claim(consumer, number, 'acked') end -- rule: ack_is_not_noted
  forget_claimed(limit)
  left = close_claim(consumer)
  -- rule: ack_wakes_nobody
  if left == 0 and tonumber(sleeping_until) == GATE and redis.call('ZCARD', prepare) < room then wake(0) end
end
keep_counts()
return { 'ok', left }
