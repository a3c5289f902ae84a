-- Return messages whose back-off has ended to Store.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] retry     ZSET  member -> ms + retries/1024
-- KEYS[3] failures  HASH  member -> last failure
-- KEYS[4] stats     HASH  counter -> n
-- KEYS[5] control   HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] retry_priority  original or lowest
-- ARGV[4] max_retries     the topic's, until the slot has its own
-- ARGV[5] limit NUMBER
-- ARGV[6] now
--
-- Returns how many came back

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or max_retries), known[3]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.retry_score
-- include: _ledger
-- include: _sleep.wake
-- include: _retries.promote_due
-- include: _priority_notes.note_undrained
redis.call('HDEL', control, '')
local promoted = promote_due(limit)
if promoted > 0 then
  note_undrained()
  wake(now_ms) -- rule: promote_wakes_nobody
end
keep_counts()
return promoted
