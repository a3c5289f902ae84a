-- Deaths: whether a message that has failed is tried again, dies or is dropped (`end_for_good`), and its record in Dead. A
-- waiting message whose time is over expires when a delivery or a claim finds it.
--
-- A message that fails dies if no retry is left of `Topic.max_retries` (core/model/topic.py), or of its own limit if that is
-- lower. How many are left, and how long a message rests before the next one, is computed in _retries.

-- section: end_for_good
-- Decide whether a message that has failed is tried again, dies, or is dropped for a newer send.
--
-- needs: store retry body topic_type
-- needs: count note_failure waits forget die collects join

-- A message without retries left dies; one with a newer copy is dropped. Returns whether either happened. If not, the message is
-- to be tried again.
-- A message that collects bodies takes along those of its newer copy, which is dropped: so the message itself is tried again, or
-- dies. With the retries of that copy it would never die.
-- The last three arguments are those that end_delivery in ack returns: `failure`, its last failure before this one, or nil;
-- `kept`, its body, or nil; `outdated`, whether a newer body is there, that of a copy which was sent during the delivery.
local function end_for_good(member, left, what, text, origin, failure, kept, outdated)
  local absorbs = outdated and collects(kept) and collects(redis.call('HGET', body, member))
  if absorbs and left > 0 then -- rule: collecting_never_dies
    join(member, kept) -- rule: failed_bodies_dropped
    count('dropped')
    redis.call('ZREM', store, member)
    redis.call('ZREM', retry, member)
    return false
  elseif absorbs then
    die(member, what, text, origin, failure, 1, kept)
  elseif waits(member) then -- rule: rollback_overwrites
    count('dropped')
    if topic_type == 'fifo' then forget(member) else note_failure(member, what, text, origin, failure) end
  elseif left <= 0 then -- rule: deliveries_left
    die(member, what, text, origin, failure, 1, kept) -- rule: exhausted_without_its_body
  else
    return false
  end
  return true
end

-- section: record
-- Write the failures of a message, and its death. What makes it die: the end of its retries (`end_for_good`), a rejection
-- (ack.end_delivery), its expiry (`end_expired`), or an operator (`bury` in operate).
--
-- needs: store prepare retry dead deaths failures body [claim] [note_outcome]
-- needs: topic_type now_ms count is_retry floor_priority text_of plain_score collects joined exhumed

local function parse_failure(record)
  if not record then return nil end
  local last, times, first, _, score = string.match(record, '^(%S+) (%d+) (%d+) (%d+) (%S+)\n')
  return last and { kind = last, times = tonumber(times), first = first, score = score }
end

-- Returns the score that a message had before it first failed, so that it comes back at its own priority.
local function first_score(score, failure)
  local number = tonumber(score) or 0
  if not is_retry(number) then return plain_score(score) end
  if topic_type == 'priority' and number > floor_priority() then return text_of(math.floor(number)) end
  return failure and failure.score or plain_score(score)
end

local function note_failure(member, what, text, score, failure)
  -- The text is appended, because %s ends at a NUL.
  redis.call('HSET', failures, member, string.format('%s %d %s %.0f %s\n', what,
    (failure and failure.times or 0) + 1, failure and failure.first or string.format('%.0f', now_ms),
    now_ms, score) .. string.sub(text, 1, 1024))
end

-- Whether another copy of the member waits or rests.
local function waits(member)
  return redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member)
end

-- Another copy of the member keeps its diagnosis, and its body if it waits or rests; one that runs or is claimed has its own.
local function forget(member)
  -- On fifo topics the newer copy is a message of its own, with its own failures.
  if topic_type == 'fifo' and waits(member) then redis.call('HDEL', failures, member) end -- rule: fifo_inherits_failures
  if waits(member) then return end -- rule: body_torn_from_the_living
  redis.call('HDEL', body, member) -- rule: body_outlives
  -- rule: bury_tears_the_failures_of_the_claimed
  if redis.call('ZSCORE', prepare, member) or (claim and redis.call('ZSCORE', claim, member)) then return end
  redis.call('HDEL', failures, member)
end

-- Put a message into Dead. The caller has removed the dying copy from its set. `kept`: the body that it had there. `failed`: 1
-- if its last attempt failed just now, which `failure` does not count yet; else 0.
local function die(member, reason, text, score, failure, failed, kept)
  local died = redis.call('ZADD', dead, text_of(now_ms), member) == 0
  -- A message can be dead and alive: a newer copy of a dead message dies, and its death replaces the earlier one.
  if died then count('dead_merged') end -- rule: death_miscounted
  if died and collects(kept) then
    local had = exhumed(redis.call('HGET', deaths, member))
    if collects(had) then kept = joined(had, kept) end -- rule: earlier_death_dropped
  end
  text = string.sub(text, 1, 1024)
  redis.call('HSET', deaths, member, string.format('%s %d %s %.0f %s %d %d\n', reason,
    (failure and failure.times or 0) + failed, failure and failure.first or string.format('%.0f', now_ms),
    now_ms, score, #text, kept and 1 or 0) .. text .. (kept or ''))
  -- rule: death_leaves_no_outcome
  if note_outcome then note_outcome(member, 'dead', reason, (failure and failure.times or 0) + failed, text, failed) end
  forget(member)
  count(reason == 'lapsed' and 'lapsed' or 'died')
end

-- section: has_expired
-- Read from the envelope of a waiting message whether it has expired.
--
-- needs: now_ms

-- Returns two values:
--   whether the message has expired,
--   whether its envelope has limits of its own.
local function has_expired(envelope)
  local zero, space, _, _, bang = string.byte(envelope, 1, 5)
  if zero == 48 and space == 32 then return false, bang == 33 end
  local text, mark = string.match(envelope, '^(%d+) {?"?(!?)')
  local expires = tonumber(text)
  return expires and expires > 0 and expires < now_ms, mark == '!' -- rule: expires_at_once
end

-- section: end_expired
-- Move waiting messages that have expired to Dead.
--
-- needs: store retry failures body count parse_failure first_score die

-- `expired` is a flat list of member, score. There is no delivery.
local function end_expired(expired)
  for i = 1, #expired, 2 do
    local member = expired[i]
    local failure = parse_failure(redis.call('HGET', failures, member))
    redis.call('ZREM', store, member) -- rule: expired_stays
    count('dropped', redis.call('ZREM', retry, member)) -- rule: expired_leaves_its_retry
    local score = first_score(expired[i + 1], failure)
    die(member, 'lapsed', '', score, failure, 0, redis.call('HGET', body, member)) -- rule: expired_without_its_body
  end
end
