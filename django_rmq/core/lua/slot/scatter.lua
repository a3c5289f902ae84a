-- Send one unkeyed range_merge message to each of many slots.
--
-- A slot that needs more than the fast way of `send_merge` is left as it is, and the caller sends its message with `send_merge`.
--
-- KEYS[1...] store ZSET, retry ZSET, body HASH, stats HASH, control HASH of each slot
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] range_ms NUMBER
-- ARGV[4...] members      one for each slot
-- ARGV[#ARGV] now
--
-- Returns the answer of `send_merge` for each slot, or empty where nothing was done

local n = last - first + 1
if not (range_ms >= 0 and range_ms <= 1e14 and range_ms % 1 == 0 and n <= 64 and #slots_keys == n * 5) then
  return redis.error_reply('ERR range_ms or the number of slots is out of bounds')
end
-- include: _now
local due = now_ms + range_ms
local at, met, floor, backlog, envelope = due, 'merged', 999, 0, false
local store, retry, body, stats, control, known, sleeping_until, alone
-- include: _sleep.wake
-- Each slot is independent: a key of a foreign type in one does not affect the others.
local function send_one()
-- include: _send.single
end
local answers = {}
for i = 1, n do
  store, retry, body, stats, control = unpack(slots_keys, i * 5 - 4, i * 5)
  alone, known = ARGV[first + i - 1], redis.pcall('HMGET', control, 'slots', 'sleeping_until')
  sleeping_until = known[2] -- rule: scatter_wakes_nobody
  answers[i] = send_one() or false
end
return answers
