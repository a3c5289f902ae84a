-- Send fifo messages of one slot, each behind those that were sent before it: due at once, or after a delay.
--
-- KEYS[1] store    ZSET  member -> place: due ms + sequence/1024
-- KEYS[2] retry    ZSET  member -> ms + retries/1024
-- KEYS[3] body     HASH  member -> envelope
-- KEYS[4] stats    HASH  counter -> n
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[7] claim    ZSET  claimed member -> score it was taken with
-- KEYS[8] inflight HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
--
-- ARGV[1] channel
-- ARGV[2] slots            the caller's slot count
-- ARGV[3] backlog NUMBER   how many may wait here; 0: any number
-- ARGV[4] strict FLAG      1 or 0
-- ARGV[5] on_duplicate     keep or replace: what a message becomes that meets one with its key that waits or rests
-- ARGV[6] ensure FLAG      1: keep, and one in flight counts as well
-- ARGV[7] delay NUMBER     ms
-- ARGV[8] n NUMBER
-- ARGV[9...] members      n of them, then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the place of a single new message | {'stored', places in steps of 1/1024 ms}
--       | {'mixed', words, scores}

local topic_type = 'fifo'
local envelope = #ARGV > first + n and first + n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'last_place', 'inbox')
local known_slots, sleeping_until, last_place = known[1], known[2], known[3]
-- include: _now
-- include: _sleep.wake
-- A strict slot that answered busy stays so until something in it ends: a send does not change that.
if strict and sleeping_until == GATE then sleeping_until = nil end
-- Where another message came in this millisecond, or the clock was set back, the place has to be computed.
local in_line = (tonumber(last_place) or 0) < now_ms -- rule: alone_follows_the_clock_back
local alone = n == 1 and delay == 0 and in_line and not ensure and ARGV[first]
-- A message that meets a copy takes the slow path.
local at, due, met, floor, note, noted = now_ms, now_ms, false, math.huge, 'last_place', now_ms
local inbox = sleeping_until == NEVER and known[4]
-- include: _send.push
-- include: _send.single
-- check: types but inflight
if known.err then return known end
if not (delay >= 0 and delay <= 1e14 and n >= 1 and n <= 1000) then
  return redis.error_reply('ERR delay or n is out of bounds')
end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _scores.numbers
-- include: _ledger
-- include: _fifo_places
local function is_retry()
  return false
end
-- include: _send.place
local members, rows, scores, running, behind = {}, {}, {}, {}, 0
for i = 1, n do
  members[i] = ARGV[first + i - 1]
  behind = delay > 0 and later_place(now_ms + delay, behind) or next_place()
  scores[i] = behind / STEP
  rows[i * 2 - 1], rows[i * 2] = behind, members[i]
end
if ensure then
  if redis.call('ZCARD', prepare) > 0 then running = redis.call('ZMSCORE', prepare, unpack(members)) end
  if redis.call('ZCARD', claim) > 0 then
    for i, claimed in ipairs(redis.call('ZMSCORE', claim, unpack(members))) do
      running[i] = running[i] or claimed
    end
  end
end
local met = (ensure or on_duplicate == 'keep') and 'present' or 'replaced' -- rule: fifo_keeps_the_body
local reply = place(members, rows, envelope, met, false, running)
if delay == 0 then keep_place() end -- rule: fifo_forgets_its_place
if reply[1] == 'stored' then
  reply[2] = scores
else
  for i, at in ipairs(reply[3]) do
    if type(at) == 'number' then reply[3][i] = text_of(at) end
  end
end
return reply
