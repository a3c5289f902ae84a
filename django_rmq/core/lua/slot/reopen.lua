-- Open a slot that a re-slotting had shut, and wake the consumer that waits for it.
--
-- KEYS[1] control  HASH  field -> value
-- KEYS[2] arrived  HASH  slot -> last ticket
--
-- ARGV[1] channel
-- ARGV[2] slot
-- ARGV[3] reslot       the number of the re-slotting
-- ARGV[4] deliveries   the highest receipt of the slots that messages came from: receipts keep rising
-- ARGV[5] paused FLAG  1: one of those slots was paused
-- ARGV[6] now
--
-- Returns open | known (it was open) | stale (another re-slotting has shut it, or none)

-- check: types
local known = redis.call('HMGET', control, 'reslot', 'moving', 'deliveries')
if known[1] ~= reslot then return 'stale' end
-- The reply to an earlier call was lost, or another process of the same re-slotting was first.
if not known[2] then return 'known' end
redis.call('HDEL', control, 'moving', 'sleeping_until')
redis.call('UNLINK', arrived)
-- Listeners may have stored receipts of the family's other slots as fencing tokens, so later ones have to be higher.
-- rule: receipts_fall
if tonumber(deliveries) > (tonumber(known[3]) or 0) then redis.call('HSET', control, 'deliveries', deliveries) end
if paused then redis.call('HSET', control, 'paused', '1') end -- rule: pauses_end
redis.pcall('PUBLISH', channel, slot)
return 'open'
