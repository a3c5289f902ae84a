-- Stop delivering messages of a slot, or resume it: `prepare` and `claim` heed it.
--
-- KEYS[1] control  HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] slot NUMBER
-- ARGV[3] paused FLAG  1 or 0
-- ARGV[4] now
--
-- Returns paused | resumed | unchanged

-- check: types
if paused == (redis.call('HEXISTS', control, 'paused') == 1) then return 'unchanged' end
if paused then
  redis.call('HDEL', control, '')
  redis.call('HSET', control, 'paused', '1')
  -- Consumers that have taken messages but have not begun with them then give them back.
  redis.pcall('PUBLISH', channel, -1 - slot) -- rule: pause_tells_nobody
  return 'paused'
end
redis.call('HDEL', control, 'paused', 'sleeping_until') -- rule: pause_for_ever
redis.pcall('PUBLISH', channel, slot) -- rule: resume_wakes_nobody
return 'resumed'
