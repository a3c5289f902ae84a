-- Begin a request to this project that must run only once, or return the stored answer of an earlier one with the same key.
--
-- KEYS[1] answer  HASH  field -> value
--
-- ARGV[1] print     of the request's content
-- ARGV[2] token     drawn for this attempt
-- ARGV[3] lease_ms  how long others wait for this attempt
-- ARGV[4] now
--
-- Returns {new} | {running} (an earlier attempt runs) | {other} (the key was used with other content)
--       | {done, the stored answer}

-- check: types
-- include: _now
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
