-- Counts the messages that can be taken although they are not in Store: retries whose rest is over, deliveries that have timed
-- out, and claimed messages whose lease has ended.
--
-- needs: now_s now_ms

-- Returns the bound below which the stamps of deliveries have timed out.
local function timed_out(timeout)
  return string.format('(%.0f', (now_s - timeout) * 1000)
end

-- Returns two values:
--   how many claimed messages come back,
--   when their lease ended, in ms, or infinity.
local function unleased_claim(claim, claimants, claims)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if not head[1] or tonumber(head[2]) > now_ms then return 0, math.huge end -- rule: live_claim_is_due
  -- A query that died between two steps of `ack_claim` leaves messages behind, which do not come back.
  local record = redis.call('HGET', claims, head[1]) or ''
  if string.match(record, '^%d+ acked ') then return 0, math.huge end -- rule: acknowledged_is_due
  return redis.call('ZCARD', claim), math.max(0, math.ceil(tonumber(head[2]))) -- rule: unleased_claim_not_due
end

-- `rests`, `runs` and `held` are the sizes of Retry, Prepare and the claim. Returns three values:
--   how many messages can be taken,
--   since when the first of them can be taken, in ms, or infinity,
--   how many of them are claimed.
local function overdue(resting, rests, running, runs, timeout, claim, held, claimants, claims)
  local found, since, unleased = 0, math.huge, 0
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
    unleased, at = unleased_claim(claim, claimants, claims)
    found, since = found + unleased, math.min(since, at)
  end
  return found, since, unleased
end
