-- The names of Spark's consumers, each of which one driver holds.
--
-- KEY consumer  HASH  field -> value

-- script: hold_consumer
-- Hold the name of a Spark consumer for one driver: two drivers would read and acknowledge each other's batches.
--
-- KEYS consumer
--
-- ARGV[1] driver        the word of the caller
-- ARGV[2] checkpoint    the word of its query's checkpoint
-- ARGV[3] about         where it runs, for people
-- ARGV[4] lease NUMBER  ms
-- ARGV[5] starts FLAG   1: the driver has not held it before
-- ARGV[6] gone          the word of a driver of which the caller knows that it is dead; empty: none
-- ARGV[7] now
--
-- Returns {'held'} | {'taken', driver, about, ms since when it holds the name, ms when its lease ends}

-- check: types
if not (lease >= 1 and lease <= 86400000) then return redis.error_reply('ERR lease is out of bounds') end
-- include: _basics.now
local known = redis.call('HMGET', consumer, 'driver', 'checkpoint', 'about', 'since', 'until')
local ends = tonumber(known[5]) or 0
if known[1] and known[1] ~= driver then
  -- A restart has the checkpoint of the driver before it, and waits for no lease.
  local is_free = ends <= now_ms or known[2] == checkpoint or known[1] == gone -- rule: consumer_of_two_drivers
  -- A driver that held the name before has lost it, even if the driver that took it has ended since.
  if not (starts and is_free) then -- rule: consumer_goes_back
    return { 'taken', known[1], known[3] or '', known[4] or '0', string.format('%.0f', ends) }
  end
end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', consumer, '')
if known[1] ~= driver then
  redis.call('HSET', consumer, 'driver', driver, 'checkpoint', checkpoint, 'about', about, 'since', string.format('%.0f', now_ms))
end
redis.call('HSET', consumer, 'until', string.format('%.0f', now_ms + lease)) -- rule: consumer_without_a_lease
redis.call('PEXPIRE', consumer, string.format('%.0f', lease + 86400000))
return { 'held' }

-- script: leave_consumer
-- Leave the name of a Spark consumer to the next driver, at the end of a query or by a person.
--
-- KEYS consumer
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
