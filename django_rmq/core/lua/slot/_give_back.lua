-- The return of a delivery that has not begun.
--
-- needs: store prepare inflight retry kind keeps_first count land join

-- `score`: what it was taken with. Returns when the message can be taken again, or nil.
local function give_back(member, score)
  local number, waiting = tonumber(score), tonumber(redis.call('ZSCORE', store, member))
  local due
  redis.call('ZREM', prepare, member) -- rule: release_needs_memory
  local kept, outdated = land(member)
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
