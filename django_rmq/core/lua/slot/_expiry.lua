-- Waiting messages may expire: the time is in the envelope, and the message dies when it is found expired.
--
-- needs: store retry failures body now_ms count parse_failure first_score die

-- Returns two values:
--   whether the message has expired,
--   whether its envelope has limits of its own.
local function has_lapsed(envelope)
  local zero, space, _, _, bang = string.byte(envelope, 1, 5)
  if zero == 48 and space == 32 then return false, bang == 33 end
  local text, mark = string.match(envelope, '^(%d+) {?"?(!?)')
  local expires = tonumber(text)
  return expires and expires > 0 and expires < now_ms, mark == '!' -- rule: lapses_at_once
end
-- Move the members of a flat list of member, score from Store to Dead without a delivery.
local function bury_lapsed(lapsed)
  for i = 1, #lapsed, 2 do
    local member = lapsed[i]
    local failure = parse_failure(redis.call('HGET', failures, member))
    redis.call('ZREM', store, member) -- rule: lapsed_stays
    count('dropped', redis.call('ZREM', retry, member)) -- rule: lapsed_leaves_its_retry
    local score = first_score(lapsed[i + 1], failure)
    die(member, 'lapsed', '', score, failure, 0, redis.call('HGET', body, member)) -- rule: lapsed_without_its_body
  end
end
