-- Search one state of a slot for text: a bounded scan that returns where to continue.
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
-- ARGV[6] limit NUMBER      matches at most
-- ARGV[7] max_bytes NUMBER  read at most about this much
-- ARGV[8] scan NUMBER       entries to read, at most
-- ARGV[9] text
-- ARGV[10] where            anywhere: in member, envelope or record; error: the class of the last error, or its last part
-- ARGV[11] now
--
-- Returns {end, found} | {more, found, score, member}     found: {member, score, envelope or nil, record or nil, ...}

local descending = order == 'descending'
local anywhere = where == 'anywhere'
-- check: types
scan = math.min(scan, 1000)
-- include: _pages.rank_after
-- include: _pages.rows_from
-- Only the class is compared, because people who may filter by error class may not search bodies or error texts.
local function is_of_class(record)
  local head = string.match(record or '', '^%S+ %d+ %d+ %d+ %S+[^\n]*\n')
  if not head then return false end
  local length = string.match(head, '^%S+ %d+ %d+ %d+ %S+ (%d+) [01]\n$') or 1024
  -- A single word without a colon is text that a user wrote, not a class.
  local said = string.sub(record, #head + 1, #head + tonumber(length)) -- rule: keyed_bodies_are_errors
  local class = string.match(said, '^[^%S\n]*([A-Za-z_][A-Za-z0-9_.<>]*)[^%S\n]*:') -- rule: words_are_classes
  -- rule: error_texts_are_searched
  return class and #class <= 200 and (class == text or string.sub(class, -#text - 1) == '.' .. text)
end

local function is_meant(member, envelope, record)
  if not anywhere then return is_of_class(record) end -- rule: errors_are_searched_everywhere
  return string.find(member, text, 1, true) or (envelope and string.find(envelope, text, 1, true))
    or (record and string.find(record, text, 1, true)) -- rule: search_only_in_members
end

local rows = rows_from(set, descending, lowest, highest, after_score, after_member, scan + 1)
local found, bytes, matches = {}, 0, 0
for i = 1, math.min(#rows, scan * 2), 2 do
  local member = rows[i]
  local envelope, record = redis.call('HGET', body, member), redis.call('HGET', records, member)
  if is_meant(member, envelope, record) then
    matches = matches + 1
    found[#found + 1], found[#found + 2] = member, rows[i + 1]
    found[#found + 1], found[#found + 2] = envelope, record
  end
  bytes = bytes + #member + #(envelope or '') + #(record or '')
  local last = i + 1 == #rows
  if not last and (matches >= limit or bytes >= max_bytes or i + 1 == scan * 2) then -- rule: search_ends_early
    return { 'more', found, rows[i + 1], member }
  end
end
return { 'end', found }
