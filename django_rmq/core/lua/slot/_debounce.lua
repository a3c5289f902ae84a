-- DEBOUNCE and MAX_WAIT: how far a further send puts off a message that waits. _duplicates.merge decides that it puts it off;
-- outbox/merged_rows does the same for rows of the outbox.

-- section: debounce
-- Debounce: with each send a message starts to wait again, until a deadline that is MAX_WAIT after its first send.
--
-- The deadline is a multiple of a unit. The fraction of the score, in 1/1024, says which: of the multiples from the due time on,
-- the first one with this remainder. So it needs no record of its own, and a copy that comes back keeps it. MAX_WAIT has at most
-- 1,000 units. So the deadline is among the first 1,001 of these multiples, and no two of them have the same of 1,024 remainders.
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
