-- What this script did, written to the ledger last: a counter that cannot be written costs no message.
--
-- needs: stats

local counts = {}
local function count(name, by)
  counts[name] = (counts[name] or 0) + (by or 1) -- rule: half_the_ledger
end
local function keep_counts()
  for name, by in pairs(counts) do
    if by ~= 0 then redis.pcall('HINCRBY', stats, name, by) end
  end
end
