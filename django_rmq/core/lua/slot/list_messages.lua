-- List one state of a slot by score.
-- Changes nothing.
--
-- KEYS[1] set ZSET BY STATE       store, prepare, retry, dead or claim
-- KEYS[2] records HASH BY STATE   what belongs to it: failures, inflight or deaths
-- KEYS[3] body HASH BY STATE      member -> envelope: body, prepare_body or claim_body
--
-- ARGV[1] order             ascending or descending
-- ARGV[2] lowest            only scores from this, up to highest
-- ARGV[3] highest
-- ARGV[4] after_score       continue behind this entry; empty: from the beginning
-- ARGV[5] after_member
-- ARGV[6] limit NUMBER
-- ARGV[7] max_bytes NUMBER  stop behind the entry that reaches it
-- ARGV[8] now
--
-- Returns {more | end, {member, score, envelope or nil, record or nil, ...}}; more: continue behind the last

local descending = order == 'descending'
-- check: types
limit = math.min(limit, 1000)
-- include: _pages.rank_after
-- include: _pages.rows_from
local rows = rows_from(set, descending, lowest, highest, after_score, after_member, limit + 1)
local found, bytes = {}, 0
for i = 1, math.min(#rows, limit * 2), 2 do
  local member = rows[i]
  local envelope, record = redis.call('HGET', body, member), redis.call('HGET', records, member)
  found[#found + 1], found[#found + 2] = member, rows[i + 1]
  found[#found + 1], found[#found + 2] = envelope, record
  bytes = bytes + #member + #(envelope or '') + #(record or '')
  if bytes >= max_bytes and i + 2 <= #rows then return { 'more', found } end -- rule: list_unbounded
end
return { #rows > limit * 2 and 'more' or 'end', found } -- rule: list_ends_early
