-- The slot's own MAX_RATE: a bucket of a tenth of a second, and of one delivery at least.
--
-- needs: control slot_each_us spent_us now_us

-- Returns when the bucket was last empty, as if it had filled from then on without an end. A time that is ahead of now by more
-- than the bucket holds was written before the clock was set back.
local function emptied_at()
  local depth = math.max(slot_each_us, 100000)
  local empty = tonumber(spent_us or '') or 0
  if empty > now_us + depth then empty = 0 end -- rule: paced_out_by_a_clock
  return math.max(empty, now_us - depth)
end

-- Returns two values:
--   how many messages may be delivered now,
--   the ms at which there is one more.
local function pace()
  local empty = emptied_at()
  return math.floor((now_us - empty) / slot_each_us), math.ceil((empty + slot_each_us) / 1000)
end

-- Spend `n` deliveries. Returns the ms at which there is another one, or nil if there is one now.
local function spend(n)
  spent_us = string.format('%.0f', emptied_at() + n * slot_each_us) -- rule: pace_without_spending
  redis.call('HSET', control, 'spent_us', spent_us)
  local left, at = pace()
  return left < 1 and at or nil
end
