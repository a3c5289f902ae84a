-- Read the rank of members of one state among those of the same score.
-- Changes nothing.
--
-- KEYS[1] set ZSET BY STATE  store, prepare, retry, dead or claim
--
-- ARGV[1...] members
-- ARGV[#ARGV] now
--
-- Returns for each member its rank from 0 among those of its score, nil if it is not there

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local ranks = {}
for i = first, last do
  local rank, score = redis.call('ZRANK', set, ARGV[i]), redis.call('ZSCORE', set, ARGV[i])
  ranks[#ranks + 1] = rank and rank - redis.call('ZCOUNT', set, '-inf', '(' .. score) -- rule: ranks_among_all
end
return ranks
