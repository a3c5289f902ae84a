-- Deliver the few messages that wait, or find none, where all of them are due and the slot has nothing else: nothing in flight,
-- in Retry, in Dead or claimed, no key, no failure. Most prepares meet such a slot. The rest of the script does the same for all
-- others; to make its functions takes longer than this.
--
-- needs: store prepare inflight dead deaths failures body stats control retry claimants prepare_body
-- needs: room kind slots timeout max_retries expected serial slot_each_us owner limit max_bytes after_score
-- needs: known known_slots paused noted undrained_since now_s now_ms receipt text_of bounded

local is_open = not (known.err or paused or known[9] or noted) and slot_each_us == 0 and after_score == ''
local others = is_open and redis.call('EXISTS', prepare, inflight, dead, deaths, failures, body, retry, claimants, prepare_body)
-- rule: usual_beside_others
if others == 0 and type(redis.pcall('HLEN', stats)) == 'number' then
  local NEVER, MOST = '9007199254740991', 16
  local rows = redis.pcall('ZRANGE', store, 0, MOST, 'WITHSCORES')
  local n, bytes, lowest, latest = #rows / 2, 0, 1000, now_ms
  if kind == 'fifo' then lowest, latest = -math.huge, now_ms + 1 - 1 / 1024 end
  if kind == 'priority' then lowest, latest = math.max(16, max_retries) + 1, math.huge end
  -- Below the limit and the room the owner has seen everything, and can sleep. Of several priorities, the highest come first.
  -- rule: usual_beyond_the_limit
  local is_usual = not rows.err and n < math.min(MOST, limit) and (serial or n < room) and (n <= 1 or kind ~= 'priority')
  for i = 1, is_usual and n or 0 do
    local score = tonumber(rows[i * 2])
    bytes = bytes + #rows[i * 2 - 1]
    if score > latest then is_usual = false end -- rule: usual_before_its_time
    -- A retry has fewer deliveries left, as its score says.
    if score < lowest or (kind == 'priority' and score % 1 ~= 0) then is_usual = false end -- rule: usual_retries
  end
  if n > 1 and bytes > max_bytes then is_usual = false end -- rule: usual_bytes
  if is_usual then
    -- rule: usual_never_drained
    if kind == 'priority' and undrained_since then redis.pcall('HDEL', control, 'undrained_since') end
    if not (known_slots and known[6] and known[7]) then
      redis.call('HSET', control, 'slots', slots, 'timeout', text_of(timeout),
        'max_retries', text_of(max_retries))
    end
    if n == 0 then
      redis.call('HSET', control, 'sleeping_until', NEVER) -- rule: usual_idle_unnoticed
      return { 'empty', '' }
    end
    local ticket, prepared, flights, lefts = text_of(receipt) .. ' ', {}, {}, {}
    local date = text_of(now_s * 1000 + max_retries)
    for i = 1, n * 2, 2 do
      local member, score = rows[i], rows[i + 1]
      prepared[i], prepared[i + 1] = date, member
      flights[i], flights[i + 1] = member, ticket .. score
      if max_retries ~= expected then lefts[#lefts + 1] = max_retries end -- rule: usual_retries_of_the_topic
    end
    redis.call('UNLINK', store)
    redis.call('ZADD', prepare, unpack(prepared))
    redis.call('HSET', inflight, unpack(flights))
    -- rule: usual_owner_unknown
    redis.call('HSET', control, 'owner', owner, 'deliveries', text_of(receipt), 'sleeping_until', NEVER)
    redis.pcall('HINCRBY', stats, 'prepared', n)
    local ends = bounded((now_s + timeout + 1) * 1000, 0, tonumber(NEVER))
    return { 'ok', text_of(ends), NEVER, receipt, rows, lefts, {} }
  end
end
