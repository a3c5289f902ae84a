-- Sends to a topic with ACCUMULATE keep the bodies of a message that waits or rests, up to a number and a size.
--
-- needs: body accumulate max_body collects opened joined

-- Return an envelope in the form that collects bodies. A sender with other settings has written it without ACCUMULATE.
local function as_collecting(envelope)
  local at = not collects(envelope) and string.match(envelope, '^%d+ [^\n]*()\n')
  if not at then return envelope end
  return '0' .. string.sub(envelope, 1, at) .. string.format('%09d %d:', 1, #envelope - at) .. string.sub(envelope, at + 1)
end
local collected = {}
-- `waits`: a copy of `member` waits or rests. Returns two values:
--   its envelope with all bodies collected so far, or nil if there is no room for another body,
--   whether it is full.
local function collect(member, envelope, waits)
  local had = collected[member] or (waits and redis.call('HGET', body, member)) or nil
  envelope = as_collecting(envelope)
  if had then envelope = joined(as_collecting(had), envelope) end -- rule: collects_the_last
  local _, number = opened(envelope)
  if had and (number > accumulate or #envelope > max_body) then return nil end -- rule: collects_without_end
  collected[member] = envelope
  return envelope, number >= accumulate
end
