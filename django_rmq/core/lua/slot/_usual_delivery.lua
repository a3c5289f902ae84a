-- Deliver the few messages that wait, or find none, where all of them are due and the slot has nothing else: nothing in flight, in
-- Retry or Dead, no key, no failure, no claim. Most prepares meet such a slot. The rest of the script does the same for all others;
-- to make its functions takes longer than this.
--
-- needs: store prepare inflight dead deaths failures body stats control retry claimants prepare_body
-- needs: room kind slots timeout max_retries expected serial slot_each_us owner limit max_bytes after_score
-- needs: known undrained_since now_s now_ms receipt

if not (known.err or known[4] or known[9] or known[12]) and slot_each_us == 0 and after_score == ''
  and redis.call('EXISTS', prepare, inflight, dead, deaths, failures, body, retry, claimants, prepare_body) == 0
  and type(redis.pcall('HLEN', stats)) == 'number' then
  local NEVER, MOST = '9007199254740991', 16
  local rows = redis.pcall('ZRANGE', store, 0, MOST, 'WITHSCORES')
  local n, bytes, lowest, after = #rows / 2, 0, 1000, now_ms
  if kind == 'fifo' then lowest, after = -math.huge, now_ms + 1 - 1 / 1024 end
  if kind == 'priority' then lowest, after = math.max(16, max_retries) + 1, math.huge end
  local is_usual = not rows.err and n < math.min(MOST, limit) and (serial or n <= room) and (kind ~= 'priority' or n <= 1)
  for i = 1, is_usual and n or 0 do
    local score = tonumber(rows[i * 2])
    bytes = bytes + #rows[i * 2 - 1]
    -- A lower score is that of a retry; so is a priority with a fraction.
    is_usual = is_usual and score >= lowest and score <= after and (kind ~= 'priority' or score % 1 == 0)
  end
  if is_usual and (n <= 1 or bytes <= max_bytes) then
    if kind == 'priority' and undrained_since then redis.pcall('HDEL', control, 'undrained_since') end
    local notes = { 'sleeping_until', NEVER }
    if not (known[1] and known[6] and known[7]) then
      notes = { 'sleeping_until', NEVER, 'slots', slots, 'timeout', string.format('%.17g', timeout),
        'max_retries', string.format('%.17g', max_retries) }
    end
    if n == 0 then
      redis.call('HSET', control, unpack(notes))
      return { 'empty', '' }
    end
    local ticket, date, prepared, flights, lefts = string.format('%.17g', receipt), nil, {}, {}, {}
    date = string.format('%.17g', now_s * 1000 + max_retries)
    for i = 1, n * 2, 2 do
      prepared[i], prepared[i + 1] = date, rows[i]
      flights[i], flights[i + 1] = rows[i], ticket .. ' ' .. rows[i + 1]
      if max_retries ~= expected then lefts[#lefts + 1] = max_retries end
    end
    redis.call('UNLINK', store)
    redis.call('ZADD', prepare, unpack(prepared))
    redis.call('HSET', inflight, unpack(flights))
    redis.call('HSET', control, 'owner', owner, 'deliveries', ticket, unpack(notes))
    redis.pcall('HINCRBY', stats, 'prepared', n)
    local ends = math.max(0, math.min((now_s + timeout + 1) * 1000, tonumber(NEVER)))
    return { 'ok', string.format('%.17g', ends), NEVER, receipt, rows, lefts, {} }
  end
end
