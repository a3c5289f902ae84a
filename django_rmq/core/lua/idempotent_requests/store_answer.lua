-- Store the answer of a request that was begun, or forget the request because it did nothing.
--
-- KEYS[1] answer  HASH  field -> value
--
-- ARGV[1] token    of the attempt
-- ARGV[2] kept     empty: forget it
-- ARGV[3] keep_ms  how long it is kept
-- ARGV[4] now
--
-- Returns ok | stale (a later attempt has begun, or the request was forgotten)

-- check: types
-- An attempt that outlived its lease must not replace the answer of the attempt that took its place.
if redis.call('HGET', answer, 'token') ~= token then return 'stale' end -- rule: kept_by_the_dead
if kept == '' then
  redis.call('HDEL', answer, 'print', 'token', 'ends')
  return 'ok'
end
redis.call('HSET', answer, 'kept', kept)
redis.call('HDEL', answer, 'token', 'ends')
redis.call('PEXPIRE', answer, keep_ms)
return 'ok'
