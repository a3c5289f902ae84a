-- Redis does not roll back a script that fails, so the type of every key that exists is checked before the first write.

-- Key -> how many entries it had when it was checked.
local sizes = {}
local function mistyped(wanted, key)
  local size
  -- ZCARD and HLEN take constant time, and answer an error table for a key that another program wrote as another type.
  if wanted == 'zset' then
    size = redis.pcall('ZCARD', key)
  else
    size = redis.pcall('HLEN', key)
  end
  if type(size) == 'table' then -- rule: types_unchecked
    local kind = redis.call('TYPE', key).ok
    return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. kind .. ', not a ' .. wanted)
  end
  sizes[key] = size
end
