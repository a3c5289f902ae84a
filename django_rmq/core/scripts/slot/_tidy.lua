-- The messages of a Spark consumer: `claim` has them with the scores they were taken with, `claim_body` their bodies,
-- `claims` the number and state of its newest claim. One consumer at a time, for as long as it is in `claimants`.
--
-- needs: store retry failures claimants claim claims claim_body
-- needs: kind now_ms count

local function newest_claim(of)
  local number, state = string.match(redis.call('HGET', claims, of) or '', '^(%d+) (%l+) ')
  return tonumber(number) or 0, state or 'none'
end
local function note_claim(of, number, state)
  redis.call('HSET', claims, of, string.format('%.0f %s %.0f', number, state, now_ms))
end
-- The claim of `of` has ended if it holds nothing more: the gate opens. Returns how many are left.
local function close_claim(of)
  local left = redis.call('ZCARD', claim)
  if left == 0 then redis.call('ZREM', claimants, of) end -- rule: claim_keeps_the_gate
  return left
end

-- Delete at most `limit` messages of an acknowledged claim, or all of them if no failures have to be deleted.
local function forget_claimed(limit)
  if redis.call('HLEN', failures) == 0 then
    count('acked', redis.call('ZCARD', claim))
    redis.call('UNLINK', claim, claim_body)
    return
  end
  local members = redis.call('ZRANGE', claim, 0, limit - 1)
  if #members == 0 then return end
  local waiting, resting, gone = redis.call('ZMSCORE', store, unpack(members)), {}, {}
  if redis.call('ZCARD', retry) > 0 then resting = redis.call('ZMSCORE', retry, unpack(members)) end
  for i, member in ipairs(members) do
    local lives = kind ~= 'fifo' and (waiting[i] or resting[i])
    if not lives then gone[#gone + 1] = member end -- rule: ack_tears_the_failures_of_the_living
  end
  count('acked', redis.call('ZREM', claim, unpack(members)))
  redis.call('HDEL', claim_body, unpack(members))
  if #gone > 0 then redis.call('HDEL', failures, unpack(gone)) end -- rule: ack_leaves_failures
end
