-- Give waiting messages a new due time or priority; resting messages keep their budget.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] retry    ZSET  member -> ms + retries/1024
-- KEYS[3] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[4] stats    HASH  counter -> n
-- KEYS[5] control  HASH  field -> value
-- KEYS[6] claim    ZSET  claimed member -> score it was taken with
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] max_retries  the topic's, until the slot has its own
-- ARGV[4...] pairs     score, member
-- ARGV[#ARGV] now
--
-- Returns what each member was found as: waiting | resting (both have the new score now) | refused | running | not_found

-- check: types
if (last - first + 1) / 2 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'last_place')
local sleeping_until, max_retries, last_place = known[1], tonumber(known[2] or max_retries), known[3]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _ledger
-- include: _sleep.wake
-- include: _fifo_places
for i = first, last, 2 do
  if not is_fresh(tonumber(ARGV[i])) then return redis.error_reply('ERR score ' .. ARGV[i] .. ' is out of bounds') end
end
redis.call('HDEL', control, '')
local words, earliest = {}, math.huge
for i = first, last, 2 do
  local score, member = ARGV[i], ARGV[i + 1]
  local waiting = tonumber(redis.call('ZSCORE', store, member))
  local resting = tonumber(redis.call('ZSCORE', retry, member))
  local word = 'not_found'
  if waiting and not is_retry(waiting) then -- rule: reschedule_makes_fresh
    word = 'waiting'
    if topic_type == 'fifo' then score = text_of(later_place(tonumber(score), 0)) end
    redis.call('ZADD', store, score, member) -- rule: reschedule_early
  elseif waiting or resting then
    word = 'resting'
    if topic_type == 'priority' then
      word = 'refused'
    else
      local q = waiting and math.floor(waiting) or math.floor(resting % 1 * 1024 + 0.5)
      if waiting then redis.call('ZREM', store, member) end
      if waiting and resting then count('dropped') end
      local rest = math.min(tonumber(score), LARGEST_WITH_RETRIES)
      redis.call('ZADD', retry, text_of(rest + bounded(q, 1, 999) / 1024), member)
    end
  -- rule: reschedule_misses_the_claimed
  elseif redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member) then
    word = 'running'
  end
  if word == 'waiting' or word == 'resting' then
    count('rescheduled')
    earliest = math.min(earliest, topic_type == 'priority' and 0 or tonumber(score))
  end
  words[#words + 1] = word
end
wake(earliest)
keep_counts()
return words
