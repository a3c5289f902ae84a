-- Delete waiting, resting or dead messages, oldest first; never messages in flight.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] retry     ZSET  member -> ms + retries/1024
-- KEYS[3] dead      ZSET  member -> ms of death
-- KEYS[4] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[5] deaths    HASH  member -> death
-- KEYS[6] failures  HASH  member -> last failure
-- KEYS[7] body      HASH  member -> envelope
-- KEYS[8] stats     HASH  counter -> n
-- KEYS[9] claim     ZSET  claimed member -> score it was taken with
-- KEYS[10] control  HASH  field -> value
-- KEYS[11] trash    HASH  letter of the state, member -> the copy; what the act has deleted
--
-- ARGV[1] topic_type
-- ARGV[2] most_kept NUMBER   how many copies to keep in `trash`; 0: none
-- ARGV[3] most_bytes NUMBER  of these copies; the last one may exceed it
-- ARGV[4] state         store, retry or dead
-- ARGV[5] lowest        only scores from this, up to highest
-- ARGV[6] highest
-- ARGV[7] limit NUMBER
-- ARGV[8] now
--
-- Returns {how many were deleted, how many copies are kept, their bytes}

-- check: types
limit = math.min(limit, 1000)
local undrained_since = redis.call('HGET', control, 'undrained_since')
-- include: _now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _priority_notes.note_undrained
local set = state == 'dead' and dead or state == 'retry' and retry or store
local members = redis.call('ZRANGEBYSCORE', set, lowest, highest, 'LIMIT', 0, limit) -- rule: purge_within_bounds
if #members == 0 then return { 0, 0, 0 } end
-- include: _trash
if most_kept > 0 then
  local scores = redis.call('ZMSCORE', set, unpack(members))
  for i, member in ipairs(members) do
    if state == 'dead' then
      keep_copy(state, member, scores[i], '', redis.call('HGET', deaths, member) or '')
    else
      -- The failures of what runs are its own.
      local runs = redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)
      local failure = not runs and redis.call('HGET', failures, member) or '' -- rule: purge_keeps_the_failures_of_what_runs
      keep_copy(state, member, scores[i], failure, redis.call('HGET', body, member) or '')
    end
  end
end
local kept, bytes = keep_copies()
redis.call('ZREM', set, unpack(members))
if state == 'dead' then
  redis.call('HDEL', deaths, unpack(members))
  count('purged_dead', #members)
else
  -- A copy in the other set keeps body and diagnosis; one that is in flight or claimed has its own body.
  local running = redis.call('ZMSCORE', prepare, unpack(members))
  local claimed = redis.call('ZMSCORE', claim, unpack(members))
  local other, gone, well = redis.call('ZMSCORE', state == 'store' and retry or store, unpack(members)), {}, {}
  for i, member in ipairs(members) do
    if not other[i] then
      gone[#gone + 1] = member
      if not (running[i] or claimed[i]) then well[#well + 1] = member end -- rule: purge_leaves_what_runs
    end
  end
  if #gone > 0 then redis.call('HDEL', body, unpack(gone)) end
  for _, member in ipairs(note_outcome and well or {}) do
    local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
    note_outcome(member, 'removed', '-', tonumber(times) or 0, '', 0)
  end
  if #well > 0 then redis.call('HDEL', failures, unpack(well)) end
  count('purged', #members)
end
note_undrained()
keep_counts()
return { #members, kept, bytes }
