-- Read up to `limit` rows (member, score, ...) behind the cursor, by rank: offsets into large groups of one score would be slow.
--
-- needs: rank_after

local function rows_from(set, descending, lowest, highest, after_score, after_member, limit)
  local from
  if descending then
    from = highest == '+inf' and 0 or redis.call('ZCOUNT', set, '(' .. highest, '+inf')
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
