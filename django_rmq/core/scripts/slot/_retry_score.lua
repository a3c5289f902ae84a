-- The score of a retry: as low as the deliveries that are left to it, or its priority with these in its last ten bits.
--
-- needs: kind retry_priority bounded floor_priority LARGEST_WITH_RETRIES

local function retry_score(q, score)
  q = bounded(math.floor(q), 1, 999)
  if kind == 'priority' and retry_priority == 'original' and score > floor_priority() then -- rule: retries_sink
    return math.floor(math.min(score, LARGEST_WITH_RETRIES)) + q / 1024
  end
  return q
end
