-- Limits over all processes, of two kinds: what the workers of a topic deliver (`allow`: MAX_RATE and MAX_IN_FLIGHT), and what
-- an actor sends (`spend`: SEND_RATE and SEND_BYTES of the setting API, charged by operations/sends). The MAX_RATE of a slot is
-- fetch.slot_rate.
--
-- KEY limits  HASH  `empty`, which says how full the bucket is; worker -> its permits
-- KEY bucket  HASH  `empty`

-- script: allow
-- Share what a topic may do among the workers that want it: deliveries per second, and messages in flight.
--
-- KEYS limits
--
-- ARGV[1] worker
-- ARGV[2] rate NUMBER       deliveries per second; 0: no limit
-- ARGV[3] tokens NUMBER     deliveries wanted now; negative: give them back
-- ARGV[4] in_flight NUMBER  messages in flight; 0: no limit
-- ARGV[5] in_use NUMBER     of these, how many this worker has
-- ARGV[6] wanted NUMBER     how many it could have
-- ARGV[7] lease_ms NUMBER   how long its permits are kept without another call
-- ARGV[8] now
--
-- Returns {tokens given, us until there is another, permits: begin nothing while as many are in use, yes | no: others wait}

-- check: types
-- include: _basics.now
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that workers can drain it.
redis.call('HDEL', limits, '')
local longest_ms = lease_ms

local given, wait_us = tokens, 0
if rate > 0 then
  -- A bucket of a tenth of a second, and of one delivery at least, as in slot/fetch.slot_rate. 'empty' is when it was last empty.
  local each = 1000000 / rate
  local depth = math.max(each, 100000)
  local empty = tonumber(redis.call('HGET', limits, 'empty') or '')
  -- A time that is ahead by more than the bucket's depth was written before the clock was set back.
  if not empty or empty > now_us + depth then empty = now_us - depth end
  empty = math.max(empty, now_us - depth)
  given = math.min(tokens, math.max(0, math.floor((now_us - empty) / each + 0.000001)))
  empty = empty + given * each
  if given < tokens then wait_us = math.max(1, math.ceil(empty + each - now_us)) end
  redis.call('HSET', limits, 'empty', string.format('%.17g', empty))
  longest_ms = math.max(longest_ms, depth / 1000)
end

local permits, waiting = wanted, 'no'
if in_flight > 0 then
  local ours, others, left, crew = string.format('worker:%s', worker), 0, in_flight, {}
  local rows = redis.call('HGETALL', limits)
  for i = 1, #rows, 2 do
    local held, wants, ends = string.match(rows[i + 1], '^(%d+) (%d+) (%d+)$')
    if held and rows[i] ~= ours then
      -- A worker that died cannot give its permits back, so they end with their lease.
      if tonumber(ends) <= now_ms then
        redis.call('HDEL', limits, rows[i])
      else
        others = others + held
        if tonumber(wants) > tonumber(held) then waiting = 'yes' end
        if tonumber(wants) > 0 then crew[#crew + 1] = { rows[i], tonumber(wants) } end
      end
    end
  end
  if wanted > 0 then crew[#crew + 1] = { ours, wanted } end
  -- A worker that wants less than an even share gets all it wants. The others, `equals` of them, share the rest evenly: `share`
  -- each, and one more for `over` of them. `rank` is the place of this worker among the equals, in the order of their names.
  table.sort(crew, function(a, b)
    if a[2] ~= b[2] then return a[2] < b[2] end
    return a[1] < b[1]
  end)
  local share, over, rank, equals = 0, 0, 0, 0
  for i = 1, #crew do
    share = math.floor(left / (#crew - i + 1))
    if crew[i][2] > share then
      equals, over = #crew - i + 1, left - share * (#crew - i + 1)
      for j = i, #crew do
        if crew[j][1] < ours then rank = rank + 1 end
      end
      break
    end
    left = left - crew[i][2]
  end
  local fair = wanted
  if equals > 0 and wanted > share then
    fair = share
    -- Which of the equals get one more changes every two seconds. `turn` is a number from 0 to 255 that looks random: the count
    -- of these two seconds times 65,536 / 1.618 (a multiplicative hash), of whose last 16 bits the upper 8 are taken. If the
    -- turns were in order, they could fall into step with messages that take equally long.
    local turn = math.floor(math.floor(now_s / 2) * 40503 % 65536 / 256)
    if (rank + turn) % equals < over then fair = share + 1 end
  end
  permits = math.min(fair, math.max(0, in_flight - others))
  -- Permits in use are not withdrawn: they count until the worker calls again without them.
  local held = math.max(in_use, permits)
  if held + wanted > 0 then
    redis.call('HSET', limits, ours, string.format('%.0f %.0f %.0f', held, wanted, now_ms + lease_ms))
  else
    redis.call('HDEL', limits, ours)
  end
end
redis.pcall('PEXPIRE', limits, string.format('%.0f', math.min(longest_ms + 60000, 1e12)))
return { given, wait_us, permits, waiting }

-- script: end_permits
-- Count fewer messages in flight for a holder of permits, or restart its lease.
--
-- KEYS limits
--
-- ARGV[1] worker
-- ARGV[2] ended NUMBER     how many of its messages are no longer in flight
-- ARGV[3] lease_ms NUMBER  how long the others are kept from now on; 0: as long as before
-- ARGV[4] now
--
-- Returns how many it has left

-- check: types
-- include: _basics.now
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', limits, '')
local name = string.format('worker:%s', worker)
local held, wants, ends = string.match(redis.call('HGET', limits, name) or '', '^(%d+) (%d+) (%d+)$')
local left = math.max(0, (tonumber(held) or 0) - ended) -- rule: permits_never_end
if left > 0 then
  local until_ms = lease_ms > 0 and now_ms + lease_ms or tonumber(ends) -- rule: permits_are_not_renewed
  redis.call('HSET', limits, name, string.format('%.0f %.0f %.0f', left, tonumber(wants), until_ms))
  if lease_ms > 0 then redis.pcall('PEXPIRE', limits, string.format('%.0f', math.min(lease_ms + 60000, 1e12))) end
elseif held then
  redis.call('HDEL', limits, name)
end
return left

-- script: spend
-- Spend from a bucket that fills steadily: the whole amount, or nothing.
--
-- KEYS bucket
--
-- ARGV[1] each NUMBER    us until one more has gathered
-- ARGV[2] size NUMBER    how many it holds when it is full
-- ARGV[3] wanted NUMBER  below 0: give them back
-- ARGV[4] now
--
-- Returns us until there is enough; 0: it is spent

-- check: types
-- include: _basics.now
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
