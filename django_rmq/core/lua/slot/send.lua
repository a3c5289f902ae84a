-- Sending: the push to an owner that sleeps (`push`), the fast way of a lone message (`single`), and the places of a fifo line.
--
-- Where the message of a send is there already, _duplicates decides which of the two scores counts, and what the send is then
-- (merged, superseded, refused). `single` has a shorter form of that. How far a message is put off is decided in _debounce.

-- script: send_merge
-- Send range_merge messages of one slot: due `range_ms` from now, or merged with the copy that waits (see _debounce).
--
-- KEYS store retry body stats control prepare inflight
--
-- ARGV[1] channel
-- ARGV[2] slots            the caller's slot count
-- ARGV[3] backlog NUMBER   how many may wait here; 0: any number
-- ARGV[4] max_wait NUMBER   each send starts the wait again, up to these ms from the first; 0: the first one decides
-- ARGV[5] accumulate NUMBER how many bodies a message collects; 0: the last one counts
-- ARGV[6] max_body NUMBER   bytes of a message that collects
-- ARGV[7] range_ms NUMBER
-- ARGV[8] n NUMBER
-- ARGV[9...] members       n of them, then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the score of a single new message | {'stored', score} | {'mixed', words, scores}

local topic_type = 'range_merge'
local envelope = #ARGV > first + n and first + n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'inbox')
local known_slots, sleeping_until = known[1], known[2]
-- include: _basics.now
-- include: _sleep.wake
local due = now_ms + range_ms
local is_plain = max_wait == 0 and accumulate == 0
local alone = n == 1 and is_plain and range_ms >= 0 and range_ms <= 1e14 and range_ms % 1 == 0 and ARGV[first]
local at, met, floor = due, 'merged', 999
local inbox = sleeping_until == NEVER and known[3]
-- include: send.push
-- include: send.single
-- check: types but prepare inflight
if known.err then return known end
if not (range_ms >= 0 and range_ms <= 1e14 and n >= 1 and n <= 1000) then
  return redis.error_reply('ERR range_ms or n is out of bounds')
end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end -- rule: merge_moved_ignored
-- include: _scores.numbers
-- include: _basics.ledger
local function is_retry(score)
  return score <= floor
end
-- include: _debounce.debounce
-- include: _duplicates.merge
-- include: _duplicates.place
-- include: _accumulation.bodies
-- include: _accumulation.collect
due = max_wait > 0 and first_due(range_ms) or text_of(due)
local members, rows = {}, {}
for i = 1, n do
  local member = ARGV[first + i - 1]
  members[i], rows[i * 2 - 1], rows[i * 2] = member, due, member
end
local keep = accumulate > 0 and collect
local reply = place(members, rows, envelope, {}, keep)
if reply[1] == 'stored' then reply[2] = due end
return reply

-- script: send_replace
-- Send priority or fixed_time messages of one slot: the last score wins.
--
-- KEYS store retry body stats control prepare inflight
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] backlog NUMBER  how many may wait here; 0: any number
-- ARGV[4] topic_type            priority or fixed_time
-- ARGV[5] max_retries     the topic's, until the slot has its own
-- ARGV[6] n NUMBER
-- ARGV[7...] pairs        n times score, member; then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the score of a single new message | {'stored'} | {'mixed', words, scores}

local envelope = #ARGV > first + 2 * n and first + 2 * n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'max_retries', 'undrained_since', 'inbox')
local known_slots, sleeping_until, undrained_since = known[1], known[2], known[4]
local max_retries, settled_retries = tonumber(known[3] or max_retries), known[3] or topic_type ~= 'priority'
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _sleep.wake
local at, met, floor = ARGV[first], 'replaced', topic_type == 'priority' and floor_priority() or 999
-- The first priority of a slot takes the slow path, which stores which scores are retries.
local is_plain = n == 1 and settled_retries -- rule: alone_settles_no_retries
local alone = is_plain and is_fresh(tonumber(at)) and ARGV[first + 1] -- rule: alone_takes_any_score
local due = topic_type == 'priority' and 0 or tonumber(at)
local inbox = sleeping_until == NEVER and known[5]
if inbox then
-- include: _basics.now
-- include: send.push
end
local note, noted
if topic_type == 'priority' and not undrained_since then -- rule: alone_is_noted_again
-- include: _basics.now
  note, noted = 'undrained_since', now_ms
