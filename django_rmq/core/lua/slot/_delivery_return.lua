-- Return a delivery that has not begun.
--
-- needs: store prepare inflight retry kind keeps_first count land join

-- `score` is the score at which the message was taken. Returns when it can be taken again, or nil.
local function give_back(member, score)
  local number, waiting = tonumber(score), tonumber(redis.call('ZSCORE', store, member))
  local due
  redis.call('ZREM', prepare, member) -- rule: release_needs_memory
  local kept, outdated = land(member)
  -- The message was sent again while it was in flight; the copy that waits has the newer body.
  if outdated then join(member, kept) end -- rule: released_bodies_dropped
  local resting = redis.call('ZSCORE', retry, member)
  -- rule: earlier_time
  if not (waiting or resting) or (waiting and keeps_first(number) and number < waiting) then
    redis.call('ZADD', store, score, member)
    due = kind == 'priority' and 0 or number
  end
  redis.call('HDEL', inflight, member)
  count('released')
  if waiting or resting then count('dropped') end
  return due
end
