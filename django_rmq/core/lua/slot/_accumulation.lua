-- Topics with ACCUMULATE keep the bodies of merged sends in one envelope, which begins with an additional 0. Behind its head are
-- the number of bodies in nine digits, a space, and for each body its length, a colon and the body. What becomes of a send to a
-- message that is full is decided in _duplicates. In Python core/model/envelope.py reads this form, and what a listener sees of it
-- is in core/model/delivered_message.py.

-- section: bodies
-- Read and join the bodies of such an envelope.
--
-- needs: body

local function collects(envelope)
  return envelope and string.find(envelope, '^0%d+ ') ~= nil
end
-- Returns two values:
--   where the head of an envelope ends,
--   the number of its bodies.
local function opened(envelope)
  local at = string.find(envelope, '\n', 1, true)
  return at, at and tonumber(string.sub(envelope, at + 1, at + 9)) or 0
end
-- Returns the bodies of two copies, those of the older copy first, with the head of the newer one.
local function joined(older, newer)
  local behind, had = opened(older)
  local at, more = opened(newer)
  if not (behind and at) then return newer end
  -- Behind the line feed at `at` the number takes 9 digits and a space, so the bodies begin at `at` + 11.
  return string.sub(newer, 1, at) .. string.format('%09d ', had + more) .. string.sub(older, behind + 11)
    .. string.sub(newer, at + 11)
end
-- Put the bodies of an older copy before those of the copy that waits.
local function join(member, older)
  local newer = collects(older) and redis.call('HGET', body, member)
  if collects(newer) then redis.call('HSET', body, member, joined(older, newer)) end -- rule: collected_bodies_dropped
end
-- Read the body of a death record: `die` in _deaths writes it, behind a head of one line and the error, and Death.parse in
-- core/model/replies.py reads it. The head ends with the length of the error, and 1 if there is a body.
-- Returns nil for a death without a body, otherwise two values:
--   the body,
--   where it begins in the record.
local function exhumed(record)
  local head = string.match(record or '', '^([^\n]*)\n')
  local length, has_body = string.match(head or '', ' (%d+) ([01])$')
  if has_body ~= '1' then return nil end
  local at = #head + 2 + tonumber(length)
  return string.sub(record, at), at
end
-- Put the bodies of an older copy before those of the death `record`. Returns the record.
local function joined_death(record, older)
  local newer, at = exhumed(record)
  if not (collects(older) and collects(newer)) then return record end
  return string.sub(record, 1, at - 1) .. joined(older, newer)
end

-- section: collect
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
