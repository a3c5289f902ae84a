-- End a failed delivery: its message goes to Store, to Retry or to Dead, or is dropped for a newer send.
--
-- needs: store retry now_ms backoff_base backoff_cap micros
-- needs: own_limits end_for_good note_failure end_delivery text_of retry_score

-- Returns how long a failed message rests: twice as long with each failure. A jitter keeps messages that failed together from
-- coming back together.
local function backoff(failures, index)
  local delay = math.min(backoff_cap, backoff_base * 2 ^ math.min(failures, 40)) -- rule: no_doubling
  if backoff_cap > backoff_base then -- rule: no_jitter
    delay = delay * (1 - (micros + index * 7919) % 1000 / 2000)
  end
  return math.floor(delay)
end

-- Move a failed message with the body `kept`: it is dropped for a newer copy, dies, or becomes a retry. `outdated`: a newer body
-- is there. Without `delay` the topic's exponential back-off applies. Returns when the message can be taken again, or nil.
local function go_on(member, left, what, text, origin, failure, delay, index, kept, outdated)
  if end_for_good(member, left, what, text, origin, failure, kept, outdated) then return nil end
  delay = delay or backoff(own_limits(kept) - left, index) -- rule: later_steps
  local due = now_ms
  if delay > 0 then -- rule: no_rest
    due = now_ms + delay
    redis.call('ZADD', retry, text_of(due + left / 1024), member)
  else
    redis.call('ZADD', store, text_of(retry_score(left, tonumber(origin) or 0)), member)
  end
  note_failure(member, what, text, origin, failure)
  return due
end

local function end_failed(member, left, record, what, text, delay, index)
  local origin, failure, kept, outdated = end_delivery(member, record, what, text)
  return origin and go_on(member, left, what, text, origin, failure, delay, index, kept, outdated)
end
