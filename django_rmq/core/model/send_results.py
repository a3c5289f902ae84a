"""The results of sends and of removals, and the durability that a send may request.

A bulk send keeps its results as the answers of round trips: an object for each message is made only when it is read.

The results of a call that waits for a commit detect a rollback by a weak reference to the call. The reference is dead as soon as
Django has dropped the callback of the call, and the status is then ``discarded``. A connection has no public attribute for this:
``in_atomic_block`` and ``savepoint_ids`` are the same after a savepoint that was kept and one that was rolled back, and Django
has no callback for a rollback.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self, cast, overload

from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import TopicFull


class Durability(NamedTuple):
    """The durability requested of a send beyond being stored."""

    replicas: int = 0
    """How many replicas must confirm that they have it."""
    fsync: bool = False
    """Whether it must be on the primary's disk."""

    def is_reached_by(self, result: SendResult) -> bool:
        """Return whether a message that Redis has is confirmed to be as durable."""
        return (result.replicas or 0) >= self.replicas and (bool(result.fsynced) or not self.fsync)


STORED = Durability()
"""No durability beyond being stored."""


SendStatus = Literal[
    "pending",
    "stored",
    "merged",
    "replaced",
    "superseded",
    "present",
    "refused",
    "failed",
    "in_outbox",
    "outdated",
    "discarded",
]
"""The status of a send; ``SendResult.status`` says what each means."""

OUTDATED: Final = "outdated"
"""The status of a send or removal whose row is no longer in the outbox: the relay, a newer send or a person has taken it."""


class Confirmed(NamedTuple):
    """The durability that was confirmed. A field is None if it was not requested, or is unknown."""

    replicas: int | None = None
    fsynced: bool | None = None

    def least(self, other: Confirmed) -> Confirmed:
        """Return the lower values of the two."""
        replicas = (
            None if self.replicas is None or other.replicas is None else min(self.replicas, other.replicas)
        )
        fsynced = None if self.fsynced is None or other.fsynced is None else self.fsynced and other.fsynced
        return Confirmed(replicas, fsynced)


@dataclass(slots=True)
class SendResult:
    """The result of a send. Inside a database transaction its ``status`` is ``pending`` until the commit.

    After a rollback of the transaction, or of the send's savepoint, it is ``discarded``.
    """

    topic: str
    slot: int
    member: bytes
    status: SendStatus = "pending"
    """pending, stored, merged, replaced, superseded, present, refused (the slot or the message is full),
    failed (not sent at the commit: the server was unavailable, or has another definition of the topic), in_outbox (the relay of
    the outbox will send it), outdated (the relay or a newer send of the same message had dealt with it, or a person had deleted
    its row) or discarded (rolled back, or an earlier callback of the commit raised: Django then runs no more of them)."""
    score: float = math.nan
    """The Store score: due time in ms, or priority. NaN while pending, and where nothing was stored."""
    replicas: int | None = None
    """How many replicas have the message, if ``replicas=`` was given. None if it was not requested, or is unknown."""
    fsynced: bool | None = None
    """Whether the message is known to be on the primary's disk. None if ``fsync=`` was not given."""
    wanted: Durability = STORED

    @property
    def id(self) -> str:
        """The message's id: its slot and its member."""
        return message_id(self.slot, self.member)

    @property
    def ok(self) -> bool:
        """Whether the message is (or was already) in the queue. True if ``outdated``, also where a person has deleted its row."""
        return self.status in ("stored", "merged", "replaced", "superseded", "present", OUTDATED)

    @property
    def durable(self) -> bool:
        """Whether the message is in the queue and as durable as requested by ``replicas=`` and ``fsync=``."""
        return self.ok and self.wanted.is_reached_by(self)


WaitingCall = Callable[[], object]
"""A weak reference to the call that waits for a commit. It returns None when the call has been dropped."""


def status_by_now(result: object, name: str, call: WaitingCall | None) -> str:
    """Return the status of a result that is not final. ``complete`` sets the attribute, and Python then reads that."""
    if name != "status":
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}")
    # Only Django holds the call, so a dead reference means that a rollback has dropped the callback.
    return "discarded" if call is None or call() is None else "pending"


