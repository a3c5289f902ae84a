-- Strict order: on a fifo topic with ORDER strict, a message that has failed holds back the later ones of its slot, as long as it
-- rests. Those that were delivered together with it are held back by `holds` in core/consumer/batch_run. It comes back at its old
-- place (_retries.retry_score).

-- section: for_delivery
-- Whether nothing may be delivered now, if _one_at_a_time has not shut the slot already.
--
-- needs: shut strict in_flight claimed rests

if strict then shut = shut or in_flight > 0 or claimed or rests end -- rule: strict_overtakes

-- section: for_claim
-- Whether nothing may be claimed now, if _one_at_a_time has not shut the slot already.
--
-- needs: shut strict retry in_flight

if strict then shut = shut or in_flight > 0 or redis.call('ZCARD', retry) > 0 end -- rule: strict_claim_overtakes