end
-- include: send.single
-- check: types but prepare inflight
if known.err then return known end
if not (n >= 1 and n <= 1000) then return redis.error_reply('ERR n is out of bounds') end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _basics.now
-- include: _basics.ledger
-- include: _scores.note_undrained
-- include: _scores.note_sent
-- include: _duplicates.replace
-- include: _duplicates.place
local members, rows, fresh = {}, {}, nil
for i = 1, n do
  local score, member = ARGV[first + 2 * i - 2], ARGV[first + 2 * i - 1]
  if score ~= fresh then
    -- rule: replace_takes_any_score
    if not is_fresh(tonumber(score)) then return redis.error_reply('ERR score ' .. score .. ' is out of bounds') end
    fresh = score
  end
  members[i], rows[i * 2 - 1], rows[i * 2] = member, score, member
end
local reply = place(members, rows, envelope, {})
note_sent()
return reply

-- script: send_fifo
-- Send fifo messages of one slot, each behind those that were sent before it: due at once, or after a delay.
--
-- KEYS store retry body stats control prepare claim inflight
--
-- ARGV[1] channel
-- ARGV[2] slots            the caller's slot count
-- ARGV[3] backlog NUMBER   how many may wait here; 0: any number
-- ARGV[4] strict FLAG      1 or 0
-- ARGV[5] on_duplicate     keep or replace: what a message becomes that meets one with its key that waits or rests
-- ARGV[6] ensure FLAG      1: keep, and one in flight counts as well
-- ARGV[7] delay NUMBER     ms
-- ARGV[8] n NUMBER
-- ARGV[9...] members      n of them, then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | the place of a single new message | {'stored', places in steps of 1/1024 ms}
--       | {'mixed', words, scores}

local topic_type = 'fifo'
local envelope = #ARGV > first + n and first + n
local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'last_place', 'inbox')
local known_slots, sleeping_until, last_place = known[1], known[2], known[3]
-- include: _basics.now
-- include: _sleep.wake
-- A strict slot that answered busy stays so until something in it ends: a send does not change that.
if strict and sleeping_until == GATE then sleeping_until = nil end
-- Where another message came in this millisecond, or the clock was set back, the place has to be computed.
local in_line = (tonumber(last_place) or 0) < now_ms -- rule: alone_follows_the_clock_back
local alone = n == 1 and delay == 0 and in_line and not ensure and ARGV[first]
-- A message that meets a copy takes the slow path.
local at, due, met, floor, note, noted = now_ms, now_ms, false, math.huge, 'last_place', now_ms
local inbox = sleeping_until == NEVER and known[4]
-- include: send.push
-- include: send.single
-- check: types but inflight
if known.err then return known end
if not (delay >= 0 and delay <= 1e14 and n >= 1 and n <= 1000) then
  return redis.error_reply('ERR delay or n is out of bounds')
end
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _scores.numbers
-- include: _basics.ledger
-- include: send.fifo_places
local function is_retry()
  return false
end
-- include: _duplicates.fifo
-- include: _duplicates.place
local members, rows, scores, running, behind = {}, {}, {}, {}, 0
for i = 1, n do
  members[i] = ARGV[first + i - 1]
  behind = delay > 0 and later_place(now_ms + delay, behind) or next_place()
  scores[i] = behind / STEP
  rows[i * 2 - 1], rows[i * 2] = behind, members[i]
end
if ensure then
  if redis.call('ZCARD', prepare) > 0 then running = redis.call('ZMSCORE', prepare, unpack(members)) end
  if redis.call('ZCARD', claim) > 0 then
    for i, claimed in ipairs(redis.call('ZMSCORE', claim, unpack(members))) do
      running[i] = running[i] or claimed
    end
  end
