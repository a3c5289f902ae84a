-- Scores as numbers within bounds, and as texts with all digits.

-- Ten bits of retries fit below this in a double; at 2^43 an odd q would be rounded up, and a message never die.
local LARGEST_WITH_RETRIES = 8796093022207 -- rule: budget_at_the_largest_priority
local function bounded(value, low, high)
  if value ~= value then return low end
  return math.max(low, math.min(high, value))
end
local function text_of(number)
  return string.format('%.17g', number) -- rule: lossy_text
end
-- Versions of the server format some scores differently. The scores of dead messages have one form, because people read them.
local function plain_score(score)
  if #score < 17 and not string.find(score, '%D') then return score end
  return text_of(tonumber(score))
end
