-- What people and programs change in the messages and slots of a topic.

-- script: replay
-- Send dead messages again with their full budget; a message with a live copy keeps that copy and its newer body.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claim
--
-- ARGV[1] channel
-- ARGV[2] slots        the caller's slot count
-- ARGV[3] topic_type
-- ARGV[4] max_retries  the topic's, until the slot has its own
-- ARGV[5...] pairs     member, new envelope or empty
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | a word for each member: replayed | merged | not_found

-- check: types
if (last - first + 1) / 2 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'slots', 'undrained_since', 'last_place')
local sleeping_until, max_retries, known_slots = known[1], tonumber(known[2] or max_retries), known[3]
local undrained_since, last_place = known[4], known[5]
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _scores.note_undrained
-- include: _accumulation.bodies
-- include: send.fifo_places
-- A new body needs memory. Without one, start with a deletion of nothing: after it, a full server accepts the rest.
local edited = false
for i = first, last, 2 do
  edited = edited or ARGV[i + 1] ~= ''
end
if not edited then redis.call('HDEL', control, '') end -- rule: replay_needs_memory
-- Returns whether the body in flight is newer than that of the dead copy, and its delivery will not end by an operator's mark.
local function is_newer(member)
  if redis.call('ZSCORE', claim, member) then return true end -- rule: replay_past_what_is_claimed
  return redis.call('ZSCORE', prepare, member)
    -- rule: replay_merges_with_what_ends
    and not string.find(redis.call('HGET', inflight, member) or '', '^%d+ %S+ %S')
