-- Accept messages that left another slot, once: a copy that was sent here meanwhile is the newer one.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] retry     ZSET  member -> ms + retries/1024
-- KEYS[3] dead      ZSET  member -> ms of death
-- KEYS[4] deaths    HASH  member -> death
-- KEYS[5] failures  HASH  member -> last failure
-- KEYS[6] body      HASH  member -> envelope
-- KEYS[7] stats     HASH  counter -> n
-- KEYS[8] control   HASH  field -> value
-- KEYS[9] arrived   HASH  slot -> last ticket
--
-- ARGV[1] reslot       the number of the re-slotting
-- ARGV[2] source       the slot that they left
-- ARGV[3] ticket       of their hand-over
-- ARGV[4] topic_type
-- ARGV[5] max_retries  the topic's, until the slot has its own
-- ARGV[6...] rows      state, member, score, failure, envelope or death; empty where there is none
-- ARGV[#ARGV] now
--
-- Returns in | known (they are in) | stale (not shut by this re-slotting)

-- check: types
if (last - first + 1) / 5 > 250 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'reslot', 'moving', 'max_retries', 'undrained_since')
local max_retries, undrained_since = tonumber(known[3] or max_retries), known[4]
if known[1] ~= reslot or not known[2] then return 'stale' end -- rule: moved_into_an_open_slot
-- The process that moves the messages lost a reply, or another one repeats what it began.
-- rule: moved_in_twice
if (tonumber(redis.call('HGET', arrived, source)) or 0) >= tonumber(ticket) then return 'known' end
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _ledger
-- include: _priority_notes.note_undrained
-- include: _accumulation.bodies
redis.call('HDEL', control, '')
for i = first, last, 5 do
  local state, member, score, failure, rest = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  if state == 'dead' then
    local died = redis.call('ZSCORE', dead, member)
    if died then count('dead_merged') end
    local there = died and redis.call('HGET', deaths, member)
    if not died or tonumber(score) > tonumber(died) then -- rule: moved_over_a_later_death
      redis.call('ZADD', dead, score, member)
      if there then rest = joined_death(rest, (exhumed(there))) end
      if rest ~= '' then redis.call('HSET', deaths, member, rest) end
    elseif there then
      redis.call('HSET', deaths, member, joined_death(there, (exhumed(rest))))
    end
    count('moved_dead_in')
  else
    local waiting, resting = redis.call('ZSCORE', store, member), redis.call('ZSCORE', retry, member)
    local fresh = state == 'store' and not is_retry(tonumber(score))
    if waiting and not is_retry(tonumber(waiting)) then -- rule: moved_over_a_later_send
      -- Sent here meanwhile: merged with the copy that it would have met, which keeps its time on range_merge topics only.
      count('dropped')
      if fresh and topic_type == 'range_merge' then redis.call('ZADD', store, score, member) end
      local place = state == 'retry' and string.match(failure, '^%S+ %d+ %d+ %d+ (%S+)\n') or score
      -- rule: moved_behind_its_place
      if topic_type == 'fifo' and tonumber(place) < tonumber(waiting) then redis.call('ZADD', store, place, member) end
    elseif fresh or not (waiting or resting) then
      if resting then count('dropped', redis.call('ZREM', retry, member)) end
      if waiting then count('dropped') end
      redis.call('ZADD', state == 'retry' and retry or store, score, member)
      if rest ~= '' and not collects(rest) then redis.call('HSET', body, member, rest) end -- rule: moved_without_its_body
    else
      count('dropped')
    end
    if failure ~= '' and redis.call('HEXISTS', failures, member) == 0 then
      redis.call('HSET', failures, member, failure)
    end
    if rest ~= '' and redis.call('HSETNX', body, member, rest) == 0 and collects(rest) then -- rule: moved_bodies_dropped
      join(member, rest)
    end
    count('moved_in')
  end
end
redis.call('HSET', arrived, source, ticket)
note_undrained()
keep_counts()
return 'in'
