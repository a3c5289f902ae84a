"""The slow poll (``DuePoll``): asks Redis about slots in which nothing is under way.

A wake-up may be lost, and a program that writes with a plain ZADD sends none. So each poll asks when sleeping slots are due: up
to ``POLLED`` slots in one pipeline, with one ``heads`` per topic and ``HEADS`` slots. It also

- times out the deliveries of blocked slots, from which nothing is prepared until a listener returns;
- acquires a fenced slot again if messages are due there and no worker takes them;
- finds pushed messages that this worker has never received.

``mailbox`` reads the wake-ups.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from django_rmq.core.clock import uptime
from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker, concerns_all
from django_rmq.core.consumer.acks import SlotErrors
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.slot_acquisition import SlotAcquirer
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotSchedule, SlotState, SlotTable
from django_rmq.exceptions import RmqError, ServerTrouble

POLL_SECONDS = 1.0
"""Seconds between two slow polls: the delay after a foreign ZADD or a lost wake-up."""

POLLED = 4 * inspect.HEADS
"""The maximum number of slots asked by one slow poll. A worker with more of them asks for all within several
polls."""

Sleeping = tuple[int, ConsumedSlot | None]
"""A slot, and its object if it has one."""


@dataclass(eq=False)
class DuePoll:
    """Asks Redis every ``poll_seconds`` when sleeping slots are due."""

    broker: Broker
    table: SlotTable
    schedule: SlotSchedule
    slot_errors: SlotErrors
    acquirer: SlotAcquirer
    capacity: Capacity
    poll_seconds: float
    due: float = 0.0
    """Monotonic time of the next poll."""
    _round: Iterator[tuple[str, int, ConsumedSlot | None]] | None = None
    """The slots that the slow poll has not yet asked in this round."""
    _hurries: bool = False
    """Whether wake-ups may have been lost; then the slow poll goes through all slots without a pause."""
    _doubtful_rounds: int = 0
    """The number of rounds in which it still looks for pushes that this worker has never received.

    A send may prepare its message and push it to the worker that owns the slot. If the subscription breaks before the worker
    reads the push, the message is in flight there, and the worker does not know it.
    """

    def hurry(self, *, lost_pushes: bool) -> None:
        """Ask all slots without a pause, because wake-ups, and perhaps pushes, may have been lost."""
        self.due, self._hurries, self._round = 0.0, True, None
        if lost_pushes:
            # At the first look the answer to a commit may be under way, and its slot seem to have a delivery.
            self._doubtful_rounds = 2

    def poll(self) -> None:
        """Ask about sleeping, blocked and fenced slots. Raises an error that concerns the whole server."""
        before = uptime()
        server = self.broker.now_ms()
        self.schedule.clock.note(before, server, uptime())
        blocked = list(self.table.blocked)
        pipeline = self.broker.pipeline()
        parts = self._parts(server)
        answers = [
            pipeline.add(inspect.heads(self.table.topics[name], [number for number, _ in part]))
            for name, part in parts
        ]
        # Nothing is prepared in these until a listener returns, so nothing else would time out their
        # messages.
        timed_out = [pipeline.add(ack.time_out(slot.topic, slot.number)) for slot in blocked]
        pipeline.execute()
        untaken: list[ConsumedSlot] = []
        trouble: ServerTrouble | None = None
        for (name, part), answer in zip(parts, answers, strict=True):
            heads = answer.result()
            if isinstance(heads, RmqError):
                self.slot_errors.complain("heads", "The slow poll failed: %s", heads)
                trouble = heads if concerns_all(heads) else trouble
                continue
            untaken += self._wake(name, part, heads, server)
        for slot, ended in zip(blocked, timed_out, strict=True):
            error = ended.result()
            if isinstance(error, RmqError):
                trouble = self.slot_errors.of(slot, error) or trouble
        if untaken:
            # The coordinator may be unavailable. If nobody takes from a slot for the length of a time-out, this worker acquires
            # it again.
            for slot in self.acquirer.fenced_slots.left_alone(untaken):
                self.acquirer.acquire_fenced(slot)
        if trouble is not None:
            raise trouble
        if self._round is None:
            self._doubtful_rounds = max(0, self._doubtful_rounds - 1)
        self._hurries &= self._round is not None
        self.due = 0.0 if self._hurries else time.monotonic() + self.poll_seconds

    def _parts(self, server: float) -> list[tuple[str, list[Sleeping]]]:
        """Return the slots to ask, in groups of the size of one script."""
        by_topic: defaultdict[str, list[Sleeping]] = defaultdict(list)
        for name, number, slot in self._next(server):
            by_topic[name].append((number, slot))
        return [
            (name, slots[start : start + inspect.HEADS])
            for name, slots in by_topic.items()
            for start in range(0, len(slots), inspect.HEADS)
        ]

    def _wake(
        self, name: str, part: list[Sleeping], heads: Sequence[float | None], server: float
    ) -> list[ConsumedSlot]:
        """Make slots ready in which a message is due earlier than known; return the fenced slots that have messages due."""
        untaken: list[ConsumedSlot] = []
        for (number, known), due in zip(part, heads, strict=True):
            slot = known
            if slot is None:
                slot = self.table.get(name, number) if due is not None else None
            if slot is None:
                continue
            if slot.state is SlotState.FENCED:
                if due is not None and due <= server:
                    untaken.append(slot)
                else:
                    slot.untaken_since = None
            elif self._doubtful_rounds and due is not None and self._seems_idle(slot):
                # Something may be in flight there that this worker has never received, also if another message is due.
                self.acquirer.mark_uncertain(slot)  # rule: forgets_what_was_pushed_in_vain
            elif due is not None and due < slot.due:
                # The slot is prepared even if that time is later than now: the prepare stores until when this worker sleeps.
                self.schedule.make_ready(slot)
        return untaken

    def _seems_idle(self, slot: ConsumedSlot) -> bool:
        """Return whether sends may push messages of a slot, and this worker knows of none in flight there."""
        is_quiet = slot.state is SlotState.ACQUIRED and slot.fetch is FetchState.IDLE and not slot.batches
        return is_quiet and slot.topic.name in self.capacity.pushed_topics

    def _next(self, server: float) -> list[tuple[str, int, ConsumedSlot | None]]:
        """Return the next sleeping slots; all of them come in turn."""
        if self._round is None or len(self.table) <= POLLED:
            self._round = self.table.round()
        sleeping = (
            (topic, number, slot)
            for topic, number, slot in self._round
            if slot is None or _is_polled(slot, server)
        )
        polled = list(islice(sleeping, POLLED))
        if len(polled) < POLLED or len(self.table) <= POLLED:
            self._round = None
        return polled


def _is_polled(slot: ConsumedSlot, server: float) -> bool:
    """Return whether the slow poll asks for a slot that has a record; ``server`` is the time of Redis in ms."""
    if slot.blocked_by is not None:
        return False
    return slot.state is SlotState.FENCED or (slot.state is SlotState.ACQUIRED and slot.due > server)
