-- Compute how many retries of `most` a delivery has left: from its score, or on fifo topics from its failures.
--
-- needs: kind failures bounded is_retry floor_priority

local function budget(score, member, most)
  if kind == 'fifo' then
    local times = string.match(redis.call('HGET', failures, member) or '', '^%S+ (%d+) ')
    return bounded(most - (tonumber(times) or 0), 0, most) -- rule: fifo_without_a_budget
  end
  if not is_retry(score) then return most end -- rule: budget_ignores_settings
  local q = score
  if kind == 'priority' and score > floor_priority() then q = math.floor(score % 1 * 1024 + 0.5) end
  -- A message that has joined a later send has the limit of that send, which may be lower.
  return bounded(math.floor(q) - 1, 0, most) -- rule: one_delivery_more
end
