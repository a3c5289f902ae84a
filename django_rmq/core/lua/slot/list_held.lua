-- Read the messages in Prepare of an owner, with which a worker continues after a lost reply of prepare.
-- Changes nothing.
--
-- KEYS[1] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[2] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[3] prepare_body HASH  member in flight -> envelope
-- KEYS[4] control   HASH  field -> value
--
-- ARGV[1] owner
-- ARGV[2] offset NUMBER  rank in Prepare to begin at
-- ARGV[3] limit NUMBER
-- ARGV[4] now
--
-- Returns {'busy'} | {'ok', {member, score in Prepare, record, envelope or nil, ...}}

-- check: types
limit = math.min(limit, 1000)
local holding = redis.call('HGET', control, 'owner')
-- rule: list_held_tells_strangers
if holding and holding ~= owner and redis.call('ZCARD', prepare) > 0 then return { 'busy' } end
-- The prepare whose reply was lost did not run, so this owner has taken nothing.
if holding ~= owner then return { 'ok', {} } end
local rows = redis.call('ZRANGE', prepare, offset, offset + limit - 1, 'WITHSCORES')
local found = {}
for i = 1, #rows, 2 do
  local member = rows[i]
  found[#found + 1] = member
  found[#found + 1] = rows[i + 1]
  found[#found + 1] = redis.call('HGET', inflight, member) -- rule: list_held_without_receipts
  found[#found + 1] = redis.call('HGET', prepare_body, member)
end
return { 'ok', found }
