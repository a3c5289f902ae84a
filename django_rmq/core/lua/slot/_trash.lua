-- Keep what a person deletes, for an hour, under the key of the act: a field is the first letter of the state, and the member.
-- Its value is "score deleted_us length\n", the last failure of this length, and the envelope or death.
--
-- needs: trash most_kept most_bytes now_us plain_score

local kept_copies, kept_bytes = {}, 0
local function keep_copy(state, member, score, failure, rest)
  if #kept_copies >= most_kept * 2 or kept_bytes >= most_bytes then return end -- rule: trash_without_bound
  local n = #kept_copies
  kept_copies[n + 1] = string.sub(state, 1, 1) .. member
  kept_copies[n + 2] = string.format('%s %.0f %d\n', plain_score(score), now_us, #failure) .. failure .. rest
  kept_bytes = kept_bytes + #kept_copies[n + 1] + #kept_copies[n + 2]
end
-- Write the copies before anything is deleted. A full server refuses them, and they are deleted all the same.
-- Returns how many copies are kept, and their bytes.
local function keep_copies()
  if #kept_copies == 0 then return 0, 0 end
  local added = redis.pcall('HSET', trash, unpack(kept_copies)) -- rule: trash_blocks_the_deletion
  if type(added) ~= 'number' then return 0, 0 end
  redis.pcall('PEXPIRE', trash, 3600000) -- rule: trash_stays_for_ever
  return added, kept_bytes
end
