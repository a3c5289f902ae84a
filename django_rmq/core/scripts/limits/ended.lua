-- Count fewer messages in flight for a holder of permits, or let its lease start again.
--
-- KEYS[1] limits  HASH  field -> value
--
-- ARGV[1] worker
-- ARGV[2] ended NUMBER     how many of its messages are in flight no more
-- ARGV[3] lease_ms NUMBER  how long what is left is kept from now on; 0: as long as before
-- ARGV[4] now
--
-- Returns how many it has left

-- check: types
-- include: _now
-- A write of nothing first, so that a full server lets the rest pass: what ends drains.
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
