-- Sends to a topic with ACCUMULATE: the bodies of a message that waits or rests are kept, up to a number and a size.
--
-- needs: body accumulate max_body collects opened joined

local collected = {}
-- The envelope of `member` with the bodies that it has, and whether it is full. `waits`: a copy of it waits or rests. Nil:
-- there is no room for another body.
local function collect(member, envelope, waits)
  local had = collected[member] or (waits and redis.call('HGET', body, member)) or nil
  if had and collects(had) and collects(envelope) then envelope = joined(had, envelope) end -- rule: collects_the_last
  local _, number = opened(envelope)
  if had and (number > accumulate or #envelope > max_body) then return nil end -- rule: collects_without_end
  collected[member] = envelope
  return envelope, number >= accumulate
end
