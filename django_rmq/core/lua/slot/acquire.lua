-- Acquire a slot for its owner, whom the assignment names: a new epoch, which fences every prepare sent under an older one.
--
-- KEYS[1] control  HASH  field -> value
--
-- ARGV[1] now
--
-- Returns the new epoch

-- check: types
-- This shuts nobody out: what keeps others from taking beside a holder is in `_one_at_a_time`.
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that owners can drain it.
redis.call('HDEL', control, '') -- rule: acquire_needs_memory
return redis.call('HINCRBY', control, 'epoch', 1) -- rule: acquire_does_not_fence
