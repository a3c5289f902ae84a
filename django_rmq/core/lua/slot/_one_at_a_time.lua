-- The gate: one at a time. While a worker or a Spark consumer has messages of a serial slot, no other one gets any.
-- Its holder may take more, and runs them one after the other: all in one thread (Capacity.thread_for in core/consumer/capacity),
-- or in the event loop by its queue (FairQueue in core/consumer/run_order). `push` in send delivers where nothing else is in the
-- slot, and asks that by itself.
--
-- `strict`: on a fifo topic with ORDER strict, a message that has failed also holds back the later ones of its slot, as long as
-- it rests. Those that were delivered together with it are held back by `holds` in core/consumer/batch_run.

-- section: for_delivery
-- Whether nothing may be delivered to `owner` now. A slot that is not serial has at most MAX_PREPARED messages in flight.
--
-- needs: slot_capacity serial strict owner holder in_flight claimed claims_shut rests
-- offers: shut

local shut = in_flight >= slot_capacity -- rule: room_off
if serial then shut = holder ~= owner and (in_flight > 0 or claims_shut) end -- rule: gate
if strict then shut = shut or in_flight > 0 or claimed or rests end -- rule: strict_overtakes

-- section: for_claim
-- Whether the consumer may claim nothing now. `ours`: it has a claim already. `holding`: how many consumers have one.
--
-- needs: retry serial strict holding ours in_flight
-- offers: shut

local shut = (holding > 0 and not ours) or (serial and in_flight > 0) -- rule: claim_gate
if strict then shut = shut or in_flight > 0 or redis.call('ZCARD', retry) > 0 end -- rule: strict_claim_overtakes
