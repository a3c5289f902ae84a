-- Phase one: deliver available messages, after the upkeep that is due.
--
-- KEYS[1] store       ZSET  member -> due ms, or priority
-- KEYS[2] prepare     ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight    HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] dead        ZSET  member -> ms of death
-- KEYS[5] deaths      HASH  member -> death
-- KEYS[6] failures    HASH  member -> last failure
-- KEYS[7] body        HASH  member -> envelope
-- KEYS[8] stats       HASH  counter -> n
-- KEYS[9] control     HASH  field -> value
-- KEYS[10] retry      ZSET  member -> ms + retries/1024
-- KEYS[11] claimants  ZSET  Spark consumer -> ms when its lease ends
-- KEYS[12] claim      ZSET  member -> score it was taken with
-- KEYS[13] claims     HASH  Spark consumer -> "number state ms"
-- KEYS[14] claim_body HASH  claimed member -> envelope
-- KEYS[15] prepare_body HASH  member in flight -> envelope
-- KEYS[16] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
-- KEYS[17] inserting   ZSET  Store by another name, if the last step of an insertion has failed
--
-- ARGV[1] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[2] topic_type
-- ARGV[3] slots                the caller's slot count
-- ARGV[4] retry_priority       original or lowest
-- ARGV[5] backoff_base NUMBER  ms, after a time-out
-- ARGV[6] backoff_cap NUMBER   ms
-- ARGV[7] timeout              seconds; the topic's, until the slot has its own
-- ARGV[8] max_retries          the topic's, until the slot has its own
-- ARGV[9] serial FLAG         1 or 0
-- ARGV[10] strict FLAG         1: nothing is delivered while something is in flight, claimed or resting
-- ARGV[11] slot_each_us NUMBER  us between two deliveries of the slot; 0: no limit
-- ARGV[12] owner              the caller. The field `owner` of control has the last one that took messages: here, the holder
-- ARGV[13] epoch NUMBER        of the owner's acquire; empty: not fenced
-- ARGV[14] inbox              the channel to which sends may push single messages for this owner; empty: they may not
-- ARGV[15] limit NUMBER        messages at most
-- ARGV[16] max_bytes NUMBER    of members and envelopes; one message is delivered whatever its size
-- ARGV[17] after_score         with ARGV[18]: continue behind this entry; empty: from the head
-- ARGV[18] after_member
-- ARGV[19] now
--
-- Returns {'moved', slots} | {'fenced'} | {word, next due ms or empty}            word: busy | paused | empty
--       | {'more', next due, score, member}                                    continue behind this entry
--       | {'ok', next due, sleeping until or empty, receipt, alone, {member, score, ...}[, {retries left, ...} or empty
--          [, {envelope, ...} or empty[, suspect[, timeout]]]]}
--         sleeping until: as long as what is delivered is in flight, or has succeeded, the caller need not ask before; who makes
--         something available earlier wakes it; no retries left: all have ARGV[8]; no envelopes: each member is its own body
--         alone: 1 if nothing else is in flight and the slot has no failures, 2 if it has failures, 0 if something is in flight
--         suspect: its last delivery timed out; timeout: some have one of their own, of which this is the shortest

-- A foreign key of the slot has another type: then the check of the types below ends the script.
local known = redis.pcall('HMGET', control, 'slots', 'epoch', 'deliveries', 'timeout', 'max_retries', 'paused', 'moving',
  'inserting', 'undrained_since', 'inbox', 'inbox_epoch')
local known_slots, known_epoch, last_receipt = known[1], tonumber(known[2]), tonumber(known[3]) or 0
local is_settled = known_slots and known[4] and known[5]
-- The caller assumes the retries of its own settings if the answer has none.
local expected = tonumber(max_retries)
local timeout, max_retries = tonumber(known[4] or timeout), tonumber(known[5] or max_retries)
local paused, moving, noted, undrained_since = known[6], known[7], known[8], known[9]
local offered, offered_epoch = known[10], tonumber(known[11])
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: moved_hands_out
-- Another worker has acquired the slot since; this call may have been under way for long.
if epoch and known_epoch and epoch < known_epoch then -- rule: epoch_off
  redis.pcall('HINCRBY', stats, 'fenced', 1) -- rule: fenced_uncounted
  return { 'fenced' }
end
limit = math.max(1, math.min(limit, 1000))
-- Sends may push single messages to this owner from now on, or no longer.
local offer = {}
if inbox ~= '' and epoch and not known.err then
  -- rule: offers_nothing
  if offered ~= inbox or offered_epoch ~= epoch then offer = { 'inbox', inbox, 'inbox_epoch', epoch } end
elseif offered then -- rule: keeps_the_offer
  redis.pcall('HDEL', control, 'inbox', 'inbox_epoch')
end
-- include: _now
-- Receipts are a hybrid logical clock: if a fail-over loses the last deliveries, the next receipt is still higher than theirs.
-- Receipts are odd and even in turn, so that choices that depend on this take turns.
local receipt = last_receipt + 1 -- rule: receipts_repeat
local ahead = math.max(0, now_us - receipt) -- rule: receipts_come_again
receipt = receipt + ahead + ahead % 2 -- rule: receipts_take_no_turns
-- include: _delivery.usual
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.pcall('HDEL', control, '') -- rule: prepare_needs_memory
if #offer > 0 then redis.pcall('HSET', control, unpack(offer)) end
-- include: _scores.numbers
-- check: types but claim claims claim_body claim_failed inserting
-- The other keys of claims are touched only while something is claimed.
local claimed = unusual and redis.call('ZCARD', claimants) > 0
local wrong_claim = claimed and (mistyped('zset', claim) or mistyped('hash', claims) or mistyped('hash', claim_body)
  or mistyped('hash', claim_failed))
