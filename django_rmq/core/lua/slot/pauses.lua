-- Read which of many slots are paused. Most of many slots are empty, and whether they are paused is all there is to know of them.
-- Changes nothing.
--
-- KEYS[1...] control HASH of each slot
--
-- ARGV[1] now
--
-- Returns for each slot 1 if it is paused, 0 if it is not, or 2 if its control is a key of another type

if #slots_keys > 1024 then return redis.error_reply('ERR too many slots') end
local pauses = {}
for i, control in ipairs(slots_keys) do
  local paused = redis.pcall('HGET', control, 'paused')
  pauses[i] = type(paused) == 'table' and 2 or paused and 1 or 0 -- rule: nothing_is_paused
end
return pauses
