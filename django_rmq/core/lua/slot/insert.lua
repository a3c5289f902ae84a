-- Insertion: many messages of one slot in a transaction, past a look at each.
--
-- What meets a waiting copy is merged into it or replaces its score, as _duplicates.merge and _duplicates.replace decide. The
-- ZADD of core/commands/insert does it, with NX or without. `begin` declines where a retry waits or rests, so that no other case
-- of _duplicates.place can occur.

-- script: insert
-- Send many unkeyed messages of one slot in a transaction, without a look at each.
--
-- The transaction has three commands: this script with the step `begin`, a ZADD of all messages and of an empty member to
-- `inserting`, and this script with the step `end`. In between Store has the name `inserting`. Where each message has to be
-- looked at, `begin` declines: a hash in `inserting` refuses the ZADD. A ZADD without `begin` fills an `inserting` of its own,
-- which `end` deletes. The empty member is the sentinel: without it the ZADD has failed.
-- Both steps are one script with the same keys, so that a server lacks or denies both of them or none.
--
-- KEYS store retry failures stats control inserting
--
-- ARGV[1] channel
-- ARGV[2] slots            the caller's slot count
-- ARGV[3] backlog NUMBER   how many may wait here; 0: any number
-- ARGV[4] topic_type             range_merge, priority or fixed_time
-- ARGV[5] max_retries      the topic's, until the slot has its own
-- ARGV[6] max_wait NUMBER  0: the first send decides the time
-- ARGV[7] step             begin or end
-- ARGV[8] n NUMBER         how many messages; 0: an earlier transaction is ended, and those that are new count
-- ARGV[9] range_ms NUMBER  range_merge: how long they wait
-- ARGV[10] lowest NUMBER   of the scores; all range_merge messages have the same
-- ARGV[11] highest NUMBER
-- ARGV[12] now
--
-- Returns {'begun'} | {'declined'} | {'inserted', how many of them are new}

local known = redis.pcall('HMGET', control, 'slots', 'sleeping_until', 'max_retries', 'undrained_since',
  'inserting')
local known_slots, sleeping_until, undrained_since, noted = known[1], known[2], known[4], known[5]
local max_retries, settled_retries = tonumber(known[3] or max_retries), known[3] or topic_type ~= 'priority'
-- include: _basics.now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _basics.ledger
-- include: _sleep.wake
-- include: _scores.note_undrained
-- include: _scores.note_sent

-- include: insert.end_insertion
if step == 'end' then
  local added = restored()
  if not added then
    keep_counts()
    return { 'declined' }
  end
  count('stored', added)
  count(topic_type == 'range_merge' and 'merged' or 'replaced', math.max(n, added) - added)
  if not known_slots then redis.pcall('HSET', control, 'slots', slots) end -- rule: insert_notes_no_slots
  -- rule: insert_wakes_nobody
  if added > 0 or topic_type ~= 'range_merge' then wake(topic_type == 'priority' and 0 or lowest) end
  keep_counts()
  note_sent() -- rule: insert_notes_nothing
  return { 'inserted', added }
end

-- The last step of an earlier transaction has failed, so Store may still have its other name.
if noted or redis.call('EXISTS', inserting) == 1 then
  end_insertion() -- rule: leaves_what_was_left
  keep_counts()
end
-- include: _basics.mistyped
local function is_plain()
  if known.err then return false end
  if mistyped('zset', store) or mistyped('zset', retry) then return false end -- rule: insert_of_foreign_types
  if mistyped('hash', failures) or mistyped('hash', stats) then return false end -- rule: insert_of_foreign_types
  if known_slots and known_slots ~= slots then return false end -- rule: inserts_into_a_moved_slot
  if not (n >= 1 and n <= 1000 and lowest <= highest) then return false end
  if not (is_fresh(lowest) and is_fresh(highest)) then return false end -- rule: inserts_any_score
  local floor = 999
  if topic_type == 'priority' then
    floor = floor_priority()
    if redis.call('HLEN', failures) > 0 then return false end -- rule: insert_ignores_retries_of_priorities
  elseif topic_type == 'range_merge' then
    local late = now_ms + range_ms - lowest
    if max_wait > 0 or lowest < highest then return false end -- rule: inserts_debounced
    if late < -1000 or late > 1000 then return false end -- rule: inserts_at_any_time
  elseif topic_type ~= 'fixed_time' then
    return false
  end
  if redis.call('ZCOUNT', store, '-inf', floor) > 0 then return false end -- rule: insert_ignores_retries_that_wait
  if redis.call('EXISTS', retry) == 1 then return false end -- rule: insert_ignores_what_rests
  if backlog > 0 and redis.call('ZCARD', store) + n > backlog then return false end -- rule: inserts_beyond_the_backlog
  return not redis.call('ZSCORE', store, '') -- rule: takes_an_empty_message_for_the_sentinel
end
local plain = is_plain()
if plain then
  local waiting = redis.call('ZCARD', store)
  -- The note comes first: a full server refuses it, and Store would keep its other name without a note.
  redis.call('HSET', control, 'inserting', waiting) -- rule: renames_before_it_is_noted
  if waiting > 0 and redis.pcall('RENAME', store, inserting).err then
    redis.call('HDEL', control, 'inserting') -- rule: notes_what_was_not_renamed
    plain = false
  end
end
if plain then return { 'begun' } end
-- Redis runs the ZADD of the transaction whatever this script answers; on a hash it fails, and changes nothing.
redis.call('HSET', inserting, 'declined', 1)
return { 'declined' }

-- section: end_insertion
-- End an insertion: a transaction of a bulk send that fills Store past Lua, while Store has the name `inserting` (see insert).
-- Store gets its name back. The last step of the insertion does it; if that has failed, the next prepare, claim, insertion or
-- re-slotting of the slot does.
--
-- needs: store inserting control noted count

-- Returns how many messages are new, or nil if the ZADD or `begin` has failed.
local function restored()
  -- `begin` has declined and left a hash here, or it has failed, and the ZADD behind it has filled a key of its own.
  if not noted then
    redis.call('UNLINK', inserting) -- rule: keeps_what_nobody_began
    return nil
  end
  local has_receipt = redis.call('ZREM', inserting, '') == 1
  local held = redis.call('ZCARD', inserting)
  if held > 0 and redis.call('EXISTS', store) == 0 then
    redis.call('RENAME', inserting, store)
  else
    -- An earlier `end` has failed, and others have sent since then. Their copies are the later ones.
    for _ = 1, held, 1000 do
      local flat = {}
      local rows = redis.call('ZRANGE', inserting, 0, 999, 'WITHSCORES')
      for i = 1, #rows, 2 do
        flat[i], flat[i + 1] = rows[i + 1], rows[i]
      end
      local came = redis.call('ZADD', store, 'NX', unpack(flat)) -- rule: overwrites_what_came_meanwhile
      count('dropped', #rows / 2 - came) -- rule: counts_what_came_meanwhile_twice
      redis.call('ZREMRANGEBYRANK', inserting, 0, 999)
    end
  end
  redis.call('HDEL', control, 'inserting')
  return has_receipt and held - (tonumber(noted) or held) or nil -- rule: books_what_failed
end

-- Count the new messages of an insertion whose last step has failed.
local function end_insertion()
  count('stored', restored() or 0)
end
