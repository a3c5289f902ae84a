-- What this script did, written to the ledger last: a counter that cannot be written costs no message.
local counts = {}
local function count(name, by)
  counts[name] = (counts[name] or 0) + (by or 1)
end
local function keep_counts()
  for name, by in pairs(counts) do
    -- As text: Redis writes numbers that a script hands it with seventeen digits, which takes it longer than to count.
    if by ~= 0 then redis.pcall('HINCRBY', stats, name, string.format('%d', by)) end
  end
end
