-- Note that messages of a sealed claim failed: they stay in it, and when it ends, however it does, each uses a retry or dies.
--
-- KEYS[1] stats        HASH  counter -> n
-- KEYS[2] control      HASH  field -> value
-- KEYS[3] claim        ZSET  member -> score it was taken with
-- KEYS[4] claims       HASH  Spark consumer -> "number state ms"
-- KEYS[5] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim
-- ARGV[3...] failures    member, what (failed, rejected), error
-- ARGV[#ARGV] now
--
-- Returns a word for each member: ok | again (it had failed before, and that stays) | not_found (not in the claim)
--         | open (the claim is not sealed) | stale (it has ended, or was never there)

-- check: types
if (last - first + 1) / 3 > 1000 then return redis.error_reply('ERR too many members') end
-- include: _ledger
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
local words = {}
for i = first, last, 3 do
  local member, kind, text, word = ARGV[i], ARGV[i + 1], ARGV[i + 2], 'ok'
  if tonumber(newest) ~= number or not (state == 'sealed' or state == 'open') then -- rule: fail_of_the_ended
    word = 'stale'
    count('stale')
  elseif state == 'open' then -- rule: fail_without_a_seal
    word = 'open'
  elseif not redis.call('ZSCORE', claim, member) then -- rule: fail_of_what_is_not_claimed
    word = 'not_found'
  -- A query that was restarted reads its batch again, and notes failures again.
  elseif redis.call('HSETNX', claim_failed, member, kind .. '\n' .. string.sub(text, 1, 1024)) == 0 then
    word = 'again'
  end
  words[#words + 1] = word
end
keep_counts()
return words
