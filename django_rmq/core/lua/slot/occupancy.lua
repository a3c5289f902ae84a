-- Read which of many slots hold messages, and which of the empty ones are paused.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, prepare ZSET, retry ZSET, dead ZSET, claim ZSET, control HASH of each slot
--
-- ARGV[1] now
--
-- Returns for each slot 0 if it is empty, 1 if it is empty and paused, or 2 if `count` has to say what it holds

if #slots_keys > 6144 then return redis.error_reply('ERR too many slots') end
local found = {}
for i = 1, #slots_keys, 6 do
  local store, prepare, retry, dead, claim, control = unpack(slots_keys, i, i + 5)
  -- What another program has written to the key, `count` names.
  local paused = redis.pcall('HGET', control, 'paused')
  if type(paused) == 'table' or redis.call('EXISTS', store, prepare, retry, dead, claim) > 0 then -- rule: claimed_slots_are_empty
    found[#found + 1] = 2
  else
    found[#found + 1] = paused and 1 or 0 -- rule: nothing_is_paused
  end
end
return found
