-- The history of a topic: a record for each minute, and how long messages waited and ran.
--
-- KEY minutes  HASH  minute -> its record
-- KEY pending  HASH  what the next record gets: field -> value
-- KEY times    HASH  how long messages waited and ran: field -> value

-- script: sample
-- Sum the messages by state and the ledgers of many slots of one topic, for the history.
-- Changes nothing.
--
-- KEYS store prepare retry dead stats control claim claimants claims of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] now
--
-- Returns {slots read, store, due, prepare, retry, dead, oldest due ms or empty,
--          {what was sent, then the sums of the counters named below},
--          earliest ms since when Store of a priority topic has not been empty, or empty}

if #slots_keys > 2304 then return redis.error_reply('ERR too many slots') end
-- include: _basics.now
-- include: inspect.overdue
-- What was sent has been stored, or met a message: no counter of its own says how much it was.
local is_send = { stored = true, merged = true, replaced = true }
-- The sums are those of SAMPLED in core/model/replies.py, in its order: the first one is what was sent.
local place = {}
for j, name in ipairs({ 'merged', 'replaced', 'prepared', 'committed', 'acked', 'failed', 'expired', 'rejected', 'died',
  'lapsed', 'claimed', 'claim_returned', 'released', 'stale', 'fenced', 'revived', 'replay_merged', 'cancelled', 'overran' }) do
  place[name] = j + 1
