"""Feeding: passes batches to the threads, reads their reports, and gives back what has not begun."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.delivery_control import BrokerDeliveryControl
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.executor_pool import ExecutorPool
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.poison_messages import PoisonMessages
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.core.consumer.shutdown import ShutdownState
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.model.message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic

REFRESH_SECONDS = 1.0
"""Seconds for which messages wait in hand. Those that have not begun by then are given back, so that they count as due,
and others can have them; they are taken again when a thread has room."""

REFRESHED = 128
"""The maximum number of batches given back at once that will be taken again soon."""

SUSPECT_REST_SECONDS = 5.0
"""Seconds until a suspect is taken again that would have had to wait for another one."""


class BatchRouter:
    """Feeds the threads of ``crew``. ``took`` is called with the seconds that each call of a listener took."""

    def __init__(
        self,
        broker: Broker,
        crew: ExecutorPool,
        hand: InFlight,
        room: Capacity,
        schedule: SlotSchedule,
        settling: AckQueue,
        ending: ShutdownState,
        took: Callable[[Topic, Sequence[float]], None],
    ) -> None:
        self.suspects = PoisonMessages()
        self._holder = BrokerDeliveryControl(broker)
        self._crew = crew
        self._hand = hand
        self._room = room
        self._places = room.places
        self._schedule = schedule
        self._settling = settling
        self._ending = ending
        self._took = took
        self._next_refresh = 0.0

    # --- to the threads

    def start(
        self,
        place: SlotState,
        receipt: int,
        deliveries: Sequence[Delivery],
        at: float,
        size: int,
        *,
        is_suspect: bool = False,
        is_plain: bool = False,
        timeout: int | None = None,
    ) -> None:
        """Pass ``size`` bytes of messages to a thread, unless they have to wait for another suspect.

        They were handed out by a call that was sent ``at``. ``timeout``: their own, if it is shorter than the topic's.
        """
        if place.blocked_by:  # rule: starts_in_a_slot_that_is_shut
            # It was shut while the answer was on its way: nothing runs beside a listener that does not return.
            self._settling.release(place, receipt, [delivery.member for delivery in deliveries])
            return
        messages = [Message(place.topic, place.slot, receipt, each, self._holder) for each in deliveries]
        batch = Batch(place, self._room.listeners[place.topic.name], receipt, messages, at)
        batch.size = size
        batch.commits_all = is_plain and place.topic.is_strict and not place.topic.outcome_retention_ms
        if timeout is not None:
            batch.timeout = timeout
        thread = self._room.thread_for(place, self._hand.load)
        self._hand.add(batch)
        self._room.started(batch)
        if not is_suspect or self.suspects.add(batch):
            self._put(batch, thread)

    def _put(self, batch: Batch, thread: int) -> None:
        topic = batch.topic.name
        if topic not in self._room.overlap:
            batch.cost = len(batch.messages) * self._room.paces[topic].seconds
            self._hand.load[thread] += batch.cost
            self._room.lanes.started(id(batch), topic, thread)
        self._crew.threads[thread].put(batch)

    def cleared(self, batch: Batch) -> None:
        """Run the suspects that waited for this one."""
        for follower in self.suspects.remove(batch):
            if not self._ending.begun:
                self._put(follower, self._room.thread_for(follower.place, self._hand.load))

    # --- from the threads

    def finished(self, report: BatchReport) -> None:
        """Process a thread's report."""
        batch = report.batch
        place: SlotState = batch.place
        released = report.released
        if released and (batch.cut or batch.stale):
            released = [m for m in released if m not in batch.cut and m not in batch.stale]
        self._settling.note(report, released)
        if report.times:
            self._took(place.topic, report.times)
        done = len(report.committed) + len(report.failures)
        if done:
            self._hand.last_work = now = time.monotonic()
            self._room.reported(place.topic.name, report.seconds, done, now)
        if report.last and self._hand.remove(batch):
            self._ended(batch, place)
            if released and place.topic.is_priority:
                # The batch took longer than estimated, so what is queued behind it was taken too early as
                # well.
                self.give_back_slot(place, drops=False)
            # This goes into the round trip that settles the batch; after a prepare that finds nothing,
            # senders wake this worker.
            self._schedule.ready(place)
            self._places.forget(place)

    def _ended(self, batch: Batch, place: SlotState) -> None:
        self._room.ended(batch)
        if place.blocked_by is batch:
            self._places.unblock(place)
        self.cleared(batch)

    # --- what is taken back

    def give_back_slot(self, place: SlotState, *, drops: bool = True) -> None:
        """Give back all messages of a slot that have not begun, and those on their way."""
        place.recalled = place.asked
        for batch in self._hand.of(place):
            self.give_back(batch, drops=drops)

    def give_back(self, batch: Batch, *, drops: bool = True) -> None:
        """Begin no more messages of a batch, and release those that have not begun, whatever its thread is doing.

        Unless the batch is dropped (``drops``), its thread settles one by one the messages of a list that
        failed.
        """
        if batch not in self._hand:  # rule: gives_back_what_has_ended
            return  # it has ended, and all of it was given back
        batch.halted, batch.dropped = True, batch.dropped or drops
        waits = batch.thread is None and batch in self.suspects
        if waits or (batch.thread is not None and batch.thread.withdraw(batch)):
            self.finished(BatchReport(batch, [], [], members_of(batch.messages), 0.0, True))
            return
        rest = members_of(batch.messages[batch.begun :])
        released = [member for member in rest if member not in batch.cut and member not in batch.stale]
        if released:
            batch.cut |= frozenset(released)
            self._settling.release(batch.place, batch.receipt, released)

    @property
    def due(self) -> float:
        """The monotonic time of the next ``refresh``."""
        return self._next_refresh if self._hand.messages else float("inf")

    def refresh(self, now: float) -> None:
        """Give back messages that have waited long for their thread, if it is time to.

        Meanwhile a higher priority may have arrived in the slot, or another thread or worker may be free.
        """
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_SECONDS
        self._hand.estimate(self._crew.running(), self._crew.blocked_seconds())
        self._room.note_slow(self._hand.slow())
        before = uptime() - REFRESH_SECONDS
        late = [
            batch
            for batch in self._hand.batches.values()
            if batch.queued < before and not batch.halted and batch.begun < len(batch.messages)
        ]
        again = 0
        for batch in late:
            if batch.thread is None and batch in self.suspects:
                batch.place.not_before = now + SUSPECT_REST_SECONDS
            elif not self._keeps_waiting(batch):
                again += 1
            if again <= REFRESHED:
                self.give_back(batch, drops=False)  # rule: stops_lists_that_it_refreshes

    def full_topics(self, seconds: float) -> frozenset[str]:
        """Return the topics for which all that could run their listeners has been taken for so long."""
        room, hand = self._room, self._hand
        full = set[str]()
        if min(map(hand.ran, range(room.threads))) >= seconds:
            full = {name for name in self._places.topics if name not in room.overlap}
        if room.overlap:
            is_blocked = hand.ran(room.threads) >= seconds
            running = Counter(batch.topic.name for batch in hand.slow(seconds))
            full |= {
                name
                for name in room.overlap.concurrency
                if is_blocked or running[name] >= room.overlap.most(name)
            }
        return frozenset(full)

    def _keeps_waiting(self, batch: Batch) -> bool:
        """Return whether what a batch waits for does not end soon, so that its messages will not be taken again at once."""
        thread = batch.thread
        return (
            batch.topic.name in self._room.overlap
            or thread is None
            or thread.hangs
            or self._hand.is_taken(thread.index)
        )


def members_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the members of messages."""
    return [message.delivery.member for message in messages]


__all__ = ["BatchRouter", "members_of"]
