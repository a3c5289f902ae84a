-- What Spark consumers hold: claims, their leases and their ends.

-- script: claim
-- Move available messages into a claim of a Spark consumer, after the upkeep that is due.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claimants claim claims claim_body prepare_body
--      claim_failed inserting
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] slots                the caller's slot count
-- ARGV[5] retry_priority       original or lowest
-- ARGV[6] backoff_base NUMBER  ms, after a time-out
-- ARGV[7] backoff_cap NUMBER   ms
-- ARGV[8] timeout              seconds; the topic's, until the slot has its own
-- ARGV[9] max_retries          the topic's, until the slot has its own
-- ARGV[10] serial FLAG         1 or 0
-- ARGV[11] strict FLAG         1: nothing is claimed while something is in flight or resting
-- ARGV[12] consumer
-- ARGV[13] number NUMBER       of the claim: the first, or one that is still open, or the next
-- ARGV[14] lease NUMBER        ms
-- ARGV[15] limit NUMBER        messages at most
-- ARGV[16] max_bytes NUMBER    of members and envelopes; one message is taken whatever its size
-- ARGV[17] now
--
-- Returns {'moved', slots} | {word} | {'ok', taken, held in all, more or end}
--         word: busy (also: what its consumer has lost comes back) | paused | stale (the number is no longer open)
--               | unfinished (an earlier claim is not over)

-- check: types
if not (number >= 1 and number < 9007199254740992 and lease >= 1 and lease <= 86400000) then
  return redis.error_reply('ERR number or lease is out of bounds')
end
local known = redis.call('HMGET', control, 'slots', 'paused', 'timeout', 'max_retries', 'sleeping_until',
  'moving', 'undrained_since', 'inserting')
local known_slots, paused, sleeping_until, undrained_since = known[1], known[2], known[5], known[7]
local timeout, max_retries, noted = tonumber(known[3] or timeout), tonumber(known[4] or max_retries), known[8]
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
limit = math.max(1, limit)
-- One script moves at most this many members by commands of Redis.
local STEP = 4000
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
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: ack.end_delivery
-- include: _deaths.end_for_good
-- include: ack.give_back
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _deaths.has_expired
-- include: _deaths.end_expired
-- include: claims.leases
-- include: _retries.shortened_by
-- include: _time_outs.time_outs
-- include: _retries.promote_due
-- include: _scores.note_undrained
-- include: _scores.latest_due
-- include: insert.end_insertion
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
if not (known_slots and known[3] and known[4]) then
  redis.call('HSET', control, 'slots', slots, 'timeout', text_of(timeout), 'max_retries', text_of(max_retries))
end
-- The last step of an insertion has failed, so Store still has its other name.
if noted then end_insertion() end -- rule: claim_sees_no_store
local share = math.min(limit, 400)
local timed_out, earliest = time_out_due(share)
local in_flight, holding = redis.call('ZCARD', prepare), redis.call('ZCARD', claimants)
if promote_due(share) > 0 then earliest = now_ms end
if timed_out > 0 and sleeping_until == GATE and in_flight < slot_capacity then earliest = 0 end
local function answer(...)
  if earliest then wake(earliest) end
  note_undrained()
  keep_counts()
  return { ... }
end

-- A new consumer: records of consumers that ended thirty days ago make room for it. If 1000 are left, so does that of the
-- consumer that ended longest ago.
if redis.call('HEXISTS', claims, consumer) == 0 then
  local known_claims = redis.call('HGETALL', claims)
  local size, first, first_since = #known_claims / 2, nil, math.huge
  for i = 1, #known_claims, 2 do
    local name, since = known_claims[i], tonumber(string.match(known_claims[i + 1], '^%d+ %l+ (%d+)$')) or 0
    if not redis.call('ZSCORE', claimants, name) then
      if since < now_ms - 2592000000 then -- rule: claim_forgets_no_consumer
        redis.call('HDEL', claims, name)
        size = size - 1
      elseif since < first_since or (since == first_since and name < first) then -- rule: claim_forgets_any_consumer
        first, first_since = name, since
      end
    end
  end
  if size >= 1000 and first then redis.call('HDEL', claims, first) end -- rule: claim_refuses_the_newcomer
