-- Retries: how many a message has left, how long it rests after a failure, and how it comes back. _deaths.end_for_good decides
-- whether it is tried again, dies or is dropped.
--
-- How many it has at first is `Topic.max_retries` (core/model/topic.py), or its own limit if that is lower (`own_limits`, in
-- Python `Topic.retries_of`). A rest that the listener or a BACKOFF function gives is computed in core/consumer/failures. What a
-- failed message of a fifo topic holds back is decided in _strict_order, and within its delivery in
-- core/consumer/batch_run (`holds`).

-- section: own_limits
-- The limits that a message brings along. They are the first entry of the meta in its envelope: {"!":"retries timeout"}.
--
-- needs: max_retries

-- Returns two values:
--   how often the message may be tried again, at most as often as its topic allows,
--   its own time-out in seconds, or nil.
local function own_limits(envelope)
  local retries, seconds = string.match(envelope or '', '^%d+ {"!":"(%d*) (%d*)"')
  return math.min(tonumber(retries) or max_retries, max_retries), tonumber(seconds) -- rule: own_retries_above_the_topic
end

-- section: shortened_by
-- Compute by how many seconds a delivery's own time-out is shorter than `timeout`: its stamp in Prepare is that much earlier.

local function shortened_by(record, timeout)
  local seconds = string.find(record, ':', 1, true) and tonumber(string.match(record, '^%d+ [^ :]+:(%d+)'))
  return seconds and math.max(0, timeout - seconds) or 0
end

-- section: budget
-- Compute how many retries of `most` a delivery has left: from its score, or on fifo topics from its failures.
--
-- needs: topic_type failures bounded is_retry floor_priority

local function budget(score, member, most)
  if topic_type == 'fifo' then
    local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
    return bounded(most - (tonumber(times) or 0), 0, most) -- rule: fifo_without_a_budget
  end
  if not is_retry(score) then return most end -- rule: budget_ignores_settings
  local q = score
  if topic_type == 'priority' and score > floor_priority() then q = math.floor(score % 1 * 1024 + 0.5) end
  -- A message that has joined a later send has the limit of that send, which may be lower.
  return bounded(math.floor(q) - 1, 0, most) -- rule: one_delivery_more
end

-- section: retry_score
-- Compute the score of a retry: the number of its deliveries left, or its priority with that number in the last ten bits.
--
-- needs: topic_type retry_priority bounded floor_priority LARGEST_WITH_RETRIES

local function retry_score(q, score)
  if topic_type == 'fifo' then return score end -- rule: fifo_loses_its_place
  q = bounded(math.floor(q), 1, 999)
  if topic_type == 'priority' and retry_priority == 'original' and score > floor_priority() then -- rule: retries_sink
    return math.floor(math.min(score, LARGEST_WITH_RETRIES)) + q / 1024
  end
  return q
end

-- section: backoff
-- Returns how long a failed message rests: `backoff_base` at first, twice as long with each failure, and `backoff_cap` at most.
-- Both are the BACKOFF of the topic (`Topic.backoff` in core/model/topic.py), which core/commands/script_call adds to each call.
-- A jitter keeps messages that failed together from coming back together. worker/once adds these rests without jitter, and its
-- check E064 compares the sum with ONCE_RETENTION.
--
-- needs: backoff_base backoff_cap micros

local function backoff(failures, index)
  local delay = math.min(backoff_cap, backoff_base * 2 ^ math.min(failures, 40)) -- rule: no_doubling
  if backoff_cap > backoff_base then -- rule: no_jitter
    delay = delay * (1 - (micros + index * 7919) % 1000 / 2000)
  end
  return math.floor(delay)
end

-- section: end_failed
-- End a failed delivery: its message goes to Store, to Retry or to Dead, or is dropped for a newer send.
--
-- needs: store retry now_ms own_limits end_for_good note_failure end_delivery text_of retry_score backoff

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

-- section: promote_due
-- End at most `limit` back-offs: back to Store, or dropped for a newer send. Returns how many.
--
-- needs: store retry failures now_ms count bounded text_of retry_score

local function promote_due(limit)
  -- rule: promote_early
  local rested = redis.call('ZRANGEBYSCORE', retry, '-inf', '(' .. text_of(now_ms + 1), 'WITHSCORES',
    'LIMIT', 0, limit)
  for i = 1, #rested, 2 do
    local member = rested[i]
    local alive = redis.call('ZSCORE', store, member)
    local q = bounded(math.floor(tonumber(rested[i + 1]) % 1 * 1024 + 0.5), 1, 999) -- rule: promote_gives_a_retry
    local record = redis.call('HGET', failures, member) or ''
    local origin = tonumber(string.match(record, '^%S+ %d+ %d+ %d+ (%S+)\n')) or 0
    redis.call('ZREM', retry, member)
    -- A ZADD of another program has sent the resting message again: that copy is the newer one.
    if alive then -- rule: promote_overwrites
      count('dropped')
    else
      redis.call('ZADD', store, text_of(retry_score(q, origin)), member)
    end
  end
  return #rested / 2
end
