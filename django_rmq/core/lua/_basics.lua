-- What most scripts begin with: the clock, the check of types, the ledger.

-- section: now
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

-- section: mistyped
-- Redis does not roll back a script that fails, so the type of every key that exists is checked before the first write.

-- Key -> how many entries it had when it was checked.
local sizes = {}
local function mistyped(wanted, key)
  local size
  -- ZCARD and HLEN take constant time, and answer an error table for a key that another program wrote as another type.
  if wanted == 'zset' then
    size = redis.pcall('ZCARD', key)
  else
    size = redis.pcall('HLEN', key)
  end
  if type(size) == 'table' then -- rule: types_unchecked
    local kind = redis.call('TYPE', key).ok
    return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. kind .. ', not a ' .. wanted)
  end
  sizes[key] = size
end

-- section: ledger
-- Write what this script did to the ledger, at its end: if a counter cannot be written, no message is lost.
--
-- needs: stats [write_outcomes]

local counts = {}
local function count(name, by)
  counts[name] = (counts[name] or 0) + (by or 1) -- rule: half_the_ledger
end
local function keep_counts()
  if write_outcomes then write_outcomes() end
  for name, by in pairs(counts) do
    if by ~= 0 then redis.pcall('HINCRBY', stats, name, by) end
  end
end
