-- Returns the largest score that is due, as a bound of a range. A place in a fifo line is due from its millisecond on.
--
-- needs: kind now_ms text_of

local function latest_due()
  return kind == 'fifo' and '(' .. text_of(now_ms + 1) or text_of(now_ms) -- rule: fifo_before_its_time
end
