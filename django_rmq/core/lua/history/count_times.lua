-- Count how late messages were delivered and how long calls of the listener took, permanently.
--
-- KEYS[1] times  HASH  field -> value
--
-- ARGV[1] late            24 numbers separated by spaces, one for each bucket
-- ARGV[2] late_ms NUMBER  the sum of what they count
-- ARGV[3] took            24 numbers, as above
-- ARGV[4] took_us NUMBER  the sum of what they count
-- ARGV[5] now
--
-- Returns how many buckets were raised

-- check: types
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', times, '')
local raised = 0
local function add(name, numbers, sum)
  local bucket = 0
  for number in string.gmatch(string.sub(numbers, 1, 600), '%d+') do
    if bucket < 24 and tonumber(number) > 0 then
      redis.call('HINCRBY', times, string.format('%s%d', name, bucket), number)
      raised = raised + 1
    end
    bucket = bucket + 1
  end
  if sum > 0 then redis.call('HINCRBY', times, name, string.format('%.0f', sum)) end
end
add('late', late, late_ms)
add('took', took, took_us)
return raised
