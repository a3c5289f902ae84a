-- Read everything that a slot knows about some members, in all states.
-- Changes nothing.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] retry     ZSET  member -> ms + retries/1024
-- KEYS[5] dead      ZSET  member -> ms of death
-- KEYS[6] deaths    HASH  member -> death
-- KEYS[7] failures  HASH  member -> last failure
-- KEYS[8] body      HASH  member -> envelope
-- KEYS[9] claim     ZSET  claimed member -> score it was taken with
-- KEYS[10] claim_body HASH  claimed member -> envelope
-- KEYS[11] prepare_body HASH  member in flight -> envelope
-- KEYS[12] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
--
-- ARGV[1...] members
-- ARGV[#ARGV] now
--
-- Returns for each member {scores in store, prepare, retry, dead and claim, in-flight record, death, last failure,
--         envelope, envelopes of the claimed copy and of the one in flight, how its query has failed it},
--         nil for what there is not

-- check: types
if last - first >= 100 then return redis.error_reply('ERR too many members') end -- rule: describe_past_its_bound
local found = {}
for i = first, last do
  local member = ARGV[i]
  found[#found + 1] = {
    redis.call('ZSCORE', store, member), redis.call('ZSCORE', prepare, member),
    redis.call('ZSCORE', retry, member), redis.call('ZSCORE', dead, member), redis.call('ZSCORE', claim, member),
    redis.call('HGET', inflight, member), redis.call('HGET', deaths, member),
    redis.call('HGET', failures, member), redis.call('HGET', body, member), redis.call('HGET', claim_body, member),
    redis.call('HGET', prepare_body, member), redis.call('HGET', claim_failed, member),
  }
end
return found
