-- Send messages of one slot unless they already wait, rest or are in flight.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] retry    ZSET  member -> ms + retries/1024
-- KEYS[3] body     HASH  member -> envelope
-- KEYS[4] stats    HASH  counter -> n
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[7] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] backlog NUMBER  how many may wait here; 0: any number
-- ARGV[4] topic_type            range_merge, priority or fixed_time
-- ARGV[5] max_retries     the topic's, until the slot has its own
-- ARGV[6] max_wait NUMBER  ms from the first send, at most, if each send starts the wait again; 0: the first one decides
-- ARGV[7] n NUMBER
-- ARGV[8...] pairs        n times score (range_merge: range_ms), member; then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | {'stored'} | {'mixed', words, scores}

-- check: types
if not (n >= 1 and n <= 1000) then return redis.error_reply('ERR n is out of bounds') end
local known = redis.call('HMGET', control, 'slots', 'sleeping_until', 'max_retries', 'undrained_since')
local known_slots, sleeping_until, undrained_since = known[1], known[2], known[4]
local max_retries, settled_retries = tonumber(known[3] or max_retries), known[3] or topic_type ~= 'priority'
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _ledger
-- include: _sleep.wake
-- include: _priority_notes.note_undrained
-- include: _priority_notes.note_sent
-- include: _send.place
-- include: _debounce
local members, rows = {}, {}
for i = 1, n do
  local score = ARGV[first + 2 * i - 2]
  local refused = topic_type == 'range_merge' and not (tonumber(score) >= 0)
  local range_ms = topic_type == 'range_merge' and tonumber(score)
  if range_ms then score = text_of(now_ms + range_ms) end
  if refused or not is_fresh(tonumber(score)) then
    return redis.error_reply('ERR score ' .. score .. ' is out of bounds')
  end
  if max_wait > 0 then score = first_due(range_ms) end
  local member = ARGV[first + 2 * i - 1]
  members[i], rows[i * 2 - 1], rows[i * 2] = member, score, member
end
local running = {}
-- rule: ensure_ignores_what_runs
if redis.call('ZCARD', prepare) > 0 then running = redis.call('ZMSCORE', prepare, unpack(members)) end
if redis.call('ZCARD', claim) > 0 then
  for i, claimed in ipairs(redis.call('ZMSCORE', claim, unpack(members))) do
    running[i] = running[i] or claimed -- rule: ensure_ignores_claims
  end
end
local envelope = #ARGV > first + 2 * n and first + 2 * n
local reply = place(members, rows, envelope, 'present', false, running) -- rule: ensure_replaces
note_sent()
if reply[1] == 'mixed' or topic_type ~= 'range_merge' then return reply end
-- The caller gave how long each member waits, so it learns here until when.
local words, scores = {}, {}
for i = 1, n do
  words[i], scores[i] = 'stored', rows[i * 2 - 1]
end
return { 'mixed', words, scores }
