-- What is kept under the name of a request or a task: answers, and results.
--
-- KEY answer  HASH  the request, and its answer: field -> value
-- KEY result  HASH  the state of a task: field -> value

-- script: begin_request
-- Begin a request to this project that must run only once, or return the stored answer of an earlier one with the same key.
--
-- KEYS answer
--
-- ARGV[1] print     of the request's content
-- ARGV[2] token     drawn for this attempt
-- ARGV[3] lease_ms  how long others wait for this attempt
-- ARGV[4] now
--
-- Returns {new} | {running} (an earlier attempt runs) | {other} (the key was used with other content)
--       | {done, the stored answer}

-- check: types
-- include: _basics.now
local found = redis.call('HMGET', answer, 'print', 'kept', 'ends')
local known, kept, ends = found[1], found[2], tonumber(found[3] or '')
if known and known ~= print then return { 'other' } end -- rule: answered_for_another
if kept then return { 'done', kept } end -- rule: done_twice
-- The process of an attempt whose lease has ended counts as dead. A lease that ends later than a new one would was written
-- before the clock was set back.
-- rule: done_beside_itself
if known and ends and ends > now_ms and ends <= now_ms + lease_ms then return { 'running' } end
redis.call('HSET', answer, 'print', print, 'token', token, 'ends', string.format('%.0f', now_ms + lease_ms))
redis.call('PEXPIRE', answer, lease_ms)
return { 'new' }

-- script: store_answer
-- Store the answer of a request that was begun, or forget the request because it did nothing.
--
-- KEYS answer
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

-- script: store_result
-- Store the state of a task, unless a newer one is stored already.
--
-- KEYS result
--
-- ARGV[1] stamp NUMBER  rises with each delivery of the task, and from its start to its end
-- ARGV[2] keep_ms       how long it is kept
-- ARGV[3] job           the function of the task and its arguments
-- ARGV[4] record        what became of it
-- ARGV[5] now
--
-- Returns ok | stale (a newer state is stored)

-- check: types
-- A delivery that timed out may still report, after the next delivery of the task has begun.
if tonumber(redis.call('HGET', result, 'stamp') or 0) >= stamp then return 'stale' end -- rule: results_go_back
redis.call('HSET', result, 'stamp', string.format('%.0f', stamp), 'job', job, 'record', record)
redis.call('PEXPIRE', result, keep_ms)
return 'ok'
