-- Note what sends of priorities require: the first waiting message decides which scores are retries in this slot.
--
-- needs: control max_retries settled_retries text_of note_undrained

local function note_sent()
  -- rule: retries_unsettled
  if not settled_retries then redis.pcall('HSET', control, 'max_retries', text_of(max_retries)) end
  note_undrained() -- rule: send_notes_nothing
end
