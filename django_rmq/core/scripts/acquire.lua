-- Begin to own a slot: a new epoch, which fences every prepare sent under an older one.
--
-- KEYS[1] control  HASH  field -> value
--
-- ARGV[1] now
--
-- Returns the new epoch
local control, now = KEYS[1], ARGV[1]
-- include: _types
local wrong = mistyped('hash', control)
if wrong then return wrong end
-- A write of nothing first, so that a full server lets the rest pass: who owns can drain.
redis.call('HDEL', control, '')
return redis.call('HINCRBY', control, 'epoch', 1)
