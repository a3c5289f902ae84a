-- Heartbeat: restart the time-out of these deliveries; their receipt stays valid.
--
-- KEYS[1] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[2] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[3] stats     HASH  counter -> n
-- KEYS[4] control   HASH  field -> value
--
-- ARGV[1] receipt
-- ARGV[2...] members
-- ARGV[#ARGV] now
--
-- Returns {'ok'} if every receipt was valid and nothing is cancelled, else a word for each member:
-- ok | cancelled | stale

-- check: types
if last < first then return {} end
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
-- include: _now
-- include: _ledger
-- include: _retries.shortened_by
local records = redis.call('HMGET', inflight, unpack(ARGV, first, last))
local present = redis.call('ZMSCORE', prepare, unpack(ARGV, first, last))
local prefix, words, flat, plain, timeout = receipt .. ' ', {}, {}, 0, nil
for i = 1, #records do
  local score = tonumber(present[i])
  if records[i] and score and string.sub(records[i], 1, #prefix) == prefix then -- rule: extend_anyone
    words[i] = string.find(records[i], ' cancelled', #prefix + 1, true) and 'cancelled' or 'ok' -- rule: extend_keeps_quiet
    if words[i] == 'ok' then plain = plain + 1 end
    local since, is_limited = now_s, string.find(records[i], ':', #prefix, true)
    if is_limited then -- rule: extended_to_the_topic
      timeout = timeout or tonumber(redis.call('HGET', control, 'timeout') or 0)
      since = now_s - shortened_by(records[i], timeout)
    end
    flat[#flat + 1] = string.format('%.0f', since * 1000 + math.floor(score % 1000)) -- rule: extend_gives_retries
    flat[#flat + 1] = ARGV[first + i - 1]
  else
    words[i] = 'stale'
    count('stale')
  end
end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '') -- rule: extend_needs_memory
if #flat > 0 then redis.call('ZADD', prepare, unpack(flat)) end
keep_counts()
if plain == #records then return { 'ok' } end
return words
