-- The fast path for one message without a resting retry, with few reads. A read finds a key of the wrong type by
-- itself and changes nothing, and so does ZADD NX if a copy waits. In every other case the slow path runs from its start.
-- `met`: the answer for a send that meets a copy with a score above `floor`, the largest score of a retry.
--
-- needs: store retry body stats
-- needs: alone backlog known slots due envelope at floor met answer

if alone and backlog == 0 and known[1] == slots and not (known[2] and due < tonumber(known[2])) then -- rule: alone
  local is_free = not envelope and redis.pcall('EXISTS', retry, body) == 0 -- rule: alone_ignores_what_rests_unkeyed
    or not redis.pcall('ZSCORE', retry, alone) and type(redis.pcall('HLEN', body)) == 'number' -- rule: alone_rests
  if is_free and type(redis.pcall('HLEN', stats)) == 'number' then -- rule: alone_writes_before_the_ledger_is_known
    local added = redis.pcall('ZADD', store, 'NX', at, alone) -- rule: alone_takes_the_later_time
    local word = added == 1 and 'stored'
    if added == 0 then
      local kept = redis.call('ZSCORE', store, alone)
      local number = tonumber(kept)
      word = number > floor and number % 1 == 0 and met -- rule: alone_meets
      if word == 'replaced' then
        redis.call('ZADD', store, at, alone) -- rule: alone_keeps_the_first
        kept = at -- rule: alone_tells_the_former_score
      end
      answer = { 'mixed', { word }, { kept } }
    end
    if word then
      if envelope then redis.call('HSET', body, alone, ARGV[envelope]) end -- rule: alone_without_a_body
      redis.pcall('HINCRBY', stats, 'sent', '1')
      redis.pcall('HINCRBY', stats, word, '1') -- rule: alone_counts_half
      return answer
    end
  end
end
