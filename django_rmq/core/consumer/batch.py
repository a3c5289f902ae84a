"""Batches: the messages that one prepare delivered from one slot; the ``Executor`` that runs them, and its reports about them.

``Executor`` is what a thread of ``executor_pool`` and the event loop of ``async_executor`` have in common. It knows batches, and
a batch knows its executor, so both are here. Executors get whole batches, never single messages. They report outcomes in slices,
so that the work of a slow listener is committed while its batch runs. A batch is in flight until its executor has reported the
last message; acknowledging the outcomes is the part of ``acks``. ``InFlight`` has the batches of the worker. From their calls it
estimates the work that each thread has, and it remembers the receipts of recent deliveries, so that none begins twice.

``Batch.cancel`` notifies the listener that messages were cancelled. ``heartbeat`` calls it, and names the whole way to there.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from django_rmq.core import forked_copies
from django_rmq.core.clock import uptime
from django_rmq.core.consumer.shared_notes import ThreadNotes
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic

Outcome = tuple[Message, Failure | None]
"""A message, and how it failed; a message without a failure is committed."""


class PendingEnd(ABC):
    """The end of a message whose record is still to be written elsewhere, before the message is acknowledged.

    A listener of RMQ's own may return it in place of None, except on strict fifo topics. An executor then calls the listener
    for further messages of the batch.
    """

    @abstractmethod
    def wait(self) -> None:
        """Return once the record is written. Raises the error with which the message fails otherwise."""


class ListenerLike(Protocol):
    """The interface of a listener that the registry passes to the consumer."""

    @property
    def topic(self) -> str: ...
    @property
    def function(self) -> Callable[[Any], Any]: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def coroutine(self) -> Callable[[Any], Awaitable[Any]] | None: ...


class Executor(threading.Thread, ABC):
    """Runs the batches that it is given: one after the other in a thread, or those of async listeners in an event loop."""

    def __init__(self, name: str, index: int, marks: ThreadNotes | None) -> None:
        super().__init__(name=name, daemon=True)
        self.index = index
        self.marks = marks
        self.hangs = False
        """Whether it is given up, because its listener does not return; then it gets no more work."""

    @property
    def is_dead(self) -> bool:
        """Whether it has run and no longer runs."""
        return self.ident is not None and not self.is_alive()

    @abstractmethod
    def batches(self) -> list[Batch]:
        """Return the batches that run."""

    @abstractmethod
    def put(self, batch: Batch) -> None:
        """Queue a batch."""

    @abstractmethod
    def withdraw(self, batch: Batch) -> bool:
        """Take a batch out of the queue; return whether it was there. Otherwise it runs already."""

    @abstractmethod
    def stop(self) -> None:
        """End when nothing is queued and nothing runs."""

    @abstractmethod
    def gives_up_on(self, batch: Batch) -> bool:
        """Return whether it has to be replaced, because the listener of ``batch`` has exceeded MAX_RUNTIME."""

    @abstractmethod
    def stack_of(self, batch: Batch) -> str:
        """Return the stack of the listener of a batch."""

    @abstractmethod
    def look(self) -> None:
        """Log what keeps other listeners waiting."""


forked_copies.watch(Executor)


class AsyncCalls(Protocol):
    """The calls of one batch in the event loop, which can be stopped."""

    def blocked(self) -> float: ...
    def stop(self, why: str) -> None: ...


@dataclass(slots=True, eq=False)
class Batch:
    """The messages that one prepare delivered from one slot, until the last of them is reported."""

    slot: ConsumedSlot
    listener: ListenerLike
    receipt: int
    messages: list[Message]
    """The messages, in the order of their calls once these have begun."""
    confirmed: float
    """The ``uptime`` of the call by which Redis last confirmed that this worker holds the batch."""
    queued: float = field(default_factory=uptime)
    """The ``uptime`` at which the worker received it."""
    begun: int = 0
    """How many of ``messages`` the thread has begun. The thread writes this, then reads ``halted``; the
    dispatcher writes ``halted``, then reads this. So no message is both given back and begun."""
    reported: int = 0
    """How many of ``messages`` the thread has reported."""
    stale: set[bytes] = field(default_factory=set)
    """Members that this worker no longer holds."""
    call_began_at: float | None = None
    group: list[Message] = field(default_factory=list)
    """The list with which a batch listener was called last."""
    overran: tuple[float, float] | None = None
    """The last call that was found to have exceeded HARD_TIMEOUT: the ``uptime`` at which it began, and that of the finding."""
    async_run: AsyncCalls | None = None
    """The calls of an async listener, which can be stopped; None in an executor thread."""
    halted: bool = False
    """Whether no more messages of the batch may begin."""
    dropped: bool = False
    """Whether also the messages of a list that failed must not be tried one by one."""
    cut: frozenset[bytes] = frozenset()
    """Members that the dispatcher has given back itself."""
    abandoned: bool = False
    """Whether the listener exceeded MAX_RUNTIME; then nothing of the batch is extended."""
    thread: Executor | None = None
    """The executor that has the batch, also after that was given up; None while a suspect waits for another one."""
    size: int = 0
    """The size of its messages in bytes."""
    cost: float = 0.0
    """The seconds of work estimated when it was queued."""
    timeout: float = field(init=False)
    """Seconds from ``confirmed`` until the first of its messages times out."""

    def __post_init__(self) -> None:
        self.timeout = self.messages[0].topic.timeout

    @property
    def topic(self) -> Topic:
        return self.messages[0].topic

    @property
    def head(self) -> float:
        """The highest score, if the topic has priorities."""
        return self.messages[0].score

    def ran(self, now: float) -> float:
        """Return for how many seconds the call that runs could work: other coroutines may have blocked its loop."""
        since, run = self.call_began_at, self.async_run
        # rule: charges_those_that_a_blocked_loop_keeps_waiting
        return 0.0 if since is None else now - since - (run.blocked() if run is not None else 0.0)

    def messages_of_call(self) -> list[Message]:
        """Return the messages of the call that runs, or ran last."""
        return self.group or self.messages[max(0, self.begun - 1) : self.begun]

    def messages_of(self, began: float) -> list[Message]:
        """Return the messages of the call that began at this ``uptime``, or none if it has returned."""
        messages = self.messages_of_call()
        # ``call_began_at`` is read last, because it is cleared before the next call begins.
        return messages if self.call_began_at == began else []

    def cancel(self, members: set[bytes]) -> None:
        """Notify the listener that these members are cancelled. Those that have not begun will not."""
        for message in self.messages:
            if message.delivery.member in members:
                message.stopped = "cancelled"
        if self.async_run is not None:
            self.async_run.stop("cancelled")

    def in_flight(self) -> list[bytes]:
        """Return the members that the heartbeat must extend: neither reported nor given back."""
        # The dispatcher gives back the messages that a halted batch has not begun, so they must not be extended.
        end = self.begun if self.halted else None
        return [message.delivery.member for message in self.messages[self.reported : end]]


class BatchReport(NamedTuple):
    """An executor's report: the outcomes of some messages of a batch."""

    batch: Batch
    committed: list[bytes]
    failures: list[Failure]
    released: list[bytes]
    seconds: float
    """Seconds spent in listeners for these messages."""
    last: bool
    """Whether the executor has no message of the batch left."""
    times: Sequence[float] = ()
    """Seconds that each call of the listener took."""


