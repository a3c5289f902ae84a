-- How a score carries the budget: q deliveries are left to whoever waits as a retry of q.
-- Ten bits of retries fit below this in a double; at 2^43 an odd q would be rounded up, and a message never die.
local LARGEST_WITH_RETRIES = 8796093022207
local function bounded(value, low, high)
  if value ~= value then return low end
  return math.max(low, math.min(high, value))
end
local function floor_priority()
  return math.max(16, max_retries)
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
  if not is_retry(score) then return max_retries end
  local q = score
  if kind == 'priority' and score > floor_priority() then q = math.floor(score % 1 * 1024 + 0.5) end
  return bounded(math.floor(q) - 1, 0, max_retries)
end
local function retry_score(q, score)
  q = bounded(math.floor(q), 1, 999)
  if kind == 'priority' and retry_priority == 'original' and score > floor_priority() then
    return math.floor(math.min(score, LARGEST_WITH_RETRIES)) + q / 1024
  end
  return q
end
local function text_of(number)
  return string.format('%.17g', number)
end
-- Redis 7 writes some numbers otherwise than 6: what is kept has one form.
local function plain_score(score)
  if #score < 17 and not string.find(score, '%D') then return score end
  return text_of(tonumber(score))
end
