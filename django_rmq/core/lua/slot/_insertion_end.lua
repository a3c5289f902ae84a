-- End an insertion: a transaction of a bulk send that fills Store past Lua, while Store has the name `inserting` (see insert).
-- Store gets its name back. The last step of the insertion does it, or the next script of the slot after that step has failed.
--
-- needs: store inserting control noted count

-- Returns how many messages are new, or nil if the ZADD or `begin` has failed.
local function restored()
  -- `begin` has declined and left a hash here, or it has failed, and the ZADD behind it has filled a key of its own.
  if not noted then
    redis.call('UNLINK', inserting) -- rule: keeps_what_nobody_began
    return nil
  end
  local has_receipt = redis.call('ZREM', inserting, '') == 1
  local held = redis.call('ZCARD', inserting)
  if held > 0 and redis.call('EXISTS', store) == 0 then
    redis.call('RENAME', inserting, store)
  else
    -- An earlier `end` has failed, and others have sent since then. Their copies are the later ones.
    for _ = 1, held, 1000 do
      local flat = {}
      local rows = redis.call('ZRANGE', inserting, 0, 999, 'WITHSCORES')
      for i = 1, #rows, 2 do
        flat[i], flat[i + 1] = rows[i + 1], rows[i]
      end
      local came = redis.call('ZADD', store, 'NX', unpack(flat)) -- rule: overwrites_what_came_meanwhile
      count('dropped', #rows / 2 - came) -- rule: counts_what_came_meanwhile_twice
      redis.call('ZREMRANGEBYRANK', inserting, 0, 999)
    end
  end
  redis.call('HDEL', control, 'inserting')
  return has_receipt and held - (tonumber(noted) or held) or nil -- rule: books_what_failed
end

-- Count the new messages of an insertion whose last step has failed.
local function end_insertion()
  local added = restored() or 0
  count('sent', added)
  count('stored', added)
end
