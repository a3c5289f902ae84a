-- Find members by their digests in some areas of a slot, from a place in each outwards: a bounded search.
-- Changes nothing.
--
-- KEYS[1] store    ZSET  member -> due ms, or priority
-- KEYS[2] prepare  ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry    ZSET  member -> ms + retries/1024
-- KEYS[4] dead     ZSET  member -> ms of death
-- KEYS[5] claim    ZSET  claimed member -> score it was taken with
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
