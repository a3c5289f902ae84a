-- Decide the next tick of a schedule, once the tick before it is due; then `put_tick` writes it into its slot, once.
--
-- KEYS[1] schedules  HASH  NAME:field -> value; generation -> n
--
-- ARGV[1] name
-- ARGV[2] generation  of the schedule from which the caller computed the tick
-- ARGV[3] before      the instant after which it is the next
-- ARGV[4] instant     in ms
-- ARGV[5] topic
-- ARGV[6] crc         of the basis of its slot
-- ARGV[7] walls       the time that the clock in its zone shows then, and showed at the ticks before, as the caller writes it
-- ARGV[8] now
--
-- Returns planned | early (the tick before is not due yet) | lost (another worker was first, or the schedule was changed)

-- check: types
-- include: _now
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
if walls ~= '' then redis.call('HSET', schedules, of('walls'), walls) end
if state == 'written' then redis.call('HSET', schedules, of('last'), before) end
redis.call('HSET', schedules, of('at'), instant, of('state'), 'writing', of('topic'), topic, of('crc'), crc)
return 'planned'
