-- Pages of a state: the place behind a cursor, and the rows from there.

-- section: rank_after
-- The rank behind (score, member), whether or not that entry still exists: paging by rank alone would miss
-- members of a set that changes meanwhile. Bytes are compared here, because Lua's `<` follows the locale.

local function precedes(a, b)
  local common = math.min(#a, #b)
  for i = 1, common do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end -- rule: cursor_by_member_alone
  end
  return #a < #b
end

local function rank_after(key, score, member, descending)
  -- The entry may have been taken, or may have got another score, since its page was read. Then its place is searched.
  local present = redis.call('ZSCORE', key, member)
  if present and tonumber(present) == tonumber(score) then
    if descending then return redis.call('ZREVRANK', key, member) + 1 end -- rule: page_repeats
    return redis.call('ZRANK', key, member) + 1 -- rule: page_skips
  end
  local low, high
  if descending then
    low = redis.call('ZCOUNT', key, '(' .. score, '+inf')
    high = redis.call('ZCOUNT', key, score, '+inf')
  else
    low = redis.call('ZCOUNT', key, '-inf', '(' .. score)
    high = redis.call('ZCOUNT', key, '-inf', score)
  end
  while low < high do
    local middle = math.floor((low + high) / 2)
    local at, passed
    if descending then
      at = redis.call('ZREVRANGE', key, middle, middle)[1]
      passed = precedes(member, at)
    else
      at = redis.call('ZRANGE', key, middle, middle)[1]
      passed = precedes(at, member)
    end
    if passed then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- section: rows_from
-- Read up to `limit` rows (member, score, ...) behind the cursor, by rank: offsets into large groups of one score would be slow.
--
-- needs: rank_after

local function rows_from(set, descending, lowest, highest, after_score, after_member, limit)
  local from
  if descending then
    from = highest == 'inf' and 0 or redis.call('ZCOUNT', set, '(' .. highest, '+inf')
  else
    from = lowest == '-inf' and 0 or redis.call('ZCOUNT', set, '-inf', '(' .. lowest)
  end
  if after_score ~= '' then from = math.max(from, rank_after(set, after_score, after_member, descending)) end
  local rows
  if descending then
    rows = redis.call('ZREVRANGE', set, from, from + limit - 1, 'WITHSCORES')
    while #rows > 0 and tonumber(rows[#rows]) < tonumber(lowest) do
      rows[#rows], rows[#rows - 1] = nil, nil
    end
  else
    rows = redis.call('ZRANGE', set, from, from + limit - 1, 'WITHSCORES')
    while #rows > 0 and tonumber(rows[#rows]) > tonumber(highest) do -- rule: rows_beyond_the_bound
      rows[#rows], rows[#rows - 1] = nil, nil
    end
  end
  return rows
end
