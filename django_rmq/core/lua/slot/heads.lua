-- Read when something can next be taken from each of many slots: the slow poll, which finds what no wake-up has announced.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, retry ZSET, prepare ZSET, control HASH, claimants ZSET of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] upkeep FLAG     1: only when deliveries time out and leases of claims end
-- ARGV[4] now
--
-- Returns for each slot its next due time in ms (0: something can be taken whatever the time), or empty

if #slots_keys > 5120 then return redis.error_reply('ERR too many slots') end
-- include: _sleep.all_empty
local function head(i)
  -- A slot with a key of a foreign type counts as due: its prepare then names the key.
  local waiting = redis.pcall('ZRANGE', slots_keys[i], 0, 0, 'WITHSCORES')
  local resting = redis.pcall('ZRANGE', slots_keys[i + 1], 0, 0, 'WITHSCORES')
  local running = redis.pcall('ZRANGE', slots_keys[i + 2], 0, 0, 'WITHSCORES')
  local own = redis.pcall('HGET', slots_keys[i + 3], 'timeout')
  local claimed = redis.pcall('ZRANGE', slots_keys[i + 4], 0, 0, 'WITHSCORES')
  if waiting.err or resting.err or running.err or claimed.err then return 0 end
  if not (waiting[1] or resting[1] or running[1] or claimed[1]) then return math.huge end
  if type(own) == 'table' then return 0 end
  local due = math.huge
  if waiting[1] and not upkeep then
    local round = topic_type == 'fifo' and math.floor or math.ceil
    due = topic_type == 'priority' and 0 or round(tonumber(waiting[2]))
  end
  if resting[1] and not upkeep then due = math.min(due, math.floor(tonumber(resting[2]))) end
  if running[1] then
    -- rule: heads_without_timeouts
    due = math.min(due, (math.floor(tonumber(running[2]) / 1000) + (tonumber(own) or timeout) + 1) * 1000)
  end
  if claimed[1] then due = math.min(due, math.ceil(tonumber(claimed[2]))) end -- rule: heads_without_leases
  return due
end
local heads = {}
local none = all_empty(1, 1024)
for first = 1, #slots_keys, 80 do
  local empty = none or all_empty(first, 16)
  for i = first, math.min(first + 75, #slots_keys), 5 do
    local due = empty and math.huge or head(i)
    heads[#heads + 1] = due < 9007199254740992 and string.format('%.0f', math.max(0, due)) or ''
  end
end
return heads
