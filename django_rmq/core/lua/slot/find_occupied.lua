-- Read which of many slots hold messages.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, prepare ZSET, retry ZSET, dead ZSET, claim ZSET of each slot
--
-- ARGV[1] now
--
-- Returns for each slot 1 if it holds messages, or 0

if #slots_keys > 5120 then return redis.error_reply('ERR too many slots') end
local found = {}
for i = 1, #slots_keys, 5 do
  local exist = redis.call('EXISTS', unpack(slots_keys, i, i + 4)) -- rule: claimed_slots_are_empty
  found[#found + 1] = exist > 0 and 1 or 0
end
return found
