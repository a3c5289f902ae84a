-- What can be taken though it is not in Store: retries whose rest is over, deliveries that have timed out, and what a Spark
-- consumer holds whose lease has ended.
--
-- needs: now_s now_ms

-- The latest stamp of a delivery that has timed out.
local function timed_out(timeout)
  return string.format('(%.0f', (now_s - timeout) * 1000)
end

-- How many claimed messages come back, and when their lease ended. What was acknowledged does not come back.
local function lapsed_claim(claim, claimants, claims)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if not head[1] or tonumber(head[2]) > now_ms then return 0, math.huge end -- rule: live_claim_is_due
  local record = redis.call('HGET', claims, head[1]) or ''
  if string.match(record, '^%d+ acked ') then return 0, math.huge end -- rule: acknowledged_is_due
  return redis.call('ZCARD', claim), math.max(0, math.ceil(tonumber(head[2]))) -- rule: lapsed_claim_not_due
end

-- How many there are, since when the first of them can be taken (ms, or infinity), and how many of them are claimed. `rests`,
-- `runs` and `held`: the sizes of Retry, Prepare and the claim.
local function overdue(resting, rests, running, runs, timeout, claim, held, claimants, claims)
  local found, since, lapsed = 0, math.huge, 0
  if rests > 0 then
    found = redis.call('ZCOUNT', resting, '-inf', string.format('(%.0f', now_ms + 1)) -- rule: rested_not_due
    local head = found > 0 and redis.call('ZRANGE', resting, 0, 0, 'WITHSCORES')
    if head then since = math.max(0, math.floor(tonumber(head[2]))) end
  end
  if runs > 0 then
    local late = redis.call('ZCOUNT', running, '-inf', timed_out(timeout)) -- rule: timed_out_not_due
    local head = late > 0 and redis.call('ZRANGE', running, 0, 0, 'WITHSCORES')
    if head then since = math.min(since, math.max(0, (math.floor(tonumber(head[2]) / 1000) + timeout + 1) * 1000)) end
    found = found + late
  end
  if held > 0 then
    local at
    lapsed, at = lapsed_claim(claim, claimants, claims)
    found, since = found + lapsed, math.min(since, at)
  end
  return found, since, lapsed
end
