-- Give messages back as if they had never been delivered: shutdown, a fenced owner, a dead child.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] dead      ZSET  member -> ms of death
-- KEYS[5] deaths    HASH  member -> death
-- KEYS[6] failures  HASH  member -> last failure
-- KEYS[7] body      HASH  member -> envelope
-- KEYS[8] stats     HASH  counter -> n
-- KEYS[9] control   HASH  field -> value
-- KEYS[10] retry    ZSET  member -> ms + retries/1024
-- KEYS[11] prepare_body HASH  member in flight -> envelope
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] receipt
-- ARGV[5...] members
-- ARGV[#ARGV] now
--
-- Returns a word for each member: ok | stale

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or 16), known[3]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _delivery_end.end_marked
-- include: _delivery_end.give_back
-- include: _priority_notes.note_undrained
local prefix, words, earliest, ended = receipt .. ' ', {}, math.huge, false
for i = first, last do
  local member = ARGV[i]
  local record = redis.call('HGET', inflight, member)
  -- rule: release_anyone
  if not (record and string.sub(record, 1, #prefix) == prefix and redis.call('ZSCORE', prepare, member)) then
    words[#words + 1] = 'stale'
    count('stale')
  elseif string.find(record, ' ', #prefix + 1, true) then -- rule: release_ignores_marks
    words[#words + 1], ended = 'ok', true
    end_marked(member, record)
  else
    words[#words + 1], ended = 'ok', true
    earliest = math.min(earliest, give_back(member, string.match(record, '^[^ :]+', #prefix + 1)) or math.huge)
  end
end
-- The owner that was answered busy sleeps until the gate opens, and these messages may have kept it shut.
if ended and opens_gate() then earliest = 0 end
if ended then note_undrained() end
wake(earliest)
keep_counts()
return words