end
local newest, state = newest_claim(consumer)
local ours = redis.call('ZSCORE', claimants, consumer)
-- A request that was under way for long, or a query that lost a reply, may name a claim that is no longer open.
-- rule: claim_numbers_again
if number < newest or (number == newest and state ~= 'open') then return answer('stale') end
-- A claim that was lost or returned comes back by itself; any other one waits for its query.
local comes_back = state == 'lost' or state == 'returned'
-- rule: claim_before_the_last_has_ended
if ours and number > newest then return answer(comes_back and 'busy' or 'unfinished') end -- rule: lost_claim_is_unfinished
-- include: _one_at_a_time.for_claim
-- include: _strict_order.for_claim
-- While a re-slotting moves messages, nothing is delivered.
if shut or known[6] then return answer('busy') end -- rule: claim_of_a_moving_slot
if paused then return answer('paused') end -- rule: claim_of_a_paused_slot

local has_bodies = redis.call('HLEN', body) > 0
local function fit_here(n)
  return fit(store, body, n, max_bytes, topic_type == 'priority')
end
-- If nothing is in flight, rests or has a body, messages are moved without Lua: Store is renamed if few messages have to be
-- moved back, and otherwise Redis copies a part of it. Returns nil if Lua has to read each message, otherwise three values:
--   how many messages are moved,
--   whether there may be more,
--   how many are moved back, or nil if the part is copied.
local function as_they_are()
  if in_flight > 0 or redis.call('ZCARD', claim) > 0 then return nil end -- rule: claim_into_nothing
  if redis.call('ZCARD', retry) > 0 or has_bodies then return nil end -- rule: claim_without_a_look
  local waiting, due = redis.call('ZCARD', store), redis.call('ZCARD', store)
  -- rule: claim_of_the_future_as_it_is
  if topic_type ~= 'priority' then due = redis.call('ZCOUNT', store, '-inf', latest_due()) end
  local n = math.min(due, limit)
  local rest = waiting - n
  local few = rest <= STEP and rest < n -- rule: claim_carries_back_few
  local longest = few and longest_of(store, body, n, topic_type == 'priority') or 0
  few = few and rest * longest <= step_bytes(longest) -- rule: claim_carries_back_any_size
  -- rule: claim_whole
  if few and n * longest <= max_bytes then
    return n, n == limit or n < due, rest
  end
  n = math.min(n, STEP) -- rule: claim_copies_any_number
  local part = n > 0 and fit_here(n) or 0
  return part, part == limit or part < due
end
-- Move `n` entries into an empty set, which Redis overwrites.
local function carry(from, into, n, lowest)
  local first, last = 0, n - 1
  if not lowest then first, last = -n, -1 end -- rule: claim_of_the_wrong_end
  redis.call('ZRANGESTORE', into, from, first, last)
  redis.call('ZREMRANGEBYRANK', from, first, last)
