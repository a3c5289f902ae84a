-- Read how far a re-slotting has progressed in a slot, in one instant.
-- Changes nothing.
--
-- KEYS[1] control    HASH  field -> value
-- KEYS[2] prepare    ZSET  member -> seconds*1000 + retries left
-- KEYS[3] claimants  ZSET  Spark consumer -> ms when its lease ends
-- KEYS[4] stats      HASH  counter -> n
-- KEYS[5] leaving    HASH  field -> value; the messages on their way to another slot
--
-- ARGV[1] now
--
-- Returns {slots, reslot, 1 if shut, 1 if paused, deliveries, in flight, claims, rescheduled, revived, ticket on its way}
--         as texts, empty if there is none; in flight and claims are numbers

-- check: types
local known = redis.call('HMGET', control, 'slots', 'reslot', 'moving', 'paused', 'deliveries')
local counted = redis.call('HMGET', stats, 'rescheduled', 'revived') -- rule: progress_overlooks_replays
return { known[1] or '', known[2] or '', known[3] or '', known[4] or '', known[5] or '',
  redis.call('ZCARD', prepare), redis.call('ZCARD', claimants), counted[1] or '', counted[2] or '',
  redis.call('HGET', leaving, 'ticket') or '' }
