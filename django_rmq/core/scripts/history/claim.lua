-- Take it upon oneself to sample a topic in this minute, unless somebody else has.
--
-- KEYS[1] minutes  HASH  minute -> its record
-- KEYS[2] pending  HASH  field -> value
--
-- ARGV[1] minute  minutes since the epoch
-- ARGV[2] now
--
-- Returns ok | taken
local minutes, pending = KEYS[1], KEYS[2]
local minute, now = tonumber(ARGV[1]), ARGV[2]
-- include: _types
local wrong = mistyped('hash', minutes, pending)
if wrong then return wrong end
local claimed = tonumber(redis.call('HGET', pending, 'claimed') or '')
-- More than an hour ahead: the clock was set back since.
if claimed and claimed >= minute and claimed <= minute + 60 then return 'taken' end
redis.call('HDEL', pending, 'claimed')
redis.call('HSET', pending, 'claimed', string.format('%.0f', minute))
return 'ok'
