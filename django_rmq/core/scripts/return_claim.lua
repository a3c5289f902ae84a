-- Give back what a claim holds: as if never claimed, or with a retry spent as after a time-out.
--
-- KEYS[1] store        ZSET  member -> due ms, or priority
-- KEYS[2] prepare      ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight     HASH  member -> "receipt original_score [mark [outlived]]"
-- KEYS[4] dead         ZSET  member -> ms of death
-- KEYS[5] deaths       HASH  member -> death
-- KEYS[6] failures     HASH  member -> last failure
-- KEYS[7] body         HASH  member -> envelope
-- KEYS[8] stats        HASH  counter -> n
-- KEYS[9] control      HASH  field -> value
-- KEYS[10] retry       ZSET  member -> ms + retries/1024
-- KEYS[11] claimants   ZSET  Spark consumer -> ms when its lease ends
-- KEYS[12] claim       ZSET  member -> score it was taken with
-- KEYS[13] claims      HASH  Spark consumer -> "number state ms"
-- KEYS[14] claim_body  HASH  member -> envelope
-- KEYS[15] prepare_body HASH  member in flight -> envelope
--
-- ARGV[1] channel
-- ARGV[2] room            others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] kind
-- ARGV[4] retry_priority  original or lowest
-- ARGV[5] backoff_base    ms
-- ARGV[6] backoff_cap     ms
-- ARGV[7] max_retries     the topic's, until the slot has its own
-- ARGV[8] consumer
-- ARGV[9] number          of the claim
-- ARGV[10] spent          1 or 0
-- ARGV[11] limit          messages at most
-- ARGV[12] now
--
-- Returns {word, left in the claim}   word: ok (ask again while something is left) | stale (acknowledged, or never there)
local store, prepare, inflight, dead, deaths = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local failures, body, stats, control, retry = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local claimants, claim, claims, claim_body = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local prepare_body = KEYS[15]
local channel, room, kind, retry_priority = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local backoff_base, backoff_cap = tonumber(ARGV[5]), tonumber(ARGV[6])
local consumer, number, spent = ARGV[8], tonumber(ARGV[9]), ARGV[10] == '1'
local limit, now = math.min(tonumber(ARGV[11]), 1000), ARGV[12]
-- include: _types
local wrong = mistyped('zset', store, prepare, dead, retry, claimants, claim)
  or mistyped('hash', inflight, deaths, failures, body, stats, control, claims, claim_body, prepare_body)
if wrong then return wrong end
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or ARGV[7]), known[3]
-- include: _now
-- include: _retries
-- include: _ledger
-- include: _wake
-- include: _failures
-- include: _tidy
-- include: _claims
-- include: _undrained
-- A write of nothing first, so that a full server lets the rest pass.
redis.call('HDEL', control, '')
local newest, state = newest_claim(consumer)
if number ~= newest or state == 'acked' then
  count('stale')
  keep_counts()
  return { 'stale', 0 }
end
local left = 0
if redis.call('ZSCORE', claimants, consumer) then
  -- What was begun as one of the two ends as that one.
  if state == 'open' or state == 'sealed' then
    state = spent and 'lost' or 'returned'
    note_claim(consumer, number, state)
  end
  local _, earliest = return_claimed(limit, state == 'lost')
  left = close_claim(consumer)
  if left == 0 and tonumber(sleeping_until) == GATE and redis.call('ZCARD', prepare) < room then earliest = 0 end
  note_undrained()
  if earliest then wake(earliest) end
end
keep_counts()
return { 'ok', left }
