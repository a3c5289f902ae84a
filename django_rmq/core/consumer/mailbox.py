"""The mailbox of a dispatcher: other threads report slots that come and go, wake-ups, outcomes of batches, and the end.

Any thread may put an item into the mailbox, and only the dispatcher's thread reads it. So the state of the dispatcher needs
no locks. The part that registers a handler for a type of items decides what they mean. The report of an executor may be
deferred until something else comes, because waking the dispatcher costs more than processing the report.
"""

from __future__ import annotations

from array import array
from collections import deque
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


class DeferredReport(NamedTuple):
    """A report was deferred just when the dispatcher stopped to defer reports."""


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
    | DeferredReport
    | MaxRuntimeExceeded
    | HardTimeoutExceeded
    | LimitsChange
    | Stop
)
Item = TypeVar("Item", bound=MailboxItem)


class Mailbox:
    """Any thread may put an item into ``queue``; the dispatcher's thread reads it. Executors ``put`` their reports."""

    def __init__(self) -> None:
        # ``put`` of a SimpleQueue is reentrant, so a signal handler may call it while its own thread is in the queue.
        self.queue: SimpleQueue[MailboxItem] = SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {
            DeferredReport: lambda _: self._process_deferred()
        }
        self._defers_reports = False
        """Whether the dispatcher sleeps, and a report of commits does not wake it."""
        self._deferred: deque[BatchReport] = deque()
        """The reports that have not woken it."""

    def on(self, kind: type[Item], handler: Callable[[Item], None]) -> None:
        """Pass items of this kind to ``handler``."""
        self._handlers[kind] = handler

    def put(self, report: BatchReport, /) -> None:
        """Take the report of an executor. It wakes the dispatcher, unless that defers reports of commits."""
        is_deferred = self._defers_reports and not (report.failures or report.released)
        if not is_deferred:
            self.queue.put(report)
            return
        self._deferred.append(report)
        # The report is added before the flag is read, and the dispatcher does the reverse. So no report is deferred
        # beyond the end of a sleep.
        # rule: overlooks_a_report_at_the_end_of_its_sleep
        if not self._defers_reports:
            self.queue.put(DeferredReport())

    def process_items(self) -> None:
        """Process the items that are there."""
        self.read(0.0)

    def read(self, timeout: float, *, defers_reports: bool = False) -> None:
        """Process the items that are there; if there are none, wait for one, for at most this many seconds.

        ``defers_reports``: executors' reports of commits do not end this wait, and are processed after it.
        """
        self._defers_reports = defers_reports
        item: MailboxItem | None = None
        try:
            item = self.queue.get(timeout=timeout) if timeout > 0 else self.queue.get_nowait()
        except Empty:
            # Deferred reports may have come all the same.
            pass
        self._defers_reports = False
        # These come first: a later report of the same batch may be in the queue.
        self._process_deferred()
        try:
            while item is not None:
                self.handle(item)
                item = self.queue.get_nowait()
        except Empty:
            pass

    def _process_deferred(self) -> None:
        while self._deferred:
            self.handle(self._deferred.popleft())

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
