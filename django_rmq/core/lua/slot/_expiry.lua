-- The end of a waiting message's life: it expires, and dies when a delivery or a claim finds it.

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
