-- How many messages a slot holds in each state, which consumer took last, and whether it is paused.
-- Changes nothing.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry    ZSET  member -> ms + retries/1024
-- KEYS[4] dead     ZSET  member -> ms of death
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] kind
-- ARGV[2] now
--
-- Returns {store, of these due, prepare, retry, dead, earliest due ms that has passed or empty, owner or empty, 1 if paused,
--          claimed, ms since when Store of a priority topic has not been empty or empty}

-- check: types
-- include: _now
local waiting = redis.call('ZCARD', store)
local due, oldest = waiting, ''
if kind ~= 'priority' then
  local at = string.format('%.0f', now_ms)
  due = redis.call('ZCOUNT', store, '-inf', at) -- rule: count_all_as_due
  local head = redis.call('ZRANGEBYSCORE', store, '(999', at, 'WITHSCORES', 'LIMIT', 0, 1)
  oldest = head[2] or ''
end
local known = redis.call('HMGET', control, 'owner', 'paused', 'undrained_since')
local undrained_since = kind == 'priority' and waiting > 0 and known[3] or ''
return { waiting, due, redis.call('ZCARD', prepare), redis.call('ZCARD', retry), redis.call('ZCARD', dead), oldest,
  known[1] or '', known[2] and 1 or 0, redis.call('ZCARD', claim), undrained_since } -- rule: count_never_paused
