-- Restart the lease of a claim. A sealed one takes no more messages, and can be read and acknowledged.
--
-- KEYS[1] stats      HASH  counter -> n
-- KEYS[2] control    HASH  field -> value
-- KEYS[3] claimants  ZSET  Spark consumer -> ms when its lease ends
-- KEYS[4] claim      ZSET  member -> score it was taken with
-- KEYS[5] claims     HASH  Spark consumer -> "number state ms"
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim
-- ARGV[3] lease NUMBER   ms
-- ARGV[4] seal FLAG      1 or 0
-- ARGV[5] now
--
-- Returns {'ok', held in all} | {'stale'}   stale: the claim is lost, or was never there

-- check: types
if not (lease >= 1 and lease <= 86400000) then return redis.error_reply('ERR lease is out of bounds') end
-- include: _now
-- include: _ledger
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
if tonumber(newest) ~= number or not (state == 'open' or state == 'sealed') then -- rule: renewal_of_the_lost
  count('stale')
  keep_counts()
  return { 'stale' }
end
if seal and state == 'open' then -- rule: no_seal
  redis.call('HSET', claims, consumer, string.format('%.0f sealed %.0f', number, now_ms))
end
redis.call('ZADD', claimants, string.format('%.0f', now_ms + lease), consumer)
return { 'ok', redis.call('ZCARD', claim) }
