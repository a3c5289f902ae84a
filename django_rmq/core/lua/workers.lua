-- Who works: beats, the roster and the assignment of slots.
--
-- KEY sessions    ZSET  worker -> ms when its session ends
-- KEY workers     HASH  worker -> its token, and its description of itself
-- KEY assignment  HASH  field -> value

-- script: beat
-- Join, or renew a worker's session; end the sessions that ran out; return what changed since the worker's last call.
--
-- KEYS sessions workers assignment
--
-- ARGV[1] channel
-- ARGV[2] worker
-- ARGV[3] token              random, drawn by the process that uses the id `worker`
-- ARGV[4] record             begins with the token: joins, or updates the worker's description; empty: only renews
-- ARGV[5] session_ms NUMBER
-- ARGV[6] known_members      the version of the membership that the worker knows
-- ARGV[7] known_number       the number of the assignment that the worker knows
-- ARGV[8] now
--
-- Returns {ok, members, number, ms until the first session ends, basis, plan, workers, records}
--       | {expired} (the session has ended, and the call has no record) | {duplicate, record of the other process} | {full}
--         basis, plan and the two lists are empty if the worker knows them

-- check: types
-- include: _basics.now
local found, ends = redis.call('HGET', workers, worker), redis.call('ZSCORE', sessions, worker)
local ours = found and string.sub(found, 1, #token) == token
-- Two processes must not share an id. The id of a process whose session has ended is free.
if found and not ours and ends and tonumber(ends) > now_ms then return { 'duplicate', found } end
-- Another worker, or a fail-over to a replica without the last writes, has ended the session: the worker has to join again.
if record == '' and not (ours and ends) then return { 'expired' } end

-- Start with a deletion of nothing: after it, a full server accepts the rest, so that workers can drain it.
redis.call('ZREM', sessions, '')
local changed = not ends or not ours
for _, other in ipairs(redis.call('ZRANGEBYSCORE', sessions, '-inf', now_ms, 'LIMIT', 0, 100)) do
  if other ~= worker then
    redis.call('ZREM', sessions, other)
    redis.call('HDEL', workers, other)
    changed = true
  end
end
-- A session that ends in more than an hour was written before the clock was set back.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', sessions, now_ms + 3600000, '+inf', 'LIMIT', 0, 100)) do
  redis.call('ZADD', sessions, now_ms + session_ms, other)
end
-- Sessions that are over have been deleted, so workers that died together keep no successor out.
-- The coordinator says this number in its error (redis_coordinator), and reads of the sessions end at it.
if not ends and redis.call('ZCARD', sessions) >= 2000 then return { 'full' } end
redis.call('ZADD', sessions, now_ms + session_ms, worker)
if record ~= '' and found ~= record then
  redis.call('HSET', workers, worker, record)
  changed = true
end

local known = redis.call('HMGET', assignment, 'members', 'number')
local members, number = known[1] or '', known[2] or ''
if changed or members == '' then
  -- A version never comes twice, not even after all data was deleted: a worker would take it for the membership that it knows.
  local version = math.max(now_us, (tonumber(members) or 0) + 1)
  if not (version < 9007199254740992) then version = now_us end
  members = string.format('%.0f', version)
  redis.call('HSET', assignment, 'members', members)
  redis.pcall('PUBLISH', channel, members)
end

local first = redis.call('ZRANGE', sessions, 0, 0, 'WITHSCORES')
local first_end = math.max(0, math.min(tonumber(first[2]) - now_ms, session_ms))
local reply = { 'ok', members, number, string.format('%.0f', first_end), '', '', {}, {} }
if number ~= known_number then
  local plan = redis.call('HMGET', assignment, 'basis', 'plan')
  reply[5], reply[6] = plan[1] or '', plan[2] or ''
end
if members ~= known_members then
  reply[7] = redis.call('ZRANGE', sessions, 0, 1999)
  reply[8] = redis.call('HMGET', workers, unpack(reply[7]))
end
return reply

-- script: leave
-- End a worker's session at once, so that other workers take over its slots.
--
-- KEYS sessions workers assignment
--
-- ARGV[1] channel
-- ARGV[2] worker
-- ARGV[3] token
-- ARGV[4] now
--
-- Returns left | absent

-- check: types
-- include: _basics.now
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

-- script: assign
-- Write a new assignment, if membership and assignment have not changed since they were read.
--
-- KEYS assignment
--
-- ARGV[1] channel
-- ARGV[2] members  the version of the membership that the plan was made for
-- ARGV[3] number   the assignment that it was made from; empty: none
-- ARGV[4] plan
-- ARGV[5] now
--
-- Returns {ok, new number} | {changed}

-- check: types
-- include: _basics.now
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

-- script: roster
-- Read the workers, the ends of their sessions and the assignment, in one instant. `beat` decides that a session has ended.
--
-- KEYS sessions workers assignment
--
-- ARGV[1] known_members  the version of the membership that the caller knows
-- ARGV[2] known_number   the number of the assignment that the caller knows
-- ARGV[3] now
--
-- Returns {ms now, members, number, basis, plan, workers with ms when their sessions end, records}
--         plan and records are empty if the caller knows them

-- check: types
-- include: _basics.now
local fields = redis.call('HMGET', assignment, 'members', 'number', 'basis')
local members, number, basis = fields[1] or '', fields[2] or '', fields[3] or ''
local plan, records = '', {}
if number == '' or number ~= known_number then plan = redis.call('HGET', assignment, 'plan') or '' end
local rows, ids = redis.call('ZRANGE', sessions, 0, 1999, 'WITHSCORES'), {}
for i = 1, #rows, 2 do ids[#ids + 1] = rows[i] end
if #ids > 0 and (members == '' or members ~= known_members) then
  records = redis.call('HMGET', workers, unpack(ids))
end
return { string.format('%.0f', now_ms), members, number, basis, plan, rows, records }
