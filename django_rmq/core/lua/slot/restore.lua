-- Bring back what an act has deleted, some at a time; where a newer copy is there by now, that one stays.
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
-- KEYS[12] trash    HASH  letter of the state, member -> "score deleted_us length\n", failure, envelope or death
--
-- ARGV[1] channel
-- ARGV[2] slots         the caller's slot count
-- ARGV[3] topic_type
-- ARGV[4] max_retries   the topic's, until the slot has its own
-- ARGV[5] cursor        0: from the beginning
-- ARGV[6] limit NUMBER  how many, roughly
-- ARGV[7] now
--
-- Returns {'moved', slots} | {'restored', cursor to continue with (0: all were read), how many came back, how many were merged}

-- check: types
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'slots', 'undrained_since')
local sleeping_until, max_retries, known_slots = known[1], tonumber(known[2] or max_retries), known[3]
local undrained_since = known[4]
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: restored_into_a_former_slot
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _ledger
-- include: _sleep.wake
-- include: _priority_notes.note_undrained
-- include: _accumulation.bodies
-- Returns whether a copy in flight or claimed is newer than one that was deleted at `deleted_us`, or may be.
local function runs_newer(member, fresh, deleted_us, rest)
  if collects(rest) then return false end -- rule: restored_bodies_dropped
  if redis.call('ZSCORE', claim, member) then return not fresh or rest ~= '' end -- rule: restored_behind_a_claim
  if not redis.call('ZSCORE', prepare, member) then return false end
  if not fresh then return true end -- rule: retry_restored_beside_a_delivery
  local receipt, marked = string.match(redis.call('HGET', inflight, member) or '', '^(%d+) %S+ ?(%S*)')
  -- A receipt is the time of the delivery. What was deleted while the delivery ran, waited behind it.
  return marked == '' and tonumber(receipt) > deleted_us -- rule: restored_behind_a_newer_delivery
end
local function restore_dead(member, score, rest)
  count('restored_dead')
  if redis.call('ZSCORE', dead, member) then -- rule: restored_over_a_later_death
    count('dead_merged')
    local there = redis.call('HGET', deaths, member)
    if there then redis.call('HSET', deaths, member, joined_death(there, (exhumed(rest)))) end
    return 0
  end
  redis.call('ZADD', dead, score, member)
  if rest ~= '' then redis.call('HSET', deaths, member, rest) end
  return 1
end
local earliest = math.huge
local function restore_live(state, member, score, deleted_us, failure, rest)
  count('restored')
  local fresh = state == 's' and not is_retry(tonumber(score))
  local waits = redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member) -- rule: restored_twice
  if waits or runs_newer(member, fresh, deleted_us, rest) then
    count('dropped')
    if waits then join(member, rest) end
    return 0
  end
  redis.call('ZADD', state == 's' and store or retry, score, member)
  if failure ~= '' then redis.call('HSETNX', failures, member, failure) end -- rule: restored_without_its_failures
  if rest ~= '' then redis.call('HSET', body, member, rest) end -- rule: restored_without_its_body
  earliest = math.min(earliest, topic_type == 'priority' and state == 's' and 0 or tonumber(score))
  return 1
end
local scanned = redis.call('HSCAN', trash, cursor, 'COUNT', limit)
local copies, back, merged = scanned[2], 0, 0
-- A copy that waits comes before one of the same member that rests.
for _, state in ipairs({ 's', 'r', 'd' }) do
  for i = 1, #copies, 2 do
    local field, value = copies[i], copies[i + 1]
    local score, deleted_us, length, at = string.match(value, '^(%S+) (%d+) (%d+)\n()')
    if string.sub(field, 1, 1) == state and score then
      local member, rest_at = string.sub(field, 2), at + tonumber(length)
      local failure, rest = string.sub(value, at, rest_at - 1), string.sub(value, rest_at)
      -- Start with a deletion: after it, a full server accepts the rest.
      redis.call('HDEL', trash, field) -- rule: restored_again
      local restored
      if state == 'd' then
        restored = restore_dead(member, score, rest)
      else
        restored = restore_live(state, member, score, tonumber(deleted_us), failure, rest)
      end
      back, merged = back + restored, merged + 1 - restored
    end
  end
end
note_undrained()
wake(earliest) -- rule: restored_unheard
keep_counts()
return { 'restored', scanned[1], back, merged }
