-- Counts what a slot holds by state, for the scripts that count one slot or many.
--
-- needs: topic_type timeout now_ms sizes mistyped timed_out overdue

-- Returns what `count` returns, or an error: the control or the records of the slot are of another type. The sets have been
-- measured before, those that most slots lack only where one of them exists.
local function count_slot(store, prepare, retry, dead, control, claim, inflight, claimants, claims)
  local waiting, runs = sizes[store], sizes[prepare]
  local rests, ended, held = sizes[retry] or 0, sizes[dead] or 0, sizes[claim] or 0
  local due, oldest = waiting, ''
  if topic_type ~= 'priority' and waiting > 0 then
    local first = tonumber(redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2])
    local at = string.format('%.0f', now_ms)
    due = first <= now_ms and redis.call('ZCOUNT', store, '-inf', at) or 0 -- rule: count_all_as_due
    if due > 0 then oldest = redis.call('ZRANGEBYSCORE', store, '(999', at, 'WITHSCORES', 'LIMIT', 0, 1)[2] or '' end
  end
  local known = redis.pcall('HMGET', control, 'owner', 'paused', 'undrained_since', 'timeout')
  if known.err then return mistyped('hash', control) end
  local undrained_since = topic_type == 'priority' and waiting > 0 and known[3] or ''
  local time_limit = tonumber(known[4]) or timeout
  if runs + held > 0 then
    local wrong = mistyped('hash', inflight) or mistyped('hash', claims) or mistyped('zset', claimants)
    if wrong then return wrong end
  end
  local others, since, unleased = overdue(retry, rests, prepare, runs, time_limit, claim, held, claimants, claims)
  if others > 0 then
    local first = string.format('%.0f', since)
    if topic_type == 'priority' then
      if since < (tonumber(undrained_since) or math.huge) then undrained_since = first end -- rule: overdue_undated
    elseif since < (tonumber(oldest) or math.huge) then
      oldest = first
    end
  end

  -- A receipt is the time of its delivery in microseconds, and no extension changes it.
  local first_delivery = ''
  if runs > 0 then
    local low, first = string.sub(timed_out(time_limit), 2), math.huge
    local members = redis.call('ZRANGEBYSCORE', prepare, low, '+inf', 'LIMIT', 0, 1000)
    for _, record in ipairs(#members > 0 and redis.call('HMGET', inflight, unpack(members)) or {}) do
      first = math.min(first, tonumber(string.match(record or '', '^%d+')) or math.huge) -- rule: newest_runs_longest
    end
    if first < math.huge then first_delivery = string.format('%.0f', math.floor(first / 1000)) end
  end
  return { waiting, due + others, runs, rests, ended, oldest,
    known[1] or '', known[2] and 1 or 0, held, undrained_since, first_delivery, unleased } -- rule: count_never_paused
end
