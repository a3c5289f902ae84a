-- What a slot of priorities notes in control, because its scores do not show it.

-- section: note_undrained
-- Priorities have no time, so the slot stores since when its Store has not been empty. On time topics, the scores show it.
--
-- needs: store control topic_type undrained_since now_ms text_of

local function note_undrained()
  if topic_type ~= 'priority' then return end -- rule: times_are_noted_too
  local waits = redis.call('EXISTS', store) == 1
  if waits and not undrained_since then -- rule: noted_once
    redis.pcall('HSET', control, 'undrained_since', text_of(now_ms))
  elseif undrained_since and not waits then -- rule: never_drained
    redis.pcall('HDEL', control, 'undrained_since')
  end
end

-- section: note_sent
-- Note what sends of priorities require: the first waiting message decides which scores are retries in this slot.
--
-- needs: control max_retries settled_retries text_of note_undrained

local function note_sent()
  -- rule: retries_unsettled
  if not settled_retries then redis.pcall('HSET', control, 'max_retries', text_of(max_retries)) end
  note_undrained() -- rule: send_notes_nothing
end