class DeferredResult(SendResult):
    """The result of a send that waits for a commit."""

    __slots__ = ("_call",)

    def __init__(self, topic: str, slot: int, member: bytes, wanted: Durability, call: WaitingCall) -> None:
        self.topic, self.slot, self.member = topic, slot, member
        self.score = math.nan
        self.replicas = self.fsynced = None
        self.wanted = wanted
        self._call = call

    def __getattr__(self, name: str) -> object:
        # The slot ``status`` is empty until the commit, so Python calls this for every read of it.
        return status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy in another process does not see the commit, so it holds the status of now.
        values = (self.topic, self.slot, self.member, self.status, self.score, self.replicas, self.fsynced)
        return SendResult, (*values, self.wanted)

    def complete(self, outcome: SendResult) -> None:
        """Set the outcome of the message at the commit."""
        self.status = outcome.status
        self.slot, self.score = outcome.slot, outcome.score
        self.replicas = outcome.replicas if self.wanted.replicas else None
        self.fsynced = outcome.fsynced if self.wanted.fsync else None


class SendResults(Sequence[SendResult]):
    """The results of a bulk send, in the order of its messages.

    A result object is made when it is first read.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._made: list[SendResult] = []
        self._trips: list[tuple[Sequence[int], Sequence[bytes], Mapping[int, Sequence[Sent]]]] = []

    def add(self, slots: Sequence[int], members: Sequence[bytes], sent: Mapping[int, Sequence[Sent]]) -> None:
        """Add one round trip: the slot of each member, and the answers of each slot in that order."""
        self._trips.append((slots, members, sent))

    def extend(self, results: Iterable[SendResult]) -> None:
        """Add results that already exist."""
        # The results of earlier trips become objects first, which keeps the order.
        self._make().extend(results)

    def counts(self) -> Counter[str]:
        """Return the number of messages of each status."""
        counts = Counter[str](result.status for result in self._made)
        for _, _, sent in self._trips:
            for answers in sent.values():
                counts.update(status for status, _ in answers)
        return counts

    def _make(self) -> list[SendResult]:
        for slots, members, sent in self._trips:
            answers = {slot: iter(replies) for slot, replies in sent.items()}
            for slot, member in zip(slots, members, strict=True):
                status, score = next(answers[slot])
                self._made.append(SendResult(self._topic, slot, member, cast("SendStatus", status), score))
        self._trips.clear()
        return self._made

    def __len__(self) -> int:
        return len(self._made) + sum(len(slots) for slots, _, _ in self._trips)

    @overload
    def __getitem__(self, index: int) -> SendResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...
    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        return self._make()[index]

    def __iter__(self) -> Iterator[SendResult]:
        return iter(self._make())

    def __repr__(self) -> str:
        return f"<SendResults of {len(self)} messages of {self._topic}: {dict(self.counts())}>"


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
    ``discarded`` after a rollback. Its text stays ``pending``, so compare ``status`` in a transaction.
    """

    __slots__ = ("_call", "member", "status", "topic")

    topic: str
    member: bytes
    """The member in Redis: the encoded body, or the key."""
    status: RemoveStatus
    """Where the message was; ``pending`` until the commit."""
    _call: WaitingCall | None

    def __new__(cls, word: str, topic: str, member: bytes, call: WaitingCall | None = None) -> Self:
        """Return ``word`` as the result of removing ``member``, which waits for ``call`` if there is one."""
        result = super().__new__(cls, word)
        result.topic, result.member, result._call = topic, member, call
        if call is None:
            result.status = cast("RemoveStatus", word)
        return result

    def __getattr__(self, name: str) -> object:
        return status_by_now(self, name, self._call)

    def __reduce__(self) -> tuple[object, ...]:
        # As in ``DeferredResult``: a copy in another process does not see the commit.
        return RemoveResult, (self.status, self.topic, self.member)

    def complete(self, outcome: SendResult) -> None:
        """Set the state in which the message was found at the commit."""
        self.status = cast("RemoveStatus", outcome.status)


def too_full(topic: Topic, result: SendResult) -> TopicFull:
    """Return the error for a slot that was too full for the message of ``result``."""
    if topic.accumulate and topic.max_backlog:
        return TopicFull(
            f"the message has collected ACCUMULATE = {topic.accumulate} bodies or MAX_BODY = {topic.max_body} bytes, or "
            f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of MAX_BACKLOG"
        )
    if topic.accumulate:
        return TopicFull(
            f"a message of topic {topic.name} has collected ACCUMULATE = {topic.accumulate} bodies, or MAX_BODY = "
            f"{topic.max_body} bytes: it is due, and takes more once it has been delivered"
        )
    return TopicFull(
        f"slot {result.slot} of topic {topic.name} holds {topic.slot_backlog} messages, its share of "
        f"MAX_BACKLOG = {topic.max_backlog}"
    )
