-- Places in the line of a fifo topic: milliseconds, and a sequence in steps of 1/1024, so that no two are equal.
--
-- Whether a message waits for a failed one before it is decided by _one_at_a_time. Here messages that are due at once have the
-- lower half of a millisecond, those with a delay the upper one. A full half continues in the next millisecond.
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
