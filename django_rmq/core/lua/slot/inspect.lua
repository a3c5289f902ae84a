-- What people, programs and workers read of slots.

-- script: count
-- Count what a slot holds by state; read since when messages wait and run, its last consumer, and whether it is paused.
-- Changes nothing.
--
-- KEYS store prepare retry dead control claim inflight claimants claims
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] now
--
-- Returns {store, due, prepare, retry, dead, earliest due ms that has passed or empty, owner or empty, 1 if paused, claimed,
--          ms since when Store of a priority topic has not been empty or empty, ms of the first delivery that runs or empty,
--          how many are claimed under a lease that has ended}
--         due counts messages that are due in Store, have rested in Retry, have timed out in Prepare, or are claimed under a
--         lease that has ended; the earliest ms are those of the first of them

-- check: types but control inflight claimants claims
-- include: _basics.now
-- include: inspect.overdue
-- include: inspect.count_slot
return count_slot(store, prepare, retry, dead, control, claim, inflight, claimants, claims) -- rule: dead_is_resting

-- script: count_slots
-- Count what each of many slots holds, as `count` does of one.
-- Changes nothing.
--
-- KEYS store prepare retry dead control claim inflight claimants claims of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topics, if a slot has none
-- ARGV[3] now
--
-- Returns for each slot what `count` returns, or nil if a key is of another type

