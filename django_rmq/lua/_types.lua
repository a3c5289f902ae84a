-- Redis does not roll back a script that fails half way: look at every key before the first write.
local function mistyped(wanted, ...)
  for _, key in ipairs({ ... }) do
    local kind = redis.call('TYPE', key).ok
    if kind ~= wanted and kind ~= 'none' then
      return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. kind .. ', not a ' .. wanted)
    end
  end
end