end
local words, earliest = {}, math.huge
for i = first, last, 2 do
  local member, envelope, word = ARGV[i], ARGV[i + 1], 'not_found'
  if redis.call('ZSCORE', dead, member) then
    local record = redis.call('HGET', deaths, member)
    local score = string.match(record or '', '^%S+ %d+ %d+ %d+ (%S+) %d+ [01]\n')
    local buried = exhumed(record)
    if envelope ~= '' then buried = nil end
    word = 'merged'
    local lives = redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member) -- rule: replay_takes_two
    if lives and buried then join(member, buried) end -- rule: replayed_bodies_dropped
    if not lives and buried and not collects(buried) then lives = is_newer(member) end -- rule: newer_body
    if not lives then
      word = 'replayed'
      local again = topic_type == 'fifo' and next_place() or now_ms -- rule: fifo_replays_at_once
      if topic_type == 'priority' then
        again = math.min(math.floor(bounded(tonumber(score) or 0, 0, 8796093022208)), 8796093022208)
        if is_retry(again) then again = floor_priority() + 1 end -- rule: replay_at_once_or_never
      end
      redis.call('ZADD', store, text_of(again), member)
      envelope = buried or envelope -- rule: replay_without_body
      earliest = math.min(earliest, topic_type == 'priority' and 0 or again)
    end
    if envelope ~= '' then redis.call('HSET', body, member, envelope) end
    redis.call('ZREM', dead, member)
    redis.call('HDEL', deaths, member)
    count(word == 'replayed' and 'revived' or 'replay_merged')
  end
  words[#words + 1] = word
end
if topic_type == 'fifo' and earliest < math.huge then keep_place() end
note_undrained()
wake(earliest)
keep_counts()
return words

-- script: bury
-- Put messages into Dead for an operator; one in flight is marked, and dies when its delivery ends.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claim
--
-- ARGV[1] topic_type
-- ARGV[2] max_retries  the topic's, until the slot has its own
-- ARGV[3] why
-- ARGV[4...] members
-- ARGV[#ARGV] now
--
-- Returns what each member was found as: waiting | resting | running | running_and_waiting | dead | not_found

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'max_retries', 'undrained_since')
local max_retries, undrained_since = tonumber(known[1] or max_retries), known[2]
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _accumulation.bodies
-- include: _deaths.record
-- include: _scores.note_undrained
-- include: ack.mark_delivery
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local words = {}
for i = first, last do
  local member = ARGV[i]
  local waiting, resting = redis.call('ZSCORE', store, member), redis.call('ZSCORE', retry, member)
  local running, record = redis.call('ZSCORE', prepare, member), redis.call('HGET', inflight, member)
  local word = 'not_found'
  if redis.call('ZSCORE', dead, member) then word = 'dead' end
  if resting then word = 'resting' end
  if waiting then word = 'waiting' end
  local kept, claimed = redis.call('HGET', body, member), redis.call('ZSCORE', claim, member)
  -- Claimed messages cannot be marked. A newer copy with its own body stays: it would die before the older copy ends.
  if (waiting or resting) and not (claimed and kept) then -- rule: bury_before_what_is_claimed
    local failure = parse_failure(redis.call('HGET', failures, member))
    if waiting then redis.call('ZREM', store, member) end
    if resting then redis.call('ZREM', retry, member) end -- rule: bury_leaves_a_retry
    die(member, 'buried', why, first_score(waiting or failure and failure.score or '0', failure), failure, 0, kept)
    if waiting and resting then count('dropped') end
  end
  if running then
    word = (waiting or resting) and 'running_and_waiting' or 'running'
    local receipt_and_score = string.match(record or '', '^%d+ %S+') or '0 0'
    -- rule: bury_forgets_the_newer_death
    local outlived = (waiting or resting or string.find(record or '', ' outlived', 1, true)) and ' outlived' or ''
    mark_delivery(member, receipt_and_score, ' buried' .. outlived) -- rule: bury_lets_it_run
  elseif claimed then
    word = (waiting or resting) and 'running_and_waiting' or 'running'
  end
  words[#words + 1] = word
end
note_undrained()
keep_counts()
return words

-- script: remove
-- Delete or cancel messages for an operator; one in flight is marked for the end of its delivery.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claim trash
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] most_kept NUMBER   how many copies to keep in `trash`; 0: none
-- ARGV[4] most_bytes NUMBER  of these copies; the last one may exceed it
-- ARGV[5] which  live, dead, cancel (live), or any: the live copies, else the dead one
-- ARGV[6...] members
-- ARGV[#ARGV] now
--
-- Returns {words, how many copies are kept, their bytes}; the words say what each member was found as:
-- waiting | resting | running | running_and_waiting | dead | not_found,
-- and with `cancel` also claimed: Spark has the message, and cannot be notified

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local undrained_since = redis.call('HGET', control, 'undrained_since')
-- include: _basics.now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _scores.note_undrained
-- include: ack.mark_delivery
-- include: operate.trash
for i = first, most_kept > 0 and last or 0 do
  local member, found = ARGV[i], false
  if which ~= 'dead' then
    local waiting, resting = redis.call('ZSCORE', store, member), redis.call('ZSCORE', retry, member)
    local runs = redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)
    found = waiting or resting or runs
    if waiting or resting then
      -- The failures of what runs are its own.
      local failure = not runs and redis.call('HGET', failures, member) or '' -- rule: trash_takes_the_failures_of_what_runs
      local envelope = redis.call('HGET', body, member) or ''
      if waiting then keep_copy('store', member, waiting, failure, envelope) end
      if resting then keep_copy('retry', member, resting, failure, envelope) end
    end
  end
  local died = not found and which ~= 'live' and which ~= 'cancel' and redis.call('ZSCORE', dead, member)
  if died then keep_copy('dead', member, died, '', redis.call('HGET', deaths, member) or '') end
end
local kept, bytes = keep_copies()
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
local words, cancels, tells = {}, which == 'cancel', false
for i = first, last do
  local member, word = ARGV[i], 'not_found'
  if which ~= 'dead' then
    local gone = redis.call('ZREM', store, member)
    local rested = redis.call('ZREM', retry, member)
    local running = redis.call('ZSCORE', prepare, member)
    count('removed', gone + rested)
    if rested > 0 then word = 'resting' end
    if gone > 0 then word = 'waiting' end
    if running then
      word = gone + rested > 0 and 'running_and_waiting' or 'running'
      local record = redis.call('HGET', inflight, member) or ''
      local receipt_and_score = string.match(record, '^%d+ %S+') or '0 0'
      -- rule: remove_forgets_the_newer_death
      local outlived = string.find(record, ' outlived', 1, true) and ' outlived' or ''
      -- rule: remove_forgets_the_cancellation
      local cancelled = cancels or string.find(record, ' cancelled', 1, true)
      local mark = cancelled and ' cancelled' or ' removed'
      tells = tells or cancels
      mark_delivery(member, receipt_and_score, mark .. outlived) -- rule: remove_lets_it_run
    elseif redis.call('ZSCORE', claim, member) then -- rule: remove_tears_the_failures_of_the_claimed
      -- Spark continues with claimed messages.
      if not cancels then
        word = gone + rested > 0 and 'running_and_waiting' or 'running'
      elseif gone + rested == 0 then
        word = 'claimed'
      end
    elseif gone + rested > 0 then
      if note_outcome then
        local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
        note_outcome(member, 'removed', '-', tonumber(times) or 0, '', 0) -- rule: removal_leaves_no_outcome
      end
      redis.call('HDEL', failures, member)
    end
    -- A copy that is in flight or claimed has its own body.
    if gone + rested > 0 then redis.call('HDEL', body, member) end -- rule: remove_leaves_the_body
  end
  if word == 'not_found' and which ~= 'live' and not cancels and redis.call('ZREM', dead, member) > 0 then -- rule: remove_digs_up
    redis.call('HDEL', deaths, member)
    count('removed_dead')
    word = 'dead'
  end
  words[#words + 1] = word
end
note_undrained()
keep_counts()
-- The owner then extends the deliveries that it has of this slot: `extend` answers which of them are cancelled. The module
-- core/consumer/heartbeat names the whole way from here to the listener. The number is -1 - MAX_SLOTS - slot, which
-- core/model/keys.read_wakeup reads.
if tells then redis.pcall('PUBLISH', channel, -1048577 - string.match(store, '%d+$')) end -- rule: cancel_tells_nobody
return { words, kept, bytes }

-- script: discard
-- Delete dead messages that have not changed since they were read: by member and time of death.
--
-- KEYS dead deaths stats trash
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
-- include: _basics.now
-- include: _scores.numbers
-- include: _basics.ledger
-- include: operate.trash
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

-- script: purge
-- Delete waiting, resting or dead messages, oldest first; never messages in flight.
--
-- KEYS store retry dead prepare deaths failures body stats claim control trash
--
-- ARGV[1] topic_type
-- ARGV[2] most_kept NUMBER   how many copies to keep in `trash`; 0: none
-- ARGV[3] most_bytes NUMBER  of these copies; the last one may exceed it
-- ARGV[4] state         store, retry or dead
-- ARGV[5] lowest        only scores from this, up to highest
-- ARGV[6] highest
-- ARGV[7] limit NUMBER
-- ARGV[8] now
--
-- Returns {how many were deleted, how many copies are kept, their bytes}

-- check: types
limit = math.min(limit, 1000)
local undrained_since = redis.call('HGET', control, 'undrained_since')
-- include: _basics.now
-- include: _scores.numbers
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _basics.ledger
-- include: _scores.note_undrained
local set = state == 'dead' and dead or state == 'retry' and retry or store
local members = redis.call('ZRANGEBYSCORE', set, lowest, highest, 'LIMIT', 0, limit) -- rule: purge_within_bounds
if #members == 0 then return { 0, 0, 0 } end
-- include: operate.trash
if most_kept > 0 then
  local scores = redis.call('ZMSCORE', set, unpack(members))
  for i, member in ipairs(members) do
    if state == 'dead' then
      keep_copy(state, member, scores[i], '', redis.call('HGET', deaths, member) or '')
    else
      -- The failures of what runs are its own.
      local runs = redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member)
      local failure = not runs and redis.call('HGET', failures, member) or '' -- rule: purge_keeps_the_failures_of_what_runs
      keep_copy(state, member, scores[i], failure, redis.call('HGET', body, member) or '')
    end
  end
end
local kept, bytes = keep_copies()
redis.call('ZREM', set, unpack(members))
if state == 'dead' then
  redis.call('HDEL', deaths, unpack(members))
  count('purged_dead', #members)
else
  -- A copy in the other set keeps body and diagnosis; one that is in flight or claimed has its own body.
  local running = redis.call('ZMSCORE', prepare, unpack(members))
  local claimed = redis.call('ZMSCORE', claim, unpack(members))
  local other, gone, well = redis.call('ZMSCORE', state == 'store' and retry or store, unpack(members)), {}, {}
  for i, member in ipairs(members) do
    if not other[i] then
      gone[#gone + 1] = member
      if not (running[i] or claimed[i]) then well[#well + 1] = member end -- rule: purge_leaves_what_runs
    end
  end
  if #gone > 0 then redis.call('HDEL', body, unpack(gone)) end
  for _, member in ipairs(note_outcome and well or {}) do
    local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
    note_outcome(member, 'removed', '-', tonumber(times) or 0, '', 0)
  end
  if #well > 0 then redis.call('HDEL', failures, unpack(well)) end
  count('purged', #members)
end
note_undrained()
keep_counts()
return { #members, kept, bytes }

-- script: restore
-- Bring back what an act has deleted, some at a time; where a newer copy is there by now, that one stays.
--
-- KEYS store prepare inflight dead deaths failures body stats control retry claim trash
--
-- ARGV[1] channel
-- ARGV[2] slots         the caller's slot count
-- ARGV[3] topic_type
-- ARGV[4] max_retries   the topic's, until the slot has its own
-- ARGV[5] cursor        0: from the beginning
-- ARGV[6] limit NUMBER  how many, roughly
-- ARGV[7] now
--
-- Returns {'moved', slots} | {'restored', cursor to continue with (0: all were read), how many came back, how many were merged}

-- check: types
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'slots', 'undrained_since')
local sleeping_until, max_retries, known_slots = known[1], tonumber(known[2] or max_retries), known[3]
local undrained_since = known[4]
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: restored_into_a_former_slot
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _scores.note_undrained
-- include: _accumulation.bodies
-- Returns whether a copy in flight or claimed is newer than one that was deleted at `deleted_us`, or may be.
local function runs_newer(member, fresh, deleted_us, rest)
  if collects(rest) then return false end -- rule: restored_bodies_dropped
  if redis.call('ZSCORE', claim, member) then return not fresh or rest ~= '' end -- rule: restored_behind_a_claim
  if not redis.call('ZSCORE', prepare, member) then return false end
  if not fresh then return true end -- rule: retry_restored_beside_a_delivery
  local receipt, marked = string.match(redis.call('HGET', inflight, member) or '', '^(%d+) %S+ ?(%S*)')
  -- A receipt is the time of the delivery. What was deleted while the delivery ran, waited behind it.
  return marked == '' and tonumber(receipt) > deleted_us -- rule: restored_behind_a_newer_delivery
end
local function restore_dead(member, score, rest)
  count('restored_dead')
  if redis.call('ZSCORE', dead, member) then -- rule: restored_over_a_later_death
    count('dead_merged')
    local there = redis.call('HGET', deaths, member)
    if there then redis.call('HSET', deaths, member, joined_death(there, (exhumed(rest)))) end
    return 0
  end
  redis.call('ZADD', dead, score, member)
  if rest ~= '' then redis.call('HSET', deaths, member, rest) end
  return 1
end
local earliest = math.huge
local function restore_live(state, member, score, deleted_us, failure, rest)
  count('restored')
  local fresh = state == 's' and not is_retry(tonumber(score))
  local waits = redis.call('ZSCORE', store, member) or redis.call('ZSCORE', retry, member) -- rule: restored_twice
  if waits or runs_newer(member, fresh, deleted_us, rest) then
    count('dropped')
    if waits then join(member, rest) end
    return 0
  end
  redis.call('ZADD', state == 's' and store or retry, score, member)
  if failure ~= '' then redis.call('HSETNX', failures, member, failure) end -- rule: restored_without_its_failures
  if rest ~= '' then redis.call('HSET', body, member, rest) end -- rule: restored_without_its_body
  earliest = math.min(earliest, topic_type == 'priority' and state == 's' and 0 or tonumber(score))
  return 1
end
local scanned = redis.call('HSCAN', trash, cursor, 'COUNT', limit)
local copies, back, merged = scanned[2], 0, 0
-- A copy that waits comes before one of the same member that rests.
for _, state in ipairs({ 's', 'r', 'd' }) do
  for i = 1, #copies, 2 do
    local field, value = copies[i], copies[i + 1]
    local score, deleted_us, length, at = string.match(value, '^(%S+) (%d+) (%d+)\n()')
    if string.sub(field, 1, 1) == state and score then
      local member, rest_at = string.sub(field, 2), at + tonumber(length)
      local failure, rest = string.sub(value, at, rest_at - 1), string.sub(value, rest_at)
      -- Start with a deletion: after it, a full server accepts the rest.
      redis.call('HDEL', trash, field) -- rule: restored_again
      local restored
      if state == 'd' then
        restored = restore_dead(member, score, rest)
      else
        restored = restore_live(state, member, score, tonumber(deleted_us), failure, rest)
      end
      back, merged = back + restored, merged + 1 - restored
    end
  end
end
note_undrained()
wake(earliest) -- rule: restored_unheard
keep_counts()
return { 'restored', scanned[1], back, merged }

-- script: reschedule
-- Give waiting messages a new due time or priority; resting messages keep their budget.
--
-- On priority topics a retry is refused, because its score is no due time. So `reschedule_all` in operations/bulk_actions refuses
-- it, and admin/page_actions does not offer it.
--
-- KEYS store retry prepare stats control claim
--
-- ARGV[1] channel
-- ARGV[2] topic_type
-- ARGV[3] max_retries  the topic's, until the slot has its own
-- ARGV[4...] pairs     score, member
-- ARGV[#ARGV] now
--
-- Returns what each member was found as: waiting | resting (both have the new score now) | refused | running | not_found

-- check: types
if (last - first + 1) / 2 > 1000 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'last_place')
local sleeping_until, max_retries, last_place = known[1], tonumber(known[2] or max_retries), known[3]
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _sleep.wake
-- include: send.fifo_places
for i = first, last, 2 do
  if not is_fresh(tonumber(ARGV[i])) then return redis.error_reply('ERR score ' .. ARGV[i] .. ' is out of bounds') end
end
redis.call('HDEL', control, '')
local words, earliest = {}, math.huge
for i = first, last, 2 do
  local score, member = ARGV[i], ARGV[i + 1]
  local waiting = tonumber(redis.call('ZSCORE', store, member))
  local resting = tonumber(redis.call('ZSCORE', retry, member))
  local word = 'not_found'
  if waiting and not is_retry(waiting) then -- rule: reschedule_makes_fresh
    word = 'waiting'
    if topic_type == 'fifo' then score = text_of(later_place(tonumber(score), 0)) end
    redis.call('ZADD', store, score, member) -- rule: reschedule_early
  elseif waiting or resting then
    word = 'resting'
    if topic_type == 'priority' then
      word = 'refused'
    else
      local q = waiting and math.floor(waiting) or math.floor(resting % 1 * 1024 + 0.5)
      if waiting then redis.call('ZREM', store, member) end
      if waiting and resting then count('dropped') end
      local rest = math.min(tonumber(score), LARGEST_WITH_RETRIES)
      redis.call('ZADD', retry, text_of(rest + bounded(q, 1, 999) / 1024), member)
    end
  -- rule: reschedule_misses_the_claimed
  elseif redis.call('ZSCORE', prepare, member) or redis.call('ZSCORE', claim, member) then
    word = 'running'
  end
  if word == 'waiting' or word == 'resting' then
    count('rescheduled')
    earliest = math.min(earliest, topic_type == 'priority' and 0 or tonumber(score))
  end
  words[#words + 1] = word
end
wake(earliest)
keep_counts()
return words

-- script: pause
-- Stop delivering messages of a slot, or resume it: `prepare`, `claim` and `push` heed it.
--
-- KEYS control
--
-- ARGV[1] channel
-- ARGV[2] slot NUMBER
-- ARGV[3] paused FLAG  1 or 0
-- ARGV[4] now
--
-- Returns paused | resumed | unchanged

-- check: types
if paused == (redis.call('HEXISTS', control, 'paused') == 1) then return 'unchanged' end
if paused then
  redis.call('HDEL', control, '')
  redis.call('HSET', control, 'paused', '1')
  -- Consumers that have taken messages but have not begun with them then give them back.
  redis.pcall('PUBLISH', channel, -1 - slot) -- rule: pause_tells_nobody
  return 'paused'
end
redis.call('HDEL', control, 'paused', 'sleeping_until') -- rule: pause_for_ever
redis.pcall('PUBLISH', channel, slot) -- rule: resume_wakes_nobody
return 'resumed'

-- script: adopt
-- Record messages that another program put into a slot as foreign, so that the ledger balances again.
--
-- KEYS stats
--
-- ARGV[1] drift NUMBER  how many messages the ledger does not know
-- ARGV[2] foreign       how many were recorded when that was found, so that two people do not record the same messages
-- ARGV[3] now
--
-- Returns ok | changed

-- check: types
if not (drift >= 1) then return redis.error_reply('ERR drift is out of bounds') end
-- Two people may adopt the same messages at once, or a reply may be lost and the call be repeated.
if (redis.call('HGET', stats, 'foreign') or '0') ~= foreign then return 'changed' end -- rule: adopt_twice
redis.call('HINCRBY', stats, 'foreign', drift)
return 'ok'

-- script: find_orphans
-- Search a part of the records of a slot for those that belong to no message, and delete them if requested.
--
-- KEYS store prepare retry dead inflight deaths failures body claim claim_body prepare_body claim_failed
--
-- ARGV[1] kind         inflight, deaths, failures, body, claim_body, prepare_body or claim_failed
-- ARGV[2] cursor       0: from the beginning
-- ARGV[3] repair FLAG  1: delete them
-- ARGV[4] now
--
-- Returns {cursor to continue with (0: all were read), how many were read, {member, ...}}

-- check: types
local records, homes = inflight, { prepare }
if kind == 'deaths' then
  records, homes = deaths, { dead }
elseif kind == 'body' then
  records, homes = body, { store, retry } -- rule: orphans_take_what_rests
elseif kind == 'failures' then
  records, homes = failures, { store, retry, prepare, claim } -- rule: orphans_forget_spark
elseif kind == 'claim_body' then
  records, homes = claim_body, { claim }
elseif kind == 'prepare_body' then
  records, homes = prepare_body, { prepare }
elseif kind == 'claim_failed' then
  records, homes = claim_failed, { claim }
end
local scanned = redis.call('HSCAN', records, cursor, 'COUNT', 100)
local loose = {}
for i = 1, #scanned[2], 2 do
  local member, found = scanned[2][i], false
  for _, home in ipairs(homes) do
    found = found or redis.call('ZSCORE', home, member)
  end
  if not found then loose[#loose + 1] = member end
end
if repair and #loose > 0 then redis.call('HDEL', records, unpack(loose)) end -- rule: orphans_are_deleted_unasked
return { scanned[1], #scanned[2] / 2, loose }

-- section: trash
-- Keep what a person deletes, for an hour (UNDO_MS in core/model/stored_actions), under the key of the act: a field is the first
-- letter of the state, and the member. Its value is "score deleted_us length\n", the last failure of this length, and the
-- envelope or death.
--
-- needs: trash most_kept most_bytes now_us plain_score

local kept_copies, kept_bytes = {}, 0
local function keep_copy(state, member, score, failure, rest)
  if #kept_copies >= most_kept * 2 or kept_bytes >= most_bytes then return end -- rule: trash_without_bound
  local n = #kept_copies
  kept_copies[n + 1] = string.sub(state, 1, 1) .. member
  kept_copies[n + 2] = string.format('%s %.0f %d\n', plain_score(score), now_us, #failure) .. failure .. rest
  kept_bytes = kept_bytes + #kept_copies[n + 1] + #kept_copies[n + 2]
end
-- Write the copies before anything is deleted. A full server refuses them, and they are deleted all the same.
-- Returns how many copies are kept, and their bytes.
local function keep_copies()
  if #kept_copies == 0 then return 0, 0 end
  local added = redis.pcall('HSET', trash, unpack(kept_copies)) -- rule: trash_blocks_the_deletion
  if type(added) ~= 'number' then return 0, 0 end
  redis.pcall('PEXPIRE', trash, 3600000) -- rule: trash_stays_for_ever
  return added, kept_bytes
end
