-- How a send writes messages, in three ways: `push` puts a lone one into flight at once, `single` is the fast way of one message
-- into Store, and `place` the way of many, each beside the copy that it meets.
--
-- `single` and `place` decide the word of a message that meets a copy: merged, superseded, present, refused or stored. Which of
-- the two scores counts, and whether what comes later merges or replaces, is decided by send_merge, send_replace and send_fifo.

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
    and type(redis.pcall('HINCRBY', stats, 'prepared', '1')) == 'number' then -- rule: pushes_before_the_ledger_is_known
    -- The next receipt, as `prepare` computes it.
    local ahead = math.max(0, since - 1)
    local receipt, retries = last_receipt + 1 + ahead + ahead % 2, offer[5]
    -- Each number is written in two parts, which fit into 32 bits: '%.0f' would take as long as another command.
    local score = type(at) == 'number' and string.format('%d%03d', math.floor(at / 1000), at % 1000) or at
    local ticket = string.format('%d%06d ', math.floor(receipt / 1000000), receipt % 1000000)
    redis.call('HSET', inflight, alone, ticket .. score)
    local notice = ticket .. score .. ' ' .. retries .. ' ' .. store .. '\n' .. alone
    local receivers = redis.pcall('PUBLISH', inbox, notice)
    if type(receivers) == 'number' and receivers > 0 then -- rule: pushes_to_nobody
      redis.call('ZADD', prepare, now_s * 1000 + retries, alone)
      redis.call('HSET', control, 'deliveries', receipt, unpack(note and { note, noted } or {}))
      redis.pcall('HINCRBY', stats, 'sent', '1')
      redis.pcall('HINCRBY', stats, 'stored', '1')
      return at
    end
    redis.call('UNLINK', inflight)
    redis.call('HDEL', control, 'inbox')
    redis.pcall('HINCRBY', stats, 'prepared', '-1') -- rule: counts_what_nobody_received
  end
end

-- section: single
-- The fast path for one message without a resting retry, with few reads. A read finds a key of the wrong type by
-- itself and changes nothing, and so does ZADD NX if a copy waits. In every other case the slow path runs from its start.
-- `met`: the answer for a send that meets a copy with a score above `floor`, the largest score of a retry. `note`: a field of
-- control that the send sets to `noted`.
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
      redis.pcall('HINCRBY', stats, 'sent', '1')
      redis.pcall('HINCRBY', stats, word, '1') -- rule: alone_counts_half
      return answer
    end
  end
end

-- section: place
-- Put `members` into Store by `rows`, which has score and member of each. If a fresh copy waits, the answer is `met`; one that
-- waits or rests as a retry is superseded, unless `met` is 'present'. `overwrite` says what score a fresh copy has then: false,
-- the present one; true, the new one; or a function, which computes it from the present one.
-- The first branch that fits decides the word of a member: refused in this call before, present, met, superseded, refused
-- because the slot is full, stored.
-- `collect` (see _accumulation.collect) gives the envelope to keep; a message that it finds full is due at once.
-- A member can wait and rest at once, if a ZADD of another program met a resting retry, which is dropped then.
-- `taken[i]`: the member counts as present. ZADD (or HSET) comes first, so that a full server refuses a send.
-- Returns {'stored'} if every member is new, else {'mixed', a word for each member, the score of each or ''}.
--
-- needs: unusual sizes store retry body control backlog slots known_slots topic_type sleeping_until
-- needs: count keep_counts is_retry wake now_ms text_of

local function place(members, rows, envelope, met, overwrite, taken, collect)
  local n = #members -- rule: refusal_after_a_write
  local waiting, resting = sizes[store], unusual and redis.call('ZCARD', retry) or 0
  local found = waiting > 0 and redis.call('ZMSCORE', store, unpack(members)) or {}
  local rested = resting > 0 and redis.call('ZMSCORE', retry, unpack(members)) or {}
  local room = backlog > 0 and backlog - waiting - resting or math.huge -- rule: backlog_unlimited
  local clean, flat, words, kept, grown = room >= n, rows, nil, nil, {}
  for i = 1, n do
    if found[i] or rested[i] or taken[i] then
      clean = false
      break
    end
  end
  -- ZADD counts the added members: fewer than n means that this call names a member twice.
  if clean and redis.call('ZADD', store, unpack(flat)) == n then
    count('sent', n)
    count('stored', n)
  else
    clean, flat, words, kept = false, {}, {}, {}
    local earlier, leave = {}, {}
    for i = 1, n do
      local member, word, set = members[i], 'stored', true
      local existing = earlier[member] or found[i] or nil
      local resting = rested[i] and not earlier[member]
      local retried = existing and not earlier[member] and is_retry(tonumber(existing)) -- rule: merge_keeps_the_retry
      if earlier[member] == 'refused' then
        word, set, existing = 'refused', false, nil
      elseif taken[i] or (met == 'present' and (existing or resting)) then
        word, set = 'present', false
      elseif existing and not retried then
        word, set = met, overwrite
        if set and set ~= true then rows[i * 2 - 1] = set(existing) end
      elseif resting and topic_type == 'fifo' then
        word, set = met, false -- rule: fifo_moves_what_rests
      elseif retried or resting then
        word = 'superseded'
      elseif room < 1 then
        word, set = 'refused', false
      else
        room = room - 1
      end
      if collect and (word == met or word == 'superseded' or word == 'stored') then
        local fits, full = collect(member, ARGV[envelope + i - 1], word ~= 'stored')
        if not fits then word, set = 'refused', false end -- rule: refused_and_counted
        local early = existing and not retried and tonumber(existing) > now_ms
        if (full or not fits) and (set or early) then rows[i * 2 - 1], set = text_of(now_ms), true end -- rule: full_but_not_due
        grown[member] = fits or grown[member]
      end
      if set then flat[#flat + 1], flat[#flat + 2] = rows[i * 2 - 1], member end
      words[i], kept[i] = word, word ~= 'refused' and (set and rows[i * 2 - 1] or existing) or ''
      earlier[member] = word == 'refused' and word or kept[i]
      count(word)
      if word ~= 'refused' and word ~= 'present' then count('sent') end
      if word == 'superseded' then
        count('stored')
        if retried then count('dropped') end
      end
      if resting and word ~= 'present' and word ~= 'refused' and (existing or topic_type ~= 'fifo') then
        count('dropped')
        leave[#leave + 1] = member
      end
    end
    if #flat > 0 then redis.call('ZADD', store, unpack(flat)) end
    if #leave > 0 then redis.call('ZREM', retry, unpack(leave)) end -- rule: resting_retry_stays
  end
  if envelope then
    local bodies, at = {}, 0
    for i = 1, n do
      if clean or (words[i] ~= 'refused' and words[i] ~= 'present') then
        bodies[at + 1], bodies[at + 2] = members[i], grown[members[i]] or ARGV[envelope + i - 1]
        at = at + 2
      end
    end
    if #bodies > 0 then redis.call('HSET', body, unpack(bodies)) end
  end
  local earliest = math.huge
  for i = 1, sleeping_until and #flat or 0, 2 do
    earliest = math.min(earliest, tonumber(flat[i]))
  end
  if not known_slots then redis.pcall('HSET', control, 'slots', slots) end
  if earliest < math.huge then wake(topic_type == 'priority' and 0 or earliest) end -- rule: send_wakes_nobody
  keep_counts()
  if clean then return { 'stored' } end
  return { 'mixed', words, kept }
end
