-- Take back the tick of a schedule that waits here, and refuse ticks of its earlier generations from now on.
--
-- KEYS[1] store     ZSET  member -> due ms
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] claim     ZSET  claimed member -> score it was taken with
-- KEYS[4] failures  HASH  member -> last failure
-- KEYS[5] body      HASH  member -> envelope
-- KEYS[6] stats     HASH  counter -> n
-- KEYS[7] control   HASH  field -> value; tick:NAME -> "generation instant [taken]"
--
-- ARGV[1] latest_field       tick:NAME of the schedule
-- ARGV[2] generation NUMBER  the present one
-- ARGV[3] instant            of the tick, in ms
-- ARGV[4] member
-- ARGV[5] now
--
-- Returns removed | written (it was put here, and a consumer has taken it) | unwritten; the same however often it is called

-- check: types
local due = tonumber(instant)
if not due then return redis.error_reply('ERR instant is out of bounds') end
local latest, last = string.match(redis.call('HGET', control, latest_field) or '0 0', '^(%d+) (-?%d+)')
latest, last = tonumber(latest) or 0, tonumber(last) or 0
-- An instant below 0 says that this tick was removed.
local outcome = (last == due or last == -due) and last or 0 -- rule: a_retraction_forgets
-- A reply was lost, or the caller was slow and another worker was first: the answer is that of the first call.
if latest >= generation then -- rule: a_retraction_takes_a_later_tick
  return outcome < 0 and 'removed' or outcome > 0 and 'written' or 'unwritten'
end
-- include: _ledger
redis.call('HDEL', control, '')
-- A score of a retry shows that the tick was delivered before.
local score = tonumber(redis.call('ZSCORE', store, member) or 0)
if score > 999 and redis.call('ZREM', store, member) > 0 then -- rule: a_retraction_takes_what_ran
  count('removed')
  redis.call('HDEL', body, member) -- rule: a_retraction_leaves_the_body
  local runs = redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)
  if not runs then redis.call('HDEL', failures, member) end
  outcome = -due
end
-- rule: a_late_writer_is_not_fenced
redis.call('HSET', control, latest_field, string.format(outcome > 0 and '%.0f %.0f taken' or '%.0f %.0f', generation, outcome))
keep_counts()
return outcome < 0 and 'removed' or outcome > 0 and 'written' or 'unwritten'
