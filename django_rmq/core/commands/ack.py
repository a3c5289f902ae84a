"""Calls that end or extend deliveries: the second phase, heartbeats, and the slot's upkeep.

Those that end a delivery name its receipt. A stale receipt changes nothing, so a call may be repeated after a lost reply. Here is
also the ``DeliveryControl`` of messages, by which a listener extends its delivery and reports progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import AtSlot, Call, Reply, form, word, words
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Failure, cut_error, packed_digests
from django_rmq.core.model.topic import Topic


def commit(topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> Call[list[str]]:
    """End deliveries successfully (second phase). Answers ok or stale for each member."""
    return Call(
        form("commit", topic),
        AtSlot(topic, slot),
        (receipt, *members),
        words(len(members)),
    )


def _of_all(size: int) -> Callable[[bytes], list[str]]:
    return lambda reply: ["ok"] * size if reply == b"ok" else []


ENOUGH = 16
"""From this number of messages on, the outcome of a whole delivery is noted once for all of them.

A status looks through these notes one after the other, so there must not be many short ones.
"""


def commit_delivery(
    topic: Topic, slot: int, receipt: int, size: int, members: Sequence[bytes] = ()
) -> Call[list[str]]:
    """End successfully all ``size`` deliveries that one prepare has answered while nothing else was in flight.

    Answers ok for each, or an empty list if none has ended, so that `commit` has to name them. With ``members`` (topics
    with OUTCOME_RETENTION) their outcome is noted once for all of them; without, for each.
    """
    own: tuple[object, ...] = (receipt, size, packed_digests(members)) if members else (receipt, size)
    return Call(form("commit_delivery", topic), AtSlot(topic, slot), own, _of_all(size), varying=len(own))


def _written(failures: Sequence[Failure]) -> list[object]:
    flat: list[Reply] = []
    for member, kind, delay_ms, error in failures:
        flat += (member, kind, "" if delay_ms is None else delay_ms, cut_error(error))
    return flat


def rollback(topic: Topic, slot: int, receipt: int, failures: Sequence[Failure]) -> Call[list[str]]:
    """End deliveries as failed (second phase).

    Answers for each ok, stale, or cancelled if a person has cancelled the delivery and it ended so.
    """
    return Call(
        form("rollback", topic),
        AtSlot(topic, slot),
        (receipt, *_written(failures)),
        words(len(failures)),
    )


def release(topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> Call[list[str]]:
    """Give deliveries back; no retry is used. Answers ok or stale for each."""
    return Call(
        form("release", topic),
        AtSlot(topic, slot),
        (receipt, *members),
        words(len(members)),
    )


def extend(topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> Call[list[str]]:
    """Restart the time-out. Answers ok, cancelled (it was cancelled meanwhile) or stale for each."""
    return Call("extend", AtSlot(topic, slot), (receipt, *members), words(len(members)))


def progress(
    topic: Topic, slot: int, receipt: int, member: bytes, thousandths: int, said: bytes = b""
) -> Call[str]:
    """Note how far a delivery has got (topics with OUTCOME_RETENTION). Answers ok or stale."""
    return Call("progress", AtSlot(topic, slot), (receipt, member, thousandths, said), word)


def time_out(topic: Topic, slot: int, limit: int = 1000) -> Call[int]:
    """Time out deliveries whose heartbeat has stopped; return their number."""
    return Call(form("time_out", topic), AtSlot(topic, slot), (limit,), int)


def promote(topic: Topic, slot: int, limit: int = 1000) -> Call[int]:
    """Return messages whose back-off is over from Retry to Store; return their number."""
    return Call("promote", AtSlot(topic, slot), (limit,), int)


class BrokerDeliveryControl:
    """Extends deliveries and reports their progress, by calls of their own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def extend(self, message: Message) -> bool:
        """Restart the time-out, and note on the message if it was cancelled; return False if the delivery has ended."""
        member = message.delivery.member
        [word] = self._broker.run(extend(message.topic, message.slot, message.receipt, [member]))
        if word == "cancelled":
            message.stopped = "cancelled"
        return word != "stale"

    def report(self, message: Message, thousandths: int, text: bytes) -> bool:
        """Note the progress; return False if the delivery has ended."""
        member = message.delivery.member
        call = progress(message.topic, message.slot, message.receipt, member, thousandths, text)
        return self._broker.run(call) == "ok"
