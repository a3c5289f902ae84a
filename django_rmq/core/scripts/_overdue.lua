-- What can be taken though it is not in Store: retries whose rest is over, and deliveries that have timed out.
--
-- needs: now_s now_ms

-- The latest stamp of a delivery that has timed out.
local function timed_out(timeout)
  return string.format('(%.0f', (now_s - timeout) * 1000)
end

-- How many there are, and since when the first of them can be taken (ms, or infinity). `rests` and `runs`: the keys' sizes.
local function overdue(resting, rests, running, runs, timeout)
  local found, since = 0, math.huge
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
  return found, since
end
