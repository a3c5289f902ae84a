-- Count dead messages of a slot by the first line of their error and by hours, the last deaths first: all, or evenly spread ones.
-- Changes nothing.
--
-- KEYS[1] dead   ZSET       member -> ms of death
-- KEYS[2] deaths HASH       member -> death
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

local above = highest == '+inf' and 0 or redis.call('ZCOUNT', dead, '(' .. highest, '+inf')
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
