-- Count some dead messages of a slot by the first line of their error and by hours, the last deaths first.
-- Changes nothing.
--
-- KEYS[1] dead   ZSET       member -> ms of death
-- KEYS[2] deaths HASH       member -> death
--
-- ARGV[1] lowest            only scores from this, up to highest
-- ARGV[2] highest
-- ARGV[3] after_score       continue behind this entry; empty: from the last death
-- ARGV[4] after_member
-- ARGV[5] scan NUMBER       entries to read, at most
-- ARGV[6] max_bytes NUMBER  read at most about this much
-- ARGV[7] samples NUMBER    messages of a group to name, at most
-- ARGV[8] now
--
-- Returns {end, groups} | {more, groups, score, member}
--         groups: {{line, count, score of the first death, {hour, count, ...}, member, score, ...}, ...}, without bodies.
--         A line has 0 for each number behind its first colon; an hour is its number since the epoch.

-- check: types
scan = math.min(scan, 1000)
-- include: _cursor
-- include: _rows
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

local rows = rows_from(dead, true, lowest, highest, after_score, after_member, scan + 1)
local bytes = 0
for i = 1, math.min(#rows, scan * 2), 2 do
  local member, score = rows[i], rows[i + 1]
  local record = redis.call('HGET', deaths, member)
  local group = group_of(first_line(record))
  group[2], group[3] = group[2] + 1, score
  add_hour(group[4], tonumber(score))
  if group[2] <= samples then group[#group + 1], group[#group + 2] = member, score end -- rule: every_death_is_named
  bytes = bytes + #member + #(record or '')
  local is_last = i + 1 == #rows
  if not is_last and (bytes >= max_bytes or i + 1 == scan * 2) then -- rule: group_ends_early
    return { 'more', groups, score, member }
  end
end
return { 'end', groups }
