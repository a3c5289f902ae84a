-- The ticks of schedules among the messages of a slot.

-- script: put_tick
-- Put one tick of a schedule into Store, unless this tick or a later one of the schedule was put here before.
--
-- So each tick becomes one message, however many workers try.
--
-- KEYS store retry body stats control
--
-- ARGV[1] channel
-- ARGV[2] slots              the caller's slot count
-- ARGV[3] backlog NUMBER     how many may wait here; 0: any number
-- ARGV[4] topic_type               range_merge or fixed_time
-- ARGV[5] latest_field       tick:NAME of the schedule
-- ARGV[6] generation NUMBER  rises with every change of the schedule
-- ARGV[7] instant            when the tick is due, in ms
-- ARGV[8] member
-- ARGV[9...] envelopes        one: body and what travels with it
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | {stored} | {known} (put here before) | {stale} (of an earlier generation) | {full}

-- check: types
local due = tonumber(instant)
if topic_type == 'priority' or topic_type == 'fifo' or not due or due <= 999 or due > 1e14 or due % 1 ~= 0 then
  return redis.error_reply('ERR instant is out of bounds')
end
local known = redis.call('HMGET', control, 'slots', 'sleeping_until', latest_field)
local known_slots, sleeping_until = known[1], known[2]
local latest, last, taken = string.match(known[3] or '0 0', '^(%d+) (-?%d+)(.*)$')
latest, last = tonumber(latest) or 0, tonumber(last) or 0
if latest > generation then return { 'stale' } end -- rule: a_stale_tick_is_written
-- A tick that was already taken when the schedule changed may have left this slot for another one. It is written again.
-- rule: a_tick_is_doubled
if latest == generation and last >= due and taken == '' then return { 'known' } end -- rule: a_tick_that_left_counts
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: a_tick_in_an_old_slot
-- include: _basics.now
-- include: _scores.numbers
-- include: _basics.ledger
-- include: _sleep.wake
local function is_retry(score)
  return score <= 999
end
-- include: _duplicates.replace
-- include: _duplicates.place
local reply = place({ member }, { instant, member }, first, {})
if reply[1] == 'mixed' and reply[2][1] == 'refused' then return { 'full' } end -- rule: a_refused_tick_counts
redis.call('HSET', control, latest_field, string.format('%.0f %.0f', generation, due))
return { 'stored' }

-- script: retract
-- Take back the tick of a schedule that waits here, and refuse ticks of its earlier generations from now on.
--
-- KEYS store prepare claim failures body stats control
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
-- include: _basics.ledger
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
