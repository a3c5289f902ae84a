-- End a worker's session at once, so that other workers take over its slots.
--
-- KEYS[1] sessions    ZSET  worker -> ms when its session ends
-- KEYS[2] workers     HASH  worker -> its token, and its description of itself
-- KEYS[3] assignment  HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] worker
-- ARGV[3] token
-- ARGV[4] now
--
-- Returns left | absent

-- check: types
-- include: _now
local found = redis.call('HGET', workers, worker)
-- Another process may have joined with this id since the session of the caller ended.
if not found or string.sub(found, 1, #token) ~= token then return 'absent' end
redis.call('ZREM', sessions, worker)
redis.call('HDEL', workers, worker)
local version = math.max(now_us, (tonumber(redis.call('HGET', assignment, 'members') or '') or 0) + 1)
if not (version < 9007199254740992) then version = now_us end
local members = string.format('%.0f', version)
redis.call('HSET', assignment, 'members', members)
redis.pcall('PUBLISH', channel, members)
return 'left'
