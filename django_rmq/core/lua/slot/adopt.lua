-- Record messages that another program put into a slot as foreign, so that the ledger balances again.
--
-- KEYS[1] stats  HASH  counter -> n
--
-- ARGV[1] drift NUMBER  how many messages the ledger does not know
-- ARGV[2] foreign       how many were recorded when that was found, so that two people do not record the same messages
-- ARGV[3] now
--
-- Returns ok | changed

-- check: types
if not (drift >= 1) then return redis.error_reply('ERR drift is out of bounds') end
-- Two people may adopt the same messages at once, or a reply may be lost and the call be repeated.
if (redis.call('HGET', stats, 'foreign') or '0') ~= foreign then return 'changed' end -- rule: adopt_twice
redis.call('HINCRBY', stats, 'foreign', drift)
return 'ok'
