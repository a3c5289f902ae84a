-- Compute how long a failed message rests: twice as long with each failure. A jitter keeps messages that failed together from
-- coming back together.
--
-- needs: backoff_base backoff_cap micros

local function backoff(failures, index)
  local delay = math.min(backoff_cap, backoff_base * 2 ^ math.min(failures, 40)) -- rule: no_doubling
  if backoff_cap > backoff_base then -- rule: no_jitter
    delay = delay * (1 - (micros + index * 7919) % 1000 / 2000)
  end
  return math.floor(delay)
end
