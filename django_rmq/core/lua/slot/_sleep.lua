-- Until when the consumer of a slot sleeps (`next_due`), and what wakes it: `wake` is called by all scripts that make something
-- available, and `opens_gate` says whether the end of a delivery does. `all_empty` is for consumers of many slots.
--
-- NEVER is the largest whole number of a double: asleep until a message comes. GATE is the next one: answered busy, and asleep
-- until the gate opens. `wake` has both as the texts that Redis holds.

-- section: next_due
-- Compute until when there is nothing to deliver.
--
-- needs: store retry prepare claimants control
-- needs: topic_type timeout in_flight claimed rests behind now_ms bounded text_of note_undrained keep_counts

local NEVER, GATE = 9007199254740991, 9007199254740992

-- `more`: something can be taken now. `ends`: when the first delivery in flight times out, if that is known. Returns two values:
--   the earliest time at which another prepare can find something,
--   the same without the deliveries in flight, which end before they time out.
local function next_due(more, ends)
  local due = math.huge
  if more or behind then due = now_ms end
  if topic_type ~= 'priority' then
    local is_fifo = topic_type == 'fifo'
    local after = is_fifo and text_of(now_ms + 1) or '(' .. text_of(now_ms)
    local head = redis.call('ZRANGEBYSCORE', store, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    local round = is_fifo and math.floor or math.ceil
    if head[1] then due = math.min(due, bounded(round(tonumber(head[2])), 0, NEVER)) end
  end
  local head = rests and redis.call('ZRANGE', retry, 0, 0, 'WITHSCORES') or {}
  -- rule: next_due_forgets_retries
  if head[1] then due = math.min(due, bounded(math.floor(tonumber(head[2])), 0, NEVER)) end
  if claimed then -- rule: prepare_sleeps_past_a_lease
    head = redis.call('ZRANGE', claimants, 0, 0, 'WITHSCORES')
    due = math.min(due, bounded(math.ceil(tonumber(head[2])), 0, NEVER)) -- rule: next_due_beyond_all_instants
  end
  local waiting = due
  head = in_flight > 0 and not ends and redis.call('ZRANGE', prepare, 0, 0, 'WITHSCORES') or {}
  if head[1] then ends = (math.floor(tonumber(head[2]) / 1000) + timeout + 1) * 1000 end
  if ends then due = math.min(due, bounded(ends, 0, NEVER)) end
  return due, waiting
end

-- Answer `word` to the caller, which then sleeps until `due`. A script that makes something available before `sleep` wakes it.
local function idle(word, due, sleep)
  if sleep then redis.call('HSET', control, 'sleeping_until', text_of(sleep)) end -- rule: sleeps_unnoticed
  note_undrained()
  keep_counts()
  return { word, due < math.huge and text_of(due) or '' }
end

-- section: wake
-- Wake a consumer that sleeps past `due_ms`, once: the next one to fall asleep writes `sleeping_until` again.
--
-- needs: control channel sleeping_until

local NEVER, GATE = '9007199254740991', '9007199254740992'
local function wake(due_ms)
  local sleeper = tonumber(sleeping_until)
  if sleeper and due_ms < sleeper then -- rule: wakes_too_many
    sleeping_until = nil -- rule: wakes_without_end
    redis.pcall('HDEL', control, 'sleeping_until') -- rule: wakes_without_end
    redis.pcall('PUBLISH', channel, string.match(control, '(%d+)}$'))
  end
end

-- section: opens_gate
-- Whether a consumer sleeps until the gate opens, and may take again: Prepare holds less than the slot's capacity.
--
-- needs: prepare slot_capacity sleeping_until GATE

local function opens_gate()
  return sleeping_until == GATE and redis.call('ZCARD', prepare) < slot_capacity
end

-- section: all_empty
-- Whether `slots` slots hold nothing that can ever be taken. Most of many slots are empty; one read covers up to 1,024.
--
-- needs: slots_keys

local function all_empty(first, slots)
  local keys, n = {}, 0
  for i = first, math.min(first + 5 * (slots - 1), #slots_keys), 5 do
    -- Each slot has five keys; the fourth is control, which holds no messages.
    keys[n + 1], keys[n + 2], keys[n + 3] = slots_keys[i], slots_keys[i + 1], slots_keys[i + 2]
    keys[n + 4], n = slots_keys[i + 4], n + 4 -- rule: asleep_where_claims_end
  end
  return redis.pcall('EXISTS', unpack(keys)) == 0
end
