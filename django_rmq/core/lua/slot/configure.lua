-- Give a slot the time-out, the retries and the slot count of its topic's definition.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] retry    ZSET  member -> ms + retries/1024
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] topic_type
-- ARGV[2] slots
-- ARGV[3] timeout NUMBER      seconds
-- ARGV[4] max_retries NUMBER
-- ARGV[5] apply FLAG          1: do it; 0: only check whether it can be done
-- ARGV[6] now
--
-- Returns ok | refused   refused: live scores would change their meaning: priorities to retries, or retries to priorities

-- check: types
local known = redis.call('HMGET', control, 'timeout', 'max_retries')
local former, former_retries = tonumber(known[1] or timeout), tonumber(known[2] or max_retries)
local live = redis.call('ZCARD', store) + redis.call('ZCARD', prepare) + redis.call('ZCARD', retry)
  + redis.call('ZCARD', claim) -- rule: configure_ignores_claims
-- rule: configure_rereads_scores
if topic_type == 'priority' and math.max(16, max_retries) ~= math.max(16, former_retries) and live > 0 then return 'refused' end
if not apply then return 'ok' end -- rule: configure_only_asks
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
redis.call('HSET', control, 'slots', slots, 'timeout', timeout, 'max_retries', max_retries)
-- The stamp of a delivery with a time-out of its own depends on the slot's, so it gets another one. The script looks at the
-- deliveries that time out first, because their number has no bound; the others are stamped when they are extended.
if timeout ~= former then -- rule: own_time_out_shifts
-- include: _scores.numbers
-- include: _retries.shortened_by
  local rows, stamps = redis.call('ZRANGE', prepare, 0, 4999, 'WITHSCORES'), {}
  for first = 1, #rows, 2000 do
    local members = {}
    for i = first, math.min(first + 1998, #rows), 2 do
      members[#members + 1] = rows[i]
    end
    for i, record in ipairs(redis.call('HMGET', inflight, unpack(members))) do
      local later = record and shortened_by(record, former) - shortened_by(record, timeout) or 0
      if later ~= 0 then
        stamps[#stamps + 1] = text_of(tonumber(rows[first + i * 2 - 1]) + later * 1000)
        stamps[#stamps + 1] = members[i]
      end
    end
  end
  for first = 1, #stamps, 2000 do
    redis.call('ZADD', prepare, unpack(stamps, first, math.min(first + 1999, #stamps)))
  end
end
return 'ok'
