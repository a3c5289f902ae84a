-- Sends to a topic with ACCUMULATE: the bodies of a message that waits or rests are kept, up to a number and a size.
--
-- needs: body accumulate max_body collects opened joined

-- An envelope as one that collects; a sender with other settings has written it otherwise.
local function as_collecting(envelope)
  local at = not collects(envelope) and string.match(envelope, '^%d+ [^\n]*()\n')
  if not at then return envelope end
  return '0' .. string.sub(envelope, 1, at) .. string.format('%09d %d:', 1, #envelope - at) .. string.sub(envelope, at + 1)
end
local collected = {}
-- The envelope of `member` with the bodies that it has, and whether it is full. `waits`: a copy of it waits or rests. Nil:
-- there is no room for another body.
local function collect(member, envelope, waits)
  local had = collected[member] or (waits and redis.call('HGET', body, member)) or nil
  envelope = as_collecting(envelope)
  if had then envelope = joined(as_collecting(had), envelope) end -- rule: collects_the_last
  local _, number = opened(envelope)
  if had and (number > accumulate or #envelope > max_body) then return nil end -- rule: collects_without_end
  collected[member] = envelope
  return envelope, number >= accumulate
end
