-- Count what each of many slots holds by state; read since when messages wait and run, who consumes, and what is paused.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, prepare ZSET, retry ZSET, dead ZSET, claim ZSET, control HASH, inflight HASH, claimants ZSET,
--   claims HASH of each slot
--
-- ARGV[1] kind
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] now
--
-- Returns for each slot {owner or empty, 1 if paused}, and of a slot that has messages behind them
--           store, due, prepare, retry, dead, claimed, earliest due ms that has passed or empty,
--           ms since when Store of a priority topic has not been empty or empty, ms of the first delivery that runs or empty,
--           how many are claimed under a lease that has ended;
--         or which of its keys is of another type.
--         due counts messages that are due in Store, have rested in Retry, have timed out in Prepare, or are claimed under a
--         lease that has ended; the earliest ms are those of the first of them

if #slots_keys > 576 then return redis.error_reply('ERR too many slots') end
-- include: _types
-- include: _now
-- include: _overdue
local at = string.format('%.0f', now_ms)
local function count(i)
  local store, prepare, retry, dead, claim = unpack(slots_keys, i, i + 4)
  local control, inflight, claimants, claims = unpack(slots_keys, i + 5, i + 8)
  local known = redis.pcall('HMGET', control, 'owner', 'paused', 'undrained_since', 'timeout')
  if known.err then return mistyped('hash', control).err end
  local found = { known[1] or '', known[2] and 1 or 0 } -- rule: count_never_paused
  -- Most of many slots are empty, which one command says.
  if redis.call('EXISTS', store, prepare, retry, dead, claim) == 0 then return found end -- rule: claimed_slots_are_empty
  local wrong = mistyped('zset', store, prepare, retry, dead, claim)
  if wrong then return wrong.err end
  local waiting, runs, rests, held = sizes[store], sizes[prepare], sizes[retry], sizes[claim]
  if runs + held > 0 then
    wrong = mistyped('hash', inflight, claims) or mistyped('zset', claimants)
    if wrong then return wrong.err end
  end
  local due, oldest, undrained_since = waiting, '', ''
  if kind == 'priority' then
    undrained_since = waiting > 0 and known[3] or ''
  elseif waiting > 0 then
    due = redis.call('ZCOUNT', store, '-inf', at) -- rule: count_all_as_due
    oldest = redis.call('ZRANGEBYSCORE', store, '(999', at, 'WITHSCORES', 'LIMIT', 0, 1)[2] or ''
  end
  local own_timeout = tonumber(known[4]) or timeout
  local others, since, lapsed = overdue(retry, rests, prepare, runs, own_timeout, claim, held, claimants, claims)
  if others > 0 then
    local first = string.format('%.0f', since)
    if kind == 'priority' then
      if since < (tonumber(undrained_since) or math.huge) then undrained_since = first end -- rule: overdue_undated
    elseif since < (tonumber(oldest) or math.huge) then
      oldest = first
    end
  end

  -- A receipt is the time of its delivery in microseconds, and no extension changes it.
  local first_delivery = ''
  if runs > 0 then
    local low, first = string.sub(timed_out(own_timeout), 2), math.huge
    local members = redis.call('ZRANGEBYSCORE', prepare, low, '+inf', 'LIMIT', 0, 1000)
    for _, record in ipairs(#members > 0 and redis.call('HMGET', inflight, unpack(members)) or {}) do
      first = math.min(first, tonumber(string.match(record or '', '^%d+')) or math.huge) -- rule: newest_runs_longest
    end
    if first < math.huge then first_delivery = string.format('%.0f', math.floor(first / 1000)) end
  end
  return { found[1], found[2], waiting, due + others, runs, rests, sizes[dead], held,
    oldest, undrained_since, first_delivery, lapsed }
end
local counts = {}
for i = 1, #slots_keys, 9 do counts[#counts + 1] = count(i) end
return counts
