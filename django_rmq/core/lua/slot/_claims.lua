-- The messages that a Spark consumer holds: `claim` has them with the scores at which they were taken, `claim_body` their bodies,
-- `claims` the number and state of the consumer's newest claim, `claim_failed` the failures that its query has noted. One
-- consumer at a time has a claim, for as long as it is in `claimants`, whose scores say when its lease ends. What happens then is
-- decided here, too.
--
-- The states of a claim: `open` while it is filled; `sealed` when it is complete and can be read; `acked` when Spark has recorded
-- its batch, and its messages are forgotten; `returned` when its query has given it back, or its lease ended while it was open:
-- its messages use no retry; `lost` when its lease ended after the seal: its messages come back as after a time-out.
--
-- needs: store retry failures body claimants claim claims claim_body claim_failed
-- needs: topic_type now_ms count keeps_first budget own_limits parse_failure first_score die go_on join

-- Bound how many messages one step moves between keys. Their bytes are estimated from the longest of a hundred of them. The
-- allocator gets memory for large messages from the system and returns it, which takes longer than their copy.
local STEP_BYTES, LARGE, LARGE_STEP_BYTES = 4194304, 16384, 1048576

-- Returns the size of the longest of a hundred of the `n` first messages, or of fewer if they are large.
local function longest_of(set, bodies, n, descending)
  local has_bodies = redis.call('HLEN', bodies) > 0
  local longest, read = 1, 0
  for i = 0, n - 1, math.max(1, math.ceil(n / 100)) do
    local rank = descending and -1 - i or i
    local member = redis.call('ZRANGE', set, rank, rank)[1]
    if not member or read >= 262144 then break end
    local kept = has_bodies and redis.call('HGET', bodies, member) or '' -- rule: claim_of_any_bodies
    longest, read = math.max(longest, #member + #kept), read + #member + #kept
  end
  return longest
end
local function step_bytes(longest)
  if longest > LARGE then return LARGE_STEP_BYTES end -- rule: large_ones_as_small_ones
  return STEP_BYTES
end
-- Returns how many of the `n` first messages fit into `most` bytes, and into a step: at least one.
local function fit(set, bodies, n, most, descending)
  local longest = longest_of(set, bodies, n, descending)
  local bytes = math.min(most, step_bytes(longest)) -- rule: claim_copies_any_size
  return math.max(1, math.min(n, math.floor(bytes / longest))) -- rule: claim_fits
end

local function newest_claim(of)
  local number, state = string.match(redis.call('HGET', claims, of) or '', '^(%d+) (%l+) ')
  return tonumber(number) or 0, state or 'none'
end
local function note_claim(of, number, state)
  redis.call('HSET', claims, of, string.format('%.0f %s %.0f', number, state, now_ms))
end
-- The gate opens when the claim of the consumer `of` holds nothing more. Returns how many messages are left in it.
local function close_claim(of)
  local left = redis.call('ZCARD', claim)
  if left == 0 then redis.call('ZREM', claimants, of) end -- rule: claim_keeps_the_gate
  return left
end

-- Whether a claim keeps its slot to itself. It does until it is lost or returned; from then on, workers take other messages while
-- the claimed ones come back in steps. On fifo topics the gate stays shut, because the claimed ones precede all that wait.
local function claim_shuts()
  if topic_type == 'fifo' then return true end -- rule: fifo_passes_a_lost_claim
  local _, state = newest_claim(redis.call('ZRANGE', claimants, 0, 0)[1])
  return not (state == 'lost' or state == 'returned') -- rule: ended_claim_shuts
end

-- The body moves with the message, unless a newer one is there. Returns two values:
--   the body, or nil,
--   whether a newer body is there.
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

-- End a claimed message as failed: as its query has noted, or as after a time-out. Returns when it can be taken again, or nil.
local function fail_claimed(member, score, note, index)
  local what, text = string.match(note or 'timed_out\n', '^([%l_]+)\n(.*)$')
  local failure = parse_failure(redis.call('HGET', failures, member))
  local origin = first_score(score, failure)
  local kept, outdated = unclaim(member)
  if note then redis.call('HDEL', claim_failed, member) end -- rule: claim_note_outlives
  if what == 'rejected' then -- rule: claimed_reject_is_a_failure
    die(member, what, text, origin, failure, 1, kept)
    return nil
  end
  local left = budget(tonumber(score), member, (own_limits(kept))) -- rule: claimed_with_all_retries
  return go_on(member, left, what, text, origin, failure, nil, index, kept, outdated)
end

-- Returns the first messages of the claim with their scores: at most `limit`, and no more bytes than one step may move.
local function first_claimed(limit)
  -- rule: claim_ends_in_steps_of_any_size
  return redis.call('ZRANGE', claim, 0, fit(claim, claim_body, limit, math.huge) - 1, 'WITHSCORES')
end

-- Among the first messages of the claim, end those that its query has failed. `noted`: there are some, so at most 400 messages
-- are read. Returns two values:
--   the other messages,
--   when the first of the ended messages can be taken again, or nil.
local function end_failed_ones(limit, noted)
  local rows, others, earliest = first_claimed(noted and math.min(limit, 400) or limit), {}, nil
  for i = 1, #rows, 2 do
    local note = noted and redis.call('HGET', claim_failed, rows[i])
    local due = note and fail_claimed(rows[i], rows[i + 1], note, i)
    if not note then others[#others + 1] = rows[i] end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  return others, earliest
end

-- Delete at most `limit` messages of an acknowledged claim, or all of them if no failures have to be deleted. The messages that
-- its query has failed are ended as failed instead. Returns when the first of those can be taken again, or nil.
local function forget_claimed(limit)
  local noted = redis.call('HLEN', claim_failed) > 0 -- rule: failed_are_acknowledged
  if not noted and redis.call('HLEN', failures) == 0 then
    count('acked', redis.call('ZCARD', claim))
    redis.call('UNLINK', claim, claim_body)
    return nil
  end
  local members, earliest = end_failed_ones(limit, noted)
  if #members == 0 then return earliest end
  local waiting, resting, gone = redis.call('ZMSCORE', store, unpack(members)), {}, {}
  if redis.call('ZCARD', retry) > 0 then resting = redis.call('ZMSCORE', retry, unpack(members)) end
  for i, member in ipairs(members) do
    local lives = topic_type ~= 'fifo' and (waiting[i] or resting[i])
    if not lives then gone[#gone + 1] = member end -- rule: ack_tears_the_failures_of_the_living
  end
  count('acked', redis.call('ZREM', claim, unpack(members)))
  redis.call('HDEL', claim_body, unpack(members))
  if #gone > 0 then redis.call('HDEL', failures, unpack(gone)) end -- rule: ack_leaves_failures
  return earliest
end

-- Return at most `limit` messages of the claim to the slot. `spent`: as after a time-out, and at most 400; otherwise as if they
-- were never claimed. The messages that the query has failed end as failed in both cases. Returns two values:
--   how many messages have left the claim,
--   when the first of them can be taken again, or nil.
local function return_claimed(limit, spent)
  local noted = redis.call('HLEN', claim_failed) > 0 -- rule: failed_are_returned
  if spent or noted then limit = math.min(limit, 400) end
  local rows, earliest = first_claimed(limit), nil
  for i = 1, #rows, 2 do
    local member, score, due = rows[i], rows[i + 1], nil
    local note = noted and redis.call('HGET', claim_failed, member)
    if spent or note then
      due = fail_claimed(member, score, note, i)
    else
      local number, waiting = tonumber(score), redis.call('ZSCORE', store, member)
      local newer = waiting or redis.call('ZSCORE', retry, member)
      local kept, outdated = unclaim(member)
      if outdated then join(member, kept) end -- rule: claimed_bodies_dropped
      if newer then count('dropped') end
      local merges = waiting and keeps_first(number) and number < tonumber(waiting)
      if merges or not newer then -- rule: returned_overwrites
        redis.call('ZADD', store, score, member)
        due = topic_type == 'priority' and 0 or number
      end
    end
    if due and (not earliest or due < earliest) then earliest = due end
  end
  return #rows / 2, earliest
end

-- End a step of a claim whose lease has ended. It is lost from the first step on, unless it was acknowledged before. Returns two
-- values:
--   how many messages have left the claim,
--   when the first of them can be taken again, or nil.
local function end_unleased_claim(limit)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if limit < 1 or not head[1] or tonumber(head[2]) > now_ms then return 0, nil end -- rule: lease_ends_early
  local number, state = newest_claim(head[1])
  local ended, earliest = 0, nil
  -- The query died between two steps of `ack_claim`: Spark has recorded the batch, so its messages must not come back.
  if state == 'acked' then -- rule: acked_is_given_back
    ended = redis.call('ZCARD', claim)
    earliest = forget_claimed(limit)
    ended = ended - redis.call('ZCARD', claim)
  else
    -- No query has read an open claim, so its messages cannot have killed one, and use no retry.
    if state == 'open' then state = 'returned' elseif state == 'sealed' then state = 'lost' end -- rule: open_costs_a_retry
    note_claim(head[1], number, state) -- rule: lost_is_not_noted
    ended, earliest = return_claimed(limit, state ~= 'returned') -- rule: lost_costs_nothing
  end
  close_claim(head[1])
  return ended, earliest
end
