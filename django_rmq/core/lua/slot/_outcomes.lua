-- Outcomes: what became of messages, on topics with OUTCOME_RETENTION, and how long it is kept. A script collects the notes, and
-- writes them with the ledger at its end.

-- section: notes
-- What ends one by one has a record in `outcomes`, by the digest of its member. What a commit ends as a whole has one text in
-- `delivery_outcomes` (note_delivery). Of two notes of one message the later one counts. Its score says which that is, because
-- scores only rise: a record is not before the last text, and a text is behind all that was noted.
--
-- keys: outcomes outcome_times delivery_outcomes
-- arguments: outcome_retention_ms NUMBER
-- needs: control now_ms text_of [failures]
-- offers: note_receipt note_progress note_outcome note_done write_outcomes

local outcome_receipts, outcome_fields, worker = {}, {}, nil

-- Remember the receipt of a delivery before its record is deleted.
local function note_receipt(member, record)
  outcome_receipts[member] = string.match(record, '^%d+')
end

-- The digest stands for the member: a body may be long, and need not stay longer than its message.
local function note(member, record)
  local n = #outcome_fields
  outcome_fields[n + 1], outcome_fields[n + 2] = string.sub(redis.sha1hex(member), 1, 24), record
end

local function note_progress(member, receipt, thousandths, text)
  note(member, string.format('running %s %s %.0f\n', receipt, thousandths, now_ms) .. text)
end

local function outcome_of(state, reason, attempts, text, receipt)
  -- In two steps: one pattern would try every shorter class again where no colon follows.
  local class, after = string.match(text, '^[^%S\n]*([A-Za-z_][A-Za-z0-9_.<>]*)()')
  if not class or #class > 200 or not string.match(text, '^[^%S\n]*:', after) then class = '' end
  worker = worker or redis.call('HGET', control, 'owner') or ''
  local said_by = receipt > 0 and worker or ''
  -- A receipt is the time of the delivery in us.
  return string.format('%s %s %d %.0f %.0f %s\n', state, reason, attempts, math.floor(receipt / 1000), now_ms, class) .. said_by
end

-- `delivered`: 1 if the message ended with a delivery.
local function note_outcome(member, state, reason, attempts, text, delivered)
  local receipt = delivered == 1 and tonumber(outcome_receipts[member]) or 0
  note(member, outcome_of(state, reason, attempts, text, receipt))
end

-- Note deliveries that succeeded, before their failures are deleted. What `commit_delivery` ends has none.
local function note_done(members, receipt)
  local number, failed = tonumber(receipt), {}
  if failures and redis.call('HLEN', failures) > 0 then failed = redis.call('HMGET', failures, unpack(members)) end
  local at_once = outcome_of('done', '-', 1, '', number)
  for i, member in ipairs(members) do
    local times, text
    if failed[i] then times, text = string.match(failed[i], '^%S+ (%d+) %d+ %d+ %S+\n(.*)') end
    note(member, times and outcome_of('done', '-', times + 1, text, number) or at_once)
  end
end

local function write_outcomes()
  if #outcome_fields == 0 then return end
  -- Mostly nothing has been noted later than now.
  local later = redis.call('ZRANGEBYSCORE', delivery_outcomes, '(' .. text_of(now_ms), '+inf', 'WITHSCORES')
  local scores, ended_at = {}, later[#later] or text_of(now_ms) -- rule: outcome_before_a_delivery
  for i = 1, #outcome_fields, 2 do
    scores[i], scores[i + 1] = ended_at, outcome_fields[i]
  end
  -- pcall: as with counters, no message is lost if a note cannot be written.
  -- A value that is too long for a listpack makes Redis use a hash table at once. The next command replaces the value.
  if #outcome_fields > 64 then redis.pcall('HSET', outcomes, outcome_fields[1], string.rep(' ', 65)) end
  redis.pcall('HSET', outcomes, unpack(outcome_fields))
  redis.pcall('ZADD', outcome_times, unpack(scores))
  -- rule: outcomes_never_go
  local old = redis.call('ZRANGEBYSCORE', outcome_times, '-inf', text_of(now_ms - outcome_retention_ms), 'LIMIT', 0, 2000)
  local over = math.min(redis.call('ZCARD', outcome_times) - #old - 10000, 2000)
  if #old == 0 and over > 0 then old = redis.call('ZRANGE', outcome_times, 0, over - 1) end -- rule: outcomes_without_bound
  if #old > 0 then
    redis.call('ZREM', outcome_times, unpack(old))
    redis.call('HDEL', outcomes, unpack(old))
  end
  redis.call('PEXPIRE', outcomes, outcome_retention_ms)
  redis.call('PEXPIRE', outcome_times, outcome_retention_ms)
end

-- section: note_delivery
-- Note the outcome of a delivery that has succeeded as a whole. Its messages ended alike, so one text is enough for all of them:
-- a number that grows by one for each message, how many these are, their digests (12 bytes each), and the record of `outcomes`.
--
-- needs: delivery_outcomes outcome_times outcome_retention_ms now_ms text_of outcome_of
-- offers: note_delivery

local function note_delivery(receipt, size, digests)
  local last = redis.call('ZREVRANGE', delivery_outcomes, 0, 0, 'WITHSCORES')
  local single = redis.call('ZREVRANGE', outcome_times, 0, 0, 'WITHSCORES')
  local noted = (tonumber(string.match(last[1] or '', '^%d+')) or 0) + size
  -- rule: delivery_before_an_outcome
  local at = math.max(now_ms, (tonumber(last[2]) or 0) + 1, (tonumber(single[2]) or 0) + 1)
  local text = string.format('%.0f %.0f\n', noted, size) .. digests .. outcome_of('done', '-', 1, '', tonumber(receipt))
  redis.pcall('ZADD', delivery_outcomes, text_of(at), text)
  local rows, gone = redis.call('ZRANGE', delivery_outcomes, 0, 2, 'WITHSCORES'), 0
  for i = 1, #rows, 2 do
    local newer = noted - (tonumber(string.match(rows[i], '^%d+')) or 0)
    local is_old = tonumber(rows[i + 1]) <= now_ms - outcome_retention_ms -- rule: delivery_outcomes_never_go
    if is_old or newer >= 10000 then gone = gone + 1 end -- rule: delivery_outcomes_without_bound
  end
  if gone > 0 then redis.call('ZREMRANGEBYRANK', delivery_outcomes, 0, gone - 1) end
  redis.call('PEXPIRE', delivery_outcomes, outcome_retention_ms)
end
