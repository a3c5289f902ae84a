-- Time-outs: the end of deliveries that nobody has ended or extended in time, as of workers that are gone.

-- section: time_outs
-- When a delivery times out: after the topic's time-out (30 s: `Topic.timeout` in core/model/topic.py), or its own if that is
-- shorter (_retries.shortened_by), counted from prepare or from the last extend. Then any prepare, claim or time_out of the slot
-- ends it here. The lease of a claim (claims.leases) ends in the same step. Stamps count whole seconds, so a delivery ends
-- (seconds + timeout + 1) * 1000. This is also computed in _sleep.lua, fetch.lua and inspect.lua, in
-- core/consumer/fetch_round_trips.py, in spark/reader.py, and for deliveries over REST in operations/consumption.py.
--
-- needs: prepare inflight timeout claimed strict max_retries now_s bounded text_of shortened_by end_failed give_back
-- needs: end_unleased_claim

-- Returns the first place in flight. Messages of a strict slot run in their order, so only the first one can have caused a
-- time-out.
local function first_in_flight()
  local first, records = math.huge, redis.call('HGETALL', inflight)
  for i = 2, #records, 2 do
    first = math.min(first, tonumber(string.match(records[i], '^%d+ ([^ :]+)')) or math.huge)
  end
  return first
end

-- End at most `limit` deliveries and claimed messages that have timed out. Returns two values:
--   how many messages were ended,
--   when the first of them can be taken again, or nil.
local function time_out_due(limit)
  -- Stamps that are further ahead than a time-out were written before the clock was set back.
  local ahead = redis.call('ZRANGEBYSCORE', prepare, text_of((now_s + timeout + 1) * 1000), '+inf',
    'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #ahead, 2 do -- rule: future_stamps_stay
    local left = bounded(math.floor(tonumber(ahead[i + 1]) % 1000), 0, max_retries)
    -- rule: future_stamps_forget_own_time_outs
    local since = now_s - shortened_by(redis.call('HGET', inflight, ahead[i]) or '', timeout)
    redis.call('ZADD', prepare, text_of(since * 1000 + left), ahead[i])
  end
  -- rule: time_out_a_second_early
  local late = redis.call('ZRANGEBYSCORE', prepare, '-inf', '(' .. text_of((now_s - timeout) * 1000),
    'WITHSCORES', 'LIMIT', 0, limit)
  local earliest
  local to_blame = strict and #late > 0 and first_in_flight() or math.huge
  for i = 1, #late, 2 do
    local left = bounded(math.floor(tonumber(late[i + 1]) % 1000), 0, max_retries)
    local record = redis.call('HGET', inflight, late[i]) or '0 0'
    local score, mark = string.match(record, '^%d+ ([^ :]+)%S* ?(%S*)')
    local due
    -- The deliveries behind the first one in line have not begun, so they use no retry.
    if strict and mark == '' and tonumber(score) > to_blame then -- rule: strict_charges_all
      due = give_back(late[i], score)
    else
      due = end_failed(late[i], left, record, 'timed_out', '', nil, i)
    end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  local lost, due = 0, nil
  if claimed then lost, due = end_unleased_claim(limit - #late / 2) end -- rule: leases_never_end
  if due and (not earliest or due < earliest) then earliest = due end
  return #late / 2 + lost, earliest
end
