-- The limits that a message brings along. They are the first entry of the meta in its envelope: {"!":"retries timeout"}.
--
-- needs: max_retries

-- Returns two values:
--   how often the message may be tried again, at most as often as its topic allows,
--   its own time-out in seconds, or nil.
local function own_limits(envelope)
  local retries, seconds = string.match(envelope or '', '^%d+ {"!":"(%d*) (%d*)"')
  return math.min(tonumber(retries) or max_retries, max_retries), tonumber(seconds) -- rule: own_retries_above_the_topic
end
