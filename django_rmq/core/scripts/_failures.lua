-- The end of a delivery that did not succeed: back to Store, to Retry, to Dead, or given up for a newer send.
local function backoff(failures, index)
  local delay = math.min(backoff_cap, backoff_base * 2 ^ math.min(failures, 40))
  if backoff_cap > backoff_base then
    delay = delay * (1 - (micros + index * 7919) % 1000 / 2000)
  end
  return math.floor(delay)
end

local function parse_failure(record)
  if not record then return nil end
  local last, times, first, _, score = string.match(record, '^(%S+) (%d+) (%d+) (%d+) (%S+)\n')
  return last and { kind = last, times = tonumber(times), first = first, score = score }
end

-- The score a message had before it first failed, so that it comes back at its own priority.
local function first_score(score, failure)
  local number = tonumber(score) or 0
  if not is_retry(number) then return plain_score(score) end
  if kind == 'priority' and number > floor_priority() then return text_of(math.floor(number)) end
  return failure and failure.score or plain_score(score)
end

local function note_failure(member, what, text, score, failure)
  -- The text is appended, for %s ends at a NUL.
  redis.call('HSET', failures, member, string.format('%s %d %s %.0f %s\n', what,
    (failure and failure.times or 0) + 1, failure and failure.first or string.format('%.0f', now_ms),
    now_ms, score) .. string.sub(text, 1, 1024))
end

local function waits(member)
  return redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member)
end

-- What a delivery was handed out with goes where the message goes, unless a newer body is there. Returns it.
local function land(member)
  local delivered = redis.call('HGET', prepare_body, member)
  if delivered then
    redis.call('HDEL', prepare_body, member)
    redis.call('HSETNX', body, member, delivered)
  end
  return delivered
end

-- Another copy of the member keeps its diagnosis, and its body if it waits or rests; one that runs or is claimed has its own.
local function forget(member)
  if waits(member) then return end
  redis.call('HDEL', body, member)
  if redis.call('ZSCORE', prepare, member) or (claim and redis.call('ZSCORE', claim, member)) then return end
  redis.call('HDEL', failures, member)
end

-- The caller has taken the copy that dies out of its place. `kept`: the body that it had there.
local function die(member, reason, text, score, failure, failed, kept)
  if redis.call('ZADD', dead, text_of(now_ms), member) == 0 then count('dead_merged') end
  text = string.sub(text, 1, 1024)
  redis.call('HSET', deaths, member, string.format('%s %d %s %.0f %s %d %d\n', reason,
    (failure and failure.times or 0) + failed, failure and failure.first or string.format('%.0f', now_ms),
    now_ms, score, #text, kept and 1 or 0) .. text .. (kept or ''))
  forget(member)
  count(reason == 'lapsed' and 'lapsed' or 'died')
end

-- What failed with the body `kept` goes on: given up for a newer copy, dead, or a retry. `delay` nil: the topic's
-- exponential back-off. Returns when the message can be taken again, or nil.
local function go_on(member, left, what, text, origin, failure, delay, index, kept)
  if waits(member) then
    count('dropped')
    note_failure(member, what, text, origin, failure)
    return nil
  elseif left <= 0 then
    die(member, what, text, origin, failure, 1, kept)
    return nil
  end
  delay = delay or backoff(max_retries - left, index)
  local due = now_ms
  if delay > 0 then
    due = now_ms + delay
    redis.call('ZADD', retry, text_of(due + left / 1024), member)
  else
    redis.call('ZADD', store, text_of(retry_score(left, tonumber(origin) or 0)), member)
  end
  note_failure(member, what, text, origin, failure)
  return due
end

local function end_failed(member, left, record, what, text, delay, index)
  local score, mark, outlived = string.match(record, '^%d+ (%S+) ?(%S*) ?(%S*)')
  score, mark = score or '0', mark or ''
  local failure, due = parse_failure(redis.call('HGET', failures, member)), nil
  local origin = first_score(score, failure)
  redis.call('ZREM', prepare, member)
  local kept = land(member)
  if mark == 'removed' then
    count('ended_marked')
    count('removed')
    redis.call('HDEL', inflight, member)
    forget(member)
    return nil
  end
  if mark == 'buried' then
    count('ended_marked')
    if outlived ~= '' and redis.call('ZSCORE', dead, member) then
      -- The newer copy that was buried with it is the one that stays.
      count('dropped')
      forget(member)
    else
      die(member, 'buried', text, origin, failure, 1, kept)
    end
  elseif what == 'rejected' then
    count('rejected')
    die(member, 'rejected', text, origin, failure, 1, kept)
  else
    count(what == 'timed_out' and 'expired' or 'failed')
    due = go_on(member, left, what, text, origin, failure, delay, index, kept)
  end
  redis.call('HDEL', inflight, member)
  return due
end
