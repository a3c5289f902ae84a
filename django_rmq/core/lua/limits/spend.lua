-- Spend from a bucket that fills steadily: the whole amount, or nothing.
--
-- KEYS[1] bucket  HASH  field -> value
--
-- ARGV[1] each NUMBER    us until one more has gathered
-- ARGV[2] size NUMBER    how many it holds when it is full
-- ARGV[3] wanted NUMBER  below 0: give them back
-- ARGV[4] now
--
-- Returns us until there is enough; 0: it is spent

-- check: types
-- include: _now
-- `empty` is the time at which the bucket was last empty, as if it had filled from then on without an end.
local full_us = each * size
local empty = tonumber(redis.call('HGET', bucket, 'empty') or '')
-- A time that is ahead by more than the bucket's size was written before the clock was set back.
if not empty or empty > now_us + full_us then empty = now_us - full_us end -- rule: locked_out_by_a_clock
empty = math.max(empty, now_us - full_us) + each * wanted -- rule: a_bucket_without_a_bound
if empty > now_us then return math.ceil(empty - now_us) end -- rule: spent_beyond_the_rate
redis.call('HSET', bucket, 'empty', string.format('%.17g', empty))
redis.pcall('PEXPIRE', bucket, string.format('%.0f', math.min(full_us / 1000 + 1000, 1e12)))
return 0
