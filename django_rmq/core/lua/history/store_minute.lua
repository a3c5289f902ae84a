-- Store the record of a minute with the lateness counted since the last record, and delete records older than the retention.
--
-- KEYS[1] minutes  HASH  minute -> its record
-- KEYS[2] pending  HASH  field -> value
--
-- ARGV[1] minute NUMBER  minutes since the epoch
-- ARGV[2] record
-- ARGV[3] keep NUMBER    how many minutes are kept
-- ARGV[4] now
--
-- Returns kept | present

-- check: types
record = string.sub(record, 1, 500)
-- An earlier attempt whose reply was lost has written the record, with the counts that were pending then.
local field = string.format('%.0f', minute)
if redis.call('HEXISTS', minutes, field) == 1 then return 'present' end
local names, late = { 'first' }, {}
for bucket = 0, 23 do names[#names + 1] = string.format('late%d', bucket) end
local found = redis.call('HMGET', pending, unpack(names))
for i = 2, #names do
  if found[i] then late[#late + 1] = string.format('%d:%s', i - 2, string.sub(found[i], 1, 16)) end
end
-- Delete old minutes, oldest first, in bounded steps. There are none before 'first'.
local first, gone = tonumber(found[1] or '') or minute, {}
if first > minute then first = minute - keep - 1000 end
local last = math.min(minute - keep, first + 999)
for old = first, last do gone[#gone + 1] = string.format('%.0f', old) end
if #gone > 0 then redis.call('HDEL', minutes, unpack(gone)) end
redis.call('HDEL', pending, unpack(names))
redis.call('HSET', minutes, field, string.format('%s|%s', record, table.concat(late, ' ')))
redis.call('HSET', pending, 'first', string.format('%.0f', math.max(first, last + 1)))
-- If sampling stops, the key expires when its last minute is too old.
redis.pcall('EXPIRE', minutes, (keep + 60) * 60)
redis.pcall('EXPIRE', pending, (keep + 60) * 60)
return 'kept'
