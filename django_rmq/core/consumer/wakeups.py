"""Wake-ups: Redis publishes the slots in which something can be taken, and the slow poll finds what a wake-up did not announce.

A thread subscribes, and the dispatcher reads the subscription by its ``mailbox``. A wake-up may be lost, and a program that
writes with a plain ZADD sends none. Therefore sleeping slots are also asked now and then when they are due (``DuePoll``): by
one ``heads`` per 1,024 slots and second, and at most four.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from django_rmq.core.clock import uptime
from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker, WakeupSubscription, concerns_all
from django_rmq.core.consumer.acks import SlotErrors
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.mailbox import Mailbox, Resubscribed, Wake
from django_rmq.core.consumer.slot_acquisition import SlotAcquirer
from django_rmq.core.consumer.slots import ConsumedSlot, FetchState, SlotSchedule, SlotState, SlotTable
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.replies import Pushed
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.consumer")

PAUSE_SECONDS = 0.2
"""Seconds between the end of a subscription and the next one."""


class WakeupSubscriber(threading.Thread):
    """Subscribes to wake-ups, because that may take long, and puts each new subscription into ``mailbox``.

    It reads only a subscription without a socket by itself: that of a broker in memory. ``subscribed`` is called after each
    new subscription.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Sequence[Topic],
        mailbox: Mailbox,
        subscribed: Callable[[], None],
        inbox: bytes,
    ) -> None:
        super().__init__(name="rmq-wakeups", daemon=True)
        self.subscribed = threading.Event()
        self._broker = broker
        self._topics = topics
        self._inbox = inbox
        self._mailbox = mailbox
        self._on_subscribed = subscribed
        self._is_stopped = False
        self._renewed = threading.Event()
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End soon. The dispatcher reads wake-ups no more."""
        self._is_stopped = True
        self._renewed.set()

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._renewed.set()

    def run(self) -> None:
        wakeups = None
        while True:
            # The flag is cleared before anything is done, so that what is requested meanwhile is not overlooked.
            self._renewed.clear()
            if self._is_stopped:
                break
            try:
                wakeups = self._broker.wakeups(self._topics, self._inbox)
                self.subscribed.set()
                self._on_subscribed()
                self._attend(wakeups)
            except RmqError:
                # Redis is unavailable, and it is tried again.
                pass
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain(
                    "wake-ups", "The wake-up subscription failed; polling continues: %s", error, exc_info=True
                )
            if not self._is_stopped:
                time.sleep(PAUSE_SECONDS)
        if wakeups is not None:
            # The dispatcher has ended, and perhaps did not see this one.
            wakeups.close()

    def _attend(self, wakeups: WakeupSubscription) -> None:
        """Give a subscription to the dispatcher, and wait until there has to be another one."""
        try:
            wakeups.fileno()
        except OSError:
            self._read(wakeups)
            return
        # The dispatcher closes it, because it may read it at any time.
        self._mailbox.put(Resubscribed(wakeups))
        self._renewed.wait()

    def _read(self, wakeups: WakeupSubscription) -> None:
        self._mailbox.put(Resubscribed(None))
        try:
            while not self._renewed.is_set():
                for woken in wakeups.get(timeout=0.1):
                    self._mailbox.put(woken if isinstance(woken, Pushed) else Wake(*woken))
        finally:
            wakeups.close()


POLL_SECONDS = 1.0
"""Seconds between two slow polls: the delay after a foreign ZADD or a lost wake-up."""

POLLED = 4 * inspect.HEADS
"""The maximum number of slots asked by one slow poll. A worker with more of them asks for all within several
polls."""

Sleeping = tuple[int, ConsumedSlot | None]
"""A slot, and its object if it has one."""


@dataclass(eq=False)
class DuePoll:
    """The slow poll: asks Redis when sleeping slots are due, because a wake-up may be lost and a plain ZADD sends none."""

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
    """For how many rounds it looks for pushes that this worker has never received."""

    def hurry(self, *, lost_pushes: bool) -> None:
        """Ask all slots soon, because wake-ups, and perhaps pushes, may have been lost."""
        self.due, self._hurries, self._round = 0.0, True, None
        if lost_pushes:
            # At the first look the answer to a commit may be under way, and its slot seem to have a delivery.
            self._doubtful_rounds = 2

    def poll(self) -> None:
        """Ask for the next due times of sleeping slots. Raises an error that concerns the whole server."""
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
