-- Choice: which due messages a prepare takes next. `choose` reads the candidates in their order, `selection` keeps those that
-- the limits allow.
--
-- When a message is due is in its score (_scores). Whether this owner may have any is decided before, in _one_at_a_time and
-- fetch.slot_rate. A slot that holds nothing but a few due messages hands out all of them (fetch.usual). Claims of Spark take
-- what is due in the order of Store (claims).

-- section: choose
-- Choose the messages that can be delivered, in their order, as flat lists of member, score.
--
-- needs: store prepare claim topic_type limit after_score after_member
-- needs: in_flight claimed receipt micros now_ms text_of latest_due rank_after

-- Returns the first due messages; on time topics, the retries as a second list.
local function look(scan)
  if after_score ~= '' then
    local from = rank_after(store, after_score, after_member, topic_type == 'priority')
    if topic_type == 'priority' then
      return redis.call('ZREVRANGE', store, from, from + scan - 1, 'WITHSCORES'), {}
    end
    local rows = redis.call('ZRANGE', store, from, from + scan - 1, 'WITHSCORES')
    local latest = topic_type == 'fifo' and now_ms + 1023 / 1024 or now_ms
    while #rows > 0 and tonumber(rows[#rows]) > latest do
      rows[#rows], rows[#rows - 1] = nil, nil
    end
    return rows, {}
  elseif topic_type == 'priority' then
    return redis.call('ZREVRANGE', store, 0, scan - 1, 'WITHSCORES'), {}
  elseif topic_type == 'fifo' then
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

-- At most half of a delivery is retries, and the odd one alternates with the receipt. If too few fresh messages are due, retries
-- take their places. Returns two values:
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
--   how many at their head may be retries; math.huge: any of them, because the order mixes retries with others,
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
  local retries = (topic_type == 'priority' or after_score ~= '') and math.huge or 0
  local is_head = topic_type ~= 'priority' and after_score == '' and #late == 0 and #free == #rows -- rule: head_of_store
  if #rested > 0 then
    free, retries = with_retries(rested, free)
    complete = complete and retries * 2 == #rested
  end
  if topic_type == 'priority' and after_score == '' and (#free > limit * 2 or not complete) then
    complete = complete and #free / 2 <= limit
    turn_group(free, #free >= limit * 2 and free[limit * 2] or last_score)
  end
  return free, retries, complete, is_head, last_score, last_member
end

-- section: selection
-- Choose what is delivered of the candidates: no more than `limit` and `max_bytes`, a suspect alone, and no expired message.
--
-- From fetch: `wary` says whether the slot has failures. Then each member is asked whether it is `suspicious`: a suspect, whose
-- last delivery timed out or ran for too long. `expected` is the number of retries that the caller assumes if the answer has
-- none.
--
-- needs: body unusual topic_type timeout max_retries expected serial limit max_bytes
-- needs: receipt now_s in_flight wary suspicious free retries complete text_of is_retry budget own_limits has_expired
-- offers: taken members lefts prepared flights bodies kept envelopes expired more refused plain suspect shortest

local total = math.min(#free / 2, limit)
local more = not complete or total < #free / 2
local kept = {}
if total > 0 and unusual and redis.call('HLEN', body) > 0 then
  local names = {}
  for i = 1, total do
    names[i] = free[i * 2 - 1]
  end
  kept = redis.call('HMGET', body, unpack(names))
end
local bytes, taken, stamp, plain, refused, suspect = 0, 0, now_s * 1000, true, false, nil
local members, flights, prepared, lefts, envelopes, expired = {}, {}, {}, {}, {}, {}
local bodies, shortest, last_left, date, last_text, flight = {}, nil, nil, nil, nil, nil
local ticket = text_of(receipt) .. ' ' -- rule: receipts_lose_digits
if retries == math.huge and topic_type == 'priority' then
  -- Equal priorities follow each other, so few of them have to be looked at.
  local last
  retries = 0
  for i = 2, total * 2, 2 do
    if free[i] ~= last then
      last = free[i]
      if is_retry(tonumber(last)) then retries = math.huge end -- rule: retries_as_fresh
    end
  end
end
if #kept == 0 and not wary and retries == 0 then
  -- This is the common case: nothing has failed, and every member is its own body.
  date, plain = text_of(stamp + max_retries), max_retries == expected
  for i = 1, total do
    local at, member, score = i * 2, free[i * 2 - 1], free[i * 2]
    bytes = bytes + #member
    if bytes > max_bytes and i > 1 then -- rule: plain_bytes_unbounded
      more = true
      break
    end
    if score ~= last_text then last_text, flight = score, ticket .. score end
    taken, members[i], lefts[i] = i, member, max_retries
    prepared[at - 1], prepared[at] = date, member
    flights[at - 1], flights[at] = member, flight
  end
else
  for i = 1, total do
    local member, score, envelope = free[i * 2 - 1], free[i * 2], kept[i]
    local is_over, is_limited = false, false
    if envelope then is_over, is_limited = has_expired(envelope) end
    if is_over then -- rule: expired_is_delivered
      expired[#expired + 1], expired[#expired + 2] = member, score
    else
      local alone = wary and suspicious(member) -- rule: suspect_in_company
      bytes = bytes + #member + (envelope and #envelope or 0)
      -- A suspect may kill its process, which would charge the messages in flight beside it with a time-out.
      refused = alone and serial and in_flight > 0 and taken == 0
      if refused or (taken > 0 and (alone or bytes > max_bytes)) then -- rule: bytes_unbounded
        more = true
        break
      end
      local left, seconds = max_retries, nil
      if is_limited then left, seconds = own_limits(envelope) end -- rule: limits_of_the_topic
      if i <= retries or (wary and topic_type == 'fifo') then left = budget(tonumber(score), member, left) end
      if left ~= last_left then last_left, date = left, text_of(stamp + left) end
      plain = plain and left == expected
      if score ~= last_text then last_text, flight = score, ticket .. score end
      local at = taken * 2 + 1
      taken = taken + 1
      members[taken], lefts[taken] = member, left
      if taken < i then free[at], free[at + 1] = member, score end
      prepared[at], prepared[at + 1] = date, member
      flights[at], flights[at + 1] = member, flight
      if envelope then bodies[#bodies + 1], bodies[#bodies + 2] = member, envelope end
      if #kept > 0 then envelopes[taken] = envelope or '' end
      if seconds then -- rule: time_out_of_the_topic
        local short = math.min(seconds, timeout)
        prepared[at] = text_of(stamp - (timeout - short) * 1000 + left)
        flights[at + 1] = string.format('%s:%.0f', flight, seconds)
        shortest = math.min(shortest or short, short)
      end
      if alone then
        more, suspect = more or i < total, 'suspect' -- rule: suspect_untold
        break
      end
    end
  end
end
