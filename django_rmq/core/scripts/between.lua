-- How many messages of one state have a score in bounds.
--
-- KEYS[1] set  ZSET  the state's: store, prepare, retry or dead
--
-- ARGV[1] lowest   only scores from this, up to highest
-- ARGV[2] highest
-- ARGV[3] now
--
-- Returns how many
local set, lowest, highest, now = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- include: _types
local wrong = mistyped('zset', set)
if wrong then return wrong end
return redis.call('ZCOUNT', set, lowest, highest)
