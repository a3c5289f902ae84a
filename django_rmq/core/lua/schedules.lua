-- The state of schedules, and their next ticks.
--
-- KEY schedules  HASH  NAME:field -> value; generation -> n

-- script: change_schedule
-- Change one field of a schedule; a tick of it that is written and not due yet has to be taken back first.
--
-- KEYS schedules
--
-- A tick is ready, writing (into its slot), written (until it is due), or retracting (it is taken back): see
-- `ScheduleRecord.state` in core/model/schedule.py.
--
-- ARGV[1] name
-- ARGV[2] field          spec, override, paused, walls (the local times of ticks) or removed
-- ARGV[3] value          empty: none
-- ARGV[4] from_now FLAG  1: ticks count from now on; 0: from the last one
-- ARGV[5] renewed        when a worker last declared it, as the caller knows it; empty: whenever that was
-- ARGV[6] now
--
-- Returns changed | same (or declared by a worker meanwhile) | not_found

-- check: types
-- include: _basics.now
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

-- script: renew_schedule
-- Note that a worker declares a schedule as it is, or that it ends.
--
-- KEYS schedules
--
-- ARGV[1] name
-- ARGV[2] ends FLAG  1: the worker ends; another one that declares the schedule will say so
-- ARGV[3] now
--
-- Returns renewed | not_found

-- check: types
-- include: _basics.now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('spec'), of('removed'))
if not known[1] or known[2] then return 'not_found' end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', schedules, '')
redis.call('HSET', schedules, of('renewed'), ends and '0' or string.format('%.0f', now_ms))
return 'renewed'

-- script: plan_tick
-- Decide the next tick of a schedule, once the tick before it is due; then `put_tick` writes it into its slot, once.
--
-- KEYS schedules
--
-- ARGV[1] name
-- ARGV[2] generation  of the schedule from which the caller computed the tick
-- ARGV[3] before      the instant after which it is the next
-- ARGV[4] instant     in ms
-- ARGV[5] topic
-- ARGV[6] crc         of the basis of its slot
-- ARGV[7] local_times  what the clock in its zone shows then, and showed at the ticks before, as the caller writes it
-- ARGV[8] now
--
-- Returns planned | early (the tick before is not due yet) | lost (another worker was first, or the schedule was changed)

-- check: types
-- include: _basics.now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('generation'), of('at'), of('state'), of('paused'))
local state = known[3]
-- Two workers may plan at the same time, from the same record. The second one finds that the record has changed.
if known[1] ~= generation or known[2] ~= before or known[4] then return 'lost' end -- rule: two_plans_for_one_tick
if state ~= 'ready' and state ~= 'written' then return 'lost' end -- rule: a_plan_skips_the_write
if state == 'written' and tonumber(before) > now_ms then return 'early' end -- rule: two_ticks_wait
if not (tonumber(instant) > tonumber(before)) then
  return redis.error_reply('ERR instant is not after the one before')
end
redis.call('HDEL', schedules, of('walls'))
if local_times ~= '' then redis.call('HSET', schedules, of('walls'), local_times) end
if state == 'written' then redis.call('HSET', schedules, of('last'), before) end
redis.call('HSET', schedules, of('at'), instant, of('state'), 'writing', of('topic'), topic, of('crc'), crc)
return 'planned'

-- script: settle_tick
-- Note what the slot of a tick has answered: that the tick is written, or what came of taking it back.
--
-- KEYS schedules
--
-- ARGV[1] name
-- ARGV[2] generation
-- ARGV[3] instant  of the tick, in ms
-- ARGV[4] outcome  written, or removed (it did not run)
-- ARGV[5] now
--
-- Returns settled | forgotten (the schedule was removed) | lost (noted before, or the schedule was changed)

-- check: types
-- include: _basics.now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('generation'), of('at'), of('state'), of('changed'), of('removed'))
-- A writer may have been slow: another worker has settled this tick since, or the schedule was changed.
if known[1] ~= generation or known[2] ~= instant then return 'lost' end -- rule: a_stale_writer_settles
local at, state = tonumber(instant), known[3]
if state == 'writing' and outcome == 'written' then
  redis.call('HDEL', schedules, '')
  local late = string.format('%.0f', math.max(0, now_ms - at))
  redis.call('HSET', schedules, of('state'), 'written', of('late'), late)
  return 'settled'
end
if state ~= 'retracting' then return 'lost' end
-- A schedule that was removed is forgotten only when its tick has been taken back.
if known[5] then
  redis.call('HDEL', schedules, of('spec'), of('override'), of('paused'), of('removed'), of('generation'), of('at'),
    of('state'), of('changed'), of('topic'), of('crc'), of('last'), of('late'),
    of('renewed'), of('former'), of('walls'))
  return 'forgotten'
end
redis.call('HDEL', schedules, '')
if outcome == 'written' then
  redis.call('HSET', schedules, of('state'), 'written')
  return 'settled'
end
-- The tick did not run, so the next one is searched from before its instant, or from the change if that was earlier.
at = math.min(at - 1, tonumber(known[4])) -- rule: a_tick_taken_back_is_lost
redis.call('HSET', schedules, of('at'), string.format('%.0f', at), of('state'), 'ready')
return 'settled'
