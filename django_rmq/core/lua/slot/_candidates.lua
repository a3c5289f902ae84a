-- Choose the messages that can be delivered, in their order, as flat lists of member, score.
--
-- needs: store prepare claim kind limit after_score after_member
-- needs: in_flight claimed receipt micros now_ms text_of latest_due rank_after

-- Returns the first due messages; on time topics, the retries as a second list.
local function look(scan)
  if after_score ~= '' then
    local from = rank_after(store, after_score, after_member, kind == 'priority')
    if kind == 'priority' then
      return redis.call('ZREVRANGE', store, from, from + scan - 1, 'WITHSCORES'), {}
    end
    local rows = redis.call('ZRANGE', store, from, from + scan - 1, 'WITHSCORES')
    local latest = kind == 'fifo' and now_ms + 1023 / 1024 or now_ms
    while #rows > 0 and tonumber(rows[#rows]) > latest do
      rows[#rows], rows[#rows - 1] = nil, nil
    end
    return rows, {}
  elseif kind == 'priority' then
    return redis.call('ZREVRANGE', store, 0, scan - 1, 'WITHSCORES'), {}
  elseif kind == 'fifo' then
    -- A message that failed has its old place in the line, so its retry is among the others.
    return redis.call('ZRANGEBYSCORE', store, '-inf', latest_due(), 'WITHSCORES', 'LIMIT', 0, scan), {}
  end
  -- rule: before_their_time
  return redis.call('ZRANGEBYSCORE', store, '(999', text_of(now_ms), 'WITHSCORES', 'LIMIT', 0, scan),
    redis.call('ZRANGEBYSCORE', store, '-inf', 999, 'WITHSCORES', 'LIMIT', 0, scan)
end

-- Leave out members that are in flight: their newer copy waits for the end of the delivery.
local function free_of(list)
  if not (in_flight > 0 or claimed) or #list == 0 then return list end -- rule: in_flight_twice
  local names, free = {}, {}
  for i = 1, #list, 2 do
    names[#names + 1] = list[i]
  end
  local running = redis.call('ZMSCORE', prepare, unpack(names))
  local held = claimed and redis.call('ZMSCORE', claim, unpack(names)) or {}
  for i, member in ipairs(names) do
    if not (running[i] or held[i]) then -- rule: prepare_takes_what_is_claimed
      free[#free + 1], free[#free + 2] = member, list[i * 2]
    end
  end
  return free
end

-- Returns a bound of how many skipped entries are in flight.
local function running_ahead()
  return math.min(in_flight + (claimed and redis.call('ZCARD', claim) or 0), 1000)
end

-- While fresh messages are due, at most half of a delivery is retries; the odd one alternates with the receipt. Returns two
-- values:
--   the retries before the other messages,
--   the number of the retries.
local function with_retries(rested, free)
  local share = math.floor(limit / 2) + limit % 2 * (receipt % 2) -- rule: odd_one_never_a_retry
  share = math.min(#rested / 2, math.max(share, limit - #free / 2)) -- rule: all_retries
  local both = {}
  for i = 1, share * 2 do
    both[i] = rested[i]
  end
  for i = 1, #free do
    both[#both + 1] = free[i]
  end
  return both, share
end

-- If the limit cuts a group of equal priorities, its members are taken from a random start: Redis orders them by their bytes, and
-- the last ones would wait as long as others keep coming.
local function turn_group(free, score)
  local above, size = 0, redis.call('ZCOUNT', store, score, score)
  while above < #free / 2 and free[above * 2 + 2] ~= score do
    above = above + 1
  end
  local base = redis.call('ZCOUNT', store, '(' .. score, '+inf')
  -- Mixed, so that regular intervals still reach every member.
  local start = (micros * 16807 + receipt % 1000003 * 69621) % 2147483647 % size -- rule: no_random_start
  local want = math.min(size, limit - above + running_ahead())
  local group = redis.call('ZREVRANGE', store, base + start, base + math.min(start + want, size) - 1, 'WITHSCORES')
  if start + want > size then
    local turned = redis.call('ZREVRANGE', store, base, base + start + want - size - 1, 'WITHSCORES')
    for i = 1, #turned do
      group[#group + 1] = turned[i]
    end
  end
  group = free_of(group)
  for i = above * 2 + 1, #free do
    free[i] = nil
  end
  for i = 1, #group do
    free[above * 2 + i] = group[i]
  end
end

-- Returns six values:
--   the candidates,
--   how many at their head may be retries,
--   whether there are no others,
--   whether they are the first entries of Store with none left out, so that they can be removed by rank,
--   the score of the last entry that was read,
--   the member of that entry.
local function choose()
  local scan = limit
  local rows, late = look(scan)
  local free, rested = free_of(rows), free_of(late)
  if #free + #rested == 0 and math.max(#rows, #late) == scan * 2 then
    -- All entries of the window are in flight: read further, once.
    scan = limit + running_ahead()
    rows, late = look(scan)
    free, rested = free_of(rows), free_of(late)
  end
  local complete = #late < scan * 2 and #rows < scan * 2
  local seen = #rows > 0 and rows or late
  local last_score, last_member = seen[#seen], seen[#seen - 1]
  local retries = (kind == 'priority' or after_score ~= '') and math.huge or 0
  local is_head = kind ~= 'priority' and after_score == '' and #late == 0 and #free == #rows -- rule: head_of_store
  if #rested > 0 then
    free, retries = with_retries(rested, free)
    complete = complete and retries * 2 == #rested
  end
  if kind == 'priority' and after_score == '' and (#free > limit * 2 or not complete) then
    complete = complete and #free / 2 <= limit
    turn_group(free, #free >= limit * 2 and free[limit * 2] or last_score)
  end
  return free, retries, complete, is_head, last_score, last_member
end
