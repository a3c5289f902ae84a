-- How a topic gets another number of slots, and how slots that it no longer uses end.

-- script: configure
-- Give a slot the time-out, the retries and the slot count of its topic's definition.
--
-- KEYS store prepare inflight retry control claim
--
-- ARGV[1] topic_type
-- ARGV[2] slots
-- ARGV[3] timeout NUMBER      seconds
-- ARGV[4] max_retries NUMBER
-- ARGV[5] apply FLAG          1: do it; 0: only check whether it can be done
-- ARGV[6] now
--
-- Returns ok | refused   refused: live scores would change their meaning: priorities to retries, or retries to priorities

-- check: types
local known = redis.call('HMGET', control, 'timeout', 'max_retries')
local former, former_retries = tonumber(known[1] or timeout), tonumber(known[2] or max_retries)
local live = redis.call('ZCARD', store) + redis.call('ZCARD', prepare) + redis.call('ZCARD', retry)
  + redis.call('ZCARD', claim) -- rule: configure_ignores_claims
-- rule: configure_rereads_scores
if topic_type == 'priority' and math.max(16, max_retries) ~= math.max(16, former_retries) and live > 0 then return 'refused' end
if not apply then return 'ok' end -- rule: configure_only_asks
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
redis.call('HSET', control, 'slots', slots, 'timeout', timeout, 'max_retries', max_retries)
-- The stamp of a delivery with a time-out of its own depends on the slot's, so it gets another one. The script looks at the
-- deliveries that time out first, because their number has no bound; the others are stamped when they are extended.
if timeout ~= former then -- rule: own_time_out_shifts
-- include: _scores.numbers
-- include: _retries.shortened_by
  local rows, stamps = redis.call('ZRANGE', prepare, 0, 4999, 'WITHSCORES'), {}
  for first = 1, #rows, 2000 do
    local members = {}
    for i = first, math.min(first + 1998, #rows), 2 do
      members[#members + 1] = rows[i]
    end
    for i, record in ipairs(redis.call('HMGET', inflight, unpack(members))) do
      local later = record and shortened_by(record, former) - shortened_by(record, timeout) or 0
      if later ~= 0 then
        stamps[#stamps + 1] = text_of(tonumber(rows[first + i * 2 - 1]) + later * 1000)
        stamps[#stamps + 1] = members[i]
      end
    end
  end
  for first = 1, #stamps, 2000 do
    redis.call('ZADD', prepare, unpack(stamps, first, math.min(first + 1999, #stamps)))
  end
end
return 'ok'

-- script: shut
-- Shut a slot for a re-slotting and give it the new slot count: sends with another count are rejected as moved from now on.
--
-- KEYS control store prepare retry dead claimants stats inserting
--
-- ARGV[1] channel
-- ARGV[2] slot
-- ARGV[3] slots        the new slot count
-- ARGV[4] reslot       the number of the re-slotting
-- ARGV[5] fresh FLAG   1: a new slot of the topic, which takes time-out and retries from this call
-- ARGV[6] timeout      seconds
-- ARGV[7] max_retries
-- ARGV[8] empty FLAG   1: only if the slot holds nothing
-- ARGV[9] now
--
-- Returns shut | known (by this re-slotting before) | stale (a later one has shut it) | holds

-- check: types
local known = tonumber(redis.call('HGET', control, 'reslot')) or 0
if known > tonumber(reslot) then return 'stale' end -- rule: a_later_re_slotting_is_overruled
if known == tonumber(reslot) then return 'known' end -- rule: a_slot_is_shut_again
local noted = redis.call('HGET', control, 'inserting')
-- include: _basics.ledger
-- include: insert.end_insertion
-- An interrupted insertion holds Store under its other name, where the re-slotting would not look for messages.
if noted then end_insertion() end -- rule: shuts_what_it_does_not_see
keep_counts()
local held = redis.call('ZCARD', store) + redis.call('ZCARD', prepare) + redis.call('ZCARD', retry)
  + redis.call('ZCARD', dead) + redis.call('ZCARD', claimants)
if empty and held > 0 then return 'holds' end -- rule: shut_though_it_holds_something
-- Start with a deletion: after it, a full server accepts the rest.
redis.call('HDEL', control, 'sleeping_until')
redis.call('HSET', control, 'slots', slots, 'reslot', reslot, 'moving', '1')
if fresh then redis.call('HSET', control, 'timeout', timeout, 'max_retries', max_retries) end
redis.pcall('PUBLISH', channel, slot)
return 'shut'

-- script: move_out
-- Move messages out of a shut slot for another slot: they stay in `leaving` until they are known to have arrived.
--
-- KEYS store prepare retry dead deaths failures body stats control claimants leaving
--
-- ARGV[1] reslot            the number of the re-slotting
-- ARGV[2] arrived           the ticket that is known to have arrived; empty: none
-- ARGV[3] target            the other slot
-- ARGV[4] max_bytes NUMBER  of one hand-over; one message is moved whatever its size
-- ARGV[5] topic_type
-- ARGV[6...] pairs          store, retry or dead; member
-- ARGV[#ARGV] now
--
-- Returns {stale} (not shut by this re-slotting) | {busy} (something is in flight) | {nothing}
--       | {word, ticket, target, {state, member, score, failure, envelope or death, ...}}
--         word: moved, or staged where an earlier hand-over has to arrive first; empty texts where there is none

-- check: types
if (last - first + 1) / 2 > 250 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'reslot', 'moving', 'tickets', 'undrained_since')
local undrained_since = known[4]
-- include: _basics.now
-- include: _scores.numbers
-- include: _basics.ledger
-- include: _scores.note_undrained
if known[1] ~= reslot or not known[2] then return { 'stale' } end -- rule: moved_out_of_an_open_slot
local staged = redis.call('HMGET', leaving, 'ticket', 'target', 'rows')
-- The process that took these messages out died, or lost a reply, so they may not have arrived: they are handed over again.
if staged[1] and staged[1] ~= arrived then -- rule: what_left_is_forgotten
  local rows = {}
  for i = 1, tonumber(staged[3]) do
    local parts = redis.call('HMGET', leaving, string.format('state%d', i), string.format('member%d', i),
      string.format('score%d', i), string.format('failure%d', i), string.format('rest%d', i))
    for j = 1, 5 do
      rows[#rows + 1] = parts[j]
    end
  end
  return { 'staged', staged[1], staged[2], rows }
end
redis.call('UNLINK', leaving)
-- rule: moved_while_in_flight
if redis.call('ZCARD', prepare) > 0 or redis.call('ZCARD', claimants) > 0 then return { 'busy' } end
local sets, seen = { store = store, retry = retry, dead = dead }, { store = {}, retry = {}, dead = {} }
local rows, parts, bytes, n, moved_dead = {}, {}, 0, 0, 0
for i = first, last, 2 do
  local state, member = ARGV[i], ARGV[i + 1]
  local score = redis.call('ZSCORE', sets[state], member)
  if score and not seen[state][member] and (n == 0 or bytes < max_bytes) then
    seen[state][member] = true
    local failure = state ~= 'dead' and redis.call('HGET', failures, member) or ''
    local rest = redis.call('HGET', state == 'dead' and deaths or body, member) or ''
    local row = { state, member, plain_score(score), failure, rest }
    n = n + 1
    for j, name in ipairs({ 'state', 'member', 'score', 'failure', 'rest' }) do
      rows[#rows + 1] = row[j]
      parts[#parts + 1], parts[#parts + 2] = string.format('%s%d', name, n), row[j]
    end
    bytes = bytes + #member + #failure + #rest
    if state == 'dead' then moved_dead = moved_dead + 1 end
  end
end
if n == 0 then return { 'nothing' } end
local ticket = text_of((tonumber(known[3]) or 0) + 1)
redis.call('HSET', control, 'tickets', ticket)
redis.call('HSET', leaving, 'ticket', ticket, 'target', target, 'rows', text_of(n), unpack(parts))
for i = 1, #rows, 5 do
  local state, member = rows[i], rows[i + 1]
  redis.call('ZREM', sets[state], member)
  if state == 'dead' then
    redis.call('HDEL', deaths, member)
  elseif not redis.call('ZSCORE', state == 'store' and retry or store, member) then
    redis.call('HDEL', failures, member)
    redis.call('HDEL', body, member)
  end
end
count('moved_out', n - moved_dead)
count('moved_dead_out', moved_dead)
note_undrained()
keep_counts()
return { 'moved', ticket, target, rows }

-- script: move_in
-- Accept messages that left another slot, once: a copy that was sent here meanwhile is the newer one.
--
-- KEYS store retry dead deaths failures body stats control arrived
--
-- ARGV[1] reslot       the number of the re-slotting
-- ARGV[2] source       the slot that they left
-- ARGV[3] ticket       of their hand-over
-- ARGV[4] topic_type
-- ARGV[5] max_retries  the topic's, until the slot has its own
-- ARGV[6] max_wait NUMBER  each send starts the wait again, up to these ms from the first; 0: the first one decides
-- ARGV[7...] rows      state, member, score, failure, envelope or death; empty where there is none
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
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _scores.note_undrained
-- include: _accumulation.bodies
-- include: _debounce.debounce
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
      -- With DEBOUNCE that copy would have been put off until then, but not beyond its deadline.
      count('dropped')
      if fresh and max_wait > 0 then -- rule: moved_before_its_wait_is_over
        score = prolonged(math.floor(bounded(tonumber(waiting), 0, LARGEST_WITH_RETRIES)) - now_ms, tonumber(score))
      end
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

-- script: reopen
-- Open a slot that a re-slotting had shut, and wake the consumer that waits for it.
--
-- KEYS control arrived
--
-- ARGV[1] channel
-- ARGV[2] slot
-- ARGV[3] reslot       the number of the re-slotting
-- ARGV[4] deliveries   the highest receipt of the slots that messages came from: receipts keep rising
-- ARGV[5] paused FLAG  1: one of those slots was paused
-- ARGV[6] now
--
-- Returns open | known (it was open) | stale (another re-slotting has shut it, or none)

-- check: types
local known = redis.call('HMGET', control, 'reslot', 'moving', 'deliveries')
if known[1] ~= reslot then return 'stale' end
-- The reply to an earlier call was lost, or another process of the same re-slotting was first.
if not known[2] then return 'known' end
redis.call('HDEL', control, 'moving', 'sleeping_until')
redis.call('UNLINK', arrived)
-- Listeners may have stored receipts of the family's other slots as fencing tokens, so later ones have to be higher.
-- rule: receipts_fall
if tonumber(deliveries) > (tonumber(known[3]) or 0) then redis.call('HSET', control, 'deliveries', deliveries) end
if paused then redis.call('HSET', control, 'paused', '1') end -- rule: pauses_end
redis.pcall('PUBLISH', channel, slot)
return 'open'

-- script: reslot_progress
-- Read how far a re-slotting has progressed in a slot, in one instant.
-- Changes nothing.
--
-- KEYS control prepare claimants stats leaving
--
-- ARGV[1] now
--
-- Returns {slots, reslot, 1 if shut, 1 if paused, deliveries, in flight, claims, rescheduled, revived, ticket on its way}
--         as texts, empty if there is none; in flight and claims are numbers

-- check: types
local known = redis.call('HMGET', control, 'slots', 'reslot', 'moving', 'paused', 'deliveries')
local counted = redis.call('HMGET', stats, 'rescheduled', 'revived') -- rule: progress_overlooks_replays
return { known[1] or '', known[2] or '', known[3] or '', known[4] or '', known[5] or '',
  redis.call('ZCARD', prepare), redis.call('ZCARD', claimants), counted[1] or '', counted[2] or '',
  redis.call('HGET', leaving, 'ticket') or '' }

-- script: retire
-- Delete the keys of an empty slot of a topic that is no longer used: its ledger, its owner and its settings.
--
-- KEYS store prepare retry dead claimants leaving inflight deaths failures body prepare_body claims claim claim_body arrived
--      stats control outcomes outcome_times delivery_outcomes claim_failed inserting
--
-- ARGV[1] now
--
-- Returns retired | holds (messages: nothing is changed)

-- check: types
-- rule: retire_what_holds
if redis.call('EXISTS', store, prepare, retry, dead, claimants, leaving, claim, inserting) > 0 then return 'holds' end
redis.call('UNLINK', inflight, deaths, failures, body, prepare_body, claims, claim_body, claim_failed, arrived, stats,
  control, outcomes, outcome_times, delivery_outcomes)
return 'retired'
