-- Wake a consumer that sleeps past `due_ms`, once: the next one to fall asleep writes `sleeping_until` again.
--
-- needs: store control channel sleeping_until

local GATE = 9007199254740992
local function wake(due_ms)
  local sleeper = tonumber(sleeping_until)
  if sleeper and due_ms < sleeper then -- rule: wakes_too_many
    sleeping_until = nil -- rule: wakes_without_end
    redis.pcall('HDEL', control, 'sleeping_until') -- rule: wakes_without_end
    redis.pcall('PUBLISH', channel, string.match(store, '%d+$'))
  end
end
