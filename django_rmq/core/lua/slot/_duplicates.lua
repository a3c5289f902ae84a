-- Duplicates: a send whose message is there already. Which of the two scores counts then, and what becomes of the send.
--
-- Whether the first score, the last one or a prolonged one counts is the choice of `merge`, `replace`, `fifo` and `ensure`. Each
-- says two things: `met`, the word of a send that meets a fresh copy; and `overwrite`, the score of that copy afterwards. False:
-- the present one. True: the new one. A function computes it from the present one. `place` carries this out.
--
-- The same choices in a shorter form: `single` in send (a lone message), insert (a bulk insertion), and outbox/merged_rows (the
-- rows of one message). Where a delivery comes back to a copy that waits, `keeps_first` decides; where a copy moves to another
-- slot, move_in in reslot. How bodies are joined is in _accumulation. Which sends are one message is decided in
-- core/producer/identity.

-- section: merge
-- range_merge: the first score counts, so a copy keeps its time. With DEBOUNCE and MAX_WAIT each send prolongs the wait.
--
-- needs: max_wait range_ms prolonged

local met, overwrite, prolongations = 'merged', false, {} -- rule: merge_takes_the_later_time
if max_wait > 0 then
  overwrite = function(score) -- rule: keeps_the_first_wait
    local due_again = prolongations[score] or prolonged(range_ms, tonumber(score))
    prolongations[score] = due_again
    return due_again
  end
end

-- section: replace
-- priority, fixed_time, and ticks of schedules: the last score counts.

local met, overwrite = 'replaced', true -- rule: replace_keeps_the_first

-- section: fifo
-- fifo: a copy that waits or rests keeps its place, and with ON_DUPLICATE "replace" gets the new body.
--
-- needs: ensure on_duplicate

local met, overwrite = (ensure or on_duplicate == 'keep') and 'present' or 'replaced', false -- rule: fifo_keeps_the_body

-- section: ensure
-- `ensure` on the other topics: a copy stays as it is.

local met, overwrite = 'present', false -- rule: ensure_replaces

-- section: keeps_first
-- Returns whether the earlier one of two copies of a message keeps its time, or its place, where a delivery comes back to a copy
-- that waits.
--
-- needs: topic_type is_retry

local function keeps_first(score)
  return topic_type == 'fifo' or (topic_type == 'range_merge' and not is_retry(score))
end

-- section: place
-- Put `members` into Store by `rows`, which has score and member of each. If a fresh copy waits, the answer is `met`; one that
-- waits or rests as a retry is superseded, unless `met` is 'present'.
-- The first branch that fits decides the word of a member: refused in this call before, present, met, superseded, refused
-- because the slot is full, stored.
-- `collect` (see _accumulation.collect) gives the envelope to keep; a message that it finds full is due at once.
-- A member can wait and rest at once, if a ZADD of another program met a resting retry, which is dropped then.
-- `taken[i]`: the member counts as present. ZADD (or HSET) comes first, so that a full server refuses a send.
-- Returns {'stored'} if every member is new, else {'mixed', a word for each member, the score of each or ''}.
--
-- needs: met overwrite unusual sizes store retry body control backlog slots known_slots topic_type sleeping_until
-- needs: count keep_counts is_retry wake now_ms text_of

local function place(members, rows, envelope, taken, collect)
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
