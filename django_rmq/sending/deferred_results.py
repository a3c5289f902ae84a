"""Results of calls that wait for a commit; their ``status`` is current whenever it is read.

How a rollback is detected: each result holds a weak reference to its call, and only Django holds the call, as
the callback given to ``transaction.on_commit``. Django drops the callbacks of a transaction or savepoint at
the rollback, and the reference is dead from then on. A connection has no public attribute for this:
``in_atomic_block`` and ``savepoint_ids`` are the same after a savepoint that was kept and one that was rolled
back, and there is no callback for a rollback.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Self, cast
from weakref import ref

from django_rmq.core.model.send_results import Durability, SendResult
from django_rmq.core.producer.placement import Outgoing


class DeferredResult(SendResult):
    """The result of a send that waits for a commit."""

    __slots__ = ("_call",)

    def __init__(self, out: Outgoing, wanted: Durability, call: ref[Any]) -> None:
        self.topic = out.topic.name
        self.slot = out.slot
        self.member = out.member
        self.score = math.nan
        self.replicas = self.fsynced = None
        self.wanted = wanted
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return _status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process is not updated.
        told = (self.topic, self.slot, self.member, self.status, self.score, self.replicas, self.fsynced)
        return SendResult, (*told, self.wanted)

    def complete(self, outcome: SendResult) -> None:
        """Set the outcome of the message at the commit."""
        self.status = outcome.status
        self.slot, self.score = outcome.slot, outcome.score
        self.replicas = outcome.replicas if self.wanted.replicas else None
        self.fsynced = outcome.fsynced if self.wanted.fsync else None


RemoveStatus = Literal[
    "pending",
    "waiting",
    "resting",
    "running",
    "running_and_waiting",
    "not_found",
    "claimed",
    "failed",
    "in_outbox",
    "outdated",
    "discarded",
]
"""The status of a removal; ``RemoveResult`` says what each means."""


class RemoveResult(str):
    """The result of ``remove_message`` or ``cancel_message``: a word, with a ``status`` that is updated at the commit.

    ``waiting``, ``resting``, ``running``, ``running_and_waiting`` or ``not_found``: where the message was;
    for ``cancel_message`` also ``claimed``. In a transaction the word is ``pending``, and so is ``status`` until the
    commit; after it one of the above, ``failed``, ``in_outbox`` or ``outdated`` (as of ``SendResult``), or
    ``discarded`` after a rollback.
    """

    __slots__ = ("_call", "member", "status", "topic")

    topic: str
    member: bytes
    """The member in Redis: the encoded body, or the key."""
    status: RemoveStatus
    """Where the message was; ``pending`` until the commit."""
    _call: ref[Any] | None

    def __new__(cls, word: str, topic: str, member: bytes, call: ref[Any] | None = None) -> Self:
        """Return ``word`` as the result of removing ``member``, which waits for ``call`` if there is one."""
        result = super().__new__(cls, word)
        result.topic, result.member, result._call = topic, member, call
        if call is None:
            result.status = cast("RemoveStatus", word)
        return result

    def __getattr__(self, name: str) -> Any:
        return _status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[Any, ...]:
        # As in DeferredResult.
        return RemoveResult, (self.status, self.topic, self.member)

    def complete(self, outcome: SendResult) -> None:
        """Set the state in which the message was found at the commit."""
        self.status = cast("RemoveStatus", outcome.status)


def _status_by_now(result: object, name: str, call: ref[Any] | None) -> str:
    """Return the status of a result that is not yet final; it is set as soon as it cannot change any more."""
    if name != "status":
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}")
    return "discarded" if call is None or call() is None else "pending"


__all__ = ["DeferredResult", "RemoveResult"]
