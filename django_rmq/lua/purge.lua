-- Delete what waits, rests or is dead, oldest first; never what is in flight.
--
-- KEYS[1] set       ZSET  the state's: store, retry or dead
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] deaths    HASH  member -> death
-- KEYS[4] failures  HASH  member -> last failure
-- KEYS[5] body      HASH  member -> envelope
-- KEYS[6] stats     HASH  counter -> n
-- KEYS[7] control   HASH  field -> value
--
-- ARGV[1] state   store, retry or dead
-- ARGV[2] up_to   only scores up to this; +inf: all
-- ARGV[3] limit
-- ARGV[4] now
--
-- Returns how many are gone
local set, prepare, deaths, failures, body, stats, control = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local state, up_to, limit, now = ARGV[1], ARGV[2], math.min(tonumber(ARGV[3]), 3000), ARGV[4]
-- include: _types
local wrong = mistyped('zset', set, prepare) or mistyped('hash', deaths, failures, body, stats, control)
if wrong then return wrong end
-- include: _ledger
local members = redis.call('ZRANGEBYSCORE', set, '-inf', up_to, 'LIMIT', 0, limit)
if #members == 0 then return 0 end
redis.call('ZREM', set, unpack(members))
if state == 'dead' then
  redis.call('HDEL', deaths, unpack(members))
  count('purged_dead', #members)
else
  local running, gone = redis.call('ZMSCORE', prepare, unpack(members)), {}
  for i, member in ipairs(members) do
    if not running[i] then gone[#gone + 1] = member end
  end
  if #gone > 0 then
    redis.call('HDEL', failures, unpack(gone))
    redis.call('HDEL', body, unpack(gone))
  end
  count('purged', #members)
end
keep_counts()
return #members
