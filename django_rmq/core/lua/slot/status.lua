-- Read what a slot knows about one message: its state, its failures, its progress, and its outcome (OUTCOME_RETENTION).
-- Changes nothing.
--
-- KEYS[1] store     ZSET  member -> due ms, or priority
-- KEYS[2] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[4] retry     ZSET  member -> ms + retries/1024
-- KEYS[5] dead      ZSET  member -> ms of death
-- KEYS[6] deaths    HASH  member -> death
-- KEYS[7] failures  HASH  member -> last failure
-- KEYS[8] claim     ZSET  claimed member -> score it was taken with
-- KEYS[9] control   HASH  field -> value
-- KEYS[10] outcomes HASH  digest -> what became of the message
-- KEYS[11] outcome_times ZSET digest -> ms
-- KEYS[12] delivery_outcomes ZSET what became of a whole delivery -> ms
--
-- ARGV[1] outcome_retention_ms NUMBER  0: the topic keeps nothing
-- ARGV[2] digest          of the member
-- ARGV[3...] members      the message; none: only its digest is known, so only the outcome is returned
-- ARGV[#ARGV] now
--
-- Returns {scores in store, prepare, retry, dead and claim, in-flight record, death without its body, last failure, worker,
--         outcome}, nil for what there is not

-- check: types
-- include: _now
local outcome, oldest = false, now_ms - outcome_retention_ms
local at = outcome_retention_ms > 0 and tonumber(redis.call('ZSCORE', outcome_times, digest))
if at and at > oldest then outcome, oldest = redis.call('HGET', outcomes, digest), at end -- rule: outcome_outstays
if outcome_retention_ms > 0 then
  local packed = string.gsub(digest, '%x%x', function(code) return string.char(tonumber(code, 16)) end)
  -- Texts that are newer than what was noted for this message alone, the last one first.
  local texts = redis.call('ZRANGE', delivery_outcomes, '+inf', string.format('(%.17g', oldest), 'BYSCORE', 'REV')
  for _, text in ipairs(texts) do
    local size, from = string.match(text, '^%d+ (%d+)\n()')
    local behind = size and from + size * 12
    local place = size and string.find(text, packed, from, true)
    if place and place < behind then
      outcome = string.sub(text, behind)
      break
    end
  end
end
if last < first then return { false, false, false, false, false, false, false, false, false, outcome } end
local member = ARGV[first]
local death = redis.call('HGET', deaths, member)
-- The body is left out of a death: it may be large, and a status does not show it.
local head, length = string.match(death or '', '^(%S+ %d+ %d+ %d+ %S+ (%d+) )[01]\n')
if head then
  local from = string.find(death, '\n', 1, true)
  death = head .. '0\n' .. string.sub(death, from + 1, from + tonumber(length))
end
return {
  redis.call('ZSCORE', store, member), redis.call('ZSCORE', prepare, member), redis.call('ZSCORE', retry, member),
  redis.call('ZSCORE', dead, member), redis.call('ZSCORE', claim, member), redis.call('HGET', inflight, member),
  death, redis.call('HGET', failures, member), redis.call('HGET', control, 'owner'), outcome,
}
