-- Count what a slot holds by state; read since when messages wait and run, its last consumer, and whether it is paused.
-- Changes nothing.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry    ZSET  member -> ms + retries/1024
-- KEYS[4] dead     ZSET  member -> ms of death
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] claim    ZSET  claimed member -> score it was taken with
-- KEYS[7] inflight HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[8] claimants ZSET Spark consumer -> ms when its lease ends
-- KEYS[9] claims   HASH  Spark consumer -> "number state ms"
--
-- ARGV[1] kind
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] now
--
-- Returns {store, due, prepare, retry, dead, earliest due ms that has passed or empty, owner or empty, 1 if paused, claimed,
--          ms since when Store of a priority topic has not been empty or empty, ms of the first delivery that runs or empty,
--          how many are claimed under a lease that has ended}
--         due counts messages that are due in Store, have rested in Retry, have timed out in Prepare, or are claimed under a
--         lease that has ended; the earliest ms are those of the first of them

-- check: types but inflight claimants claims
-- include: _now
-- include: _overdue
-- The check of types has measured the sets; it skips those that most slots lack where none of them exists.
local waiting, runs = sizes[store], sizes[prepare]
local rests, ended, held = sizes[retry] or 0, sizes[dead] or 0, sizes[claim] or 0
local due, oldest = waiting, ''
if kind ~= 'priority' and waiting > 0 then
  local at = string.format('%.0f', now_ms)
  due = redis.call('ZCOUNT', store, '-inf', at) -- rule: count_all_as_due
  local head = redis.call('ZRANGEBYSCORE', store, '(999', at, 'WITHSCORES', 'LIMIT', 0, 1)
  oldest = head[2] or ''
end
local known = redis.call('HMGET', control, 'owner', 'paused', 'undrained_since', 'timeout')
local undrained_since = kind == 'priority' and waiting > 0 and known[3] or ''
timeout = tonumber(known[4]) or timeout
if runs + held > 0 then
  local wrong = mistyped('hash', inflight, claims) or mistyped('zset', claimants)
  if wrong then return wrong end
end
local others, since, lapsed = overdue(retry, rests, prepare, runs, timeout, claim, held, claimants, claims)
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
  local low, first = string.sub(timed_out(timeout), 2), math.huge
  local members = redis.call('ZRANGEBYSCORE', prepare, low, '+inf', 'LIMIT', 0, 1000)
  for _, record in ipairs(#members > 0 and redis.call('HMGET', inflight, unpack(members)) or {}) do
    first = math.min(first, tonumber(string.match(record or '', '^%d+')) or math.huge) -- rule: newest_runs_longest
  end
  if first < math.huge then first_delivery = string.format('%.0f', math.floor(first / 1000)) end
end
return { waiting, due + others, runs, rests, ended, oldest,
  known[1] or '', known[2] and 1 or 0, held, undrained_since, first_delivery, lapsed } -- rule: count_never_paused
