-- Scores: numbers without lost digits, and what a score says of its message. _choice decides which due message is taken next.
--
-- The score of a send comes with its call (score_of in core/producer/placement.py, which refuses what is out of bounds), or is
-- now_ms + range_ms (send_merge, ensure).
--
-- Store, on topics of time: the due ms. With DEBOUNCE and MAX_WAIT, a fraction in 1/1024 that says the deadline (_debounce).
-- Store, on priority topics: the priority, a whole number above the floor, which is 16 or MAX_RETRIES.
-- Store, on fifo topics: the place: ms, and a sequence in 1/1024. What is due at once has the lower half of a ms (`fifo_places`).
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
-- Read what a score says of its message. A retry with the number q has q deliveries left. In Python: core/model/scores.py, and
-- `Topic.min_priority`, which is one above the floor. Shorter forms of is_retry are in send (`single`, too), insert, ticks,
-- _choice.look, fetch.usual, inspect and history. That a time is at most 1e14 is also in send and ticks.
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
local function is_fresh(score)
  if not score or is_retry(score) or score % 1 ~= 0 then return false end
  if topic_type == 'fifo' then return score >= 0 and score <= LARGEST_WITH_RETRIES end
  return score <= (topic_type == 'priority' and 8796093022208 or 1e14)
end

-- section: latest_due
-- Returns the largest score that is due, as a bound of a range. A place in a fifo line is due from its millisecond on,
-- so the last one that is due has 1023/1024 as its fraction: _choice.look and fetch.usual have that number.
--
-- needs: topic_type now_ms text_of

local function latest_due()
  return topic_type == 'fifo' and '(' .. text_of(now_ms + 1) or text_of(now_ms) -- rule: fifo_before_its_time
end

-- section: note_undrained
-- Priorities have no time, so the slot stores since when its Store has not been empty. On time topics, the scores show it.
--
-- needs: store control topic_type undrained_since now_ms text_of

local function note_undrained()
  if topic_type ~= 'priority' then return end -- rule: times_are_noted_too
  local waits = redis.call('EXISTS', store) == 1
  if waits and not undrained_since then -- rule: noted_once
    redis.pcall('HSET', control, 'undrained_since', text_of(now_ms))
  elseif undrained_since and not waits then -- rule: never_drained
    redis.pcall('HDEL', control, 'undrained_since')
  end
end

-- section: note_sent
-- Note what sends of priorities require: the first waiting message decides which scores are retries in this slot.
--
-- needs: control max_retries settled_retries text_of note_undrained

local function note_sent()
  -- rule: retries_unsettled
  if not settled_retries then redis.pcall('HSET', control, 'max_retries', text_of(max_retries)) end
  note_undrained() -- rule: send_notes_nothing
end
