"""Calls that put messages into a slot: one script per kind of topic, for one message or many.

Validated messages come from ``producer``; here only scripts, arguments and answers are decided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Self

from django_rmq.core.commands.script_call import (
    Answers,
    AtSlot,
    AtSlots,
    Call,
    Packed,
    Reply,
    each_or_error,
    moved,
)
from django_rmq.core.model.replies import Sent
from django_rmq.core.model.topic import Topic, TopicType

# Without the constructor of the named tuple, which is Python code.
_new_sent: Callable[[tuple[object, ...]], Sent] = partial(tuple.__new__, Sent)


def _tally(count: int) -> Callable[[Reply], Counter[str]]:
    """Parse the number of messages of each status."""

    def parse(reply: Reply) -> Counter[str]:
        if _is_of_one(reply) or reply[0] == b"stored":
            return Counter(stored=count)
        moved(reply)
        return Counter(word.decode() for word in reply[1])

    return parse


def _is_of_one(reply: Reply) -> bool:
    """Return whether a reply is the score of a single new message."""
    return isinstance(reply, (int, bytes))


@lru_cache(maxsize=1_024)
def _stored(score: int | bytes) -> tuple[Sent]:
    # Most messages of a bulk send are due in the same ms, and many small objects are work for the garbage collector.
    return (Sent("stored", float(score)),)


def _sent(scores: Sequence[float]) -> Callable[[Reply], Sequence[Sent]]:
    def parse(reply: Reply) -> Sequence[Sent]:
        if _is_of_one(reply):
            return _stored(reply)
        if reply[0] == b"stored":
            if len(reply) > 1:
                return _stored(reply[1]) * len(scores)
            return list(map(Sent, repeat("stored"), scores))
        moved(reply)
        return [
            Sent(word.decode(), float(score) if score else math.nan)
            for word, score in zip(reply[1], reply[2], strict=True)
        ]

    return parse


_one_merged = _sent([math.nan])


def _in_line(reply: Reply) -> Sequence[Sent]:
    """Parse the places in the line of a fifo topic."""
    if not _is_of_one(reply) and reply[0] == b"stored":
        # Redis cuts off the fraction of a number that a script returns, so the script returns whole steps.
        return list(map(_new_sent, zip(repeat("stored"), [steps / 1024 for steps in reply[1]])))
    return _one_merged(reply)


def _pairs(scores: Sequence[int], members: Sequence[bytes]) -> list[object]:
    """Return each score followed by its member."""
    pairs: list[object] = [None] * (2 * len(members))
    pairs[::2], pairs[1::2] = scores, members
    return pairs


def _one_message(
    script: str,
    topic: Topic,
    slot: int,
    own: tuple[object, ...],
    decode: Callable[[Reply], Sequence[Sent]],
    varying: int,
) -> Call[Sequence[Sent]]:
    """Return the call that sends one message; its last arguments vary from message to message.

    It avoids the constructor of the named tuple, which is Python code: a single message is sent 3 % faster.
    """
    place = tuple.__new__(AtSlot, (topic, slot))
    return tuple.__new__(Call, (script, place, own, decode, None, varying))


def send_merge(
    topic: Topic,
    slot: int,
    range_ms: int,
    members: Sequence[bytes],
    envelopes: Sequence[bytes] = (),
) -> Call[Sequence[Sent]]:
    """Send range_merge messages due ``range_ms`` from now. A message that is already waiting keeps its time."""
    count = len(members)
    own = (range_ms, count, *members, *envelopes)
    if count == 1:
        return _one_message("send_merge", topic, slot, own, _one_merged, 1 + len(envelopes))
    return Call("send_merge", AtSlot(topic, slot), own, _sent([math.nan] * count))


SCATTERED = 32
"""The number of slots to which one script sends a message each: about 0.5 ms."""


def takes_scattered(topic: Topic) -> bool:
    """Return whether ``scatter`` can send to ``topic``: messages do not collect or wait again, and slots have no backlog."""
    is_plain = not (topic.keyed or topic.debounce_ms or topic.slot_backlog)
    return is_plain and topic.type is TopicType.RANGE_MERGE


def _scattered(reply: list[Reply]) -> Answers:
    return [None if answer is None else _one_merged(answer) for answer in reply]


class _Scatter(Call[Answers]):
    """A call whose last arguments are one for each slot."""

    def parts(self) -> list[Self]:
        place, own = self.place, self.own
        assert isinstance(place, AtSlots)
        members = own[-len(place.slots) :]
        return [
            self._replace(place=part, own=(own[0], member))
            for part, member in zip(place.parts(), members, strict=True)
        ]


def scatter(topic: Topic, slots: Sequence[int], range_ms: int, members: Sequence[bytes]) -> Call[Answers]:
    """Send one unkeyed range_merge message to each slot, in one script, or in one for each slot on a Redis Cluster.

    Answers for each slot what ``send_merge`` answers, or None where nothing was done: that message needs ``send_merge``.
    A pipeline to a Redis Cluster puts an ``RmqError`` in the place of each slot whose node does not answer.
    """
    return _Scatter("scatter", AtSlots(topic, slots), (range_ms, *members), _scattered, each_or_error)


def send_replace(
    topic: Topic,
    slot: int,
    scores: Sequence[int],
    members: Sequence[bytes],
    envelopes: Sequence[bytes] = (),
) -> Call[Sequence[Sent]]:
    """Send priority or fixed_time messages. If a member is sent several times, the last score counts."""
    count = len(members)
    if count == 1:
        own: tuple[object, ...] = (1, *scores, *members, *envelopes)
        return _one_message("send_replace", topic, slot, own, _sent(scores), 2 + len(envelopes))
    return Call(
        "send_replace",
        AtSlot(topic, slot),
        (count, *_pairs(scores, members), *envelopes),
        _sent(scores),
    )


def send_packed(topic: Topic, slot: int, packed: Packed, range_ms: int | None = None) -> Call[Counter[str]]:
    """Send encoded messages; return the number of messages of each status. ``range_ms``: on range_merge topics."""
    place, count = AtSlot(topic, slot), len(packed)
    if topic.type is TopicType.RANGE_MERGE:
        return Call("send_merge", place, (range_ms, count, packed), _tally(count))
    return Call("send_replace", place, (count, packed), _tally(count))


def ensure(
    topic: Topic,
    slot: int,
    scores: Sequence[int],
    members: Sequence[bytes],
    envelopes: Sequence[bytes] = (),
) -> Call[Sequence[Sent]]:
    """Send messages that are not waiting, resting or in flight. ``scores``: range_ms on range_merge topics."""
    return Call(
        "ensure",
        AtSlot(topic, slot),
        (len(members), *_pairs(scores, members), *envelopes),
        _sent([math.nan] * len(members) if topic.type is TopicType.RANGE_MERGE else scores),
    )


def send_fifo(
    topic: Topic,
    slot: int,
    delay_ms: int,
    members: Sequence[bytes],
    envelopes: Sequence[bytes] = (),
    *,
    ensure: bool = False,
) -> Call[Sequence[Sent]]:
    """Send fifo messages due ``delay_ms`` from now, in the order given, behind all that were sent before.

    A message whose key waits or rests stays as it is, or takes the new body, as the ON_DUPLICATE of its topic says.
    ``ensure``: the message stays as it is, also if it is in flight.
    """
    return Call(
        "send_fifo",
        AtSlot(topic, slot),
        (int(ensure), delay_ms, len(members), *members, *envelopes),
        _in_line,
    )
