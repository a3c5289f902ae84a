-- Move available messages into a claim of a Spark consumer, after the upkeep that is due.
--
-- KEYS[1] store        ZSET  member -> due ms, or priority
-- KEYS[2] prepare      ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight     HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] dead         ZSET  member -> ms of death
-- KEYS[5] deaths       HASH  member -> death
-- KEYS[6] failures     HASH  member -> last failure
-- KEYS[7] body         HASH  member -> envelope
-- KEYS[8] stats        HASH  counter -> n
-- KEYS[9] control      HASH  field -> value
-- KEYS[10] retry       ZSET  member -> ms + retries/1024
-- KEYS[11] claimants   ZSET  Spark consumer -> ms when its lease ends
-- KEYS[12] claim       ZSET  member -> score it was taken with
-- KEYS[13] claims      HASH  Spark consumer -> "number state ms"
-- KEYS[14] claim_body  HASH  member -> envelope
-- KEYS[15] prepare_body HASH  member in flight -> envelope
-- KEYS[16] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
-- KEYS[17] inserting   ZSET  Store by another name, if the last step of an insertion has failed
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
local STEP = 10000
local claimed = redis.call('ZCARD', claimants) > 0
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _delivery_end.give_back
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _expiry.has_expired
-- include: _expiry.end_expired
-- include: _claims
-- include: _time_outs
-- include: _retries.promote_due
-- include: _priority_notes.note_undrained
-- include: _scores.latest_due
-- include: _insertion_end
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
