-- Sum the messages by state and the ledgers of many slots of one topic, for the history.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, prepare ZSET, retry ZSET, dead ZSET, stats HASH, control HASH, claim ZSET,
--   claimants ZSET, claims HASH of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] now
--
-- Returns {slots read, store, due, prepare, retry, dead, oldest due ms or empty, {sums of the counters named below},
--          earliest ms since when Store of a priority topic has not been empty, or empty}

if #slots_keys > 2304 then return redis.error_reply('ERR too many slots') end
-- include: _now
-- include: _overdue
local place = {}
for j, name in ipairs({ 'sent', 'merged', 'replaced', 'prepared', 'committed', 'acked', 'failed', 'expired', 'rejected', 'died',
  'lapsed', 'claimed', 'claim_returned', 'released', 'stale', 'fenced', 'revived', 'replay_merged', 'cancelled', 'overran' }) do
  place[name] = j
end
local read, oldest, undrained = 0, nil, nil
local depths, sums = { 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
for i = 1, #slots_keys, 9 do
  local store, prepare, retry, dead_set, stats, control, claim, claimants, claims = unpack(slots_keys, i, i + 8)
  local waiting, running, resting, dead, held = 0, 0, 0, 0, 0
  -- Most of many slots are empty, which one command says.
  if redis.call('EXISTS', store, prepare, retry, dead_set, claim) > 0 then
    -- A slot with a key of a foreign type is left out; the others are still counted.
    waiting, running = redis.pcall('ZCARD', store), redis.pcall('ZCARD', prepare)
    resting, dead = redis.pcall('ZCARD', retry), redis.pcall('ZCARD', dead_set)
    -- If a key of its claims has a foreign type, only the claimed messages are not counted.
    held = redis.pcall('ZCARD', claim)
    if type(held) ~= 'number' or (held > 0 and (type(redis.pcall('ZCARD', claimants)) ~= 'number'
      or type(redis.pcall('HLEN', claims)) ~= 'number')) then held = 0 end
  end
  -- Most counters of a slot have never been raised, and are not there.
  local counters = redis.pcall('HGETALL', stats)
  if type(waiting) == 'number' and type(running) == 'number' and type(resting) == 'number'
    and type(dead) == 'number' and not counters.err then
    local due, oldest_here, undrained_here = waiting, nil, nil
    local known = {}
    if resting > 0 or running > 0 or (waiting > 0 and topic_type == 'priority') then
      -- pcall: if this key has a foreign type, only these values are unknown.
      known = redis.pcall('HMGET', control, 'undrained_since', 'timeout')
      if known.err then known = {} end
    end
    if topic_type ~= 'priority' and waiting > 0 then
      due = redis.call('ZCOUNT', store, '-inf', now_ms)
      oldest_here = due > 0 and tonumber(redis.call('ZRANGEBYSCORE', store, '(999', now_ms, 'WITHSCORES', 'LIMIT', 0, 1)[2])
    elseif waiting > 0 then
      undrained_here = tonumber(known[1] or nil)
    end
    local own_timeout = tonumber(known[2] or nil) or timeout
    local others, since = overdue(retry, resting, prepare, running, own_timeout, claim, held, claimants, claims)
    if others > 0 then
      due = due + others
      if topic_type == 'priority' then
        undrained_here = math.min(undrained_here or since, since)
      else
        oldest_here = math.min(oldest_here or since, since)
      end
    end
    if oldest_here then oldest = math.min(oldest or oldest_here, oldest_here) end
    if undrained_here then undrained = math.min(undrained or undrained_here, undrained_here) end
    read = read + 1
    for j, value in ipairs({ waiting, due, running, resting, dead }) do depths[j] = depths[j] + value end
    for j = 1, #counters, 2 do
      local at = place[counters[j]]
      if at then sums[at] = sums[at] + (tonumber(counters[j + 1]) or 0) end
    end
  end
end
return { read, depths[1], depths[2], depths[3], depths[4], depths[5], oldest and string.format('%.0f', oldest) or '', sums,
  undrained and string.format('%.0f', undrained) or '' }
