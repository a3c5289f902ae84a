-- Returning the messages of a claim, and the end of its lease.
--
-- needs: store retry failures body claimants claim claim_body
-- needs: kind now_ms count keeps_first budget own_limits parse_failure first_score go_on join
-- needs: newest_claim note_claim close_claim forget_claimed

-- The body moves with the message, unless a newer one is there. Returns it, and whether a newer one is there.
local function unclaim(member)
  local kept, outdated = redis.call('HGET', claim_body, member), false
  redis.call('ZREM', claim, member)
  if kept then
    redis.call('HDEL', claim_body, member)
    outdated = redis.call('HSETNX', body, member, kept) == 0 -- rule: claimed_body_comes_back
  end
  count('claim_returned')
  return kept, outdated
end

-- At most `limit` messages of the claim go back: `spent`, as after a time-out and at most 400; else as if never claimed.
-- Returns how many, and when the first can be taken again.
local function return_claimed(limit, spent)
  if spent then limit = math.min(limit, 400) end
  local rows = redis.call('ZRANGE', claim, 0, limit - 1, 'WITHSCORES')
  local earliest
  for i = 1, #rows, 2 do
    local member, score, due = rows[i], rows[i + 1], nil
    local number, waiting = tonumber(score), redis.call('ZSCORE', store, member)
    local newer = waiting or redis.call('ZSCORE', retry, member)
    local kept, outdated = unclaim(member)
    if spent then
      local failure = parse_failure(redis.call('HGET', failures, member))
      local left = budget(number, member, (own_limits(kept))) -- rule: claimed_with_all_retries
      due = go_on(member, left, 'timed_out', '', first_score(score, failure), failure, nil, i, kept, outdated)
    else
      if outdated then join(member, kept) end -- rule: claimed_bodies_dropped
      if newer then count('dropped') end
      local merges = waiting and keeps_first(number) and number < tonumber(waiting)
      if merges or not newer then -- rule: returned_overwrites
        redis.call('ZADD', store, score, member)
        due = kind == 'priority' and 0 or number
      end
    end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  return #rows / 2, earliest
end

-- Continue with a claim whose lease has ended: it is lost from the first step on, unless it was acknowledged before.
local function expire_claim(limit)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if limit < 1 or not head[1] or tonumber(head[2]) > now_ms then return 0, nil end -- rule: lease_ends_early
  local number, state = newest_claim(head[1])
  local ended, earliest = 0, nil
  if state == 'acked' then -- rule: acked_is_given_back
    ended = redis.call('ZCARD', claim)
    forget_claimed(limit)
    ended = ended - redis.call('ZCARD', claim)
  else
    if state ~= 'lost' and state ~= 'returned' then note_claim(head[1], number, 'lost') end -- rule: lost_is_not_noted
    ended, earliest = return_claimed(limit, state ~= 'returned') -- rule: lost_costs_nothing
  end
  close_claim(head[1])
  return ended, earliest
end
