-- Count the messages of one state whose score is within bounds.
-- Changes nothing.
--
-- KEYS[1] set ZSET BY STATE  store, prepare, retry, dead or claim
--
-- ARGV[1] lowest   only scores from this, up to highest
-- ARGV[2] highest
-- ARGV[3] now
--
-- Returns how many

-- check: types
return redis.call('ZCOUNT', set, lowest, highest) -- rule: between_all
