-- Move messages out of a shut slot for another slot: they stay in `leaving` until they are known to have arrived.
--
-- KEYS[1] store      ZSET  member -> due ms, or priority
-- KEYS[2] prepare    ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry      ZSET  member -> ms + retries/1024
-- KEYS[4] dead       ZSET  member -> ms of death
-- KEYS[5] deaths     HASH  member -> death
-- KEYS[6] failures   HASH  member -> last failure
-- KEYS[7] body       HASH  member -> envelope
-- KEYS[8] stats      HASH  counter -> n
-- KEYS[9] control    HASH  field -> value
-- KEYS[10] claimants ZSET  Spark consumer -> ms when its lease ends
-- KEYS[11] leaving   HASH  field -> value; the messages on their way to another slot
--
-- ARGV[1] reslot            the number of the re-slotting
-- ARGV[2] arrived           the ticket that is known to have arrived; empty: none
-- ARGV[3] target            the other slot
-- ARGV[4] max_bytes NUMBER  of one hand-over; one message is moved whatever its size
-- ARGV[5] topic_type
-- ARGV[6...] pairs          store, retry or dead; member
-- ARGV[#ARGV] now
--
-- Returns {stale} (not shut by this re-slotting) | {busy} (something is in flight) | {nothing}
--       | {word, ticket, target, {state, member, score, failure, envelope or death, ...}}
--         word: moved, or staged where an earlier hand-over has to arrive first; empty texts where there is none

-- check: types
if (last - first + 1) / 2 > 250 then return redis.error_reply('ERR too many members') end
local known = redis.call('HMGET', control, 'reslot', 'moving', 'tickets', 'undrained_since')
local undrained_since = known[4]
-- include: _now
-- include: _scores.numbers
-- include: _ledger
-- include: _priority_notes.note_undrained
if known[1] ~= reslot or not known[2] then return { 'stale' } end -- rule: moved_out_of_an_open_slot
local staged = redis.call('HMGET', leaving, 'ticket', 'target', 'rows')
-- The process that took these messages out died, or lost a reply, so they may not have arrived: they are handed over again.
if staged[1] and staged[1] ~= arrived then -- rule: what_left_is_forgotten
  local rows = {}
  for i = 1, tonumber(staged[3]) do
    local parts = redis.call('HMGET', leaving, string.format('state%d', i), string.format('member%d', i),
      string.format('score%d', i), string.format('failure%d', i), string.format('rest%d', i))
    for j = 1, 5 do
      rows[#rows + 1] = parts[j]
    end
  end
  return { 'staged', staged[1], staged[2], rows }
end
redis.call('UNLINK', leaving)
-- rule: moved_while_in_flight
if redis.call('ZCARD', prepare) > 0 or redis.call('ZCARD', claimants) > 0 then return { 'busy' } end
local sets, seen = { store = store, retry = retry, dead = dead }, { store = {}, retry = {}, dead = {} }
local rows, parts, bytes, n, moved_dead = {}, {}, 0, 0, 0
for i = first, last, 2 do
  local state, member = ARGV[i], ARGV[i + 1]
  local score = redis.call('ZSCORE', sets[state], member)
  if score and not seen[state][member] and (n == 0 or bytes < max_bytes) then
    seen[state][member] = true
    local failure = state ~= 'dead' and redis.call('HGET', failures, member) or ''
    local rest = redis.call('HGET', state == 'dead' and deaths or body, member) or ''
    local row = { state, member, plain_score(score), failure, rest }
    n = n + 1
    for j, name in ipairs({ 'state', 'member', 'score', 'failure', 'rest' }) do
      rows[#rows + 1] = row[j]
      parts[#parts + 1], parts[#parts + 2] = string.format('%s%d', name, n), row[j]
    end
    bytes = bytes + #member + #failure + #rest
    if state == 'dead' then moved_dead = moved_dead + 1 end
  end
end
if n == 0 then return { 'nothing' } end
local ticket = text_of((tonumber(known[3]) or 0) + 1)
redis.call('HSET', control, 'tickets', ticket)
redis.call('HSET', leaving, 'ticket', ticket, 'target', target, 'rows', text_of(n), unpack(parts))
for i = 1, #rows, 5 do
  local state, member = rows[i], rows[i + 1]
  redis.call('ZREM', sets[state], member)
  if state == 'dead' then
    redis.call('HDEL', deaths, member)
  elseif not redis.call('ZSCORE', state == 'store' and retry or store, member) then
    redis.call('HDEL', failures, member)
    redis.call('HDEL', body, member)
  end
end
count('moved_out', n - moved_dead)
count('moved_dead_out', moved_dead)
note_undrained()
keep_counts()
return { 'moved', ticket, target, rows }
