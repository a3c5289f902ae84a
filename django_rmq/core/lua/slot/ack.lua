-- How deliveries end or are extended: success, failure, return, time-out. Who ends them at their time-out is in _time_outs.

-- script: commit
-- Phase two, success: end deliveries whose receipt the caller still holds.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry prepare_body
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
-- include: _basics.now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
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
-- include: _deaths.record
-- include: ack.end_delivery
-- include: _deaths.end_for_good
-- include: ack.end_marked
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

-- script: commit_delivery
-- Phase two, success, of all messages that one prepare has delivered alone, without naming them.
--
-- KEYS prepare inflight stats control
--
-- ARGV[1] channel
-- ARGV[2] receipt
-- ARGV[3] size NUMBER  messages that the prepare delivered, while nothing else was in flight
-- ARGV[4...] digests     of all members, 12 bytes each, in one text; none: each gets an outcome of its own (OUTCOME_RETENTION)
-- ARGV[#ARGV] now
--
-- Returns ok | unsure (nothing is changed: they have to be committed by name)

local known = redis.pcall('HMGET', control, 'deliveries', 'marked', 'sleeping_until')
-- check: types but control stats
if known.err then return mistyped('hash', control) end
-- The slot had nothing in flight when it delivered these, so until it delivers again nothing else is in flight there.
if known[1] ~= receipt then return 'unsure' end -- rule: commit_delivery_of_a_later_delivery
if known[2] == receipt then return 'unsure' end -- rule: commit_delivery_ignores_marks
if sizes[prepare] ~= size then return 'unsure' end -- rule: commit_delivery_counts_what_has_ended
local sleeping_until = known[3]
-- include: _basics.now where OUTCOME_RETENTION
-- include: _scores.numbers where OUTCOME_RETENTION
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _outcomes.note_delivery where OUTCOME_RETENTION
-- include: _sleep.wake
local digests = first == last and #ARGV[first] == size * 12 and ARGV[first]
-- rule: whole_success_leaves_no_outcome
if note_done and not digests then note_done(redis.call('ZRANGE', prepare, 0, -1), receipt) end
-- The first write finds by itself whether the ledger has another type. On a full server it fails until something is deleted.
local is_counted = type(redis.pcall('HINCRBY', stats, 'committed', size)) == 'number'
local foreign = not is_counted and mistyped('hash', stats)
if foreign then return foreign end
redis.call('UNLINK', prepare, inflight)
if not is_counted then redis.pcall('HINCRBY', stats, 'committed', size) end -- rule: full_server_counts_nothing
if sleeping_until == GATE then wake(0) end -- rule: commit_delivery_opens_silently
if note_delivery and digests then note_delivery(receipt, size, digests) end -- rule: delivery_leaves_no_outcome
if write_outcomes then write_outcomes() end
return 'ok'

-- script: rollback
-- Phase two, failure: back to Store, to Retry or to Dead, for deliveries whose receipt the caller still holds.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry prepare_body
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] receipt
-- ARGV[5] retry_priority       original or lowest
-- ARGV[6] backoff_base NUMBER  ms
-- ARGV[7] backoff_cap NUMBER   ms
-- ARGV[8...] failures          member, what (failed, undecodable, timed_out, overran, cancelled, rejected), delay ms or
--                            empty, error
-- ARGV[#ARGV] now
--
-- Returns a word for each member: ok | cancelled (the delivery was cancelled meanwhile, and ended so) | stale

-- check: types
if (last - first + 1) / 4 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or 16), known[3]
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: ack.end_delivery
-- include: _deaths.end_for_good
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _scores.note_undrained
local prefix, words, earliest, ended = receipt .. ' ', {}, math.huge, false
for i = first, last, 4 do
  local member, what, delay, text = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local record, score = redis.call('HGET', inflight, member), redis.call('ZSCORE', prepare, member)
  if record and score and string.sub(record, 1, #prefix) == prefix then -- rule: rollback_anyone
    local left = bounded(math.floor(tonumber(score) % 1000), 0, max_retries)
    -- At most 139 years, so that the score in Retry has room for the retries left.
    if delay then delay = bounded(math.floor(delay), 0, 4398046511104) end -- rule: rollback_delay_unbounded
    earliest = math.min(earliest, end_failed(member, left, record, what, text, delay, #words) or math.huge)
    -- rule: rollback_keeps_quiet
    words[#words + 1] = string.find(record, ' cancelled', #prefix + 1, true) and 'cancelled' or 'ok'
    ended = true
  else
    -- The delivery timed out, or the reply to an earlier call was lost. A newer delivery of the message may run now.
    words[#words + 1] = 'stale'
    count('stale')
  end
end
-- The owner that was answered busy sleeps until the gate opens, and these messages may have kept it shut.
-- rule: rollback_opens_silently
if ended and opens_gate() then earliest = 0 end
if ended then note_undrained() end
wake(earliest)
keep_counts()
return words

-- script: release
-- Give messages back as if they had never been delivered: shutdown, a fenced owner, a dead child.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry prepare_body
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
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _duplicates.keeps_first
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: ack.end_delivery
-- include: _deaths.end_for_good
-- include: ack.end_marked
-- include: ack.give_back
-- include: _scores.note_undrained
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

-- script: extend
-- Heartbeat: restart the time-out of these deliveries; their receipt stays valid.
--
-- KEYS prepare inflight stats control
--
-- ARGV[1] receipt
-- ARGV[2...] members
-- ARGV[#ARGV] now
--
-- Returns {'ok'} if every receipt was valid and nothing is cancelled, else a word for each member:
-- ok | cancelled | stale

-- check: types
if last < first then return {} end
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
-- include: _basics.now
-- include: _basics.ledger
-- include: _retries.shortened_by
local records = redis.call('HMGET', inflight, unpack(ARGV, first, last))
local present = redis.call('ZMSCORE', prepare, unpack(ARGV, first, last))
local prefix, words, flat, plain, timeout = receipt .. ' ', {}, {}, 0, nil
for i = 1, #records do
  local score = tonumber(present[i])
  if records[i] and score and string.sub(records[i], 1, #prefix) == prefix then -- rule: extend_anyone
    words[i] = string.find(records[i], ' cancelled', #prefix + 1, true) and 'cancelled' or 'ok' -- rule: extend_keeps_quiet
    if words[i] == 'ok' then plain = plain + 1 end
    local since, is_limited = now_s, string.find(records[i], ':', #prefix, true)
    if is_limited then -- rule: extended_to_the_topic
      timeout = timeout or tonumber(redis.call('HGET', control, 'timeout') or 0)
      since = now_s - shortened_by(records[i], timeout)
    end
    flat[#flat + 1] = string.format('%.0f', since * 1000 + math.floor(score % 1000)) -- rule: extend_gives_retries
    flat[#flat + 1] = ARGV[first + i - 1]
  else
    words[i] = 'stale'
    count('stale')
  end
end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '') -- rule: extend_needs_memory
if #flat > 0 then redis.call('ZADD', prepare, unpack(flat)) end
keep_counts()
if plain == #records then return { 'ok' } end
return words

-- script: progress
-- Note how far a delivery has got, if the caller still holds its receipt (OUTCOME_RETENTION).
--
-- KEYS prepare inflight failures stats control outcomes outcome_times delivery_outcomes
--
-- ARGV[1] outcome_retention_ms NUMBER
-- ARGV[2] receipt
-- ARGV[3] member
-- ARGV[4] thousandths  of the work that are done
-- ARGV[5] text         what the listener says about it
-- ARGV[6] now
--
-- Returns ok | stale

-- check: types
-- include: _basics.now
-- include: _scores.numbers
-- include: _outcomes.notes
-- include: _basics.ledger
local record, prefix = redis.call('HGET', inflight, member), receipt .. ' '
-- rule: zombie_reports_progress
if not (record and string.sub(record, 1, #prefix) == prefix and redis.call('ZSCORE', prepare, member)) then
  count('stale')
  keep_counts()
  return 'stale'
end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
note_progress(member, receipt, thousandths, text)
keep_counts()
return 'ok'

-- script: time_out
-- Time out deliveries and claims without a heartbeat, as `prepare` does, too.
--
-- Each message uses a retry, or dies, unless it cannot have begun (see _time_outs and claims.leases).
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claimants claim claims claim_body prepare_body
--      claim_failed
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] retry_priority       original or lowest
-- ARGV[5] backoff_base NUMBER  ms
-- ARGV[6] backoff_cap NUMBER   ms
-- ARGV[7] timeout              seconds; the topic's, until the slot has its own
-- ARGV[8] max_retries          the topic's, until the slot has its own
-- ARGV[9] strict FLAG          1: only the first in line is charged
-- ARGV[10] limit NUMBER
-- ARGV[11] now
--
-- Returns how many timed out

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'timeout', 'max_retries', 'undrained_since')
local sleeping_until, timeout, max_retries = known[1], tonumber(known[2] or timeout), tonumber(known[3] or max_retries)
local undrained_since = known[4]
local claimed = redis.call('ZCARD', claimants) > 0
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _duplicates.keeps_first
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: ack.end_delivery
-- include: _deaths.end_for_good
-- include: ack.give_back
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: claims.leases
-- include: _retries.shortened_by
-- include: _time_outs.time_outs
-- include: _scores.note_undrained
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '') -- rule: time_out_needs_memory
local timed_out, earliest = time_out_due(limit)
-- The owner that was answered busy sleeps until the gate opens, and what has timed out may have opened it.
-- rule: time_out_opens_silently
if timed_out > 0 and opens_gate() then earliest = 0 end
if timed_out > 0 then note_undrained() end
if earliest then wake(earliest) end
keep_counts()
return timed_out

-- script: promote
-- Return messages whose back-off has ended to Store.
--
-- KEYS store retry failures stats control
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] retry_priority  original or lowest
-- ARGV[4] max_retries     the topic's, until the slot has its own
-- ARGV[5] limit NUMBER
-- ARGV[6] now
--
-- Returns how many came back

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or max_retries), known[3]
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.retry_score
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _retries.promote_due
-- include: _scores.note_undrained
redis.call('HDEL', control, '')
local promoted = promote_due(limit)
if promoted > 0 then
  note_undrained()
  wake(now_ms) -- rule: promote_wakes_nobody
end
keep_counts()
return promoted

-- section: mark_delivery
-- Mark a delivery for its end, and note that in control: commit_delivery reads no records.
--
-- needs: inflight control

local function mark_delivery(member, receipt_and_score, mark)
  redis.call('HSET', inflight, member, receipt_and_score .. mark)
  redis.call('HSET', control, 'marked', string.match(receipt_and_score, '^%d+')) -- rule: mark_unnoted
end

-- section: end_delivery
-- End a delivery, and do what an operator has marked it for meanwhile.
--
-- needs: prepare inflight dead deaths failures body prepare_body
-- needs: count parse_failure first_score forget die joined_death [note_receipt] [note_outcome]

-- The delivered body moves with the message, unless a newer body is there. Returns two values:
--   the delivered body, or nil,
--   whether a newer body is there.
local function land(member)
  local delivered, outdated = redis.call('HGET', prepare_body, member), false
  if delivered then
    redis.call('HDEL', prepare_body, member) -- rule: delivered_body_outlives
    outdated = redis.call('HSETNX', body, member, delivered) == 0 -- rule: body_comes_back
  end
  return delivered, outdated
end

-- Take a delivery out of Prepare. Returns nil if a mark, a rejection or a cancellation has ended it. Otherwise it has failed, and
-- there are four values:
--   the score of the message before it first failed,
--   its last failure, or nil,
--   its body, or nil,
--   whether a newer body is there.
local function end_delivery(member, record, what, text)
  local score, mark, outlived = string.match(record, '^%d+ ([^ :]+)%S* ?(%S*) ?(%S*)')
  score, mark = score or '0', mark or ''
  local failure = parse_failure(redis.call('HGET', failures, member))
  local origin = first_score(score, failure)
  if note_receipt then note_receipt(member, record) end
  redis.call('ZREM', prepare, member)
  redis.call('HDEL', inflight, member) -- rule: record_outlives
  local kept, outdated = land(member)
  if mark == 'removed' then -- rule: removed_returns
    count('ended_marked')
    count('removed')
    if note_outcome then note_outcome(member, 'removed', '-', (failure and failure.times or 0) + 1, '', 1) end
    forget(member)
    return nil
  end
  if mark == 'buried' then -- rule: buried_returns
    count('ended_marked')
    if outlived ~= '' and redis.call('ZSCORE', dead, member) then -- rule: older_death
      -- The operator has buried this delivery together with a newer copy, whose death stays.
      count('dropped')
      redis.call('HSET', deaths, member, joined_death(redis.call('HGET', deaths, member) or '', kept))
      forget(member)
    else
      die(member, 'buried', text, origin, failure, 1, kept) -- rule: buried_with_the_newer_body
    end
    return nil
  elseif mark == 'cancelled' or what == 'cancelled' then -- rule: cancelled_returns
    count('cancelled')
    if note_outcome then note_outcome(member, 'cancelled', '-', (failure and failure.times or 0) + 1, '', 1) end
    forget(member)
    return nil
  elseif what == 'rejected' then -- rule: reject_is_a_failure
    count('rejected')
    die(member, 'rejected', text, origin, failure, 1, kept) -- rule: dead_with_the_newer_body
    return nil
  end
  count(what == 'timed_out' and 'expired' or 'failed')
  if what == 'overran' then count('overran') end -- rule: overran_uncounted
  return origin, failure, kept, outdated
end

-- section: end_marked
-- End a delivery that succeeded or is given back, but that an operator has marked meanwhile.
--
-- needs: end_delivery end_for_good

local function end_marked(member, record)
  local origin, failure, kept = end_delivery(member, record, 'failed', '') -- rule: marked_stays
  if origin then end_for_good(member, 0, 'failed', '', origin, failure, kept) end
end

-- section: give_back
-- Return a delivery that has not begun.
--
-- needs: store prepare inflight retry topic_type keeps_first count land join

-- `score` is the score at which the message was taken. Returns when it can be taken again, or nil.
local function give_back(member, score)
  local number, waiting = tonumber(score), tonumber(redis.call('ZSCORE', store, member))
  local due
  redis.call('ZREM', prepare, member) -- rule: release_needs_memory
  local kept, outdated = land(member)
  -- The message was sent again while it was in flight; the copy that waits has the newer body.
  if outdated then join(member, kept) end -- rule: released_bodies_dropped
  local resting = redis.call('ZSCORE', retry, member)
  -- rule: earlier_time
  if not (waiting or resting) or (waiting and keeps_first(number) and number < waiting) then
    redis.call('ZADD', store, score, member)
    due = topic_type == 'priority' and 0 or number
  end
  redis.call('HDEL', inflight, member)
  count('released')
  if waiting or resting then count('dropped') end
  return due
end
