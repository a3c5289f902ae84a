-- Delete the keys of an empty slot of a topic that is no longer used: its ledger, its owner and its settings.
--
-- KEYS[1] store       ZSET  member -> due ms, or priority
-- KEYS[2] prepare     ZSET  member -> seconds*1000 + retries left
-- KEYS[3] retry       ZSET  member -> ms + retries/1024
-- KEYS[4] dead        ZSET  member -> ms of death
-- KEYS[5] claimants   ZSET  Spark consumer -> ms when its lease ends
-- KEYS[6] leaving     HASH  field -> value; the messages on their way to another slot
-- KEYS[7] inflight    HASH  member -> receipt, original score, mark
-- KEYS[8] deaths      HASH  member -> death
-- KEYS[9] failures    HASH  member -> last failure
-- KEYS[10] body       HASH  member -> envelope
-- KEYS[11] prepare_body HASH member -> envelope
-- KEYS[12] claims     HASH  Spark's open claims, and those that ended
-- KEYS[13] claim      ZSET  member -> score
-- KEYS[14] claim_body HASH  member -> envelope
-- KEYS[15] arrived    HASH  slot -> last ticket
-- KEYS[16] stats      HASH  counter -> n
-- KEYS[17] control    HASH  field -> value
-- KEYS[18] outcomes   HASH  digest -> what became of the message
-- KEYS[19] outcome_times ZSET digest -> ms
-- KEYS[20] delivery_outcomes ZSET outcome -> ms
-- KEYS[21] claim_failed HASH member -> how its query has failed it
-- KEYS[22] inserting  ZSET  member -> score, if a step of an insertion has failed
--
-- ARGV[1] now
--
-- Returns retired | holds (messages: nothing is changed)

-- check: types
-- rule: retire_what_holds
if redis.call('EXISTS', store, prepare, retry, dead, claimants, leaving, claim, inserting) > 0 then return 'holds' end
redis.call('UNLINK', inflight, deaths, failures, body, prepare_body, claims, claim_body, claim_failed, arrived, stats,
  control, outcomes, outcome_times, delivery_outcomes)
return 'retired'
