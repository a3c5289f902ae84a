-- Send range_merge messages of one slot: due `range_ms` from now, or merged with the copy that waits (see _debounce).
--
-- KEYS[1] store    ZSET  member -> due ms
-- KEYS[2] retry    ZSET  member -> ms + retries/1024
-- KEYS[3] body     HASH  member -> envelope
-- KEYS[4] stats    HASH  counter -> n
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[7] inflight HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
--
-- ARGV[1] channel
-- ARGV[2] slots            the caller's slot count
-- ARGV[3] backlog NUMBER   how many may wait here; 0: any number
-- ARGV[4] max_wait NUMBER   each send starts the wait again, up to these ms from the first; 0: the first one decides
-- ARGV[5] accumulate NUMBER how many bodies a message collects; 0: the last one counts
-- ARGV[6] max_body NUMBER   bytes of a message that collects
-- ARGV[7] range_ms NUMBER
-- ARGV[8] n NUMBER
-- ARGV[9...] members       n of them, then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the score of a single new message | {'stored', score} | {'mixed', words, scores}

local topic_type = 'range_merge'
local envelope = #ARGV > first + n and first + n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'inbox')
local known_slots, sleeping_until = known[1], known[2]
-- include: _now
-- include: _sleep.wake
local due = now_ms + range_ms
local is_plain = max_wait == 0 and accumulate == 0
local alone = n == 1 and is_plain and range_ms >= 0 and range_ms <= 1e14 and range_ms % 1 == 0 and ARGV[first]
local at, met, floor = due, 'merged', 999
local inbox = sleeping_until == NEVER and known[3]
-- include: _send.push
-- include: _send.single
-- check: types but prepare inflight
if known.err then return known end
if not (range_ms >= 0 and range_ms <= 1e14 and n >= 1 and n <= 1000) then
  return redis.error_reply('ERR range_ms or n is out of bounds')
end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: merge_moved_ignored
-- include: _scores.numbers
-- include: _ledger
local function is_retry(score)
  return score <= floor
end
-- include: _send.place
-- include: _debounce
-- include: _accumulation.bodies
-- include: _accumulation.collect
due = max_wait > 0 and first_due(range_ms) or text_of(due)
local again, prolongations = false, {}
if max_wait > 0 then
  again = function(score) -- rule: keeps_the_first_wait
    local due_again = prolongations[score] or prolonged(range_ms, tonumber(score))
    prolongations[score] = due_again
    return due_again
  end
end
local members, rows = {}, {}
for i = 1, n do
  local member = ARGV[first + i - 1]
  members[i], rows[i * 2 - 1], rows[i * 2] = member, due, member
end
local keep = accumulate > 0 and collect
local reply = place(members, rows, envelope, 'merged', again, {}, keep) -- rule: merge_takes_the_later_time
if reply[1] == 'stored' then reply[2] = due end
return reply
