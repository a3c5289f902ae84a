-- Delivery: who owns a slot, and how `prepare` hands out messages, with MAX_RATE of a slot and the fast way of usual slots.
-- Before, it ends what has timed out (_time_outs) and promotes what has rested (_retries). Which messages come next is decided
-- in _choice.

-- script: prepare
-- Phase one: deliver available messages, after the upkeep that is due.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claimants claim claims claim_body prepare_body
--      claim_failed inserting
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
--         suspect: its last delivery timed out or ran for too long; timeout: some have one of their own, of which this is the
--         shortest

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
-- include: _basics.now
-- Receipts are a hybrid logical clock: if a fail-over loses the last deliveries, the next receipt is still higher than theirs.
-- Receipts are odd and even in turn, so that choices that depend on this take turns.
local receipt = last_receipt + 1 -- rule: receipts_repeat
local ahead = math.max(0, now_us - receipt) -- rule: receipts_come_again
receipt = receipt + ahead + ahead % 2 -- rule: receipts_take_no_turns
-- include: fetch.usual
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
-- include: _duplicates.keeps_first
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
if not is_settled then
  redis.call('HSET', control, 'slots', slots, 'timeout', text_of(timeout), 'max_retries', text_of(max_retries))
end
local others = redis.call('HMGET', control, 'owner', 'spent_us')
local holder, spent_us, sleeping_until = others[1], others[2], nil
-- The last step of an insertion has failed, so Store still has its other name.
if noted then
-- include: insert.end_insertion
  end_insertion() -- rule: prepare_sees_no_store
end
local in_flight = sizes[prepare]
local rests = unusual and redis.call('ZCARD', retry) > 0
local behind, claims_shut = false, false
-- Most slots need no upkeep, so its functions are made only here.
if in_flight > 0 or rests or claimed then
-- include: _retries.retry_score
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
-- include: _scores.note_undrained
-- include: _scores.latest_due
-- include: _pages.rank_after
-- include: _sleep.next_due
-- include: _choice.choose
-- include: _one_at_a_time.for_delivery
-- include: _strict_order.for_delivery
-- While a re-slotting moves messages, nothing is delivered.
if shut or moving then return idle('busy', next_due(false), GATE) end -- rule: shut_slots_hand_out
if paused then return idle('paused', next_due(false), nil) end -- rule: paused_hands_out
if not serial then limit = math.min(limit, slot_capacity - in_flight) end
if slot_each_us > 0 then
-- include: fetch.slot_rate
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

-- include: _deaths.has_expired
-- include: _choice.selection
if #expired > 0 then
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: _deaths.end_expired
  end_expired(expired)
end
if taken > 0 then
-- include: fetch.take
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
-- include: fetch.slot_rate
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

-- script: list_held
-- Read the messages in Prepare of an owner, with which a worker continues after a lost reply of prepare.
-- Changes nothing.
--
-- KEYS prepare inflight prepare_body control
--
-- ARGV[1] owner
-- ARGV[2] offset NUMBER  rank in Prepare to begin at
-- ARGV[3] limit NUMBER
-- ARGV[4] now
--
-- Returns {'busy'} | {'ok', {member, score in Prepare, record, envelope or nil, ...}}

