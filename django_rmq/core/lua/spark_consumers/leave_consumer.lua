-- Leave the name of a Spark consumer to the next driver, at the end of a query or by a person.
--
-- KEYS[1] consumer  HASH  field -> value
--
-- ARGV[1] driver    the word of the caller; empty: any holder
-- ARGV[2] now
--
-- Returns left | absent (another driver holds it, or none)

-- check: types
local holder = redis.call('HGET', consumer, 'driver')
if not holder or (driver ~= '' and holder ~= driver) then return 'absent' end -- rule: leaves_what_another_holds
-- The fields stay, so that a driver that comes back finds that another one had the name in the meantime.
redis.call('HDEL', consumer, 'until')
return 'left'
