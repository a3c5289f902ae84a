-- Return to Store what has rested long enough.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] retry     ZSET  member -> ms + retries/1024
-- KEYS[3] failures  HASH  member -> last failure
-- KEYS[4] stats     HASH  counter -> n
-- KEYS[5] control   HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] kind
-- ARGV[3] retry_priority  original or lowest
-- ARGV[4] max_retries     the topic's, until the slot has its own
-- ARGV[5] limit
-- ARGV[6] now
--
-- Returns how many came back
local store, retry, failures, stats, control = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local channel, kind, retry_priority = ARGV[1], ARGV[2], ARGV[3]
local limit, now = math.min(tonumber(ARGV[5]), 1000), ARGV[6]
-- include: _types
local wrong = mistyped('zset', store, retry) or mistyped('hash', failures, stats, control)
if wrong then return wrong end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or ARGV[4]), known[3]
-- include: _now
-- include: _retries
-- include: _ledger
-- include: _wake
-- include: _promote
-- include: _undrained
redis.call('HDEL', control, '')
local promoted = promote_due(limit)
if promoted > 0 then
  note_undrained()
  wake(now_ms)
end
keep_counts()
return promoted
