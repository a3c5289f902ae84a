-- Waiting messages may expire: the time is in the envelope, and the message dies when it is found expired.
--
-- needs: now_ms

-- Returns two values:
--   whether the message has expired,
--   whether its envelope has limits of its own.
local function has_lapsed(envelope)
  local zero, space, _, _, bang = string.byte(envelope, 1, 5)
  if zero == 48 and space == 32 then return false, bang == 33 end
  local text, mark = string.match(envelope, '^(%d+) {?"?(!?)')
  local expires = tonumber(text)
  return expires and expires > 0 and expires < now_ms, mark == '!' -- rule: lapses_at_once
end
