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
