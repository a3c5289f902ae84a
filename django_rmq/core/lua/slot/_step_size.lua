-- Bound how many messages one step moves between keys. Their bytes are estimated from the longest of a hundred of them. The
-- allocator gets memory for large messages from the system and returns it, which takes longer than their copy.

local STEP_BYTES, LARGE, LARGE_STEP_BYTES = 4194304, 16384, 1048576

-- Returns the size of the longest of a hundred of the `n` first messages, or of fewer if they are large.
local function longest_of(set, bodies, n, descending)
  local has_bodies = redis.call('HLEN', bodies) > 0
  local longest, read = 1, 0
  for i = 0, n - 1, math.max(1, math.ceil(n / 100)) do
    local rank = descending and -1 - i or i
    local member = redis.call('ZRANGE', set, rank, rank)[1]
    if not member or read >= 262144 then break end
    local kept = has_bodies and redis.call('HGET', bodies, member) or '' -- rule: claim_of_any_bodies
    longest, read = math.max(longest, #member + #kept), read + #member + #kept
  end
  return longest
end
local function step_bytes(longest)
  if longest > LARGE then return LARGE_STEP_BYTES end -- rule: large_ones_as_small_ones
  return STEP_BYTES
end
-- Returns how many of the `n` first messages fit into `most` bytes, and into a step: at least one.
local function fit(set, bodies, n, most, descending)
  local longest = longest_of(set, bodies, n, descending)
  local bytes = math.min(most, step_bytes(longest)) -- rule: claim_copies_any_size
  return math.max(1, math.min(n, math.floor(bytes / longest))) -- rule: claim_fits
end
