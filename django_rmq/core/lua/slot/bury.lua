-- Put messages into Dead for an operator; one in flight is marked, and dies when its delivery ends.
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
-- KEYS[11] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] topic_type
-- ARGV[2] max_retries  the topic's, until the slot has its own
-- ARGV[3] why
-- ARGV[4...] members
-- ARGV[#ARGV] now
--
-- Returns what each member was found as: waiting | resting | running | running_and_waiting | dead | not_found

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'max_retries', 'undrained_since')
local max_retries, undrained_since = tonumber(known[1] or max_retries), known[2]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _accumulation.bodies
-- include: _death_record
-- include: _priority_notes.note_undrained
-- include: _delivery_end.mark_delivery
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local words = {}
for i = first, last do
  local member = ARGV[i]
  local waiting, resting = redis.call('ZSCORE', store, member), redis.call('ZSCORE', retry, member)
  local running, record = redis.call('ZSCORE', prepare, member), redis.call('HGET', inflight, member)
  local word = 'not_found'
  if redis.call('ZSCORE', dead, member) then word = 'dead' end
  if resting then word = 'resting' end
  if waiting then word = 'waiting' end
  local kept, claimed = redis.call('HGET', body, member), redis.call('ZSCORE', claim, member)
  -- Claimed messages cannot be marked. A newer copy with its own body stays: it would die before the older copy ends.
  if (waiting or resting) and not (claimed and kept) then -- rule: bury_before_what_is_claimed
    local failure = parse_failure(redis.call('HGET', failures, member))
    if waiting then redis.call('ZREM', store, member) end
    if resting then redis.call('ZREM', retry, member) end -- rule: bury_leaves_a_retry
    die(member, 'buried', why, first_score(waiting or failure and failure.score or '0', failure), failure, 0, kept)
    if waiting and resting then count('dropped') end
  end
  if running then
    word = (waiting or resting) and 'running_and_waiting' or 'running'
    local receipt_and_score = string.match(record or '', '^%d+ %S+') or '0 0'
    -- rule: bury_forgets_the_newer_death
    local outlived = (waiting or resting or string.find(record or '', ' outlived', 1, true)) and ' outlived' or ''
    mark_delivery(member, receipt_and_score, ' buried' .. outlived) -- rule: bury_lets_it_run
  elseif claimed then
    word = (waiting or resting) and 'running_and_waiting' or 'running'
  end
  words[#words + 1] = word
end
note_undrained()
keep_counts()
return words
