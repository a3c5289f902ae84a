-- How deliveries end, except by a commit: as failed, as marked by an operator, or given back. Who ends them at their time-out
-- is the subject of _time_outs.

-- section: mark_delivery
-- Mark a delivery for its end, and note that in control: commit_delivery reads no records.
--
-- needs: inflight control

local function mark_delivery(member, receipt_and_score, mark)
  redis.call('HSET', inflight, member, receipt_and_score .. mark)
  redis.call('HSET', control, 'marked', string.match(receipt_and_score, '^%d+')) -- rule: mark_unnoted
end

-- section: end_delivery
-- End a delivery, and do what an operator has marked it for meanwhile.
--
-- needs: prepare inflight dead deaths failures body prepare_body
-- needs: count parse_failure first_score forget die joined_death [note_receipt] [note_outcome]

-- The delivered body moves with the message, unless a newer body is there. Returns two values:
--   the delivered body, or nil,
--   whether a newer body is there.
local function land(member)
  local delivered, outdated = redis.call('HGET', prepare_body, member), false
  if delivered then
    redis.call('HDEL', prepare_body, member) -- rule: delivered_body_outlives
    outdated = redis.call('HSETNX', body, member, delivered) == 0 -- rule: body_comes_back
  end
  return delivered, outdated
end

-- Take a delivery out of Prepare. Returns nil if a mark or a rejection has ended it. Otherwise it has failed, and there are four
-- values:
--   the score of the message before it first failed,
--   its last failure, or nil,
--   its body, or nil,
--   whether a newer body is there.
local function end_delivery(member, record, what, text)
  local score, mark, outlived = string.match(record, '^%d+ ([^ :]+)%S* ?(%S*) ?(%S*)')
  score, mark = score or '0', mark or ''
  local failure = parse_failure(redis.call('HGET', failures, member))
  local origin = first_score(score, failure)
  if note_receipt then note_receipt(member, record) end
  redis.call('ZREM', prepare, member)
  redis.call('HDEL', inflight, member) -- rule: record_outlives
  local kept, outdated = land(member)
  if mark == 'removed' then -- rule: removed_returns
    count('ended_marked')
    count('removed')
    if note_outcome then note_outcome(member, 'removed', '-', (failure and failure.times or 0) + 1, '', 1) end
    forget(member)
    return nil
  end
  if mark == 'buried' then -- rule: buried_returns
    count('ended_marked')
    if outlived ~= '' and redis.call('ZSCORE', dead, member) then -- rule: older_death
      -- The operator has buried this delivery together with a newer copy, whose death stays.
      count('dropped')
      redis.call('HSET', deaths, member, joined_death(redis.call('HGET', deaths, member) or '', kept))
      forget(member)
    else
      die(member, 'buried', text, origin, failure, 1, kept) -- rule: buried_with_the_newer_body
    end
    return nil
  elseif mark == 'cancelled' or what == 'cancelled' then -- rule: cancelled_returns
    count('cancelled')
    if note_outcome then note_outcome(member, 'cancelled', '-', (failure and failure.times or 0) + 1, '', 1) end
    forget(member)
    return nil
  elseif what == 'rejected' then -- rule: reject_is_a_failure
    count('rejected')
    die(member, 'rejected', text, origin, failure, 1, kept) -- rule: dead_with_the_newer_body
    return nil
  end
  count(what == 'timed_out' and 'expired' or 'failed')
  if what == 'overran' then count('overran') end -- rule: overran_uncounted
  return origin, failure, kept, outdated
end

-- section: end_marked
-- End a delivery that succeeded or is given back, but that an operator has marked meanwhile.
--
-- needs: end_delivery end_for_good

local function end_marked(member, record)
  local origin, failure, kept = end_delivery(member, record, 'failed', '') -- rule: marked_stays
  if origin then end_for_good(member, 0, 'failed', '', origin, failure, kept) end
end

-- section: give_back
-- Return a delivery that has not begun.
--
-- needs: store prepare inflight retry topic_type keeps_first count land join

-- `score` is the score at which the message was taken. Returns when it can be taken again, or nil.
local function give_back(member, score)
  local number, waiting = tonumber(score), tonumber(redis.call('ZSCORE', store, member))
  local due
  redis.call('ZREM', prepare, member) -- rule: release_needs_memory
  local kept, outdated = land(member)
  -- The message was sent again while it was in flight; the copy that waits has the newer body.
  if outdated then join(member, kept) end -- rule: released_bodies_dropped
  local resting = redis.call('ZSCORE', retry, member)
  -- rule: earlier_time
  if not (waiting or resting) or (waiting and keeps_first(number) and number < waiting) then
    redis.call('ZADD', store, score, member)
    due = topic_type == 'priority' and 0 or number
  end
  redis.call('HDEL', inflight, member)
  count('released')
  if waiting or resting then count('dropped') end
  return due
end
