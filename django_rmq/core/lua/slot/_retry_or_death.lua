-- Decide whether a message that has failed is tried again, dies, or is dropped for a newer send.
--
-- needs: store retry body kind
-- needs: count note_failure waits forget die collects join

-- A message without retries left dies; one with a newer copy is dropped. Returns whether either happened.
-- A message that collects bodies takes along those of its newer copy. With the retries of that copy it would never die.
local function end_for_good(member, left, what, text, origin, failure, kept, outdated)
  local absorbs = outdated and collects(kept) and collects(redis.call('HGET', body, member))
  if absorbs and left > 0 then -- rule: collecting_never_dies
    join(member, kept) -- rule: failed_bodies_dropped
    count('dropped')
    redis.call('ZREM', store, member)
    redis.call('ZREM', retry, member)
    return false
  elseif absorbs then
    die(member, what, text, origin, failure, 1, kept)
  elseif waits(member) then -- rule: rollback_overwrites
    count('dropped')
    if kind == 'fifo' then forget(member) else note_failure(member, what, text, origin, failure) end
  elseif left <= 0 then -- rule: deliveries_left
    die(member, what, text, origin, failure, 1, kept) -- rule: exhausted_without_its_body
  else
    return false
  end
  return true
end
