-- Read the ledger of a slot and its depths, in one instant.
-- Changes nothing.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry    ZSET  member -> ms + retries/1024
-- KEYS[4] dead     ZSET  member -> ms of death
-- KEYS[5] stats    HASH  counter -> n
-- KEYS[6] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] now
--
-- Returns {store, prepare, retry, dead, {counter, n, ...}, claimed}

-- check: types
-- rule: audit_of_another
return { redis.call('ZCARD', store), redis.call('ZCARD', prepare), redis.call('ZCARD', retry),
  redis.call('ZCARD', dead), redis.call('HGETALL', stats), redis.call('ZCARD', claim) }
