-- Send priority or fixed_time messages of one slot: the last score wins.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] retry    ZSET  member -> ms + retries/1024
-- KEYS[3] body     HASH  member -> envelope
-- KEYS[4] stats    HASH  counter -> n
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[7] inflight HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] backlog NUMBER  how many may wait here; 0: any number
-- ARGV[4] topic_type            priority or fixed_time
-- ARGV[5] max_retries     the topic's, until the slot has its own
-- ARGV[6] n NUMBER
-- ARGV[7...] pairs        n times score, member; then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the score of a single new message | {'stored'} | {'mixed', words, scores}

local envelope = #ARGV > first + 2 * n and first + 2 * n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'max_retries', 'undrained_since', 'inbox')
local known_slots, sleeping_until, undrained_since = known[1], known[2], known[4]
local max_retries, settled_retries = tonumber(known[3] or max_retries), known[3] or topic_type ~= 'priority'
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _sleep.wake
local at, met, floor = ARGV[first], 'replaced', topic_type == 'priority' and floor_priority() or 999
-- The first priority of a slot takes the slow path, which stores which scores are retries.
local is_plain = n == 1 and settled_retries -- rule: alone_settles_no_retries
local alone = is_plain and is_fresh(tonumber(at)) and ARGV[first + 1] -- rule: alone_takes_any_score
local due = topic_type == 'priority' and 0 or tonumber(at)
local inbox = sleeping_until == NEVER and known[5]
if inbox then
-- include: _now
-- include: _send.push
end
local note, noted
if topic_type == 'priority' and not undrained_since then -- rule: alone_is_noted_again
-- include: _now
  note, noted = 'undrained_since', now_ms
end
-- include: _send.single
-- check: types but prepare inflight
if known.err then return known end
if not (n >= 1 and n <= 1000) then return redis.error_reply('ERR n is out of bounds') end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _now
-- include: _ledger
-- include: _priority_notes.note_undrained
-- include: _priority_notes.note_sent
-- include: _send.place
local members, rows, fresh = {}, {}, nil
for i = 1, n do
  local score, member = ARGV[first + 2 * i - 2], ARGV[first + 2 * i - 1]
  if score ~= fresh then
    -- rule: replace_takes_any_score
    if not is_fresh(tonumber(score)) then return redis.error_reply('ERR score ' .. score .. ' is out of bounds') end
    fresh = score
  end
  members[i], rows[i * 2 - 1], rows[i * 2] = member, score, member
end
local reply = place(members, rows, envelope, 'replaced', true, {}) -- rule: replace_keeps_the_first
note_sent()
return reply
