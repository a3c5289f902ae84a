-- Note that a worker declares a schedule as it is, or that it ends.
--
-- KEYS[1] schedules  HASH  NAME:field -> value; generation -> n
--
-- ARGV[1] name
-- ARGV[2] ends FLAG  1: the worker ends; another one that declares the schedule will say so
-- ARGV[3] now
--
-- Returns renewed | not_found

-- check: types
-- include: _now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('spec'), of('removed'))
if not known[1] or known[2] then return 'not_found' end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', schedules, '')
redis.call('HSET', schedules, of('renewed'), ends and '0' or string.format('%.0f', now_ms))
return 'renewed'
