-- Read the workers, the ends of their sessions and the assignment, in one instant. `beat` decides that a session has ended.
--
-- KEYS[1] sessions    ZSET  worker -> ms when its session ends
-- KEYS[2] workers     HASH  worker -> its token, and its description of itself
-- KEYS[3] assignment  HASH  field -> value
--
-- ARGV[1] known_members  the version of the membership that the caller knows
-- ARGV[2] known_number   the number of the assignment that the caller knows
-- ARGV[3] now
--
-- Returns {ms now, members, number, basis, plan, workers with ms when their sessions end, records}
--         plan and records are empty if the caller knows them

-- check: types
-- include: _now
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
