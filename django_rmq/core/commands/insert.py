"""Calls that insert many messages of a slot in one transaction, in which Lua looks at none of them: the fast way of Spark.

``send`` has the calls in which a script looks at each message; ``spark.bulk_write`` falls back on them.

The script ``insert`` (``lua/slot/insert.lua``) begins and ends the transaction. Its step ``begin`` renames Store, or declines if
each message has to be looked at. A ZADD adds the messages under that name. The step ``end`` gives Store its name back, counts
the messages and wakes the consumer.

The invariant: an insertion does what a send of the same messages does, or it changes nothing, and outside its transaction
Store has its name. If the last step could not run, the next prepare, claim, insertion or
re-slotting of the slot restores Store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from django_rmq.core.commands.script_call import AtSlot, Call, KeyPlace, Packed, RedisCommand, Reply
from django_rmq.core.model.topic import Topic, TopicType

SENTINEL = (0, b"")
"""Score and member of the empty message at the end of a ZADD: it shows that the ZADD has not failed."""


class _Nowhere(NamedTuple):
    """The place of commands without keys."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        return ()


_NOWHERE = _Nowhere()


class InsertRows(NamedTuple):
    """The messages of a transaction: at least one and at most ``BATCH``, none of them empty."""

    number: int
    pairs: Sequence[object] | Packed
    """Scores and members, in turn; or these, encoded already."""
    lowest: int
    """The lowest score. On range_merge topics all are the same: the server's time in ms and TIME_RANGE."""
    highest: int


def insert(topic: Topic, slot: int, rows: InsertRows) -> list[Call[object]]:
    """Return the calls of one transaction, for pipelines to one server. The last one has the answer.

    It is the number of messages of each status. If it is None, or an error of the whole transaction, nothing was sent, and
    only ``send_merge`` or ``send_replace`` can send these messages.
    """
    met = "merged" if topic.type is TopicType.RANGE_MERGE else "replaced"

    def parse(reply: list[Reply]) -> Counter[str] | None:
        answer = reply[-1]
        # The script declines where each message has to be looked at, and the ZADD fails on a full server.
        if isinstance(answer, Exception) or answer[0] != b"inserted":
            return None
        return +Counter({"stored": answer[1], met: rows.number - answer[1]})

    place = AtSlot(topic, slot)
    # The choice of ``merge`` and ``replace`` in ``lua/slot/_duplicates``: with NX the first score counts, without it the last.
    keeps = ("NX",) if met == "merged" else ()
    return [
        _part("MULTI"),
        _step(b"begin", topic, slot, rows),
        _part("ZADD", place, (*keeps, *SENTINEL, *_last(rows.pairs))),
        _step(b"end", topic, slot, rows),
        RedisCommand("EXEC", _NOWHERE, (), parse),
    ]


PARTS = 5
"""The number of calls of an insertion."""


def end_insertion(topic: Topic, slot: int) -> Call[None]:
    """Restore Store, or delete a leftover, after a transaction whose last step the server has not run."""
    return _step(b"end", topic, slot, InsertRows(0, (), 0, 0))


def transaction_time() -> list[Call[object]]:
    """Return the calls that read the server's clock in a transaction. The last one has the answer, in ms."""

    def parse(reply: list[Reply]) -> int:
        seconds, micros = reply[0]
        return int(seconds) * 1000 + int(micros) // 1000

    return [_part("MULTI"), _part("TIME"), RedisCommand("EXEC", _NOWHERE, (), parse)]


def _last(pairs: Sequence[object] | Packed) -> Sequence[object]:
    return (pairs,) if isinstance(pairs, Packed) else pairs


def _nothing(_: object) -> None:
    """Parse the reply of a part, which says only that it is queued."""


def _part(command: str, place: KeyPlace = _NOWHERE, own: Sequence[object] = ()) -> RedisCommand[None]:
    return RedisCommand(command, place, own, _nothing)


def _step(name: bytes, topic: Topic, slot: int, rows: InsertRows) -> Call[None]:
    own = (name, rows.number, topic.time_range_ms or 0, rows.lowest, rows.highest)
    return Call("insert", AtSlot(topic, slot), own, _nothing)
