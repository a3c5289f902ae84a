-- The gate: one at a time. While a worker or a Spark consumer has messages of a serial slot, no other one gets any.
-- Its holder may take more, and runs them one after the other: all in one thread (Capacity.thread_for in core/consumer/capacity),
-- or in the event loop by its queue (FairQueue in core/consumer/run_order). `push` in send delivers where nothing else is in the
-- slot, and asks that by itself. On a strict fifo topic also a message that has failed shuts its slot (_strict_order).

-- section: for_delivery
-- Whether nothing may be delivered to `owner` now. A slot that is not serial has at most MAX_PREPARED messages in flight.
--
-- needs: slot_capacity serial owner holder in_flight claims_shut
-- offers: shut

local shut = in_flight >= slot_capacity -- rule: room_off
if serial then shut = holder ~= owner and (in_flight > 0 or claims_shut) end -- rule: gate

-- section: for_claim
-- Whether the consumer may claim nothing now. `ours`: it has a claim already. `holding`: how many consumers have one.
--
-- needs: serial holding ours in_flight
-- offers: shut

local shut = (holding > 0 and not ours) or (serial and in_flight > 0) -- rule: claim_gate
