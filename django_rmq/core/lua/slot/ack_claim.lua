-- Delete the messages of a sealed claim, because Spark has recorded its batch; those that it has failed are tried again, or die.
--
-- KEYS[1] store        ZSET  member -> due ms, or priority
-- KEYS[2] prepare      ZSET  member -> seconds*1000 + retries left
-- KEYS[3] inflight     HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
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
-- KEYS[16] claim_failed HASH  claimed member -> "what LF error", if its query has failed it
--
-- ARGV[1] channel
-- ARGV[2] slot_capacity NUMBER others may take while Prepare holds fewer than this; 1 on serial topics
-- ARGV[3] topic_type
-- ARGV[4] retry_priority       original or lowest
-- ARGV[5] backoff_base NUMBER  ms
-- ARGV[6] backoff_cap NUMBER   ms
-- ARGV[7] max_retries          the topic's, until the slot has its own
-- ARGV[8] consumer
-- ARGV[9] number NUMBER        of the claim
-- ARGV[10] limit NUMBER        messages at most, if the failures of each have to be deleted
-- ARGV[11] now
--
-- Returns {word, left in the claim}   word: ok (ask again while something is left) | open (not sealed: give it back)
--                                         | stale (the claim is lost, or was never there)

-- check: types
limit = math.min(limit, 1000)
local known = redis.call('HMGET', control, 'sleeping_until', 'max_retries', 'undrained_since')
local sleeping_until, max_retries, undrained_since = known[1], tonumber(known[2] or max_retries), known[3]
-- include: _now
-- include: _scores.numbers
-- include: _scores.kinds
-- include: _retries.own_limits
-- include: _retries.budget
-- include: _retries.retry_score
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _ledger
-- include: _sleep.wake
-- include: _sleep.opens_gate
-- include: _accumulation.bodies
-- include: _death_record
-- include: _delivery_end.end_delivery
-- include: _retries.end_for_good
-- include: _retries.backoff
-- include: _retries.end_failed
-- include: _claims
-- include: _priority_notes.note_undrained
-- Start with a deletion of nothing: after it, a full server accepts the rest, so that it can be drained.
redis.call('HDEL', control, '')
local newest, state = newest_claim(consumer)
local left = 0
if number ~= newest or not (state == 'open' or state == 'sealed' or state == 'acked') then -- rule: ack_of_the_lost
  count('stale')
  keep_counts()
  return { 'stale', 0 }
end
if state == 'open' then return { 'open', redis.call('ZCARD', claim) } end -- rule: ack_without_a_seal
if redis.call('ZSCORE', claimants, consumer) then
  if state == 'sealed' then note_claim(consumer, number, 'acked') end -- rule: ack_is_not_noted
  local earliest = forget_claimed(limit)
  left = close_claim(consumer)
  -- rule: ack_wakes_nobody
  if left == 0 and opens_gate() then earliest = 0 end
  if earliest then
    note_undrained() -- rule: ack_leaves_undrained
    wake(earliest) -- rule: ack_wakes_the_gate_alone
  end
end
keep_counts()
return { 'ok', left }
