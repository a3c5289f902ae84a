-- Phase two, success: end deliveries whose receipt the caller still holds.
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
-- Returns {'ok'} if every receipt was valid, else a word for each member: ok | stale

-- check: types
if last < first then return {} end
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries')
local sleeping_until, max_retries = known[1], tonumber(known[2] or 16)
-- include: _now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- The listener finished before it learned of the cancellation: the message has succeeded.
local function decides(record)
  return not string.find(record, ' cancelled', 1, true) -- rule: cancelled_cannot_succeed
end
local records = redis.call('HMGET', inflight, unpack(ARGV, first, last))
local prefix = receipt .. ' '
local width, words, done, marked, top = #prefix, {}, {}, {}, 0
for i = 1, #records do
  local record = records[i]
  if record and string.find(record, prefix, 1, true) == 1 then -- rule: commit_anyone
    words[i] = 'ok'
    if string.find(record, ' ', width + 1, true) and decides(record) then -- rule: commit_ignores_marks
      marked[#marked + 1] = i
    else
      top = top + 1
      done[top] = ARGV[first + i - 1]
    end
  else
    -- The delivery timed out, or the reply to an earlier call was lost. A newer delivery of the message may run now.
    words[i] = 'stale'
    count('stale')
  end
end

if #done > 0 then
  count('committed', redis.call('ZREM', prepare, unpack(done))) -- rule: commit_miscounts
  redis.call('HDEL', inflight, unpack(done))
  if note_done then note_done(done, receipt) end -- rule: success_leaves_no_outcome
end
local keyed = unusual and redis.call('HLEN', prepare_body) > 0
local failed = unusual and redis.call('HLEN', failures) > 0
if keyed or failed or #marked > 0 then
-- include: _scores.kinds
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _delivery_end.end_marked
  if #done > 0 and (keyed or failed) then
    local waiting, resting, gone = redis.call('ZMSCORE', store, unpack(done)), {}, {}
    if redis.call('ZCARD', retry) > 0 then resting = redis.call('ZMSCORE', retry, unpack(done)) end
    for i, member in ipairs(done) do
      local lives = waiting[i] or resting[i]
      -- On fifo topics the newer copy is a message of its own, with its own failures.
      if not lives or topic_type == 'fifo' then gone[#gone + 1] = member end -- rule: commit_takes_the_diagnosis
      if lives and keyed then land(member) end -- rule: commit_takes_the_body
    end
    if failed and #gone > 0 then redis.call('HDEL', failures, unpack(gone)) end
    if keyed then redis.call('HDEL', prepare_body, unpack(done)) end -- rule: commit_leaves_the_body
  end
  for _, i in ipairs(marked) do
    -- Read again: the call may name the member twice, but the delivery ends once.
    local member = ARGV[first + i - 1]
    local record = redis.call('HGET', inflight, member)
    if record then end_marked(member, record) end
  end
end
-- rule: commit_opens_silently
if #done + #marked > 0 and opens_gate() then wake(0) end
keep_counts()
if #done == #records then return { 'ok' } end
return words