end
local reply = place(members, rows, envelope, running)
if delay == 0 then keep_place() end -- rule: fifo_forgets_its_place
if reply[1] == 'stored' then
  reply[2] = scores
else
  for i, at in ipairs(reply[3]) do
    if type(at) == 'number' then reply[3][i] = text_of(at) end
  end
end
return reply

-- script: ensure
-- Send messages of one slot unless they already wait, rest or are in flight.
--
-- KEYS store retry body stats control prepare claim
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] backlog NUMBER  how many may wait here; 0: any number
-- ARGV[4] topic_type            range_merge, priority or fixed_time
-- ARGV[5] max_retries     the topic's, until the slot has its own
-- ARGV[6] max_wait NUMBER  ms from the first send, at most, if each send starts the wait again; 0: the first one decides
-- ARGV[7] n NUMBER
-- ARGV[8...] pairs        n times score (range_merge: range_ms), member; then n envelopes if the topic is keyed
-- ARGV[#ARGV] now
--
-- Returns {'moved', slots} | {'stored'} | {'mixed', words, scores}

-- check: types
if not (n >= 1 and n <= 1000) then return redis.error_reply('ERR n is out of bounds') end
local known = redis.call('HMGET', control, 'slots', 'sleeping_until', 'max_retries', 'undrained_since')
local known_slots, sleeping_until, undrained_since = known[1], known[2], known[4]
local max_retries, settled_retries = tonumber(known[3] or max_retries), known[3] or topic_type ~= 'priority'
if known_slots and known_slots ~= slots then return { 'moved', known_slots } end
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _scores.note_undrained
-- include: _scores.note_sent
-- include: _duplicates.ensure
-- include: _duplicates.place
-- include: _debounce.debounce
local members, rows = {}, {}
for i = 1, n do
  local score = ARGV[first + 2 * i - 2]
  local refused = topic_type == 'range_merge' and not (tonumber(score) >= 0)
  local range_ms = topic_type == 'range_merge' and tonumber(score)
  if range_ms then score = text_of(now_ms + range_ms) end
  if refused or not is_fresh(tonumber(score)) then
    return redis.error_reply('ERR score ' .. score .. ' is out of bounds')
  end
  if max_wait > 0 then score = first_due(range_ms) end
  local member = ARGV[first + 2 * i - 1]
  members[i], rows[i * 2 - 1], rows[i * 2] = member, score, member
end
local running = {}
-- rule: ensure_ignores_what_runs
if redis.call('ZCARD', prepare) > 0 then running = redis.call('ZMSCORE', prepare, unpack(members)) end
if redis.call('ZCARD', claim) > 0 then
  for i, claimed in ipairs(redis.call('ZMSCORE', claim, unpack(members))) do
    running[i] = running[i] or claimed -- rule: ensure_ignores_claims
  end
end
local envelope = #ARGV > first + 2 * n and first + 2 * n
local reply = place(members, rows, envelope, running)
note_sent()
if reply[1] == 'mixed' or topic_type ~= 'range_merge' then return reply end
-- The caller gave how long each member waits, so it learns here until when.
local words, scores = {}, {}
for i = 1, n do
  words[i], scores[i] = 'stored', rows[i * 2 - 1]
end
return { 'mixed', words, scores }

-- script: scatter
-- Send one unkeyed range_merge message to each of many slots.
--
-- A slot that needs more than the fast way of `send_merge` is left as it is, and the caller sends its message with `send_merge`.
--
-- KEYS store retry body stats control of each slot
--
-- ARGV[1] channel
-- ARGV[2] slots           the caller's slot count
-- ARGV[3] range_ms NUMBER
-- ARGV[4...] members      one for each slot
-- ARGV[#ARGV] now
--
-- Returns the answer of `send_merge` for each slot, or empty where nothing was done

local n = last - first + 1
if not (range_ms >= 0 and range_ms <= 1e14 and range_ms % 1 == 0 and n <= 64 and #slots_keys == n * 5) then
  return redis.error_reply('ERR range_ms or the number of slots is out of bounds')
end
-- include: _basics.now
local due = now_ms + range_ms
local at, met, floor, backlog, envelope = due, 'merged', 999, 0, false
local store, retry, body, stats, control, known, sleeping_until, alone
-- include: _sleep.wake
-- Each slot is independent: a key of a foreign type in one does not affect the others.
local function send_one()
-- include: send.single
end
local answers = {}
for i = 1, n do
  store, retry, body, stats, control = unpack(slots_keys, i * 5 - 4, i * 5)
  alone, known = ARGV[first + i - 1], redis.pcall('HMGET', control, 'slots', 'sleeping_until')
  sleeping_until = known[2] -- rule: scatter_wakes_nobody
  answers[i] = send_one() or false
end
return answers

-- section: push
-- Push a lone message to the owner of the slot, which sleeps and has made an offer: the message is in flight at once, as
-- `prepare` would deliver it, and the owner reads it from its inbox. In every other case nothing is changed.
--
-- An owner that is lost with its host receives nothing, and what was pushed to it waits for its time-out. So it has to have
-- ended a delivery of the slot a moment ago: the last one began within WARM_US, and is no longer in flight.
--
-- needs: store retry body stats control prepare inflight
-- needs: alone backlog known slots due envelope at inbox now_us now_s now_ms [note] [noted]

local WARM_US = 2000000
-- rule: pushes_what_is_not_due
if inbox and alone and backlog == 0 and not envelope and due <= now_ms and known[1] == slots then
  local offer = redis.call('HMGET', control, 'owner', 'epoch', 'inbox_epoch', 'deliveries', 'max_retries', 'paused',
    'moving', 'inserting')
  local owner, last_receipt = offer[1], tonumber(offer[4]) or 0
  local since = now_us - last_receipt
  local is_warm = since < WARM_US and since > -1000 -- rule: pushes_where_nothing_was_taken_lately
  -- Since the offer nobody else has acquired the slot, or taken from it.
  local is_valid = owner and offer[5] and offer[2] == offer[3] -- rule: pushes_under_an_earlier_epoch
    and string.sub(inbox, -#owner) == owner -- rule: pushes_to_who_did_not_take_last
  local is_open = not (offer[6] or offer[7] or offer[8]) -- rule: pushes_into_a_shut_slot
  if is_warm and is_valid and is_open
    and redis.call('EXISTS', store, prepare, inflight, retry, body) == 0 -- rule: pushes_beside_others
  then
    -- PUBLISH would also count programs that subscribe to a pattern such as `*`, and they process no message.
    local listeners = redis.pcall('PUBSUB', 'NUMSUB', inbox)[2] or 0
    if listeners > 0 -- rule: pushes_to_nobody
      and type(redis.pcall('HINCRBY', stats, 'prepared', '1')) == 'number' then -- rule: pushes_before_the_ledger_is_known
      -- The next receipt, as `prepare` computes it.
      local ahead = math.max(0, since - 1)
      local receipt, retries = last_receipt + 1 + ahead + ahead % 2, offer[5]
      -- Each number is written in two parts, which fit into 32 bits: '%.0f' would take as long as another command.
      local score = type(at) == 'number' and string.format('%d%03d', math.floor(at / 1000), at % 1000) or at
      local ticket = string.format('%d%06d ', math.floor(receipt / 1000000), receipt % 1000000)
      local notice = ticket .. score .. ' ' .. retries .. ' ' .. store .. '\n' .. alone
      if type(redis.pcall('PUBLISH', inbox, notice)) == 'number' then -- rule: pushes_what_cannot_be_published
        redis.call('HSET', inflight, alone, ticket .. score)
        redis.call('ZADD', prepare, now_s * 1000 + retries, alone)
        redis.call('HSET', control, 'deliveries', receipt, unpack(note and { note, noted } or {}))
        redis.pcall('HINCRBY', stats, 'stored', '1')
        return at
      end
      redis.pcall('HINCRBY', stats, 'prepared', '-1') -- rule: counts_what_nobody_received
    elseif listeners == 0 then
      redis.call('HDEL', control, 'inbox')
    end
  end
end

-- section: single
-- The fast path for one message without a resting retry, with few reads. A read finds a key of the wrong type by
-- itself and changes nothing, and so does ZADD NX if a copy waits. In every other case the slow path runs from its start.
-- `met`: the answer for a send that meets a copy with a score above `floor`, the largest score of a retry. It is that of
-- _duplicates.merge and _duplicates.replace: the first score counts if it is 'merged', the last one if it is 'replaced'; if it is
-- false, any copy needs the slow path. `note`: a field of control that the send sets to `noted`.
--
-- needs: store retry body stats control
-- needs: alone backlog known slots due envelope at floor met wake [note] [noted]

if alone and backlog == 0 and not known.err and (known[1] or slots) == slots then -- rule: alone
  local is_free = not envelope and redis.pcall('EXISTS', retry, body) == 0 -- rule: alone_ignores_what_rests_unkeyed
    or not redis.pcall('ZSCORE', retry, alone) and type(redis.pcall('HLEN', body)) == 'number' -- rule: alone_rests
  if is_free and type(redis.pcall('HLEN', stats)) == 'number' then -- rule: alone_writes_before_the_ledger_is_known
    local added = redis.pcall('ZADD', store, 'NX', at, alone) -- rule: alone_takes_the_later_time
    local word, answer = added == 1 and 'stored', at
    if added == 0 then
      local kept = redis.call('ZSCORE', store, alone)
      local number = tonumber(kept)
      word = number > floor and number % 1 == 0 and met -- rule: alone_meets
      if word == 'replaced' then
        redis.call('ZADD', store, at, alone) -- rule: alone_keeps_the_first
        kept = at -- rule: alone_tells_the_former_score
      end
      answer = { 'mixed', { word }, { kept } }
    end
    if word then
      if envelope then redis.call('HSET', body, alone, ARGV[envelope]) end -- rule: alone_without_a_body
      if note then redis.call('HSET', control, note, noted) end -- rule: alone_notes_nothing
      if not known[1] then redis.pcall('HSET', control, 'slots', slots) end -- rule: alone_notes_no_slots
      if word ~= 'merged' then wake(due) end -- rule: alone_wakes_nobody
      redis.pcall('HINCRBY', stats, word, '1') -- rule: alone_counts_nothing
      return answer
    end
  end
end

-- section: fifo_places
-- Places in the line of a fifo topic: milliseconds, and a sequence in steps of 1/1024, so that no two are equal.
--
-- Whether a message waits for a failed one before it is decided by _strict_order. Here messages that are due at once have the
-- lower half of a millisecond, those with a delay the upper one. A full half continues in the next millisecond.
--
-- needs: store retry prepare claim control last_place now_ms text_of

local STEP = 1 / 1024
last_place = tonumber(last_place) or 0
-- In an empty slot no message can be overtaken, so after a clock was set back a place may be given again.
local is_empty = last_place >= now_ms and redis.call('EXISTS', store, retry, prepare, claim) == 0
if is_empty then last_place = 0 end -- rule: fifo_waits_for_the_clock

local function next_place()
  last_place = math.max(now_ms, last_place + STEP) -- rule: fifo_follows_the_clock_back
  if last_place % 1 >= 0.5 then last_place = math.floor(last_place) + 1 end
  return last_place
end
-- Returns the place behind everything that is due in the same millisecond. `behind`: the last place that this call gave out.
local function later_place(due, behind)
  due = math.max(due, math.floor(last_place))
  for at = due, due + 10000 do
    local later = redis.call('ZCOUNT', store, text_of(at + 1), '+inf')
    local found = redis.call('ZREVRANGE', store, later, later, 'WITHSCORES')
    local top = math.max(tonumber(found[2]) or 0, behind)
    if top < at + 0.5 then return at + 0.5 end
    if top + STEP < at + 1 then return top + STEP end -- rule: fifo_gives_a_place_twice
  end
  return due + 10001
end
local function keep_place()
  redis.call('HSET', control, 'last_place', text_of(last_place))
end
