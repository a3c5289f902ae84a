-- Count how late messages were delivered, until the next record includes the counts.
--
-- KEYS[1] pending  HASH  field -> value
--
-- ARGV[1] counts  24 numbers separated by spaces, one for each bucket
-- ARGV[2] now
--
-- Returns how many buckets were raised

-- check: types
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', pending, '')
local bucket, raised = 0, 0
for number in string.gmatch(string.sub(counts, 1, 600), '%d+') do
  if bucket < 24 and tonumber(number) > 0 then
    redis.call('HINCRBY', pending, string.format('late%d', bucket), number)
    raised = raised + 1
  end
  bucket = bucket + 1
end
return raised
