-- Duplicates: what becomes of a send whose message is there already.
--
-- `place` decides the word of a message that meets a copy: merged, superseded, present, refused or stored, as `single` in send
-- does for a lone one, and insert for those of a bulk insertion. Which of the two scores counts, and whether what comes later
-- merges or replaces, is decided by send_merge, send_replace, send_fifo and ensure in send. How bodies are joined is in
-- _accumulation. Which sends are one message is decided in core/producer/identity. What becomes of the rows of one message
-- in the outbox follows the same rules (outbox/merged_rows).

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