end
local read, oldest, undrained = 0, nil, nil
local depths, sums = { 0, 0, 0, 0, 0 }, { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
for i = 1, #slots_keys, 9 do
  local store, prepare, retry, dead_set, stats, control, claim, claimants, claims = unpack(slots_keys, i, i + 8)
  local waiting, running, resting, dead, held = 0, 0, 0, 0, 0
  -- Most of many slots are empty, which one command says.
  if redis.call('EXISTS', store, prepare, retry, dead_set, claim) > 0 then
    -- A slot with a key of a foreign type is left out; the others are still counted.
    waiting, running = redis.pcall('ZCARD', store), redis.pcall('ZCARD', prepare)
    resting, dead = redis.pcall('ZCARD', retry), redis.pcall('ZCARD', dead_set)
    -- If a key of its claims has a foreign type, only the claimed messages are not counted.
    held = redis.pcall('ZCARD', claim)
    if type(held) ~= 'number' or (held > 0 and (type(redis.pcall('ZCARD', claimants)) ~= 'number'
      or type(redis.pcall('HLEN', claims)) ~= 'number')) then held = 0 end
  end
  -- Most counters of a slot have never been raised, and are not there.
  local counters = redis.pcall('HGETALL', stats)
  if type(waiting) == 'number' and type(running) == 'number' and type(resting) == 'number'
    and type(dead) == 'number' and not counters.err then
    local due, oldest_here, undrained_here = waiting, nil, nil
    local known = {}
    if resting > 0 or running > 0 or (waiting > 0 and topic_type == 'priority') then
      -- pcall: if this key has a foreign type, only these values are unknown.
      known = redis.pcall('HMGET', control, 'undrained_since', 'timeout')
      if known.err then known = {} end
    end
    if topic_type ~= 'priority' and waiting > 0 then
      due = redis.call('ZCOUNT', store, '-inf', now_ms)
      oldest_here = due > 0 and tonumber(redis.call('ZRANGEBYSCORE', store, '(999', now_ms, 'WITHSCORES', 'LIMIT', 0, 1)[2])
    elseif waiting > 0 then
      undrained_here = tonumber(known[1] or nil)
    end
    local own_timeout = tonumber(known[2] or nil) or timeout
    local others, since = overdue(retry, resting, prepare, running, own_timeout, claim, held, claimants, claims)
    if others > 0 then
      due = due + others
      if topic_type == 'priority' then
        undrained_here = math.min(undrained_here or since, since)
      else
        oldest_here = math.min(oldest_here or since, since)
      end
    end
    if oldest_here then oldest = math.min(oldest or oldest_here, oldest_here) end
    if undrained_here then undrained = math.min(undrained or undrained_here, undrained_here) end
    read = read + 1
    for j, value in ipairs({ waiting, due, running, resting, dead }) do depths[j] = depths[j] + value end
    for j = 1, #counters, 2 do
      local name = counters[j]
      local at, sends = place[name], is_send[name]
      local value = (at or sends) and tonumber(counters[j + 1]) or 0
      if at then sums[at] = sums[at] + value end
      if sends then sums[1] = sums[1] + value end
    end
  end
end
return { read, depths[1], depths[2], depths[3], depths[4], depths[5], oldest and string.format('%.0f', oldest) or '', sums,
  undrained and string.format('%.0f', undrained) or '' }

-- script: take_minute
-- Take the sampling of a topic in this minute, unless another worker has taken it.
--
-- KEYS minutes pending
--
-- ARGV[1] minute NUMBER  minutes since the epoch
-- ARGV[2] now
--
-- Returns ok | taken

-- check: types
local minute_taken = tonumber(redis.call('HGET', pending, 'claimed') or '')
-- A minute that is more than an hour ahead was written before the clock was set back.
if minute_taken and minute_taken >= minute and minute_taken <= minute + 60 then return 'taken' end
redis.call('HDEL', pending, 'claimed')
redis.call('HSET', pending, 'claimed', string.format('%.0f', minute))
return 'ok'

-- script: count_lateness
-- Count how late messages were delivered, until the next record includes the counts.
--
-- KEYS pending
--
-- ARGV[1] counts  24 numbers separated by spaces, one for each bucket
-- ARGV[2] now
--
-- Returns how many buckets were raised

-- check: types
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', pending, '')
local bucket, raised = 0, 0
for number in string.gmatch(string.sub(counts, 1, 600), '%d+') do
  if bucket < 24 and tonumber(number) > 0 then
    redis.call('HINCRBY', pending, string.format('late%d', bucket), number)
    raised = raised + 1
  end
  bucket = bucket + 1
end
return raised

-- script: count_times
-- Count how late messages were delivered and how long calls of the listener took, permanently.
--
-- KEYS times
--
-- ARGV[1] late            24 numbers separated by spaces, one for each bucket
-- ARGV[2] late_ms NUMBER  the sum of what they count
-- ARGV[3] took            24 numbers, as above
-- ARGV[4] took_us NUMBER  the sum of what they count
-- ARGV[5] now
--
-- Returns how many buckets were raised

-- check: types
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', times, '')
local raised = 0
local function add(name, numbers, sum)
  local bucket = 0
  for number in string.gmatch(string.sub(numbers, 1, 600), '%d+') do
    if bucket < 24 and tonumber(number) > 0 then
      redis.call('HINCRBY', times, string.format('%s%d', name, bucket), number)
      raised = raised + 1
    end
    bucket = bucket + 1
  end
  if sum > 0 then redis.call('HINCRBY', times, name, string.format('%.0f', sum)) end
end
add('late', late, late_ms)
add('took', took, took_us)
return raised

-- script: store_minute
-- Store the record of a minute with the lateness counted since the last record, and delete records older than the retention.
--
-- KEYS minutes pending
--
-- ARGV[1] minute NUMBER  minutes since the epoch
-- ARGV[2] record
-- ARGV[3] keep NUMBER    how many minutes are kept
-- ARGV[4] now
--
-- Returns kept | present

-- check: types
record = string.sub(record, 1, 500)
-- An earlier attempt whose reply was lost has written the record, with the counts that were pending then.
local field = string.format('%.0f', minute)
if redis.call('HEXISTS', minutes, field) == 1 then return 'present' end
local names, late = { 'first' }, {}
for bucket = 0, 23 do names[#names + 1] = string.format('late%d', bucket) end
local found = redis.call('HMGET', pending, unpack(names))
for i = 2, #names do
  if found[i] then late[#late + 1] = string.format('%d:%s', i - 2, string.sub(found[i], 1, 16)) end
end
-- Delete old minutes, oldest first, in bounded steps. There are none before 'first'.
local first, gone = tonumber(found[1] or '') or minute, {}
if first > minute then first = minute - keep - 1000 end
local last = math.min(minute - keep, first + 999)
for old = first, last do gone[#gone + 1] = string.format('%.0f', old) end
if #gone > 0 then redis.call('HDEL', minutes, unpack(gone)) end
redis.call('HDEL', pending, unpack(names))
redis.call('HSET', minutes, field, string.format('%s|%s', record, table.concat(late, ' ')))
redis.call('HSET', pending, 'first', string.format('%.0f', math.max(first, last + 1)))
-- If sampling stops, the key expires when its last minute is too old.
redis.pcall('EXPIRE', minutes, (keep + 60) * 60)
redis.pcall('EXPIRE', pending, (keep + 60) * 60)
return 'kept'
