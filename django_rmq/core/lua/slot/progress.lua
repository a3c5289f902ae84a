-- Note how far a delivery has got, if the caller still holds its receipt (OUTCOME_RETENTION).
--
-- KEYS[1] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[2] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[3] failures  HASH  member -> last failure
-- KEYS[4] stats     HASH  counter -> n
-- KEYS[5] control   HASH  field -> value
-- KEYS[6] outcomes  HASH  digest -> what became of the message
-- KEYS[7] outcome_times ZSET digest -> ms
-- KEYS[8] delivery_outcomes ZSET what became of a whole delivery -> ms
--
-- ARGV[1] outcome_retention_ms NUMBER
-- ARGV[2] receipt
-- ARGV[3] member
-- ARGV[4] thousandths  of the work that are done
-- ARGV[5] text         what the listener says about it
-- ARGV[6] now
--
-- Returns ok | stale

-- check: types
-- include: _now
-- include: _scores.numbers
-- include: _outcomes.notes
-- include: _ledger
local record, prefix = redis.call('HGET', inflight, member), receipt .. ' '
-- rule: zombie_reports_progress
if not (record and string.sub(record, 1, #prefix) == prefix and redis.call('ZSCORE', prepare, member)) then
  count('stale')
  keep_counts()
  return 'stale'
end
-- Start with a deletion of nothing: after it, a full server accepts the rest.
redis.call('HDEL', control, '')
note_progress(member, receipt, thousandths, text)
keep_counts()
return 'ok'
