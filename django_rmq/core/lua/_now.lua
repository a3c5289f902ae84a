-- The clock of the slot: that of Redis, unless a test passes `now` in microseconds.
--
-- needs: now

local now_us = tonumber(now)
if not now_us then
  -- The clocks of workers may differ, so only the server's clock decides.
  local clock = redis.call('TIME')
  now_us = clock[1] * 1000000 + clock[2]
end
local micros = now_us % 1000000
local now_s = math.floor(now_us / 1000000) -- rule: time_of_the_caller
local now_ms = math.floor(now_us / 1000)
