"""The mailbox of a dispatcher: other threads report slots that come and go, wake-ups, outcomes of batches, and the end.

Any thread may put an item into the mailbox, and only the dispatcher's thread reads it. So the state of the dispatcher needs
no locks. The part that registers a handler for a type of items decides what they mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.progress import SharedProgress, mark_of
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import SlotMoved


class Own(NamedTuple):
    """Slots that this worker owns from now on, by topic."""

    slots: Mapping[str, array[int]]


class Disown(NamedTuple):
    """Slots that this worker no longer owns."""

    slots: list[tuple[str, int]]


class Wake(NamedTuple):
    """Something is due in a slot, or (as ``-1 - slot``) the slot was paused."""

    topic: str
    slot: int


class Resubscribed(NamedTuple):
    """The subscription was renewed; wake-ups until now may have been missed."""


class MaxRuntimeExceeded(NamedTuple):
    """A listener has exceeded MAX_RUNTIME."""

    batch: Batch


class HardTimeoutExceeded(NamedTuple):
    """A listener has exceeded HARD_TIMEOUT, and only the end of the process can end it."""

    batch: Batch


class LimitsChange(NamedTuple):
    """Topics whose limits a person has changed, with those in effect."""

    topics: list[Topic]


class Stop(NamedTuple):
    """The worker has to end."""


MailboxItem = (
    BatchReport
    | Own
    | Disown
    | Wake
    | Resubscribed
    | MaxRuntimeExceeded
    | HardTimeoutExceeded
    | LimitsChange
    | Stop
)
Item = TypeVar("Item", bound=MailboxItem)


class Mailbox:
    """Any thread may put an item into ``queue``; the dispatcher's thread reads it."""

    def __init__(self) -> None:
        # ``put`` of a SimpleQueue is reentrant, so a signal handler may call it while its own thread is in the queue.
        self.queue: SimpleQueue[MailboxItem] = SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}

    def on(self, kind: type[Item], handler: Callable[[Item], None]) -> None:
        """Pass items of this kind to ``handler``."""
        self._handlers[kind] = handler

    def process_items(self) -> None:
        """Process the items that are there."""
        self.read(0.0)

    def read(self, timeout: float) -> None:
        """Process the items that are there; if there are none, wait for one, for at most this many seconds."""
        try:
            item = self.queue.get(timeout=timeout) if timeout > 0 else self.queue.get_nowait()
            while True:
                self.handle(item)
                item = self.queue.get_nowait()
        except Empty:
            pass

    def handle(self, item: MailboxItem) -> None:
        """Do what an item asks for."""
        self._handlers[type(item)](item)


class ShutdownState:
    """Flags that any part of the worker may set and read."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the worker has stopped taking messages."""
        self.forced = False
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        self.past_hard_timeout: list[Batch] = []
        """The batches whose listener exceeded HARD_TIMEOUT; nothing waits for them, and the process ends."""
        self.moved: SlotMoved | None = None
        """The error to raise at the end, if a slot was given another slot count."""

    def is_over(self, batches: Iterable[Batch]) -> bool:
        """Return whether nothing is left to wait for among the ``batches`` in flight."""
        # A listener that exceeded HARD_TIMEOUT ends only with the process, so nothing waits for it.
        return all(batch in self.past_hard_timeout for batch in batches)


class HardTimeouts:
    """Ends the worker when a listener exceeded HARD_TIMEOUT, and records in ``notes`` which messages the parent charges."""

    def __init__(self, mailbox: Mailbox, shutdown: ShutdownState, notes: SharedProgress | None) -> None:
        self._shutdown = shutdown
        self._notes = notes
        mailbox.on(HardTimeoutExceeded, self._note)

    def _note(self, item: HardTimeoutExceeded) -> None:
        batch = item.batch
        if self._notes is not None:
            topic, slot, receipt = batch.topic.name, batch.slot.number, batch.receipt
            members = [message.delivery.member for message in batch.messages_of_call()]
            # The parent settles all messages of this process after its end. Only those of the call that ran too long use a
            # retry.
            # rule: forgives_what_ran_too_long
            self._notes.charge([mark_of(topic, slot, receipt, member) for member in members])
        self._shutdown.past_hard_timeout.append(batch)
        self._shutdown.begun = True
