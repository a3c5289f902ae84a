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
