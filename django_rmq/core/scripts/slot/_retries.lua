-- How a score carries the budget: a retry with the number q has q deliveries left.
--
-- needs: kind max_retries bounded

local function floor_priority()
  return math.max(16, max_retries) -- rule: priority_floor
end
local function is_retry(score)
  if kind ~= 'priority' then return score <= 999 end
  return score <= floor_priority() or (score < math.huge and score % 1 ~= 0)
end
local function is_fresh(score)
  if not score or is_retry(score) or score % 1 ~= 0 then return false end
  return score <= (kind == 'priority' and 8796093022208 or 1e14)
end
local function budget(score)
  if not is_retry(score) then return max_retries end -- rule: budget_ignores_settings
  local q = score
  if kind == 'priority' and score > floor_priority() then q = math.floor(score % 1 * 1024 + 0.5) end
  return bounded(math.floor(q) - 1, 0, max_retries) -- rule: one_delivery_more
end
