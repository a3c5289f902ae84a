-- Give a slot the time-out, the retries and the slot count of its topic's definition.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry    ZSET  member -> ms + retries/1024
-- KEYS[4] control  HASH  field -> value
-- KEYS[5] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] kind
-- ARGV[2] slots
-- ARGV[3] timeout             seconds
-- ARGV[4] max_retries NUMBER
-- ARGV[5] apply FLAG          1: do it; 0: only check whether it can be done
-- ARGV[6] now
--
-- Returns ok | refused   refused: live scores would change their meaning: priorities to retries, or retries to priorities

-- check: types
local known = tonumber(redis.call('HGET', control, 'max_retries')) or max_retries
local live = redis.call('ZCARD', store) + redis.call('ZCARD', prepare) + redis.call('ZCARD', retry)
  + redis.call('ZCARD', claim) -- rule: configure_ignores_claims
-- rule: configure_rereads_scores
if kind == 'priority' and math.max(16, max_retries) ~= math.max(16, known) and live > 0 then return 'refused' end
if apply then -- rule: configure_only_asks
  -- Start with a deletion of nothing: after it, a full server accepts the rest.
  redis.call('HDEL', control, '')
  redis.call('HSET', control, 'slots', slots, 'timeout', timeout, 'max_retries', max_retries)
end
return 'ok'
