-- Move waiting messages that have expired to Dead.
--
-- needs: store retry failures body count parse_failure first_score die

-- `lapsed` is a flat list of member, score. There is no delivery.
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
