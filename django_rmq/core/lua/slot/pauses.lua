-- Read how many of many slots are paused.
-- Changes nothing.
--
-- KEYS[1...] control HASH of each slot
--
-- ARGV[1] now
--
-- Returns {how many, the place among the keys of each slot whose key is of another type}

if #slots_keys > 1024 then return redis.error_reply('ERR too many slots') end
local found = { 0 }
for i = 1, #slots_keys do
  local paused = redis.pcall('HGET', slots_keys[i], 'paused')
  if type(paused) == 'table' then
    found[#found + 1] = i
  elseif paused then
    found[1] = found[1] + 1 -- rule: nothing_is_paused
  end
end
return found
