-- One message that is new to its slot, by as few looks as that takes. A look finds a key of the wrong type by itself and
-- changes nothing, nor does ZADD NX where a copy waits: whatever finds more than this goes the long way, from the start.
if alone and limit == 0 and known[1] == slots and not (known[2] and due < tonumber(known[2])) then
  local is_new = not envelope and redis.pcall('EXISTS', retry, body) == 0
    or not redis.pcall('ZSCORE', retry, alone) and type(redis.pcall('HLEN', body)) == 'number'
  if is_new and type(redis.pcall('HLEN', stats)) == 'number' and redis.pcall('ZADD', store, 'NX', at, alone) == 1 then
    if envelope then redis.call('HSET', body, alone, ARGV[envelope]) end
    redis.pcall('HINCRBY', stats, 'sent', '1')
    redis.pcall('HINCRBY', stats, 'stored', '1')
    return answer
  end
end
