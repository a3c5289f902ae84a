-- Count what each of many slots holds, as `count` does of one.
-- Changes nothing.
--
-- KEYS[1...] store ZSET, prepare ZSET, retry ZSET, dead ZSET, control HASH, claim ZSET, inflight HASH, claimants ZSET,
--            claims HASH of each slot
--
-- ARGV[1] topic_type
-- ARGV[2] timeout NUMBER  seconds; that of the topics, if a slot has none
-- ARGV[3] now
--
-- Returns for each slot what `count` returns, or nil if a key is of another type

-- include: _types
-- include: _now
-- include: _overdue
-- include: _counts
if #slots_keys > 576 then return redis.error_reply('ERR too many slots') end
local found = {}
for i = 1, #slots_keys, 9 do
  local store, prepare, retry, dead, control, claim, inflight, claimants, claims = unpack(slots_keys, i, i + 8)
  local wrong = mistyped('zset', store) or mistyped('zset', prepare)
  if not wrong and redis.call('EXISTS', retry, dead, claim) > 0 then
    wrong = mistyped('zset', retry) or mistyped('zset', dead) or mistyped('zset', claim)
  end
  local counts = wrong or count_slot(store, prepare, retry, dead, control, claim, inflight, claimants, claims)
  found[#found + 1] = not counts.err and counts -- rule: one_foreign_key_hides_all
end
return found
