-- Move the chosen messages into Prepare, with their bodies.
--
-- needs: store prepare inflight retry body prepare_body in_flight rests count

-- `prepared` has score and member of each message, `flights` member and record, `bodies` member and envelope. `is_head`: the
-- messages are the first entries of Store.
local function take(members, prepared, flights, bodies, is_head)
  local taken = #members
  -- Redis keeps small sets and hashes in a listpack, which is slow with hundreds of members. An entry that is too long for a
  -- listpack, added first and removed again, makes Redis use a skiplist or a hash table at once.
  local LONG = string.rep(' ', 65)
  local large = taken > 32 and in_flight == 0 and not redis.call('ZSCORE', store, LONG)
  if is_head then
    redis.call('ZREMRANGEBYRANK', store, 0, taken - 1)
  else
    redis.call('ZREM', store, unpack(members))
  end
  if large then redis.call('ZADD', prepare, 0, LONG) end
  redis.call('ZADD', prepare, unpack(prepared))
  if large then redis.call('ZREM', prepare, LONG) end
  if taken > 32 then redis.call('HSET', inflight, members[1], LONG) end
  redis.call('HSET', inflight, unpack(flights))
  if #bodies > 0 then
    -- A delivery has its own body, because a newer one may arrive while it is in flight.
    if taken > 32 then redis.call('HSET', prepare_body, bodies[1], LONG) end
    redis.call('HSET', prepare_body, unpack(bodies))
    redis.call('HDEL', body, unpack(members))
  end
  -- A ZADD of another program has sent a resting message again: the resting retry is superseded.
  -- rule: stranger_leaves_a_retry
  if rests then count('dropped', redis.call('ZREM', retry, unpack(members))) end
end
