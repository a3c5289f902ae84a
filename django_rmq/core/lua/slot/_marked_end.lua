-- End a delivery that succeeded or is given back, but that an operator has marked meanwhile.
--
-- needs: end_delivery end_for_good

local function end_marked(member, record)
  local origin, failure, kept = end_delivery(member, record, 'failed', '') -- rule: marked_stays
  if origin then end_for_good(member, 0, 'failed', '', origin, failure, kept) end
end
