"""The end of a worker: when it ends by itself, and how everything is settled before it does.

A worker ends on request, in a burst when nothing can be taken, after its maximum idle time, because a listener exceeded
HARD_TIMEOUT, or because a topic was given another slot count that it cannot follow. The dispatcher then gives up its slots, and
``Shutdown`` settles what is in flight: for at most the shutdown time-out (``bounds.SHUTDOWN_SECONDS`` by default). How the
process ends is the part of ``worker_processes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.fetch_round_trips import RoundTrips
from django_rmq.core.consumer.mailbox import HardTimeoutExceeded, Mailbox, ShutdownState
from django_rmq.core.consumer.shared_notes import SharedNotes, mark_of
from django_rmq.core.consumer.slot_acquisition import SlotAcquirer
from django_rmq.core.consumer.slots import SlotSchedule, SlotState, SlotTable
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.exceptions import ServerTrouble

logger = safe_logger("django_rmq.consumer")

SETTLING_SECONDS = 0.05
"""Seconds between two checks of a worker whether it has come to its end."""


@dataclass(eq=False)
class IdleCheck:
    """Decides when a worker ends by itself: in a burst, or after its maximum idle time.

    ``owns_all`` returns whether all slots assigned to this worker have been put into ``mailbox``.
    """

    in_flight: InFlight
    acks: AckQueue
    table: SlotTable
    schedule: SlotSchedule
    mailbox: Mailbox
    owns_all: Callable[[], bool]
    is_burst: bool
    max_idle_time: float | None

    def is_over(self) -> bool:
        """Return whether the worker has nothing more to do."""
        return self._is_idle() and ((self.is_burst and self._burst_is_over()) or self._idle_too_long())

    def due(self, now: float) -> float:
        """Return the monotonic time at which to ask ``is_over`` again."""
        if self.in_flight.messages:
            return float("inf")
        due = now + SETTLING_SECONDS if self.is_burst else float("inf")
        idle = self.max_idle_time
        # The time may be over while slots wait for their limits, or acknowledgements for a node of a Cluster.
        soonest = now + SETTLING_SECONDS
        return due if idle is None else min(due, max(soonest, self.in_flight.last_work + idle))

    def _is_idle(self) -> bool:
        """Return whether nothing is in flight, except for messages whose end Redis refuses. An unavailable node is waited for."""
        return not self.in_flight.messages and all(
            slot.left_alone_until and not slot.is_node_away for slot, _ in self.acks.pending
        )

    def _idle_too_long(self) -> bool:
        idle = self.max_idle_time
        if idle is None or any(self.schedule.parked.values()):
            return False
        return time.monotonic() - self.in_flight.last_work >= idle

    def _burst_is_over(self) -> bool:
        if not self.owns_all():
            return False
        # Slots that were put into the mailbox before ``owns_all`` returned may not have been read yet.
        self.mailbox.process_items()
        return self._is_idle() and self._drained()

    def _drained(self) -> bool:
        now = self.schedule.clock.ms()
        return not self.table.has_unacquired and all(
            slot.due > now or slot.blocked_by or slot.state is SlotState.FENCED or not slot.is_owned
            for slot in self.table.awake.values()
        )


UNCERTAIN_SECONDS = 5.0
"""Seconds for which a stopping worker waits for Redis only to give back the deliveries of a lost reply."""


@dataclass(eq=False)
class Shutdown:
    """Ends a worker that takes no more messages: running listeners may finish, and everything is settled.

    ``keep_alive`` is called in each turn. ``timeout`` is the shutdown time-out in seconds.
    """

    state: ShutdownState
    mailbox: Mailbox
    in_flight: InFlight
    acks: AckQueue
    round_trips: RoundTrips
    acquirer: SlotAcquirer
    keep_alive: Callable[[], None]
    timeout: float
    notes: SharedNotes | None
    _complain: LogThrottle = field(default_factory=lambda: LogThrottle(logger))

    def begin_after_hard_timeout(self, item: HardTimeoutExceeded) -> None:
        """Begin the shutdown, without the batch whose call cannot be ended; record which messages the parent charges.

        Do nothing if the call has returned after all.
        """
        batch = item.batch
        # Nothing else of the batch may begin, or the process would end in the middle of it.
        batch.halted = batch.dropped = True
        messages = batch.messages_of(item.began)
        if not messages:  # rule: ends_for_a_call_that_has_returned
            return
        if self.notes is not None:
            topic, slot, receipt = batch.topic.name, batch.slot.number, batch.receipt
            members = [message.delivery.member for message in messages]
            # The parent settles all messages of this process after its end. Only those of the call that ran too long use a
            # retry.
            # rule: forgives_what_ran_too_long
            self.notes.charge([mark_of(topic, slot, receipt, member) for member in members])
        self.state.past_hard_timeout.append(batch)
        self.state.begun = True

    def settle(self, begun: float) -> bool:
        """Wait for the listeners that run, and settle everything; return whether nothing is left.

        The shutdown time-out counts from ``begun``, a monotonic time.
        """
        while True:
            self.keep_alive()
            is_refused = self._send_rest()
            spent = time.monotonic() - begun
            if self.state.is_over(self.in_flight.batches.values()):
                # After a lost reply Redis may stay unavailable. Then its deliveries are left to their time-out.
                is_certain = not (self.acquirer.unacquired or self.mailbox.has_pushes)
                is_done = is_certain or spent > UNCERTAIN_SECONDS
                if is_done and not self.acks.pending:
                    return True
                # Redis answers and refuses some acknowledgements, so waiting for longer would not help.
                if is_refused:
                    break
            if spent >= self.timeout:
                break
            self.mailbox.read(min(0.1, self.timeout - spent))
        batches, unsettled = len(self.in_flight.batches), len(self.acks.pending)
        if batches or unsettled:
            self.state.forced = True
            logger.error(
                "Shutdown: %d batches are still running and %d are not settled; their messages will time out",
                batches,
                unsettled,
            )
        return False

    def _send_rest(self) -> bool:
        """Send the remaining acknowledgements; return whether Redis has refused some of them."""
        is_refused = self._attempt(self._send_acks)
        # If a node of a Cluster is away, one of the two may fail, and the other one is done all the same.
        self._attempt(self.acquirer.acquire_again)
        return is_refused

    def _attempt(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except ServerTrouble as error:
            self._complain("redis", "Redis is unavailable (%s) during shutdown; trying again", error)
            self.mailbox.read(0.1)
            return False

    def _send_acks(self) -> bool:
        self.round_trips.receive_rest()
        round_trip = self.round_trips.send(takes=False)
        if round_trip is None:
            return False
        self.round_trips.receive(round_trip)
        # What is pending else has to be sent once more, with names.
        return any(
            slot.left_alone_until for slot, _ in self.acks.pending
        )  # rule: takes_what_needs_names_for_refused
