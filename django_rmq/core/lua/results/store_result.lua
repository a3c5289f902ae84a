-- Store the state of a task, unless a newer one is stored already.
--
-- KEYS[1] result  HASH  field -> value
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
