-- Search a part of the records of a slot for those that belong to no message, and delete them if requested.
--
-- KEYS[1] store      ZSET  member -> due ms, or priority
-- KEYS[2] prepare    ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry      ZSET  member -> ms + retries/1024
-- KEYS[4] dead       ZSET  member -> ms of death
-- KEYS[5] inflight   HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[6] deaths     HASH  member -> death
-- KEYS[7] failures   HASH  member -> last failure
-- KEYS[8] body       HASH  member -> envelope
-- KEYS[9] claim       ZSET  claimed member -> score it was taken with
-- KEYS[10] claim_body HASH  claimed member -> envelope
-- KEYS[11] prepare_body HASH  member in flight -> envelope
-- KEYS[12] claim_failed HASH  claimed member -> how its query has failed it
--
-- ARGV[1] kind         inflight, deaths, failures, body, claim_body, prepare_body or claim_failed
-- ARGV[2] cursor       0: from the beginning
-- ARGV[3] repair FLAG  1: delete them
-- ARGV[4] now
--
-- Returns {cursor to continue with (0: all were read), how many were read, {member, ...}}

-- check: types
local records, homes = inflight, { prepare }
if kind == 'deaths' then
  records, homes = deaths, { dead }
elseif kind == 'body' then
  records, homes = body, { store, retry } -- rule: orphans_take_what_rests
elseif kind == 'failures' then
  records, homes = failures, { store, retry, prepare, claim } -- rule: orphans_forget_spark
elseif kind == 'claim_body' then
  records, homes = claim_body, { claim }
elseif kind == 'prepare_body' then
  records, homes = prepare_body, { prepare }
elseif kind == 'claim_failed' then
  records, homes = claim_failed, { claim }
end
local scanned = redis.call('HSCAN', records, cursor, 'COUNT', 100)
local loose = {}
for i = 1, #scanned[2], 2 do
  local member, found = scanned[2][i], false
  for _, home in ipairs(homes) do
    found = found or redis.call('ZSCORE', home, member)
  end
  if not found then loose[#loose + 1] = member end
end
if repair and #loose > 0 then redis.call('HDEL', records, unpack(loose)) end -- rule: orphans_are_deleted_unasked
return { scanned[1], #scanned[2] / 2, loose }
