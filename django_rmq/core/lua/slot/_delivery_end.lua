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
