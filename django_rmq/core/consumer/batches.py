"""Batches: what one prepare handed out of one slot, and what the threads report of it.

Threads get whole batches, never single messages, and report what became of them in slices, so that a slow
listener's work is committed while it goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from django_rmq.core.words.failures import Failure
from django_rmq.core.words.messages import Message
from django_rmq.core.words.topics import Topic

Outcome = tuple[Message, Failure | None]
"""What became of a message; None: commit it."""


class ListenerLike(Protocol):
    """What the registry hands to the consumer."""

    @property
    def topic(self) -> str: ...
    @property
    def function(self) -> Callable[[Any], Any]: ...
    @property
    def batch_size(self) -> int | None: ...


class Batch:
    """What one prepare handed out of one slot, until its last message is settled."""

    __slots__ = (
        "abandoned",
        "begun",
        "confirmed",
        "cost",
        "cut",
        "dropped",
        "halted",
        "listener",
        "messages",
        "place",
        "queued",
        "receipt",
        "reported",
        "running_since",
        "size",
        "stale",
        "thread",
    )

    def __init__(
        self, place: Any, listener: ListenerLike, receipt: int, messages: list[Message], confirmed: float
    ) -> None:
        self.place = place
        """The slot's state in the dispatcher."""
        self.listener = listener
        self.receipt = receipt
        self.messages = messages
        """In the order of their calls, once these have begun."""
        self.confirmed = confirmed
        """``uptime`` when Redis last confirmed that the batch is ours (at the sending of that call)."""
        self.queued = confirmed
        self.begun = 0
        """How many of ``messages`` the thread has begun. It writes this, then reads ``halted``; the
        dispatcher writes ``halted``, then reads this: so nothing is both given back and begun."""
        self.reported = 0
        """How many of ``messages`` the thread has reported."""
        self.stale: set[bytes] = set()
        """Members that are no longer ours."""
        self.running_since: float | None = None
        self.halted = False
        """Nothing more of it may begin."""
        self.dropped = False
        """Nor may it go on with the messages of a list that failed, one by one."""
        self.cut: frozenset[bytes] = frozenset()
        """Members that the dispatcher has given back by itself."""
        self.abandoned = False
        """The listener exceeded MAX_RUNTIME: nothing more is extended."""
        self.thread: Any = None
        """The executor thread that has it; None: it waits for one, or its thread was given up."""
        self.size = 0
        """Bytes of its messages."""
        self.cost = 0.0
        """Seconds of work it was reckoned to be when it was queued."""

    @property
    def topic(self) -> Topic:
        return self.messages[0].topic

    @property
    def head(self) -> float:
        """The highest score, where the topic has priorities."""
        return self.messages[0].score

    def in_flight(self) -> list[bytes]:
        """Return the members that the heartbeat has to keep: neither reported nor given back."""
        end = self.begun if self.halted else None
        return [message.delivery.member for message in self.messages[self.reported : end]]


class Slice(NamedTuple):
    """A report of a thread: what became of some messages of a batch."""

    batch: Batch
    committed: list[bytes]
    failures: list[Failure]
    released: list[bytes]
    seconds: float
    """Time spent in listeners for these messages."""
    last: bool
    """Nothing of the batch is left with the thread."""
    times: Sequence[float] = ()
    """Seconds that each call of the listener took."""


class Exited(NamedTuple):
    """A thread reports that a listener asked the process to exit."""

    batch: Batch


class Tally:
    """What a thread has not reported yet of the batch that it runs."""

    __slots__ = ("batch", "begun", "committed", "failures", "times")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.clear()

    def clear(self) -> None:
        """Start again: everything is reported."""
        self.committed: list[bytes] = []
        self.failures: list[Failure] = []
        self.times: list[float] = []
        """Seconds that each call of the listener took."""
        self.begun = time.monotonic()

    def note(self, outcomes: list[Outcome]) -> None:
        """Add what became of the messages of one call."""
        self.committed += [message.delivery.member for message, failure in outcomes if failure is None]
        self.failures += [failure for _, failure in outcomes if failure is not None]

    def slice(self, rest: list[Message] | None) -> Slice:
        """Return the report; ``rest`` is what will not begin, None: the batch goes on."""
        released = [message.delivery.member for message in rest or ()]
        seconds = time.monotonic() - self.begun
        return Slice(
            self.batch, self.committed, self.failures, released, seconds, rest is not None, self.times
        )


__all__ = ["Batch", "Exited", "ListenerLike", "Outcome", "Slice", "Tally"]
