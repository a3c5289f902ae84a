"""What sends and removals return, and the errors that explain a refused send. ``on_commit`` has the result of a waiting send.

The results of a waiting call detect a rollback by a weak reference to the call. The reference is dead as soon as Django has
dropped the callback of the call, and the status is then ``discarded``. A connection has no public attribute for this:
``in_atomic_block`` and ``savepoint_ids`` are the same after a savepoint that was kept and one that was rolled back, and
Django has no callback for a rollback.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Self, cast

from django_rmq import connections
from django_rmq.core.model.send_results import STORED, Durability, SendResult, SendStatus
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import Outgoing
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved, TopicFull

WaitingCall = Callable[[], object]
"""A weak reference to the call that waits for a commit. It returns None when the call has been dropped."""


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
        # As in DeferredResult: a copy in another process does not see the commit.
        return RemoveResult, (self.status, self.topic, self.member)

    def complete(self, outcome: SendResult) -> None:
        """Set the state in which the message was found at the commit."""
        self.status = cast("RemoveStatus", outcome.status)


def status_by_now(result: object, name: str, call: WaitingCall | None) -> str:
    """Return the status of a result that is not final. ``complete`` sets the attribute, and Python then reads that."""
    if name != "status":
        raise AttributeError(f"{type(result).__name__!r} object has no attribute {name!r}")
    # Only Django holds the call, so a dead reference means that a rollback has dropped the callback.
    return "discarded" if call is None or call() is None else "pending"


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


def explained(topic: Topic, error: RmqError) -> RmqError:
    """Return ``error``; if the topic was re-slotted, with both counts and what to do."""
    if not isinstance(error, SlotMoved):
        return error
    # The next send compares the definition again, because a process may have registered another one meanwhile.
    connections.forget(topic)
    try:
        registered = connections.get_broker().definitions().get(topic.name, {}).get("slots")
    except ServerTrouble:
        # Redis became unavailable after it refused the send: the text then lacks the registered count.
        registered = None
    now = f"{registered} slots" if registered not in (None, topic.slots) else "a different number of slots"
    explanation = SlotMoved(
        f"topic {topic.name} now has {now}, but {topic.slots} in the settings of this process. Nothing "
        "was sent. Correct SLOTS and restart the process"
    )
    explanation.__cause__ = error
    return explanation


def went_nowhere(out: Outgoing, wanted: Durability = STORED) -> SendResult:
    """Return the result of a message that an observer kept from being sent, or of its removal."""
    status = cast("SendStatus", "not_found" if out.removes else "stored")
    reached = wanted.replicas or None, wanted.fsync or None
    return SendResult(out.topic.name, out.slot, out.member, status, math.nan, *reached, wanted)
