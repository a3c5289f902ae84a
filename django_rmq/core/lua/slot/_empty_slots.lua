-- Whether `slots` slots hold nothing that can ever be taken. Most of many slots are empty; one read covers up to 1,024.
--
-- needs: slots_keys

local function all_empty(first, slots)
  local keys, n = {}, 0
  for i = first, math.min(first + 5 * (slots - 1), #slots_keys), 5 do
    keys[n + 1], keys[n + 2], keys[n + 3] = slots_keys[i], slots_keys[i + 1], slots_keys[i + 2]
    keys[n + 4], n = slots_keys[i + 4], n + 4 -- rule: asleep_where_claims_end
  end
  return redis.pcall('EXISTS', unpack(keys)) == 0
end