class ReportQueue(Protocol):
    """Where executors put their reports: the queue of the dispatcher's mailbox."""

    def put(self, item: BatchReport, /) -> None: ...


TAKEN_SECONDS = 1.0
"""Seconds after which the end of a call counts as unknown: its thread gets no batches, and other threads serve its slots."""

LONG_CALL_SECONDS = 0.1
"""Seconds from which a call that runs changes the estimated work of its thread."""


RECENT = 8_192
"""The number of deliveries whose receipts are remembered: more than a worker is sent within a second."""


class InFlight:
    """The batches of one worker. Other threads may copy ``batches``; only the dispatcher's thread changes them."""

    def __init__(self, threads: int) -> None:
        self.batches: dict[int, Batch] = {}
        """The batches by their ``id``."""
        self.messages = 0
        """The number of messages in the batches."""
        self._recent: dict[tuple[str, int, int], None] = {}
        """Topic, slot and receipt of the last deliveries, the oldest first."""
        self.load = [0.0] * threads
        """The estimated seconds of work that each thread has."""
        self.ran = [0.0] * threads
        """For how many seconds the present call of each thread has run, or has blocked the event loop."""
        self.last_work = time.monotonic()
        """When the worker last took or finished something."""

    def is_new(self, topic: str, number: int, receipt: int) -> bool:
        """Return whether no delivery of a slot with this receipt was added or noted lately."""
        return (topic, number, receipt) not in self._recent

    def note(self, topic: str, number: int, receipt: int) -> None:
        """Record that this worker has received a delivery, so that it does not begin twice."""
        self._recent[topic, number, receipt] = None
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]

    def __contains__(self, batch: Batch) -> bool:
        return id(batch) in self.batches

    def of(self, slot: ConsumedSlot) -> list[Batch]:
        """Return the batches of a slot."""
        return [batch for batch in self.batches.values() if batch.slot is slot] if slot.batches else []

    def add(self, batch: Batch) -> None:
        """Add a batch that Redis has delivered."""
        self.batches[id(batch)] = batch
        self.note(*batch.slot.key, batch.receipt)
        self.messages += len(batch.messages)
        self.last_work = time.monotonic()
        batch.slot.batches += 1

    def is_taken(self, thread: int) -> bool:
        """Return whether a thread's call has run for ``TAKEN_SECONDS``, so that its end is unknown."""
        return self.ran[thread] >= TAKEN_SECONDS

    def estimate(self, current: Iterable[Batch], blocked_seconds: float) -> None:
        """Correct the estimates of threads whose call takes longer than expected.

        ``current`` has the batch that each thread runs; ``blocked_seconds`` is how long something has blocked the event loop.
        """
        now = uptime()
        self.ran = [0.0] * len(self.load)
        self.ran[-1] = blocked_seconds
        for batch in current:
            # The thread writes ``call_began_at`` and may end the call at any time, so it is read once.
            since, thread = batch.call_began_at, batch.thread
            if since is None or thread is None or (ran := now - since) < LONG_CALL_SECONDS:
                continue
            if batch in self:
                self.ran[thread.index] = ran
                self.load[thread.index] += max(0.0, ran - batch.cost)
                batch.cost = max(batch.cost, ran)

    def slow(self, seconds: float | None = None) -> list[Batch]:
        """Return the batches whose present call has run for ``seconds``, by default for ``TAKEN_SECONDS``."""
        before = uptime() - (TAKEN_SECONDS if seconds is None else seconds)
        return [batch for batch in self.batches.values() if (since := batch.call_began_at) and since < before]

    def remove(self, batch: Batch) -> bool:
        """Remove a batch that has ended; return whether it was there."""
        # An executor that fails after the last report of a batch reports its end a second time.
        if self.batches.pop(id(batch), None) is None:
            return False
        batch.slot.batches -= 1
        self.messages -= len(batch.messages)
        if batch.thread is not None:
            self.load[batch.thread.index] -= batch.cost
        return True
