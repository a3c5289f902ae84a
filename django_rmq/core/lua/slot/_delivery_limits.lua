-- Choose what is delivered of the candidates: no more than `limit` and `max_bytes`, a suspect alone, and no expired message.
--
-- needs: body unusual kind timeout max_retries expected serial limit max_bytes
-- needs: receipt now_s in_flight wary suspicious free retries complete text_of budget own_limits has_lapsed

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
local members, flights, prepared, lefts, envelopes, lapsed = {}, {}, {}, {}, {}, {}
local bodies, shortest, last_left, date, last_text, flight = {}, nil, nil, nil, nil, nil
local ticket = text_of(receipt) .. ' ' -- rule: receipts_lose_digits
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
    if envelope then is_over, is_limited = has_lapsed(envelope) end
    if is_over then -- rule: lapsed_is_delivered
      lapsed[#lapsed + 1], lapsed[#lapsed + 2] = member, score
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
      if i <= retries or (wary and kind == 'fifo') then left = budget(tonumber(score), member, left) end
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
