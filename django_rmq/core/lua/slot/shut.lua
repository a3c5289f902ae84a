-- Shut a slot for a re-slotting and give it the new slot count: sends with another count are rejected as moved from now on.
--
-- KEYS[1] control    HASH  field -> value
-- KEYS[2] store      ZSET  member -> due ms, or priority
-- KEYS[3] prepare    ZSET  member -> seconds*1000 + retries left
-- KEYS[4] retry      ZSET  member -> ms + retries/1024
-- KEYS[5] dead       ZSET  member -> ms of death
-- KEYS[6] claimants  ZSET  Spark consumer -> ms when its lease ends
-- KEYS[7] stats      HASH  counter -> n
-- KEYS[8] inserting  ZSET  Store by another name, if the last step of an insertion has failed
--
-- ARGV[1] channel
-- ARGV[2] slot
-- ARGV[3] slots        the new slot count
-- ARGV[4] reslot       the number of the re-slotting
-- ARGV[5] fresh FLAG   1: a new slot of the topic, which takes time-out and retries from this call
-- ARGV[6] timeout      seconds
-- ARGV[7] max_retries
-- ARGV[8] empty FLAG   1: only if the slot holds nothing
-- ARGV[9] now
--
-- Returns shut | known (by this re-slotting before) | stale (a later one has shut it) | holds

-- check: types
local known = tonumber(redis.call('HGET', control, 'reslot')) or 0
if known > tonumber(reslot) then return 'stale' end -- rule: a_later_re_slotting_is_overruled
if known == tonumber(reslot) then return 'known' end -- rule: a_slot_is_shut_again
local noted = redis.call('HGET', control, 'inserting')
-- include: _ledger
-- include: _insertion_end
-- An interrupted insertion holds Store under its other name, where the re-slotting would not look for messages.
if noted then end_insertion() end -- rule: shuts_what_it_does_not_see
keep_counts()
local held = redis.call('ZCARD', store) + redis.call('ZCARD', prepare) + redis.call('ZCARD', retry)
  + redis.call('ZCARD', dead) + redis.call('ZCARD', claimants)
if empty and held > 0 then return 'holds' end -- rule: shut_though_it_holds_something
-- Start with a deletion: after it, a full server accepts the rest.
redis.call('HDEL', control, 'sleeping_until')
redis.call('HSET', control, 'slots', slots, 'reslot', reslot, 'moving', '1')
if fresh then redis.call('HSET', control, 'timeout', timeout, 'max_retries', max_retries) end
redis.pcall('PUBLISH', channel, slot)
return 'shut'
