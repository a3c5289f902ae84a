-- Note what the slot of a tick has answered: that the tick is written, or what came of taking it back.
--
-- KEYS[1] schedules  HASH  NAME:field -> value; generation -> n
--
-- ARGV[1] name
-- ARGV[2] generation
-- ARGV[3] instant  of the tick, in ms
-- ARGV[4] outcome  written, or removed (it did not run)
-- ARGV[5] now
--
-- Returns settled | forgotten (the schedule was removed) | lost (noted before, or the schedule was changed)

-- check: types
-- include: _now
local function of(part)
  return name .. ':' .. part
end
local known = redis.call('HMGET', schedules, of('generation'), of('at'), of('state'), of('changed'), of('removed'))
-- A writer may have been slow: another worker has settled this tick since, or the schedule was changed.
if known[1] ~= generation or known[2] ~= instant then return 'lost' end -- rule: a_stale_writer_settles
-- The states: `ready`: the next tick is to be planned. `writing`: the tick `at` is to be written into its slot. `written`: it is
-- there. `retracting`: it is to be taken back, because the schedule was changed or removed.
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
