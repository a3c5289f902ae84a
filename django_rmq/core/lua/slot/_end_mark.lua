-- Mark a delivery for its end, and note that in control: commit_all reads no records.
--
-- needs: inflight control

local function mark_delivery(member, receipt_and_score, mark)
  redis.call('HSET', inflight, member, receipt_and_score .. mark)
  redis.call('HSET', control, 'marked', string.match(receipt_and_score, '^%d+')) -- rule: mark_unnoted
end
