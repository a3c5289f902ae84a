-- Phase two, failure: back to Store, to Retry or to Dead, for deliveries whose receipt the caller still holds.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] dead      ZSET  member -> ms of death
-- KEYS[5] deaths    HASH  member -> death
-- KEYS[6] failures  HASH  member -> last failure
-- KEYS[7] body      HASH  member -> envelope
-- KEYS[8] stats     HASH  counter -> n
-- KEYS[9] control   HASH  field -> value
-- KEYS[10] retry    ZSET  member -> ms + retries/1024
-- KEYS[11] prepare_body HASH  member in flight -> envelope
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] receipt
-- ARGV[5] retry_priority       original or lowest
-- ARGV[6] backoff_base NUMBER  ms
-- ARGV[7] backoff_cap NUMBER   ms
-- ARGV[8...] failures          member, what (failed, undecodable, timed_out, overran, cancelled, rejected), delay ms or
--                            empty, error
-- ARGV[#ARGV] now
--
-- Returns a word for each member: ok | cancelled (the delivery was cancelled meanwhile, and ended so) | stale

-- check: types
if (last - first + 1) / 4 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or 16), known[3]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _priority_notes.note_undrained
local prefix, words, earliest, ended = receipt .. ' ', {}, math.huge, false
for i = first, last, 4 do
  local member, what, delay, text = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local record, score = redis.call('HGET', inflight, member), redis.call('ZSCORE', prepare, member)
  if record and score and string.sub(record, 1, #prefix) == prefix then -- rule: rollback_anyone
    local left = bounded(math.floor(tonumber(score) % 1000), 0, max_retries)
    -- At most 139 years, so that the score in Retry has room for the retries left.
    if delay then delay = bounded(math.floor(delay), 0, 4398046511104) end -- rule: rollback_delay_unbounded
    earliest = math.min(earliest, end_failed(member, left, record, what, text, delay, #words) or math.huge)
    -- rule: rollback_keeps_quiet
    words[#words + 1] = string.find(record, ' cancelled', #prefix + 1, true) and 'cancelled' or 'ok'
    ended = true
  else
    -- The delivery timed out, or the reply to an earlier call was lost. A newer delivery of the message may run now.
    words[#words + 1] = 'stale'
    count('stale')
  end
end
-- The owner that was answered busy sleeps until the gate opens, and these messages may have kept it shut.
-- rule: rollback_opens_silently
if ended and opens_gate() then earliest = 0 end
if ended then note_undrained() end
wake(earliest)
keep_counts()
return words
