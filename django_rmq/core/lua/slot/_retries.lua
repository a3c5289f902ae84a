-- Read the retries that a score carries: a retry with the number q has q deliveries left.
--
-- needs: kind max_retries LARGEST_WITH_RETRIES

local function floor_priority()
  return math.max(16, max_retries) -- rule: priority_floor
end
local function is_retry(score)
  if kind == 'fifo' then return false end -- its score is its place in the line, also after failures
  if kind ~= 'priority' then return score <= 999 end
  return score <= floor_priority() or (score < math.huge and score % 1 ~= 0)
end
-- Returns whether the earlier one of two copies of a message keeps its time, or its place.
local function keeps_first(score)
  return kind == 'fifo' or (kind == 'range_merge' and not is_retry(score))
end
local function is_fresh(score)
  if not score or is_retry(score) or score % 1 ~= 0 then return false end
  if kind == 'fifo' then return score >= 0 and score <= LARGEST_WITH_RETRIES end
  return score <= (kind == 'priority' and 8796093022208 or 1e14)
end
