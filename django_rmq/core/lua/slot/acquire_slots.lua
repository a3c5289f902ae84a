-- Begin to own many slots, each as `acquire` does, and sleep in the empty ones, as `prepare` does.
--
-- KEYS[1...] store ZSET, retry ZSET, prepare ZSET, control HASH, claimants ZSET of each slot
--
-- ARGV[1] slots        how many the topic has
-- ARGV[2] timeout      seconds; that of the topic, if the slot has none
-- ARGV[3] max_retries  as above
-- ARGV[4] now
--
-- Returns {{the new epoch of each slot, or empty where control cannot be read}, {'asleep' | 'look', ...}}

-- Each slot has five keys. One read of all_empty covers 16 slots. A consumer that sleeps until it is woken has NEVER, as text.
local PER_SLOT, AT_ONCE, NEVER = 5, 16, '9007199254740991'
if #slots_keys > 1024 * PER_SLOT then return redis.error_reply('ERR too many slots') end
-- include: _sleep.all_empty
local epochs, words = {}, {}
local function begin(i, empty)
  local control = slots_keys[i + 3]
  -- Each slot is independent: a key of a foreign type in one does not affect the others.
  local known = redis.pcall('HMGET', control, 'slots', 'paused', 'moving', 'timeout', 'max_retries')
  if known.err then return '', 'look' end
  -- Start with a deletion of nothing: after it, a full server accepts the rest, so that owners can drain it.
  redis.call('HDEL', control, '') -- rule: acquire_slots_needs_memory
  local epoch = redis.pcall('HINCRBY', control, 'epoch', 1) -- rule: fence
  if type(epoch) == 'table' then return '', 'look' end
  -- The worker has to ask a slot that is paused, is shut by a re-slotting or has another slot count: the answer says so.
  local is_open = not (known[2] or known[3]) and (known[1] or slots) == slots -- rule: asleep_while_open
  if not (is_open and (empty or all_empty(i, 1))) then return epoch, 'look' end -- rule: asleep_over_messages
  redis.call('HSET', control, 'slots', slots, 'timeout', known[4] or timeout, 'max_retries', known[5] or max_retries,
    'sleeping_until', NEVER) -- rule: asleep_unannounced
  return epoch, 'asleep'
end
for first = 1, #slots_keys, AT_ONCE * PER_SLOT do
  local empty = all_empty(first, AT_ONCE)
  for i = first, math.min(first + (AT_ONCE - 1) * PER_SLOT, #slots_keys), PER_SLOT do
    local n = #words + 1
    epochs[n], words[n] = begin(i, empty)
  end
end
return { epochs, words }
