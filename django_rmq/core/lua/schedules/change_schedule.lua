-- Change one field of a schedule; a tick of it that is written and not due yet has to be taken back first.
--
-- KEYS[1] schedules  HASH  NAME:field -> value; generation -> n
--
-- A tick is ready, writing (into its slot), written (until it is due), or retracting (it is taken back).
--
-- ARGV[1] name
-- ARGV[2] field          spec, override, paused, walls or removed
-- ARGV[3] value          empty: none
-- ARGV[4] from_now FLAG  1: ticks count from now on; 0: from the last one
-- ARGV[5] renewed        when a worker last declared it, as the caller knows it; empty: whenever that was
-- ARGV[6] now
--
-- Returns changed | same (or declared by a worker meanwhile) | not_found

-- check: types
-- include: _now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('spec'), of(field), of('at'), of('state'), of('removed'), of('renewed'),
  'generation')
if field ~= 'spec' and not known[1] then return 'not_found' end
if (known[2] or '') == value and not (field == 'spec' and known[5]) then return 'same' end
-- The caller believes that no worker declares the schedule, but one has declared it since the caller read that.
if renewed ~= '' and (known[6] or '0') ~= renewed then return 'same' end -- rule: a_change_against_who_declares
-- Start with a deletion: after it, a full server accepts the rest.
redis.call('HDEL', schedules, of(field), field == 'spec' and of('removed') or '')
if value ~= '' then redis.call('HSET', schedules, of(field), value) end
-- Slots remember generations. A generation that begins with the time is not given again after this key alone was lost.
local newest = now_ms - 1 -- rule: a_lost_key_gives_a_generation_again
local generation = string.format('%.0f', math.max(newest, tonumber(known[7]) or 0) + 1) -- rule: a_change_without_a_generation
redis.call('HSET', schedules, 'generation', generation)
if field == 'spec' then
  redis.call('HSET', schedules, of('renewed'), string.format('%.0f', now_ms))
  if known[1] and known[1] ~= value then redis.call('HSET', schedules, of('former'), redis.sha1hex(known[1])) end
end
local at, state = tonumber(known[3]), known[4] or 'ready'
-- A tick that is being written counts as waiting: its writer may have put it into the slot, and may have died since.
local waits = state == 'writing' or (state == 'written' and at > now_ms)
if state == 'written' and not waits then
  redis.call('HSET', schedules, of('last'), known[3])
  state = 'ready'
end
if waits or (field == 'removed' and state ~= 'retracting') then state = 'retracting' end -- rule: a_change_leaves_the_tick
if state == 'ready' and (from_now or not at) then at = now_ms end
redis.call('HSET', schedules, of('generation'), generation, of('at'), string.format('%.0f', at), of('state'), state,
  of('changed'), string.format('%.0f', now_ms))
return 'changed'
