-- Scores: numbers without lost digits, what a score says of its message, and the scores of debounced and fifo sends.
--
-- The score of any other send comes with its call (score_of in placement.py), or is now_ms + range_ms (send_merge, ensure).
--
-- Store, on topics of time: the due ms. With DEBOUNCE and MAX_WAIT, a fraction in 1/1024 that says the deadline (debounce).
-- Store, on priority topics: the priority, a whole number above the floor, which is 16 or MAX_RETRIES.
-- Store, on fifo topics: the place: ms, and a sequence in 1/1024. What is due at once has the lower half of a ms (fifo_line).
-- Store, a retry with q deliveries left: q, which is at most 999, or on priority topics at most the floor; with
--   RETRY_PRIORITY original the priority + q/1024. On fifo topics a retry has its old place (_retries.retry_score).
-- Retry: the ms at which the back-off is over + q/1024.
-- Prepare: the second of the delivery or its last extension * 1000 + the retries left.

-- section: numbers
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

-- section: kinds
-- Read what a score says of its message. A retry with the number q has q deliveries left.
--
-- needs: topic_type max_retries LARGEST_WITH_RETRIES

local function floor_priority()
  return math.max(16, max_retries) -- rule: priority_floor
end
local function is_retry(score)
  if topic_type == 'fifo' then return false end -- its score is its place in the line, also after failures
  if topic_type ~= 'priority' then return score <= 999 end
  return score <= floor_priority() or (score < math.huge and score % 1 ~= 0)
end
-- Returns whether the earlier one of two copies of a message keeps its time, or its place.
local function keeps_first(score)
  return topic_type == 'fifo' or (topic_type == 'range_merge' and not is_retry(score))
end
local function is_fresh(score)
  if not score or is_retry(score) or score % 1 ~= 0 then return false end
  if topic_type == 'fifo' then return score >= 0 and score <= LARGEST_WITH_RETRIES end
  return score <= (topic_type == 'priority' and 8796093022208 or 1e14)
end

-- section: latest_due
-- Returns the largest score that is due, as a bound of a range. A place in a fifo line is due from its millisecond on.
--
-- needs: topic_type now_ms text_of

local function latest_due()
  return topic_type == 'fifo' and '(' .. text_of(now_ms + 1) or text_of(now_ms) -- rule: fifo_before_its_time
end

-- section: debounce
-- With each send a debounced message starts to wait again, until a deadline that is MAX_WAIT after its first send. The
-- deadline is a multiple of a unit. The fraction of the score, in 1/1024, says which: of the multiples from the due time on,
-- the first one with this remainder. So it needs no record of its own, and a copy that comes back keeps it.
--
-- needs: max_wait now_ms bounded text_of

local unit = math.max(1, math.ceil(max_wait / 1000))
local function last_units()
  return math.floor((now_ms + max_wait) / unit)
end
local function debounced(range_ms, units)
  local due = math.min(now_ms + range_ms, units * unit) -- rule: debounces_for_ever
  return text_of(due + units % 1024 / 1024)
end
-- Returns the score of a first send.
local function first_due(range_ms)
  return debounced(range_ms, last_units())
end
-- Returns the new score of a message that waits with `score` and is sent again.
local function prolonged(range_ms, score)
  local scored = bounded(score, 0, 8796093022207)
  local due = math.floor(scored)
  local first = math.ceil(due / unit)
  local units = first + (math.floor((scored - due) * 1024) - first) % 1024 -- rule: forgets_the_first_send
  return debounced(range_ms, math.min(units, last_units()))
end

-- section: fifo_line
-- Places in the line of a fifo topic: milliseconds, and a sequence in steps of 1/1024, so that no two are equal.
-- Messages that are due at once have the lower half of a millisecond, those with a delay the upper one. A full half
-- continues in the next millisecond.
--
-- needs: store retry prepare claim control last_place now_ms text_of

local STEP = 1 / 1024
last_place = tonumber(last_place) or 0
-- In an empty slot no message can be overtaken, so after a clock was set back a place may be given again.
local is_empty = last_place >= now_ms and redis.call('EXISTS', store, retry, prepare, claim) == 0
if is_empty then last_place = 0 end -- rule: fifo_waits_for_the_clock

local function next_place()
  last_place = math.max(now_ms, last_place + STEP) -- rule: fifo_follows_the_clock_back
  if last_place % 1 >= 0.5 then last_place = math.floor(last_place) + 1 end
  return last_place
end
-- Returns the place behind everything that is due in the same millisecond. `behind`: the last place that this call gave out.
local function later_place(due, behind)
  due = math.max(due, math.floor(last_place))
  for at = due, due + 10000 do
    local later = redis.call('ZCOUNT', store, text_of(at + 1), '+inf')
    local found = redis.call('ZREVRANGE', store, later, later, 'WITHSCORES')
    local top = math.max(tonumber(found[2]) or 0, behind)
    if top < at + 0.5 then return at + 0.5 end
    if top + STEP < at + 1 then return top + STEP end -- rule: fifo_gives_a_place_twice
  end
  return due + 10001
end
local function keep_place()
  redis.call('HSET', control, 'last_place', text_of(last_place))
end
