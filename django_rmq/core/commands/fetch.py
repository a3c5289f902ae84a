"""Calls by which a worker acquires slots and takes messages from them: the first phase.

After a lost reply, ``list_held`` returns what the lost ``prepare`` has delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import (
    AtSlot,
    AtSlots,
    Call,
    Reply,
    cursor,
    each_or_error,
    form,
    moment,
)
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.keys import check_slots, read_store_key
from django_rmq.core.model.replies import Acquired, Delivery, HeldReply, Prepared, Pushed
from django_rmq.core.model.topic import Topic

# The constructor of a named tuple is Python code; this makes the same object without a frame for each
# message.
_new_delivery: Callable[[tuple[object, ...]], Delivery] = partial(tuple.__new__, Delivery)

_ABSENT: tuple[Reply, ...] = (None, None, None, None, None, None, b"", b"", b"", None)
"""What stands for the parts that an answer of ``prepare`` may lack at its end, each at its place: the last four."""

_ALONE, _BESIDE = 1, 0
"""What a delivery has for company: nothing else in flight and no failures in its slot, or something else in flight."""


def _prepared(max_retries: int) -> Callable[[Reply], Prepared]:
    def parse(reply: list[Reply]) -> Prepared:
        word = reply[0]
        if word == b"ok":
            # As the header of the script lists them (``lua/slot/fetch.lua``).
            _, due, sleeping_until, receipt, company, rows, lefts, envelopes, suspect, timeout = [
                *reply,
                *_ABSENT[len(reply) :],
            ]
            members, scores = rows[::2], map(float, rows[1::2])
            bodies = [envelope or None for envelope in envelopes] if envelopes else repeat(None)
            # ``repeat`` never ends, so a strict ``zip`` would raise an error.
            rows = zip(members, scores, lefts or repeat(max_retries), bodies, strict=False)
            deliveries = list(map(_new_delivery, rows))
            return Prepared(
                "ok",
                moment(due),
                int(receipt),
                deliveries,
                is_suspect=suspect == b"suspect",
                timeout=timeout,
                is_plain=not (lefts or envelopes),
                is_alone=company == _ALONE,
                is_beside=company == _BESIDE,
                sleeping_until=moment(sleeping_until),
            )
        if word == b"more":
            return Prepared("more", moment(reply[1]), cursor=(reply[2].decode(), reply[3]))
        if word == b"moved":
            return Prepared("moved", slots=check_slots(int(reply[1])))
        if word == b"fenced":
            return Prepared("fenced")
        return Prepared(word.decode(), moment(reply[1]))

    return parse


def pushed(prefix: str, notice: bytes) -> Pushed:
    """Return what a send has published to the inbox of a worker. Raises ``ValueError`` if it is something else."""
    head, _, member = notice.partition(b"\n")
    receipt, score, retries_left, store = head.split(b" ", 3)
    topic, slot = read_store_key(store, prefix)
    return Pushed(topic, slot, int(receipt), Delivery(member, float(score), int(retries_left)))


def _held(reply: list[Reply]) -> list[HeldReply] | None:
    if reply[0] == b"busy":
        return None
    rows, held = reply[1], []
    for member, score, record, envelope in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True):
        # If another program has put the message into Prepare, there is no record; or it has written the last receipt of the
        # slot, which was no number. Nobody can end such a delivery, so it times out, and must not hide the others.
        receipt, original, *mark = (record if record and record[:1].isdigit() else b"0 0").split(b" ")
        original, _, timeout = original.partition(b":")
        # The last three digits of a score in Prepare are the retries left.
        delivery = Delivery(member, float(original), int(float(score)) % 1000, envelope)
        held.append(HeldReply(delivery, int(receipt), bool(mark), int(timeout) if timeout else None))
    return held


def _acquired(reply: list[Reply]) -> list[Acquired]:
    epochs, words = reply
    return [Acquired(epoch or None, word == b"asleep") for epoch, word in zip(epochs, words, strict=True)]


def acquire(topic: Topic, slot: int) -> Call[int]:
    """Acquire the slot: return the new epoch, which fences every older prepare."""
    return Call("acquire", AtSlot(topic, slot), (), int)


def acquire_slots(topic: Topic, slots: Sequence[int]) -> Call[list[Acquired]]:
    """Acquire up to 1,024 slots, and mark the worker as asleep in those that hold nothing.

    A pipeline to a Redis Cluster puts an ``RmqError`` in the place of each slot whose node does not answer.
    """
    return Call("acquire_slots", AtSlots(topic, slots), (), _acquired, join=each_or_error)


def list_held(
    topic: Topic, slot: int, owner: str, offset: int = 0, limit: int = BATCH
) -> Call[list[HeldReply] | None]:
    """Return the messages that Prepare holds for ``owner``, or None if another owner holds some."""
    return Call("list_held", AtSlot(topic, slot), (owner, offset, limit), _held)


def prepare(
    topic: Topic,
    slot: int,
    owner: str,
    epoch: int | None,
    limit: int,
    max_bytes: int = 16_777_216,
    after: tuple[str, bytes] | None = None,
    inbox: bytes = b"",
) -> Call[Prepared]:
    """Take up to ``limit`` messages (first phase), after the slot's upkeep. Without an ``epoch`` the call is not fenced.

    ``inbox``: from now on sends may push single messages to this channel, which the owner has subscribed to; see ``Pushed``.
    """
    return Call(
        form("prepare", topic),
        AtSlot(topic, slot),
        (owner, "" if epoch is None else epoch, inbox, limit, max_bytes, *cursor(after)),
        _prepared(topic.max_retries),
        varying=6,
    )


def all_held(broker: Broker, topic: Topic, slot: int, owner: str, first: list[HeldReply]) -> list[HeldReply]:
    """Return everything that ``owner`` holds in a slot; ``first`` is the first page. Raises ``RmqError``."""
    held, before = {thing.delivery.member: thing for thing in first}, 0
    # The heartbeat of this owner moves what it extends to the end, and what was behind it moves up over the edge of a page. So
    # all pages are read again until they bring nothing new.
    while len(first) == BATCH and before < len(held):
        before, offset = len(held), 0
        while page := broker.run(list_held(topic, slot, owner, offset)):
            held |= {thing.delivery.member: thing for thing in page}
            offset += len(page)
    return list(held.values())
