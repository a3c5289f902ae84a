-- Write a new assignment, if membership and assignment have not changed since they were read.
--
-- KEYS[1] assignment  HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] members  the version of the membership that the plan was made for
-- ARGV[3] number   the assignment that it was made from; empty: none
-- ARGV[4] plan
-- ARGV[5] now
--
-- Returns {ok, new number} | {changed}

-- check: types
-- include: _now
local known = redis.call('HMGET', assignment, 'members', 'number')
-- Two workers may both believe that it is their turn to assign. The second one finds another number.
if (known[1] or '') ~= members or (known[2] or '') ~= number then return { 'changed' } end
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that owners can drain it.
redis.call('HDEL', assignment, '')
local version = math.max(now_us, (tonumber(number) or 0) + 1)
-- A number that a double does not hold exactly, or a foreign value, gives way to the time.
if not (version < 9007199254740992) then version = now_us end
local new = string.format('%.0f', version)
redis.call('HSET', assignment, 'number', new, 'basis', members, 'plan', plan)
-- pcall: a worker that misses the notice, or may not publish it, finds the change at its next beat.
redis.pcall('PUBLISH', channel, new)
return { 'ok', new }
