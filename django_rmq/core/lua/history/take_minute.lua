-- Take the sampling of a topic in this minute, unless another worker has taken it.
--
-- KEYS[1] minutes  HASH  minute -> its record
-- KEYS[2] pending  HASH  field -> value
--
-- ARGV[1] minute NUMBER  minutes since the epoch
-- ARGV[2] now
--
-- Returns ok | taken

-- check: types
local minute_taken = tonumber(redis.call('HGET', pending, 'claimed') or '')
-- A minute that is more than an hour ahead was written before the clock was set back.
if minute_taken and minute_taken >= minute and minute_taken <= minute + 60 then return 'taken' end
redis.call('HDEL', pending, 'claimed')
redis.call('HSET', pending, 'claimed', string.format('%.0f', minute))
return 'ok'
