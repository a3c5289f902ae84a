-- Count fewer messages in flight for a holder of permits, or restart its lease.
--
-- KEYS[1] limits  HASH  field -> value
--
-- ARGV[1] worker
-- ARGV[2] ended NUMBER     how many of its messages are no longer in flight
-- ARGV[3] lease_ms NUMBER  how long the others are kept from now on; 0: as long as before
-- ARGV[4] now
--
-- Returns how many it has left

-- check: types
-- include: _now
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', limits, '')
local name = string.format('worker:%s', worker)
local held, wants, ends = string.match(redis.call('HGET', limits, name) or '', '^(%d+) (%d+) (%d+)$')
local left = math.max(0, (tonumber(held) or 0) - ended) -- rule: permits_never_end
if left > 0 then
  local until_ms = lease_ms > 0 and now_ms + lease_ms or tonumber(ends) -- rule: permits_are_not_renewed
  redis.call('HSET', limits, name, string.format('%.0f %.0f %.0f', left, tonumber(wants), until_ms))
  if lease_ms > 0 then redis.pcall('PEXPIRE', limits, string.format('%.0f', math.min(lease_ms + 60000, 1e12))) end
elseif held then
  redis.call('HDEL', limits, name)
end
return left
