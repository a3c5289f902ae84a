-- Stop handing out messages of a slot, or go on with it.
--
-- KEYS[1] control  HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] slot
-- ARGV[3] paused  1 or 0
-- ARGV[4] now
--
-- Returns paused | resumed | unchanged
local control = KEYS[1]
local channel, slot, paused, now = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', ARGV[4]
-- include: _types
local wrong = mistyped('hash', control)
if wrong then return wrong end
if paused == (redis.call('HEXISTS', control, 'paused') == 1) then return 'unchanged' end
if paused then
  redis.call('HDEL', control, '')
  redis.call('HSET', control, 'paused', '1')
  -- Whoever has taken messages and not begun with them gives them back.
  redis.pcall('PUBLISH', channel, -1 - slot)
  return 'paused'
end
redis.call('HDEL', control, 'paused', 'sleeping_until')
redis.pcall('PUBLISH', channel, slot)
return 'resumed'