-- include: _basics.mistyped
-- include: _basics.now
-- include: inspect.overdue
-- include: inspect.count_slot
if #slots_keys > 576 then return redis.error_reply('ERR too many slots') end
local found = {}
for i = 1, #slots_keys, 9 do
  local store, prepare, retry, dead, control, claim, inflight, claimants, claims = unpack(slots_keys, i, i + 8)
  local wrong = mistyped('zset', store) or mistyped('zset', prepare)
  if not wrong and redis.call('EXISTS', retry, dead, claim) > 0 then
    wrong = mistyped('zset', retry) or mistyped('zset', dead) or mistyped('zset', claim)
  end
  local counts = wrong or count_slot(store, prepare, retry, dead, control, claim, inflight, claimants, claims)
  found[#found + 1] = not counts.err and counts -- rule: one_foreign_key_hides_all
end
return found

-- script: count_between
-- Count the messages of one state whose score is within bounds.
-- Changes nothing.
--
-- KEYS set
--
-- ARGV[1] lowest   only scores from this, up to highest
-- ARGV[2] highest
-- ARGV[3] now
--
-- Returns how many

-- check: types
return redis.call('ZCOUNT', set, lowest, highest) -- rule: between_all

-- script: list_messages
-- List one state of a slot by score.
-- Changes nothing.
--
-- KEYS set records body
--
-- ARGV[1] order             ascending or descending
-- ARGV[2] lowest            only scores from this, up to highest
-- ARGV[3] highest
-- ARGV[4] after_score       continue behind this entry; empty: from the beginning
-- ARGV[5] after_member
-- ARGV[6] limit NUMBER
-- ARGV[7] max_bytes NUMBER  stop behind the entry that reaches it
-- ARGV[8] now
--
-- Returns {more | end, {member, score, envelope or nil, record or nil, ...}}; more: continue behind the last

local descending = order == 'descending'
-- check: types
limit = math.min(limit, 1000)
-- include: _pages.rank_after
-- include: _pages.rows_from
local rows = rows_from(set, descending, lowest, highest, after_score, after_member, limit + 1)
local found, bytes = {}, 0
for i = 1, math.min(#rows, limit * 2), 2 do
  local member = rows[i]
  local envelope, record = redis.call('HGET', body, member), redis.call('HGET', records, member)
  found[#found + 1], found[#found + 2] = member, rows[i + 1]
  found[#found + 1], found[#found + 2] = envelope, record
  bytes = bytes + #member + #(envelope or '') + #(record or '')
  if bytes >= max_bytes and i + 2 <= #rows then return { 'more', found } end -- rule: list_unbounded
end
return { #rows > limit * 2 and 'more' or 'end', found } -- rule: list_ends_early

-- script: search_messages
-- Search one state of a slot for text: a bounded scan that returns where to continue.
-- Changes nothing.
--
-- KEYS set records body
--
-- ARGV[1] order             ascending or descending
-- ARGV[2] lowest            only scores from this, up to highest
-- ARGV[3] highest
-- ARGV[4] after_score       continue behind this entry; empty: from the beginning
-- ARGV[5] after_member
-- ARGV[6] limit NUMBER      matches at most
-- ARGV[7] max_bytes NUMBER  read at most about this much
-- ARGV[8] scan NUMBER       entries to read, at most
-- ARGV[9] text
-- ARGV[10] where            anywhere: in member, envelope or record; error: the class of the last error, or its last part
-- ARGV[11] now
--
-- Returns {end, found} | {more, found, score, member}     found: {member, score, envelope or nil, record or nil, ...}

local descending = order == 'descending'
local anywhere = where == 'anywhere'
-- check: types
scan = math.min(scan, 1000)
-- include: _pages.rank_after
-- include: _pages.rows_from
-- Only the class is compared, because people who may filter by error class may not search bodies or error texts.
local function is_of_class(record)
  local head = string.match(record or '', '^%S+ %d+ %d+ %d+ %S+[^\n]*\n')
  if not head then return false end
  local length = string.match(head, '^%S+ %d+ %d+ %d+ %S+ (%d+) [01]\n$') or 1024
  -- A single word without a colon is text that a user wrote, not a class.
  local said = string.sub(record, #head + 1, #head + tonumber(length)) -- rule: keyed_bodies_are_errors
  local class = string.match(said, '^[^%S\n]*([A-Za-z_][A-Za-z0-9_.<>]*)[^%S\n]*:') -- rule: words_are_classes
  -- rule: error_texts_are_searched
  return class and #class <= 200 and (class == text or string.sub(class, -#text - 1) == '.' .. text)
end

local function is_meant(member, envelope, record)
  if not anywhere then return is_of_class(record) end -- rule: errors_are_searched_everywhere
  return string.find(member, text, 1, true) or (envelope and string.find(envelope, text, 1, true))
    or (record and string.find(record, text, 1, true)) -- rule: search_only_in_members
end

local rows = rows_from(set, descending, lowest, highest, after_score, after_member, scan + 1)
local found, bytes, matches = {}, 0, 0
for i = 1, math.min(#rows, scan * 2), 2 do
  local member = rows[i]
  local envelope, record = redis.call('HGET', body, member), redis.call('HGET', records, member)
  if is_meant(member, envelope, record) then
    matches = matches + 1
    found[#found + 1], found[#found + 2] = member, rows[i + 1]
    found[#found + 1], found[#found + 2] = envelope, record
  end
  bytes = bytes + #member + #(envelope or '') + #(record or '')
  local last = i + 1 == #rows
  if not last and (matches >= limit or bytes >= max_bytes or i + 1 == scan * 2) then -- rule: search_ends_early
    return { 'more', found, rows[i + 1], member }
  end
end
return { 'end', found }

-- script: find_by_digest
-- Find members by their digests in some areas of a slot, from a place in each outwards: a bounded search.
-- Changes nothing.
--
-- KEYS store prepare retry dead claim
--
-- ARGV[1] scan NUMBER       entries to read, at most, approximately
-- ARGV[2] max_bytes NUMBER  read at most about this much
-- ARGV[3] digests           SHA-1 in hexadecimal, one after the other
-- ARGV[4...] state, score (empty: all scores), rank of the place among these, how far from it was read before; of each area
-- ARGV[#ARGV] now
--
-- Returns {members, looked}     members: one for each digest, nil where it was not found
--                               looked: for each area how far from its place was read, -1 if nothing of it is left

-- check: types
scan = math.min(scan, 2000)
if last - first >= 400 then return redis.error_reply('ERR too many areas') end
local members, wanted, missing = {}, {}, #digests / 40
for i = 1, missing do
  members[i] = false
  wanted[string.sub(digests, i * 40 - 39, i * 40)] = i
end

local sets = { store = store, prepare = prepare, retry = retry, dead = dead, claim = claim }
local areas, entries, bytes = {}, 0, 0
for i = first, last, 4 do
  local set, score = sets[ARGV[i]], ARGV[i + 1]
  local from, to = 0, redis.call('ZCARD', set)
  if score ~= '' then
    from, to = redis.call('ZCOUNT', set, '-inf', '(' .. score), redis.call('ZCOUNT', set, '-inf', score)
  end
  local place = math.max(from, math.min(from + tonumber(ARGV[i + 2]), to - 1))
  -- rule: find_by_digest_begins_anew
  areas[#areas + 1] = { set = set, from = from, to = to, place = place, looked = tonumber(ARGV[i + 3]) }
end

local function look_at(area, low, high)
  low, high = math.max(low, area.from), math.min(high, area.to) -- rule: find_by_digest_leaves_its_score
  if low >= high then return end
  for _, member in ipairs(redis.call('ZRANGE', area.set, low, high - 1)) do
    entries, bytes = entries + 1, bytes + #member
    local index = wanted[redis.sha1hex(member)]
    if index and not members[index] then members[index], missing = member, missing - 1 end
  end
end

local function is_left(area)
  return area.from < area.to and (area.place - area.looked >= area.from or area.place + area.looked < area.to)
end

-- All areas grow in turns, so that a missing member does not use up the search for the others.
local step = 1
for _ = 1, scan do
  local went_on = false
  for _, area in ipairs(areas) do
    if missing > 0 and entries < scan and bytes < max_bytes and is_left(area) then -- rule: find_by_digest_unbounded
      local near, far = area.looked, area.looked + step -- rule: find_by_digest_one_area_at_a_time
      look_at(area, area.place + near, area.place + far)
      look_at(area, area.place - far + 1, area.place - math.max(near, 1) + 1) -- rule: find_by_digest_forwards_only
      area.looked, went_on = far, true
    end
  end
  if not went_on then break end
  step = math.max(1, math.min(step * 2, 64, math.floor((max_bytes - bytes) * entries / math.max(bytes, 1) / 2)))
end
local looked = {}
for i, area in ipairs(areas) do looked[i] = is_left(area) and area.looked or -1 end
return { members, looked }

-- script: group_deaths
-- Count dead messages of a slot by the first line of their error and by hours, the last deaths first: all, or evenly spread ones.
-- Changes nothing.
--
-- KEYS dead deaths
--
-- ARGV[1] lowest            only scores from this, up to highest
-- ARGV[2] highest
-- ARGV[3] skip NUMBER       messages to pass over, from the last death
-- ARGV[4] stride NUMBER     of each `stride` messages from there, the first `run` are read
-- ARGV[5] run NUMBER
-- ARGV[6] scan NUMBER       messages to read, at most
-- ARGV[7] max_bytes NUMBER  read at most about this much
-- ARGV[8] samples NUMBER    messages of a group to name, at most
-- ARGV[9] now
--
-- Returns {how many messages to skip in order to go on, or 0 at the end, groups}
--         groups: {{line, count, score of the first death, {hour, count, ...}, member, score, ...}, ...}, without bodies.
--         A line has 0 for each number behind its first colon; an hour is its number since the epoch.

-- check: types
scan, run = math.max(math.min(scan, 1000), 1), math.max(run, 1)
stride = math.max(stride, run)
local HOUR_MS, LATEST_MS, LONGEST = 3600000, 1e15, 1000

local function first_line(record)
  local length, at = string.match(record or '', '^%S+ %d+ %d+ %d+ %S+ (%d+) [01]\n()')
  if not length then return '' end
  local stop = string.find(record, '\n', at, true) or #record + 1
  return string.sub(record, at, math.min(stop, at + tonumber(length)) - 1) -- rule: bodies_are_grouped
end

-- The caller cuts longer lines, and a number may be as long as the rest. A class, which ends at the colon, keeps its numbers.
local function without_numbers(line)
  if #line > LONGEST then return line end
  local colon = string.find(line, ':', 1, true) or 0 -- rule: classes_lose_their_numbers
  local text = string.gsub(string.sub(line, colon + 1), '%d+', '0')
  return string.sub(line, 1, colon) .. text
end

local groups, by_line = {}, {}

local function group_of(line)
  local group = by_line[line]
  if group then return group end
  local plain = without_numbers(line)
  group = by_line[plain]
  if not group then
    group = { plain, 0, '', {} }
    by_line[plain], groups[#groups + 1] = group, group
  end
  by_line[line] = group
  return group
end

local function add_hour(hours, at)
  if math.abs(at) > LATEST_MS then return end
  local hour, n = math.floor(at / HOUR_MS), #hours
  if hours[n - 1] == hour then -- rule: hours_are_joined
    hours[n] = hours[n] + 1
  else
    hours[n + 1], hours[n + 2] = hour, 1
  end
end

local function add(member, score, record)
  local group = group_of(first_line(record))
  group[2], group[3] = group[2] + 1, score
  add_hour(group[4], tonumber(score))
  if group[2] <= samples then group[#group + 1], group[#group + 2] = member, score end -- rule: every_death_is_named
end

local above = highest == 'inf' and 0 or redis.call('ZCOUNT', dead, '(' .. highest, '+inf')
local stop = above + redis.call('ZCOUNT', dead, lowest, highest)
local bytes = 0
for from = above + skip, stop - 1, stride do
  local rows = redis.call('ZREVRANGE', dead, from, math.min(from + math.min(run, scan), stop) - 1, 'WITHSCORES')
  local members = {}
  for i = 1, #rows, 2 do members[#members + 1] = rows[i] end
  for i, record in ipairs(redis.call('HMGET', deaths, unpack(members))) do
    add(members[i], rows[2 * i], record)
    bytes = bytes + #members[i] + #(record or '')
  end
  scan = scan - #members
  if (scan < 1 or bytes >= max_bytes) and from + stride < stop then -- rule: group_ends_early
    return { from + stride - above, groups }
  end
end
return { 0, groups }

-- script: describe_messages
-- Read everything that a slot knows about some members, in all states.
-- Changes nothing.
--
-- KEYS store prepare inflight retry dead deaths failures body claim claim_body prepare_body claim_failed
--
-- ARGV[1...] members
-- ARGV[#ARGV] now
--
-- Returns for each member {scores in store, prepare, retry, dead and claim, in-flight record, death, last failure,
--         envelope, envelopes of the claimed copy and of the one in flight, how its query has failed it},
--         nil for what there is not

-- check: types
if last - first >= 100 then return redis.error_reply('ERR too many members') end -- rule: describe_past_its_bound
local found = {}
for i = first, last do
  local member = ARGV[i]
  found[#found + 1] = {
    redis.call('ZSCORE', store, member), redis.call('ZSCORE', prepare, member),
    redis.call('ZSCORE', retry, member), redis.call('ZSCORE', dead, member), redis.call('ZSCORE', claim, member),
    redis.call('HGET', inflight, member), redis.call('HGET', deaths, member),
    redis.call('HGET', failures, member), redis.call('HGET', body, member), redis.call('HGET', claim_body, member),
    redis.call('HGET', prepare_body, member), redis.call('HGET', claim_failed, member),
  }
end
return found

-- script: status
-- Read what a slot knows about one message: its state, its failures, its progress, and its outcome (OUTCOME_RETENTION).
-- Changes nothing.
--
-- KEYS store prepare inflight retry dead deaths failures claim control outcomes outcome_times delivery_outcomes
--
-- ARGV[1] outcome_retention_ms NUMBER  0: the topic keeps nothing
-- ARGV[2] digest          of the member
-- ARGV[3...] members      the message; none: only its digest is known, so only the outcome is returned
-- ARGV[#ARGV] now
--
-- Returns {scores in store, prepare, retry, dead and claim, in-flight record, death without its body, last failure, worker,
--         outcome}, nil for what there is not

-- check: types
-- include: _basics.now
local outcome, oldest = false, now_ms - outcome_retention_ms
local at = outcome_retention_ms > 0 and tonumber(redis.call('ZSCORE', outcome_times, digest))
if at and at > oldest then outcome, oldest = redis.call('HGET', outcomes, digest), at end -- rule: outcome_outstays
if outcome_retention_ms > 0 then
  local packed = string.gsub(digest, '%x%x', function(code) return string.char(tonumber(code, 16)) end)
  -- Texts that are newer than what was noted for this message alone, the last one first.
  local texts = redis.call('ZRANGE', delivery_outcomes, '+inf', string.format('(%.17g', oldest), 'BYSCORE', 'REV')
  for _, text in ipairs(texts) do
    local size, from = string.match(text, '^%d+ (%d+)\n()')
    local behind = size and from + size * 12
    local place = size and string.find(text, packed, from, true)
    if place and place < behind then
      outcome = string.sub(text, behind)
      break
    end
  end
end
if last < first then return { false, false, false, false, false, false, false, false, false, outcome } end
local member = ARGV[first]
local death = redis.call('HGET', deaths, member)
-- The body is left out of a death: it may be large, and a status does not show it.
local head, length = string.match(death or '', '^(%S+ %d+ %d+ %d+ %S+ (%d+) )[01]\n')
if head then
  local from = string.find(death, '\n', 1, true)
  death = head .. '0\n' .. string.sub(death, from + 1, from + tonumber(length))
end
return {
  redis.call('ZSCORE', store, member), redis.call('ZSCORE', prepare, member), redis.call('ZSCORE', retry, member),
  redis.call('ZSCORE', dead, member), redis.call('ZSCORE', claim, member), redis.call('HGET', inflight, member),
  death, redis.call('HGET', failures, member), redis.call('HGET', control, 'owner'), outcome,
}

-- script: ranks
-- Read the rank of members of one state among those of the same score.
-- Changes nothing.
--
-- KEYS set
--
-- ARGV[1...] members
-- ARGV[#ARGV] now
--
-- Returns for each member its rank from 0 among those of its score, nil if it is not there

-- check: types
if last - first >= 1000 then return redis.error_reply('ERR too many members') end
local ranks = {}
for i = first, last do
  local rank, score = redis.call('ZRANK', set, ARGV[i]), redis.call('ZSCORE', set, ARGV[i])
  ranks[#ranks + 1] = rank and rank - redis.call('ZCOUNT', set, '-inf', '(' .. score) -- rule: ranks_among_all
end
return ranks

-- script: heads
-- Read when something can next be taken from each of many slots: the slow poll, which finds what no wake-up has announced.
-- Changes nothing.
--
-- KEYS store retry prepare control claimants of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topic, if the slot has none
-- ARGV[3] upkeep FLAG     1: only when deliveries time out and leases of claims end
-- ARGV[4] now
--
-- Returns for each slot its next due time in ms (0: something can be taken whatever the time), or empty

if #slots_keys > 5120 then return redis.error_reply('ERR too many slots') end
-- include: _sleep.all_empty
local function head(i)
  -- A slot with a key of a foreign type counts as due: its prepare then names the key.
  local waiting = redis.pcall('ZRANGE', slots_keys[i], 0, 0, 'WITHSCORES')
  local resting = redis.pcall('ZRANGE', slots_keys[i + 1], 0, 0, 'WITHSCORES')
  local running = redis.pcall('ZRANGE', slots_keys[i + 2], 0, 0, 'WITHSCORES')
  local own = redis.pcall('HGET', slots_keys[i + 3], 'timeout')
  local claimed = redis.pcall('ZRANGE', slots_keys[i + 4], 0, 0, 'WITHSCORES')
  if waiting.err or resting.err or running.err or claimed.err then return 0 end
  if not (waiting[1] or resting[1] or running[1] or claimed[1]) then return math.huge end
  if type(own) == 'table' then return 0 end
  local due = math.huge
  if waiting[1] and not upkeep then
    local round = topic_type == 'fifo' and math.floor or math.ceil
    due = topic_type == 'priority' and 0 or round(tonumber(waiting[2]))
  end
  if resting[1] and not upkeep then due = math.min(due, math.floor(tonumber(resting[2]))) end
  if running[1] then
    -- rule: heads_without_timeouts
    due = math.min(due, (math.floor(tonumber(running[2]) / 1000) + (tonumber(own) or timeout) + 1) * 1000)
  end
  if claimed[1] then due = math.min(due, math.ceil(tonumber(claimed[2]))) end -- rule: heads_without_leases
  return due
end
local heads = {}
local none = all_empty(1, 1024)
for first = 1, #slots_keys, 80 do
  local empty = none or all_empty(first, 16)
  for i = first, math.min(first + 75, #slots_keys), 5 do
    local due = empty and math.huge or head(i)
    heads[#heads + 1] = due < 9007199254740992 and string.format('%.0f', math.max(0, due)) or ''
  end
end
return heads

-- script: find_occupied
-- Read which of many slots hold messages.
-- Changes nothing.
--
-- KEYS store prepare retry dead claim of each slot
--
-- ARGV[1] now
--
-- Returns for each slot 1 if it holds messages, or 0

if #slots_keys > 5120 then return redis.error_reply('ERR too many slots') end
local found = {}
for i = 1, #slots_keys, 5 do
  local exist = redis.call('EXISTS', unpack(slots_keys, i, i + 4)) -- rule: claimed_slots_are_empty
  found[#found + 1] = exist > 0 and 1 or 0
end
return found

-- script: find_paused
-- Read which of many slots are paused.
-- Changes nothing.
--
-- KEYS control of each slot
--
-- ARGV[1] now
--
-- Returns {the places of those, the places of slots whose key is of another type}: places among the keys, from 1

if #slots_keys > 1024 then return redis.error_reply('ERR too many slots') end
local places, foreign = {}, {}
for i = 1, #slots_keys do
  local paused = redis.pcall('HGET', slots_keys[i], 'paused')
  if type(paused) == 'table' then
    foreign[#foreign + 1] = i
  elseif paused then
    places[#places + 1] = i -- rule: nothing_is_paused
  end
end
return { places, foreign }

-- script: audit_ledger
-- Read the ledger of a slot and its depths, in one instant.
-- Changes nothing.
--
-- KEYS store prepare retry dead stats claim
--
-- ARGV[1] now
--
-- Returns {store, prepare, retry, dead, {counter, n, ...}, claimed}

-- check: types
-- rule: audit_of_another
return { redis.call('ZCARD', store), redis.call('ZCARD', prepare), redis.call('ZCARD', retry),
  redis.call('ZCARD', dead), redis.call('HGETALL', stats), redis.call('ZCARD', claim) }

-- section: overdue
-- Counts the messages that can be taken although they are not in Store: retries whose rest is over, deliveries that have timed
-- out, and claimed messages whose lease has ended.
--
-- needs: now_s now_ms

-- Returns the bound below which the stamps of deliveries have timed out.
local function timed_out(timeout)
  return string.format('(%.0f', (now_s - timeout) * 1000)
end

-- Returns two values:
--   how many claimed messages come back,
--   when their lease ended, in ms, or infinity.
local function unleased_claim(claim, claimants, claims)
  local head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
  if not head[1] or tonumber(head[2]) > now_ms then return 0, math.huge end -- rule: live_claim_is_due
  -- A query that died between two steps of `ack_claim` leaves messages behind, which do not come back.
  local record = redis.call('HGET', claims, head[1]) or ''
  if string.match(record, '^%d+ acked ') then return 0, math.huge end -- rule: acknowledged_is_due
  return redis.call('ZCARD', claim), math.max(0, math.ceil(tonumber(head[2]))) -- rule: unleased_claim_not_due
end

-- `rests`, `runs` and `held` are the sizes of Retry, Prepare and the claim. Returns three values:
--   how many messages can be taken,
--   since when the first of them can be taken, in ms, or infinity,
--   how many of them are claimed.
local function overdue(resting, rests, running, runs, timeout, claim, held, claimants, claims)
  local found, since, unleased = 0, math.huge, 0
  if rests > 0 then
    found = redis.call('ZCOUNT', resting, '-inf', string.format('(%.0f', now_ms + 1)) -- rule: rested_not_due
    local head = found > 0 and redis.call('ZRANGE', resting, 0, 0, 'WITHSCORES')
    if head then since = math.max(0, math.floor(tonumber(head[2]))) end
  end
  if runs > 0 then
    local late = redis.call('ZCOUNT', running, '-inf', timed_out(timeout)) -- rule: timed_out_not_due
    local head = late > 0 and redis.call('ZRANGE', running, 0, 0, 'WITHSCORES')
    if head then since = math.min(since, math.max(0, (math.floor(tonumber(head[2]) / 1000) + timeout + 1) * 1000)) end
    found = found + late
  end
  if held > 0 then
    local at
    unleased, at = unleased_claim(claim, claimants, claims)
    found, since = found + unleased, math.min(since, at)
  end
  return found, since, unleased
end

-- section: count_slot
-- Counts what a slot holds by state, for the scripts that count one slot or many.
--
-- needs: topic_type timeout now_ms sizes mistyped timed_out overdue

-- Returns what `count` returns, or an error: the control or the records of the slot are of another type. The sets have been
-- measured before, those that most slots lack only where one of them exists.
local function count_slot(store, prepare, retry, dead, control, claim, inflight, claimants, claims)
  local waiting, runs = sizes[store], sizes[prepare]
  local rests, ended, held = sizes[retry] or 0, sizes[dead] or 0, sizes[claim] or 0
  local due, oldest = waiting, ''
  if topic_type ~= 'priority' and waiting > 0 then
    local first = tonumber(redis.call('ZRANGE', store, 0, 0, 'WITHSCORES')[2])
    local at = string.format('%.0f', now_ms)
    due = first <= now_ms and redis.call('ZCOUNT', store, '-inf', at) or 0 -- rule: count_all_as_due
    if due > 0 then oldest = redis.call('ZRANGEBYSCORE', store, '(999', at, 'WITHSCORES', 'LIMIT', 0, 1)[2] or '' end
  end
  local known = redis.pcall('HMGET', control, 'owner', 'paused', 'undrained_since', 'timeout')
  if known.err then return mistyped('hash', control) end
  local undrained_since = topic_type == 'priority' and waiting > 0 and known[3] or ''
  local time_limit = tonumber(known[4]) or timeout
  if runs + held > 0 then
    local wrong = mistyped('hash', inflight) or mistyped('hash', claims) or mistyped('zset', claimants)
    if wrong then return wrong end
  end
  local others, since, unleased = overdue(retry, rests, prepare, runs, time_limit, claim, held, claimants, claims)
  if others > 0 then
    local first = string.format('%.0f', since)
    if topic_type == 'priority' then
      if since < (tonumber(undrained_since) or math.huge) then undrained_since = first end -- rule: overdue_undated
    elseif since < (tonumber(oldest) or math.huge) then
      oldest = first
    end
  end

  -- A receipt is the time of its delivery in microseconds, and no extension changes it.
  local first_delivery = ''
  if runs > 0 then
    local low, first = string.sub(timed_out(time_limit), 2), math.huge
    local members = redis.call('ZRANGEBYSCORE', prepare, low, '+inf', 'LIMIT', 0, 1000)
    for _, record in ipairs(#members > 0 and redis.call('HMGET', inflight, unpack(members)) or {}) do
      first = math.min(first, tonumber(string.match(record or '', '^%d+')) or math.huge) -- rule: newest_runs_longest
    end
    if first < math.huge then first_delivery = string.format('%.0f', math.floor(first / 1000)) end
  end
  return { waiting, due + others, runs, rests, ended, oldest,
    known[1] or '', known[2] and 1 or 0, held, undrained_since, first_delivery, unleased } -- rule: count_never_paused
end
