-- Read the workers, the ends of their sessions and the assignment, in one instant.
--
-- KEYS[1] sessions    ZSET  worker -> ms when its session ends
-- KEYS[2] workers     HASH  worker -> its token, and its description of itself
-- KEYS[3] assignment  HASH  field -> value
--
-- ARGV[1] now
--
-- Returns {ms now, members, number, basis, plan, workers with ms when their sessions end, records}

-- check: types
-- include: _now
local fields = redis.call('HMGET', assignment, 'members', 'number', 'basis', 'plan')
local rows, ids = redis.call('ZRANGE', sessions, 0, 1999, 'WITHSCORES'), {}
for i = 1, #rows, 2 do ids[#ids + 1] = rows[i] end
local records = {}
if #ids > 0 then records = redis.call('HMGET', workers, unpack(ids)) end
return {
  string.format('%.0f', now_ms), fields[1] or '', fields[2] or '', fields[3] or '', fields[4] or '', rows, records,
}
