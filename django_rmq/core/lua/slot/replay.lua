-- Send dead messages again with their full budget; a message with a live copy keeps that copy and its newer body.
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
-- ARGV[1] channel
-- ARGV[2] slots        the caller's slot count
-- ARGV[3] topic_type
-- ARGV[4] max_retries  the topic's, until the slot has its own
-- ARGV[5...] pairs     member, new envelope or empty
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | a word for each member: replayed | merged | not_found

-- check: types
if (last - first + 1) / 2 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'slots', 'undrained_since', 'last_place')
local sleeping_until, max_retries, known_slots = known[1], tonumber(known[2] or max_retries), known[3]
local undrained_since, last_place = known[4], known[5]
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _ledger
-- include: _sleep.wake
-- include: _priority_notes.note_undrained
-- include: _accumulation.bodies
-- include: _fifo_places
-- A new body needs memory. Without one, start with a deletion of nothing: after it, a full server accepts the rest.
local edited = false
for i = first, last, 2 do
  edited = edited or ARGV[i + 1] ~= ''
end
if not edited then redis.call('HDEL', control, '') end -- rule: replay_needs_memory
-- Returns whether the body in flight is newer than that of the dead copy, and its delivery will not end by an operator's mark.
local function is_newer(member)
  if redis.call('ZSCORE', claim, member) then return true end -- rule: replay_past_what_is_claimed
  return redis.call('ZSCORE', prepare, member)
    -- rule: replay_merges_with_what_ends
    and not string.find(redis.call('HGET', inflight, member) or '', '^%d+ %S+ %S')
end
local words, earliest = {}, math.huge
for i = first, last, 2 do
  local member, envelope, word = ARGV[i], ARGV[i + 1], 'not_found'
  if redis.call('ZSCORE', dead, member) then
    local record = redis.call('HGET', deaths, member)
    local score = string.match(record or '', '^%S+ %d+ %d+ %d+ (%S+) %d+ [01]\n')
    local buried = exhumed(record)
    if envelope ~= '' then buried = nil end
    word = 'merged'
    local lives = redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member) -- rule: replay_takes_two
    if lives and buried then join(member, buried) end -- rule: replayed_bodies_dropped
    if not lives and buried and not collects(buried) then lives = is_newer(member) end -- rule: newer_body
    if not lives then
      word = 'replayed'
      local again = topic_type == 'fifo' and next_place() or now_ms -- rule: fifo_replays_at_once
      if topic_type == 'priority' then
        again = math.min(math.floor(bounded(tonumber(score) or 0, 0, 8796093022208)), 8796093022208)
        if is_retry(again) then again = floor_priority() + 1 end -- rule: replay_at_once_or_never
      end
      redis.call('ZADD', store, text_of(again), member)
      envelope = buried or envelope -- rule: replay_without_body
      earliest = math.min(earliest, topic_type == 'priority' and 0 or again)
    end
    if envelope ~= '' then redis.call('HSET', body, member, envelope) end
    redis.call('ZREM', dead, member)
    redis.call('HDEL', deaths, member)
    count(word == 'replayed' and 'revived' or 'replay_merged')
  end
  words[#words + 1] = word
end
if topic_type == 'fifo' and earliest < math.huge then keep_place() end
note_undrained()
wake(earliest)
keep_counts()
return words
