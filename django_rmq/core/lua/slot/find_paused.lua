-- Read which of many slots are paused.
-- Changes nothing.
--
-- KEYS[1...] control HASH of each slot
--
-- ARGV[1] now
--
-- Returns {the places of those, the places of slots whose key is of another type}: places among the keys, from 1

if #slots_keys > 1024 then return redis.error_reply('ERR too many slots') end
local places, foreign = {}, {}
for i = 1, #slots_keys do
  local paused = redis.pcall('HGET', slots_keys[i], 'paused')
  if type(paused) == 'table' then
    foreign[#foreign + 1] = i
  elseif paused then
    places[#places + 1] = i -- rule: nothing_is_paused
  end
end
return { places, foreign }
