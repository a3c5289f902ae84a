-- Delete or cancel messages for an operator; one in flight is marked for the end of its delivery.
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
-- KEYS[12] trash    HASH  letter of the state, member -> the copy; what the act has deleted
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] most_kept NUMBER   how many copies to keep in `trash`; 0: none
-- ARGV[4] most_bytes NUMBER  of these copies; the last one may exceed it
-- ARGV[5] which  live, dead, cancel (live), or any: the live copies, else the dead one
-- ARGV[6...] members
-- ARGV[#ARGV] now
--
-- Returns {words, how many copies are kept, their bytes}; the words say what each member was found as:
-- waiting | resting | running | running_and_waiting | dead | not_found,
-- and with `cancel` also claimed: Spark has the message, and cannot be notified

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local undrained_since = redis.call('HGET', control, 'undrained_since')
-- include: _now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _priority_notes.note_undrained
-- include: _delivery_end.mark_delivery
-- include: _trash
for i = first, most_kept > 0 and last or 0 do
  local member, found = ARGV[i], false
  if which ~= 'dead' then
    local waiting, resting = redis.call('ZSCORE', store, member), redis.call('ZSCORE', retry, member)
    local runs = redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)
    found = waiting or resting or runs
    if waiting or resting then
      -- The failures of what runs are its own.
      local failure = not runs and redis.call('HGET', failures, member) or '' -- rule: trash_takes_the_failures_of_what_runs
      local envelope = redis.call('HGET', body, member) or ''
      if waiting then keep_copy('store', member, waiting, failure, envelope) end
      if resting then keep_copy('retry', member, resting, failure, envelope) end
    end
  end
  local died = not found and which ~= 'live' and which ~= 'cancel' and redis.call('ZSCORE', dead, member)
  if died then keep_copy('dead', member, died, '', redis.call('HGET', deaths, member) or '') end
end
local kept, bytes = keep_copies()
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local words, cancels, tells = {}, which == 'cancel', false
for i = first, last do
  local member, word = ARGV[i], 'not_found'
  if which ~= 'dead' then
    local gone = redis.call('ZREM', store, member)
    local rested = redis.call('ZREM', retry, member)
    local running = redis.call('ZSCORE', prepare, member)
    count('removed', gone + rested)
    if rested > 0 then word = 'resting' end
    if gone > 0 then word = 'waiting' end
    if running then
      word = gone + rested > 0 and 'running_and_waiting' or 'running'
      local record = redis.call('HGET', inflight, member) or ''
      local receipt_and_score = string.match(record, '^%d+ %S+') or '0 0'
      -- rule: remove_forgets_the_newer_death
      local outlived = string.find(record, ' outlived', 1, true) and ' outlived' or ''
      -- rule: remove_forgets_the_cancellation
      local cancelled = cancels or string.find(record, ' cancelled', 1, true)
      local mark = cancelled and ' cancelled' or ' removed'
      tells = tells or cancels
      mark_delivery(member, receipt_and_score, mark .. outlived) -- rule: remove_lets_it_run
    elseif redis.call('ZSCORE', claim, member) then -- rule: remove_tears_the_failures_of_the_claimed
      -- Spark continues with claimed messages.
      if not cancels then
        word = gone + rested > 0 and 'running_and_waiting' or 'running'
      elseif gone + rested == 0 then
        word = 'claimed'
      end
    elseif gone + rested > 0 then
      if note_outcome then
        local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
        note_outcome(member, 'removed', '-', tonumber(times) or 0, '', 0) -- rule: removal_leaves_no_outcome
      end
      redis.call('HDEL', failures, member)
    end
    -- A copy that is in flight or claimed has its own body.
    if gone + rested > 0 then redis.call('HDEL', body, member) end -- rule: remove_leaves_the_body
  end
  if word == 'not_found' and which ~= 'live' and not cancels and redis.call('ZREM', dead, member) > 0 then -- rule: remove_digs_up
    redis.call('HDEL', deaths, member)
    count('removed_dead')
    word = 'dead'
  end
  words[#words + 1] = word
end
note_undrained()
keep_counts()
-- The owner then extends the deliveries that it has of this slot: `extend` answers which of them are cancelled.
if tells then redis.pcall('PUBLISH', channel, -1048577 - string.match(store, '%d+$')) end -- rule: cancel_tells_nobody
return { words, kept, bytes }
