-- Compute the score of a retry: the number of its deliveries left, or its priority with that number in the last ten bits.
--
-- needs: kind retry_priority bounded floor_priority LARGEST_WITH_RETRIES

local function retry_score(q, score)
  if kind == 'fifo' then return score end -- rule: fifo_loses_its_place
  q = bounded(math.floor(q), 1, 999)
  if kind == 'priority' and retry_priority == 'original' and score > floor_priority() then -- rule: retries_sink
    return math.floor(math.min(score, LARGEST_WITH_RETRIES)) + q / 1024
  end
  return q
end