if wrong_claim then return wrong_claim end
if noted and mistyped('zset', inserting) then return mistyped('zset', inserting) end
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
if not is_settled then
  redis.call('HSET', control, 'slots', slots, 'timeout', text_of(timeout), 'max_retries', text_of(max_retries))
end
local others = redis.call('HMGET', control, 'owner', 'spent_us')
local holder, spent_us, sleeping_until = others[1], others[2], nil
-- The last step of an insertion has failed, so Store still has its other name.
if noted then
-- include: _insertion_end
  end_insertion() -- rule: prepare_sees_no_store
end
local in_flight = sizes[prepare]
local rests = unusual and redis.call('ZCARD', retry) > 0
local behind, claims_shut = false, false
-- Most slots need no upkeep, so its functions are made only here.
if in_flight > 0 or rests or claimed then
-- include: _retries.retry_score
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _delivery_end.give_back
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _claims
-- include: _time_outs
-- include: _retries.promote_due
  local share = math.min(limit, 400)
  local timed_out = time_out_due(share) -- rule: no_upkeep
  local promoted = promote_due(share)
  -- There may be more upkeep to do. This is computed here, because `limit` may be lowered below.
  behind = timed_out >= share or promoted >= share
  unusual = unusual or timed_out > 0
  in_flight = redis.call('ZCARD', prepare)
  rests = redis.call('ZCARD', retry) > 0
  claimed = claimed and redis.call('ZCARD', claimants) > 0
  claims_shut = claimed and claim_shuts()
end
-- include: _priority_notes.note_undrained
-- include: _scores.latest_due
-- include: _pages.rank_after
-- include: _sleep.next_due
-- include: _delivery.choose
-- include: _one_at_a_time.for_delivery
-- While a re-slotting moves messages, nothing is delivered.
if shut or moving then return idle('busy', next_due(false), GATE) end -- rule: shut_slots_hand_out
if paused then return idle('paused', next_due(false), nil) end -- rule: paused_hands_out
if not serial then limit = math.min(limit, slot_capacity - in_flight) end
if slot_each_us > 0 then
-- include: _delivery.slot_rate
  local allowed, at = pace()
  if allowed < 1 then return idle('busy', math.min(next_due(false), at), nil) end -- rule: paceless
  limit = math.min(limit, allowed)
end

-- A member whose last delivery timed out, or ran for too long, is delivered alone, because it may kill its process.
local function suspicious(member)
  local failure = redis.call('HGET', failures, member)
  local what = failure and string.match(failure, '^%S+')
  return what == 'timed_out' or what == 'overran' -- rule: overran_in_company
end
local wary = unusual and redis.call('HLEN', failures) > 0
-- rule: company_for_a_suspect
if serial and wary and in_flight == 1 and suspicious(redis.call('ZRANGE', prepare, 0, 0)[1]) then
  return idle('busy', next_due(false), GATE)
end

local free, retries, complete, is_head, last_score, last_member = choose()

-- include: _expiry.has_expired
-- include: _delivery.selection
if #expired > 0 then
-- include: _accumulation.bodies
-- include: _death_record
-- include: _expiry.end_expired
  end_expired(expired)
end
if taken > 0 then
-- include: _delivery.take
  take(members, prepared, flights, bodies, is_head)
  -- What lies before the cursor was in flight when the caller read it, and may be free by now.
  local saw_all = after_score == '' -- rule: sleeps_behind_a_cursor
  -- A copy of a message in flight can be taken when that ends, and no script announces it. A suspect that is given back rests.
  -- rule: sleeps_beside_what_can_be_taken
  local alone = in_flight == 0 -- rule: alone_beside_others
  -- `commit_delivery` would be in vain, as it deletes no failures.
  if wary then alone = false end -- rule: alone_beside_failures
  local sleeps = saw_all and in_flight == 0 and not (more or behind or claimed or suspect)
  local ends = in_flight == 0 and (now_s + (shortest or timeout) + 1) * 1000
  in_flight = in_flight + taken
  count('prepared', taken)
  local at
  if slot_each_us > 0 then
-- include: _delivery.slot_rate
    at = spend(taken)
  end
  local due, waiting = next_due(more and not at, ends)
  if at then due = math.min(due, at) end
  local fields = { 'owner', owner, 'deliveries', text_of(receipt) } -- rule: owner_unknown
  -- Bodies and failures can only be deleted by the names of their messages, so this delivery has to be committed by name.
  -- rule: commit_delivery_leaves_records
  if wary or #bodies > 0 then fields[5], fields[6] = 'marked', fields[4] end
  -- An owner that takes the last message that is due sleeps from now on, and need not ask again when it has ended it.
  if sleeps then
    sleeping_until = text_of(math.min(waiting, NEVER))
    fields[#fields + 1], fields[#fields + 2] = 'sleeping_until', sleeping_until -- rule: takes_the_last_and_sleeps_unnoticed
  end
  redis.call('HSET', control, unpack(fields))
  note_undrained()
  keep_counts()
  for i = #free, taken * 2 + 1, -1 do
    free[i] = nil
  end
  local is_alone = alone and 1 or in_flight > taken and 0 or 2
  return { 'ok', due < math.huge and text_of(due) or '', sleeps and sleeping_until or '', receipt, is_alone, free,
    plain and '' or lefts, #kept > 0 and envelopes or '', suspect or (shortest and ''), shortest }
end
if refused then return idle('busy', next_due(false), GATE) end
if #expired > 0 then return idle('empty', next_due(true), nil) end
if last_member and not complete then
  note_undrained()
  keep_counts()
  return { 'more', text_of(now_ms), last_score, last_member }
end
local due = next_due(false)
if last_member then return idle('busy', due, GATE) end
return idle('empty', due, math.min(due, NEVER))
