-- Delete dead messages that have not changed since they were read: by member and time of death.
--
-- KEYS[1] dead     ZSET  member -> ms of death
-- KEYS[2] deaths   HASH  member -> death
-- KEYS[3] stats    HASH  counter -> n
-- KEYS[4] trash    HASH  letter of the state, member -> the copy; what the act has deleted
--
-- ARGV[1] most_kept NUMBER   how many copies to keep in `trash`; 0: none
-- ARGV[2] most_bytes NUMBER  of these copies; the last one may exceed it
-- ARGV[3...] pairs  score, member
-- ARGV[#ARGV] now
--
-- Returns {words, how many copies are kept, their bytes}; a word for each member:
-- dead (deleted) | changed (it has died again in the meantime) | not_found

-- check: types
if (last - first + 1) / 2 > 1000 then return redis.error_reply('ERR too many members') end
-- include: _now
-- include: _scores.numbers
-- include: _ledger
-- include: _trash
for i = first, most_kept > 0 and last or 0, 2 do
  local died = redis.call('ZSCORE', dead, ARGV[i + 1])
  if died and tonumber(died) == tonumber(ARGV[i]) then
    keep_copy('dead', ARGV[i + 1], died, '', redis.call('HGET', deaths, ARGV[i + 1]) or '')
  end
end
local kept, bytes = keep_copies()
local words = {}
for i = first, last, 2 do
  local score, member, word = tonumber(ARGV[i]), ARGV[i + 1], 'not_found'
  local died = redis.call('ZSCORE', dead, member)
  if died then
    -- If the message was replayed and has died again since it was read, the caller has not seen that death.
    word = 'changed'
    if tonumber(died) == score then -- rule: discard_takes_the_later_death
      redis.call('ZREM', dead, member)
      redis.call('HDEL', deaths, member)
      count('removed_dead')
      word = 'dead'
    end
  end
  words[#words + 1] = word
end
keep_counts()
return { words, kept, bytes }