-- check: types
limit = math.min(limit, 1000)
local holding = redis.call('HGET', control, 'owner')
-- rule: list_held_tells_strangers
if holding and holding ~= owner and redis.call('ZCARD', prepare) > 0 then return { 'busy' } end
-- The prepare whose reply was lost did not run, so this owner has taken nothing.
if holding ~= owner then return { 'ok', {} } end
local rows = redis.call('ZRANGE', prepare, offset, offset + limit - 1, 'WITHSCORES')
local found = {}
for i = 1, #rows, 2 do
  local member = rows[i]
  found[#found + 1] = member
  found[#found + 1] = rows[i + 1]
  found[#found + 1] = redis.call('HGET', inflight, member) -- rule: list_held_without_receipts
  found[#found + 1] = redis.call('HGET', prepare_body, member)
end
return { 'ok', found }

-- script: acquire
-- Acquire a slot for its owner, whom the assignment names: a new epoch, which fences every prepare sent under an older one.
--
-- KEYS control
--
-- ARGV[1] now
--
-- Returns the new epoch

-- check: types
-- This shuts nobody out: what keeps others from taking beside a holder is in `_one_at_a_time`.
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that owners can drain it.
redis.call('HDEL', control, '') -- rule: acquire_needs_memory
return redis.call('HINCRBY', control, 'epoch', 1) -- rule: acquire_does_not_fence

-- script: acquire_slots
-- Begin to own many slots, each as `acquire` does, and sleep in the empty ones, as `prepare` does.
--
-- KEYS store retry prepare control claimants of each slot
--
-- ARGV[1] slots        how many the topic has
-- ARGV[2] timeout      seconds; that of the topic, if the slot has none
-- ARGV[3] max_retries  as above
-- ARGV[4] now
--
-- Returns {{the new epoch of each slot, or empty where control cannot be read}, {'asleep' | 'look', ...}}

-- Each slot has five keys. One read of all_empty covers 16 slots. A consumer that sleeps until it is woken has NEVER, as text.
local PER_SLOT, AT_ONCE, NEVER = 5, 16, '9007199254740991'
if #slots_keys > 1024 * PER_SLOT then return redis.error_reply('ERR too many slots') end
-- include: _sleep.all_empty
local epochs, words = {}, {}
local function begin(i, empty)
  local control = slots_keys[i + 3]
  -- Each slot is independent: a key of a foreign type in one does not affect the others.
  local known = redis.pcall('HMGET', control, 'slots', 'paused', 'moving', 'timeout', 'max_retries')
  if known.err then return '', 'look' end
  -- Start with a deletion of nothing: after it, a full server accepts the rest, so that owners can drain it.
  redis.call('HDEL', control, '') -- rule: acquire_slots_needs_memory
  local epoch = redis.pcall('HINCRBY', control, 'epoch', 1) -- rule: fence
  if type(epoch) == 'table' then return '', 'look' end
  -- The worker has to ask a slot that is paused, is shut by a re-slotting or has another slot count: the answer says so.
  local is_open = not (known[2] or known[3]) and (known[1] or slots) == slots -- rule: asleep_while_open
  if not (is_open and (empty or all_empty(i, 1))) then return epoch, 'look' end -- rule: asleep_over_messages
  redis.call('HSET', control, 'slots', slots, 'timeout', known[4] or timeout, 'max_retries', known[5] or max_retries,
    'sleeping_until', NEVER) -- rule: asleep_unannounced
  return epoch, 'asleep'
end
for first = 1, #slots_keys, AT_ONCE * PER_SLOT do
  local empty = all_empty(first, AT_ONCE)
  for i = first, math.min(first + (AT_ONCE - 1) * PER_SLOT, #slots_keys), PER_SLOT do
    local n = #words + 1
    epochs[n], words[n] = begin(i, empty)
  end
end
return { epochs, words }

-- section: usual
-- Deliver the few messages that wait, or find none, where all of them are due and the slot has nothing else: nothing in flight,
-- in Retry or claimed, no key, no failure. Most prepares meet such a slot. The rest of the script does the same for all
-- others; to make its functions takes longer than this. So some rules stand here a second time, in their simplest form: the
-- floor of priorities and what a retry is (_scores.kinds), from when a fifo place is due (_scores.latest_due), and NEVER
-- (_sleep.next_due), as a text because Redis stores it.
--
-- needs: store prepare inflight failures body stats control retry claimants prepare_body
-- needs: slot_capacity topic_type slots timeout max_retries expected serial slot_each_us owner limit max_bytes after_score
-- needs: known is_settled paused moving noted undrained_since now_s now_ms receipt offer

local is_open = not (known.err or paused or moving or noted) and slot_each_us == 0 and after_score == '' and timeout < 1e9
-- rule: usual_beside_others
if is_open and redis.call('EXISTS', prepare, inflight, failures, body, retry, claimants, prepare_body) == 0 then
  local NEVER, MOST = '9007199254740991', 16
  local rows = redis.pcall('ZRANGE', store, 0, MOST, 'WITHSCORES')
  local n, bytes, lowest, latest = #rows / 2, 0, 1000, now_ms
  if topic_type == 'fifo' then lowest, latest = -math.huge, now_ms + 1 - 1 / 1024 end
  if topic_type == 'priority' then lowest, latest = math.max(16, max_retries) + 1, math.huge end
  local most = math.min(MOST, limit)
  -- Below the limit and its capacity the owner has seen everything, and can sleep. Of several priorities, the highest come first.
  -- rule: usual_beyond_the_limit
  local is_usual = not rows.err and n < most and (serial or n < slot_capacity) and (n <= 1 or topic_type ~= 'priority')
  for i = 1, is_usual and n or 0 do
    local score = tonumber(rows[i * 2])
    bytes = bytes + #rows[i * 2 - 1]
    if score > latest then is_usual = false end -- rule: usual_before_its_time
    -- A retry has fewer deliveries left, as its score says.
    if score < lowest or (topic_type == 'priority' and score % 1 ~= 0) then is_usual = false end -- rule: usual_retries
  end
  if n > 1 and bytes > max_bytes then is_usual = false end -- rule: usual_bytes
  -- The first write finds by itself whether the ledger has another type. If the server is full, the rest of the script runs.
  if is_usual and n > 0 then is_usual = type(redis.pcall('HINCRBY', stats, 'prepared', n)) == 'number' end
  if is_usual and (n > 0 or type(redis.pcall('HLEN', stats)) == 'number') then
    -- After a deletion, also one of nothing, a full server accepts the rest.
    redis.call('UNLINK', store)
    -- rule: usual_never_drained
    if topic_type == 'priority' and undrained_since then redis.pcall('HDEL', control, 'undrained_since') end
    if not is_settled then
      redis.call('HSET', control, 'slots', slots, 'timeout', timeout, 'max_retries', max_retries)
    end
    if n == 0 then
      redis.call('HSET', control, 'sleeping_until', NEVER, unpack(offer)) -- rule: usual_idle_unnoticed
      return { 'empty', '' }
    end
    local ticket, date, prepared, flights = string.format('%.0f ', receipt), now_s * 1000 + max_retries, {}, {}
    for i = 1, n * 2, 2 do
      local member, score = rows[i], rows[i + 1]
      prepared[i], prepared[i + 1] = date, member
      flights[i], flights[i + 1] = member, ticket .. score
    end
    redis.call('ZADD', prepare, unpack(prepared))
    redis.call('HSET', inflight, unpack(flights))
    -- rule: usual_owner_unknown
    redis.call('HSET', control, 'owner', owner, 'deliveries', receipt, 'sleeping_until', NEVER, unpack(offer))
    local reply = { 'ok', (now_s + timeout + 1) * 1000, NEVER, receipt, 1, rows }
    if max_retries ~= expected then -- rule: usual_retries_of_the_topic
      reply[7] = {}
      for i = 1, n do
        reply[7][i] = max_retries
      end
    end
    return reply
  end
end

-- section: slot_rate
-- The slot's own MAX_RATE: a bucket of a tenth of a second, and of one delivery at least. That of a topic: `allow` in limits.
--
-- needs: control slot_each_us spent_us now_us

-- Returns when the bucket was last empty, as if it had filled from then on without an end. A time that is ahead of now by more
-- than the bucket holds was written before the clock was set back.
local function emptied_at()
  local depth = math.max(slot_each_us, 100000)
  local empty = tonumber(spent_us or '') or 0
  if empty > now_us + depth then empty = 0 end -- rule: paced_out_by_a_clock
  return math.max(empty, now_us - depth)
end

-- Returns two values:
--   how many messages may be delivered now,
--   the ms at which there is one more.
local function pace()
  local empty = emptied_at()
  return math.floor((now_us - empty) / slot_each_us), math.ceil((empty + slot_each_us) / 1000)
end

-- Spend `n` deliveries. Returns the ms at which there is another one, or nil if there is one now.
local function spend(n)
  spent_us = string.format('%.0f', emptied_at() + n * slot_each_us) -- rule: pace_without_spending
  redis.call('HSET', control, 'spent_us', spent_us)
  local left, at = pace()
  return left < 1 and at or nil
end

-- section: take
-- Move the chosen messages into Prepare, with their bodies.
--
-- needs: store prepare inflight retry body prepare_body in_flight rests count

-- `prepared` has score and member of each message, `flights` member and record, `bodies` member and envelope. `is_head`: the
-- messages are the first entries of Store.
local function take(members, prepared, flights, bodies, is_head)
  local taken = #members
  -- Redis keeps small sets and hashes in a listpack, which is slow with hundreds of members. An entry that is too long for a
  -- listpack, added first and removed again, makes Redis use a skiplist or a hash table at once.
  local LONG = string.rep(' ', 65)
  local large = taken > 32 and in_flight == 0 and not redis.call('ZSCORE', store, LONG)
  if is_head then
    redis.call('ZREMRANGEBYRANK', store, 0, taken - 1)
  else
    redis.call('ZREM', store, unpack(members))
  end
  if large then redis.call('ZADD', prepare, 0, LONG) end
  redis.call('ZADD', prepare, unpack(prepared))
  if large then redis.call('ZREM', prepare, LONG) end
  if taken > 32 then redis.call('HSET', inflight, members[1], LONG) end
  redis.call('HSET', inflight, unpack(flights))
  if #bodies > 0 then
    -- A delivery has its own body, because a newer one may arrive while it is in flight.
    if taken > 32 then redis.call('HSET', prepare_body, bodies[1], LONG) end
    redis.call('HSET', prepare_body, unpack(bodies))
    redis.call('HDEL', body, unpack(members))
  end
  -- A ZADD of another program has sent a resting message again: the resting retry is superseded.
  -- rule: stranger_leaves_a_retry
  if rests then count('dropped', redis.call('ZREM', retry, unpack(members))) end
end
