-- Time out deliveries and claims without a heartbeat, as `prepare` does, too: each message uses a retry, or dies.
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
-- KEYS[11] claimants  ZSET  Spark consumer -> ms when its lease ends
-- KEYS[12] claim      ZSET  member -> score it was taken with
-- KEYS[13] claims     HASH  Spark consumer -> "number state ms"
-- KEYS[14] claim_body HASH  claimed member -> envelope
-- KEYS[15] prepare_body HASH  member in flight -> envelope
-- KEYS[16] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] retry_priority       original or lowest
-- ARGV[5] backoff_base NUMBER  ms
-- ARGV[6] backoff_cap NUMBER   ms
-- ARGV[7] timeout              seconds; the topic's, until the slot has its own
-- ARGV[8] max_retries          the topic's, until the slot has its own
-- ARGV[9] strict FLAG          1: only the first in line is charged
-- ARGV[10] limit NUMBER
-- ARGV[11] now
--
-- Returns how many timed out

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'timeout', 'max_retries', 'undrained_since')
local sleeping_until, timeout, max_retries = known[1], tonumber(known[2] or timeout), tonumber(known[3] or max_retries)
local undrained_since = known[4]
local claimed = redis.call('ZCARD', claimants) > 0
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _delivery_end.give_back
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _claims
-- include: _time_outs
-- include: _priority_notes.note_undrained
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '') -- rule: time_out_needs_memory
local timed_out, earliest = time_out_due(limit)
-- The owner that was answered busy sleeps until the gate opens, and what has timed out may have opened it.
-- rule: time_out_opens_silently
if timed_out > 0 and opens_gate() then earliest = 0 end
if timed_out > 0 then note_undrained() end
if earliest then wake(earliest) end
keep_counts()
return timed_out
