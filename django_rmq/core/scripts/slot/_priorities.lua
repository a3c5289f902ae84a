-- What is noted when priorities are sent. Which scores are retries here is settled by the first that waits.
--
-- needs: control max_retries settled_retries text_of note_undrained

local function note_sent()
  -- rule: retries_unsettled
  if not settled_retries then redis.pcall('HSET', control, 'max_retries', text_of(max_retries)) end
  note_undrained() -- rule: send_notes_nothing
end