end
-- Leave out members in Prepare or in this claim: their newer copy waits for the end of the delivery.
local function free_of(list)
  local names, free = {}, {}
  for i = 1, #list, 2 do
    names[#names + 1] = list[i]
  end
  local running, held = {}, {}
  if #names > 0 and in_flight > 0 then running = redis.call('ZMSCORE', prepare, unpack(names)) end
  if #names > 0 and ours then held = redis.call('ZMSCORE', claim, unpack(names)) end
  for i, member in ipairs(names) do
    if not (running[i] or held[i]) then -- rule: claim_once
      free[#free + 1], free[#free + 2] = member, list[i * 2]
    end
  end
  return free
end
local function look(scan)
  if topic_type == 'priority' then return redis.call('ZREVRANGE', store, 0, scan - 1, 'WITHSCORES') end
  -- rule: claim_of_the_future
  return redis.call('ZRANGEBYSCORE', store, '-inf', latest_due(), 'WITHSCORES', 'LIMIT', 0, scan)
end
local taken, more, rest = as_they_are()
local members, flat, bodies = {}, {}, {}
if rest then
  redis.call('RENAME', store, claim)
  if rest > 0 then carry(claim, store, rest, topic_type == 'priority') end -- rule: claim_carries_back
elseif taken and taken > 0 then
  carry(store, claim, taken, topic_type ~= 'priority')
elseif not taken then
  taken = 0
  limit, max_bytes = fit_here(math.min(limit, 1000)), math.min(max_bytes, STEP_BYTES) -- rule: claim_looks_at_any_size
  local scan = limit
  local rows = look(scan)
  local free = free_of(rows)
  if #free == 0 and #rows == scan * 2 then
    -- All entries of the window are in flight: read further, once.
    scan = limit + fit_here(1000)
    rows = look(scan)
    free = free_of(rows)
  end
  local total = math.min(#free / 2, limit)
  more = #rows == scan * 2 or total < #free / 2
  local names, kept, bytes, expired = {}, {}, 0, {}
  for i = 1, total do
    names[i] = free[i * 2 - 1]
  end
  if total > 0 and redis.call('HLEN', body) > 0 then kept = redis.call('HMGET', body, unpack(names)) end

  for i = 1, total do
    local member, score, envelope = free[i * 2 - 1], free[i * 2], kept[i]
    if envelope and has_expired(envelope) then -- rule: claim_of_what_expired
      expired[#expired + 1], expired[#expired + 2] = member, score
    else
      bytes = bytes + #member + (envelope and #envelope or 0)
      if taken > 0 and bytes > max_bytes then
        more = true
        break
      end
      taken = taken + 1
      members[taken], flat[taken * 2 - 1], flat[taken * 2] = member, score, member
      if envelope then bodies[#bodies + 1], bodies[#bodies + 2] = member, envelope end
    end
  end
  end_expired(expired)
  if taken > 0 then
    if #free < #rows then -- rule: claim_removes_by_rank_what_runs
      redis.call('ZREM', store, unpack(members))
    elseif topic_type == 'priority' then
      redis.call('ZREMRANGEBYRANK', store, -taken, -1)
    else
      redis.call('ZREMRANGEBYRANK', store, 0, taken - 1)
    end
    redis.call('ZADD', claim, unpack(flat))
    if #bodies > 0 then
      redis.call('HSET', claim_body, unpack(bodies)) -- rule: claim_leaves_the_body
      redis.call('HDEL', body, unpack(members))
    end
    -- A ZADD of another program has sent a resting message again: the resting retry is superseded.
    if redis.call('ZCARD', retry) > 0 then count('dropped', redis.call('ZREM', retry, unpack(members))) end
  end
end
if taken > 0 then
  if number > newest then note_claim(consumer, number, 'open') end
  redis.call('ZADD', claimants, text_of(now_ms + lease), consumer)
  redis.call('HSET', control, 'owner', consumer) -- rule: claim_without_an_owner
  count('claimed', taken)
end
return answer('ok', taken, redis.call('ZCARD', claim), more and 'more' or 'end')

-- script: renew_claim
-- Restart the lease of a claim. A sealed one takes no more messages, and can be read and acknowledged.
--
-- KEYS stats control claimants claim claims
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim
-- ARGV[3] lease NUMBER   ms
-- ARGV[4] seal FLAG      1 or 0
-- ARGV[5] now
--
-- Returns {'ok', held in all} | {'stale'}   stale: the claim is lost, or was never there

-- check: types
if not (lease >= 1 and lease <= 86400000) then return redis.error_reply('ERR lease is out of bounds') end
-- include: _basics.now
-- include: _basics.ledger
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
if tonumber(newest) ~= number or not (state == 'open' or state == 'sealed') then -- rule: renewal_of_the_lost
  count('stale')
  keep_counts()
  return { 'stale' }
end
if seal and state == 'open' then -- rule: no_seal
  redis.call('HSET', claims, consumer, string.format('%.0f sealed %.0f', number, now_ms))
end
redis.call('ZADD', claimants, string.format('%.0f', now_ms + lease), consumer)
return { 'ok', redis.call('ZCARD', claim) }

-- script: ack_claim
-- Delete the messages of a sealed claim, because Spark has recorded its batch; those that it has failed are tried again, or die.
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
-- ARGV[7] max_retries          the topic's, until the slot has its own
-- ARGV[8] consumer
-- ARGV[9] number NUMBER        of the claim
-- ARGV[10] limit NUMBER        messages at most, if the failures of each have to be deleted
-- ARGV[11] now
--
-- Returns {word, left in the claim}   word: ok (ask again while something is left) | open (not sealed: give it back)
--                                         | stale (the claim is lost, or was never there)

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or max_retries), known[3]
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
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: claims.leases
-- include: _scores.note_undrained
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
local newest, state = newest_claim(consumer)
local left = 0
if number ~= newest or not (state == 'open' or state == 'sealed' or state == 'acked') then -- rule: ack_of_the_lost
  count('stale')
  keep_counts()
  return { 'stale', 0 }
end
if state == 'open' then return { 'open', redis.call('ZCARD', claim) } end -- rule: ack_without_a_seal
if redis.call('ZSCORE', claimants, consumer) then
  if state == 'sealed' then note_claim(consumer, number, 'acked') end -- rule: ack_is_not_noted
  local earliest = forget_claimed(limit)
  left = close_claim(consumer)
  -- rule: ack_wakes_nobody
  if left == 0 and opens_gate() then earliest = 0 end
  if earliest then
    note_undrained() -- rule: ack_leaves_undrained
    wake(earliest) -- rule: ack_wakes_the_gate_alone
  end
end
keep_counts()
return { 'ok', left }

-- script: fail_claimed
-- Note that messages of a sealed claim failed: they stay in it, and when it ends, however it does, each uses a retry or dies.
--
-- KEYS stats control claim claims claim_failed
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim
-- ARGV[3...] failures    member, what (failed, rejected), error
-- ARGV[#ARGV] now
--
-- Returns a word for each member: ok | again (it had failed before, and that stays) | not_found (not in the claim)
--         | open (the claim is not sealed) | stale (it has ended, or was never there)

-- check: types
if (last - first + 1) / 3 > 1000 then return redis.error_reply('ERR too many members') end
-- include: _basics.ledger
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
local words = {}
for i = first, last, 3 do
  local member, kind, text, word = ARGV[i], ARGV[i + 1], ARGV[i + 2], 'ok'
  if tonumber(newest) ~= number or not (state == 'sealed' or state == 'open') then -- rule: fail_of_the_ended
    word = 'stale'
    count('stale')
  elseif state == 'open' then -- rule: fail_without_a_seal
    word = 'open'
  elseif not redis.call('ZSCORE', claim, member) then -- rule: fail_of_what_is_not_claimed
    word = 'not_found'
  -- A query that was restarted reads its batch again, and notes failures again.
  elseif redis.call('HSETNX', claim_failed, member, kind .. '\n' .. string.sub(text, 1, 1024)) == 0 then
    word = 'again'
  end
  words[#words + 1] = word
end
keep_counts()
return words

-- script: return_claim
-- Give back the messages of a claim: as if never claimed, or with a retry used, by all or by those that its query has failed.
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
-- ARGV[7] max_retries          the topic's, until the slot has its own
-- ARGV[8] consumer
-- ARGV[9] number NUMBER        of the claim
-- ARGV[10] spent FLAG          1 or 0
-- ARGV[11] limit NUMBER        messages at most
-- ARGV[12] now
--
-- Returns {word, left in the claim}   word: ok (ask again while something is left) | stale (acknowledged, or never there)

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or max_retries), known[3]
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
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: claims.leases
-- include: _scores.note_undrained
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local newest, state = newest_claim(consumer)
if number ~= newest or state == 'acked' then -- rule: return_of_the_acknowledged
  count('stale')
  keep_counts()
  return { 'stale', 0 }
end
local left = 0
if redis.call('ZSCORE', claimants, consumer) then
  -- A claim that began to return in one of the two ways ends in that way, even if a later call asks for the other one.
  if state == 'open' or state == 'sealed' then
    state = spent and 'lost' or 'returned'
    note_claim(consumer, number, state) -- rule: return_without_end
  end
  local _, earliest = return_claimed(limit, state == 'lost')
  left = close_claim(consumer)
  -- rule: return_wakes_nobody
  if left == 0 and opens_gate() then earliest = 0 end
  note_undrained()
  if earliest then wake(earliest) end
end
keep_counts()
return { 'ok', left }

-- script: read_claim
-- Read the state of a consumer's newest claim, and the rows of a sealed one: the same however often it is read.
-- Changes nothing.
--
-- KEYS claim claims claim_body
--
-- ARGV[1] consumer
-- ARGV[2] number NUMBER  of the claim; 0: whichever is the newest
-- ARGV[3] offset NUMBER  rank to begin at
-- ARGV[4] limit NUMBER   0: look at its state only
-- ARGV[5] now
--
-- Returns {state, number, size, {member, score, ...}, {envelope, ...}}
--         state: open | sealed | acked | lost | returned | none; size and rows of another claim are never returned

-- check: types
limit = math.min(limit, 1000)
local newest, state = string.match(redis.call('HGET', claims, consumer) or '', '^(%d+) (%l+) ')
newest, state = tonumber(newest) or 0, state or 'none'
if number > 0 and number ~= newest then return { 'none', newest, 0, {}, {} } end -- rule: read_of_another
if state ~= 'open' and state ~= 'sealed' then return { state, newest, 0, {}, {} } end -- rule: read_of_the_lost
local rows, envelopes = {}, {}
-- rule: read_of_the_open
if state == 'sealed' and limit > 0 then rows = redis.call('ZRANGE', claim, offset, offset + limit - 1, 'WITHSCORES') end
if #rows > 0 and redis.call('HLEN', claim_body) > 0 then
  local members = {}
  for i = 1, #rows, 2 do
    members[#members + 1] = rows[i]
  end
  envelopes = redis.call('HMGET', claim_body, unpack(members))
end
return { state, newest, redis.call('ZCARD', claim), rows, envelopes }

-- section: leases
-- The messages that a Spark consumer holds: `claim` has them with the scores at which they were taken, `claim_body` their bodies,
-- `claims` the number and state of the consumer's newest claim, `claim_failed` the failures that its query has noted. One
-- consumer at a time has a claim, for as long as it is in `claimants`, whose scores say when its lease ends. What happens then is
-- decided here, too.
--
-- The states of a claim: `open` while it is filled; `sealed` when it is complete and can be read; `acked` when Spark has recorded
-- its batch, and its messages are forgotten; `returned` when its query has given it back, or its lease ended while it was open:
-- its messages use no retry; `lost` when its lease ended after the seal: its messages come back as after a time-out.
--
-- needs: store retry failures body claimants claim claims claim_body claim_failed
-- needs: topic_type now_ms count keeps_first budget own_limits parse_failure first_score die go_on join

-- Bound how many messages one step moves between keys. Their bytes are estimated from the longest of a hundred of them. The
-- allocator gets memory for large messages from the system and returns it, which takes longer than their copy.
local STEP_BYTES, LARGE, LARGE_STEP_BYTES = 4194304, 16384, 1048576

-- Returns the size of the longest of a hundred of the `n` first messages, or of fewer if they are large.
local function longest_of(set, bodies, n, descending)
  local has_bodies = redis.call('HLEN', bodies) > 0
  local longest, read = 1, 0
  for i = 0, n - 1, math.max(1, math.ceil(n / 100)) do
    local rank = descending and -1 - i or i
    local member = redis.call('ZRANGE', set, rank, rank)[1]
    if not member or read >= 262144 then break end
    local kept = has_bodies and redis.call('HGET', bodies, member) or '' -- rule: claim_of_any_bodies
    longest, read = math.max(longest, #member + #kept), read + #member + #kept
  end
  return longest
end
local function step_bytes(longest)
  if longest > LARGE then return LARGE_STEP_BYTES end -- rule: large_ones_as_small_ones
  return STEP_BYTES
end
-- Returns how many of the `n` first messages fit into `most` bytes, and into a step: at least one.
local function fit(set, bodies, n, most, descending)
  local longest = longest_of(set, bodies, n, descending)
  local bytes = math.min(most, step_bytes(longest)) -- rule: claim_copies_any_size
  return math.max(1, math.min(n, math.floor(bytes / longest))) -- rule: claim_fits
end

local function newest_claim(of)
  local number, state = string.match(redis.call('HGET', claims, of) or '', '^(%d+) (%l+) ')
  return tonumber(number) or 0, state or 'none'
end
local function note_claim(of, number, state)
  redis.call('HSET', claims, of, string.format('%.0f %s %.0f', number, state, now_ms))
end
-- The gate opens when the claim of the consumer `of` holds nothing more. Returns how many messages are left in it.
local function close_claim(of)
  local left = redis.call('ZCARD', claim)
  if left == 0 then redis.call('ZREM', claimants, of) end -- rule: claim_keeps_the_gate
  return left
end

-- Whether a claim keeps its slot to itself. It does until it is lost or returned; from then on, workers take other messages while
-- the claimed ones come back in steps. On fifo topics the gate stays shut, because the claimed ones precede all that wait.
local function claim_shuts()
  if topic_type == 'fifo' then return true end -- rule: fifo_passes_a_lost_claim
  local _, state = newest_claim(redis.call('ZRANGE', claimants, 0, 0)[1])
  return not (state == 'lost' or state == 'returned') -- rule: ended_claim_shuts
end

-- The body moves with the message, unless a newer one is there. Returns two values:
--   the body, or nil,
--   whether a newer body is there.
local function unclaim(member)
  local kept, outdated = redis.call('HGET', claim_body, member), false
  redis.call('ZREM', claim, member)
  if kept then
    redis.call('HDEL', claim_body, member)
    outdated = redis.call('HSETNX', body, member, kept) == 0 -- rule: claimed_body_comes_back
  end
  count('claim_returned')
  return kept, outdated
end

-- End a claimed message as failed: as its query has noted, or as after a time-out. Returns when it can be taken again, or nil.
local function fail_claimed(member, score, note, index)
  local what, text = string.match(note or 'timed_out\n', '^([%l_]+)\n(.*)$')
  local failure = parse_failure(redis.call('HGET', failures, member))
  local origin = first_score(score, failure)
  local kept, outdated = unclaim(member)
  if note then redis.call('HDEL', claim_failed, member) end -- rule: claim_note_outlives
  if what == 'rejected' then -- rule: claimed_reject_is_a_failure
    die(member, what, text, origin, failure, 1, kept)
    return nil
  end
  local left = budget(tonumber(score), member, (own_limits(kept))) -- rule: claimed_with_all_retries
  return go_on(member, left, what, text, origin, failure, nil, index, kept, outdated)
end

-- Returns the first messages of the claim with their scores: at most `limit`, and no more bytes than one step may move.
local function first_claimed(limit)
  -- rule: claim_ends_in_steps_of_any_size
  return redis.call('ZRANGE', claim, 0, fit(claim, claim_body, limit, math.huge) - 1, 'WITHSCORES')
end

-- Among the first messages of the claim, end those that its query has failed. `noted`: there are some, so at most 400 messages
-- are read. Returns two values:
--   the other messages,
--   when the first of the ended messages can be taken again, or nil.
local function end_failed_ones(limit, noted)
  local rows, others, earliest = first_claimed(noted and math.min(limit, 400) or limit), {}, nil
  for i = 1, #rows, 2 do
    local note = noted and redis.call('HGET', claim_failed, rows[i])
    local due = note and fail_claimed(rows[i], rows[i + 1], note, i)
    if not note then others[#others + 1] = rows[i] end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  return others, earliest
end

-- Delete at most `limit` messages of an acknowledged claim, or all of them if no failures have to be deleted. The messages that
-- its query has failed are ended as failed instead. Returns when the first of those can be taken again, or nil.
local function forget_claimed(limit)
  local noted = redis.call('HLEN', claim_failed) > 0 -- rule: failed_are_acknowledged
  if not noted and redis.call('HLEN', failures) == 0 then
    count('acked', redis.call('ZCARD', claim))
    redis.call('UNLINK', claim, claim_body)
    return nil
  end
  local members, earliest = end_failed_ones(limit, noted)
  if #members == 0 then return earliest end
  local waiting, resting, gone = redis.call('ZMSCORE', store, unpack(members)), {}, {}
  if redis.call('ZCARD', retry) > 0 then resting = redis.call('ZMSCORE', retry, unpack(members)) end
  for i, member in ipairs(members) do
    local lives = topic_type ~= 'fifo' and (waiting[i] or resting[i])
    if not lives then gone[#gone + 1] = member end -- rule: ack_tears_the_failures_of_the_living
  end
  count('acked', redis.call('ZREM', claim, unpack(members)))
  redis.call('HDEL', claim_body, unpack(members))
  if #gone > 0 then redis.call('HDEL', failures, unpack(gone)) end -- rule: ack_leaves_failures
  return earliest
end

-- Return at most `limit` messages of the claim to the slot. `spent`: as after a time-out, and at most 400; otherwise as if they
-- were never claimed. The messages that the query has failed end as failed in both cases. Returns two values:
--   how many messages have left the claim,
--   when the first of them can be taken again, or nil.
local function return_claimed(limit, spent)
  local noted = redis.call('HLEN', claim_failed) > 0 -- rule: failed_are_returned
  if spent or noted then limit = math.min(limit, 400) end
  local rows, earliest = first_claimed(limit), nil
  for i = 1, #rows, 2 do
    local member, score, due = rows[i], rows[i + 1], nil
    local note = noted and redis.call('HGET', claim_failed, member)
    if spent or note then
      due = fail_claimed(member, score, note, i)
    else
      local number, waiting = tonumber(score), redis.call('ZSCORE', store, member)
      local newer = waiting or redis.call('ZSCORE', retry, member)
      local kept, outdated = unclaim(member)
      if outdated then join(member, kept) end -- rule: claimed_bodies_dropped
      if newer then count('dropped') end
      local merges = waiting and keeps_first(number) and number < tonumber(waiting)
      if merges or not newer then -- rule: returned_overwrites
        redis.call('ZADD', store, score, member)
        due = topic_type == 'priority' and 0 or number
      end
    end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  return #rows / 2, earliest
end

-- End a step of a claim whose lease has ended. It is lost from the first step on, unless it was acknowledged before. Returns two
-- values:
--   how many messages have left the claim,
--   when the first of them can be taken again, or nil.
local function end_unleased_claim(limit)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if limit < 1 or not head[1] or tonumber(head[2]) > now_ms then return 0, nil end -- rule: lease_ends_early
  local number, state = newest_claim(head[1])
  local ended, earliest = 0, nil
  -- The query died between two steps of `ack_claim`: Spark has recorded the batch, so its messages must not come back.
  if state == 'acked' then -- rule: acked_is_given_back
    ended = redis.call('ZCARD', claim)
    earliest = forget_claimed(limit)
    ended = ended - redis.call('ZCARD', claim)
  else
    -- No query has read an open claim, so its messages cannot have killed one, and use no retry.
    if state == 'open' then state = 'returned' elseif state == 'sealed' then state = 'lost' end -- rule: open_costs_a_retry
    note_claim(head[1], number, state) -- rule: lost_is_not_noted
    ended, earliest = return_claimed(limit, state ~= 'returned') -- rule: lost_costs_nothing
  end
  close_claim(head[1])
  return ended, earliest
end
