-- Phase two, success, of all messages that one prepare has delivered alone, without naming them.
--
-- KEYS[1] prepare   ZSET  member -> seconds*1000 + retries left
-- KEYS[2] inflight  HASH  member -> "receipt original_score[:timeout] [mark [outlived]]"
-- KEYS[3] stats     HASH  counter -> n
-- KEYS[4] control   HASH  field -> value
--
-- ARGV[1] channel
-- ARGV[2] receipt
-- ARGV[3] size NUMBER  messages that the prepare delivered, while nothing else was in flight
-- ARGV[4...] digests     of all members, 12 bytes each, in one text; none: each gets an outcome of its own (OUTCOME_RETENTION)
-- ARGV[#ARGV] now
--
-- Returns ok | unsure (nothing is changed: they have to be committed by name)

local known = redis.pcall('HMGET', control, 'deliveries', 'marked', 'sleeping_until')
-- check: types but control stats
if known.err then return mistyped('hash', control) end
-- The slot had nothing in flight when it delivered these, so until it delivers again nothing else is in flight there.
if known[1] ~= receipt then return 'unsure' end -- rule: commit_delivery_of_a_later_delivery
if known[2] == receipt then return 'unsure' end -- rule: commit_delivery_ignores_marks
if sizes[prepare] ~= size then return 'unsure' end -- rule: commit_delivery_counts_what_has_ended
local sleeping_until = known[3]
-- include: _now where OUTCOME_RETENTION
-- include: _scores.numbers where OUTCOME_RETENTION
-- include: _outcomes.notes where OUTCOME_RETENTION
-- include: _outcomes.note_delivery where OUTCOME_RETENTION
-- include: _sleep.wake
local digests = first == last and #ARGV[first] == size * 12 and ARGV[first]
-- rule: whole_success_leaves_no_outcome
if note_done and not digests then note_done(redis.call('ZRANGE', prepare, 0, -1), receipt) end
-- The first write finds by itself whether the ledger has another type. On a full server it fails until something is deleted.
local is_counted = type(redis.pcall('HINCRBY', stats, 'committed', size)) == 'number'
local foreign = not is_counted and mistyped('hash', stats)
if foreign then return foreign end
redis.call('UNLINK', prepare, inflight)
if not is_counted then redis.pcall('HINCRBY', stats, 'committed', size) end -- rule: full_server_counts_nothing
if sleeping_until == GATE then wake(0) end -- rule: commit_delivery_opens_silently
if note_delivery and digests then note_delivery(receipt, size, digests) end -- rule: delivery_leaves_no_outcome
if write_outcomes then write_outcomes() end
return 'ok'
