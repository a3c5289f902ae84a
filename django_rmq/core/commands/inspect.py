"""Calls that read slots and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django_rmq.core.commands.script_call import (
    AtSlot,
    AtSlots,
    Call,
    InState,
    OfKey,
    OfTopics,
    RedisCommand,
    Reply,
    SetsOfSlots,
    cursor,
    each_or_none,
    moment,
    number,
    pairs,
    same,
    text,
)
from django_rmq.core.model import keys
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.replies import (
    Area,
    Counts,
    DeadGroup,
    DeadGroups,
    DescribeReply,
    Entry,
    FoundReply,
    LocateReply,
    Page,
    Pauses,
    digest,
    shortened,
)
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError


def _entries(rows: list[Reply]) -> list[Entry]:
    return [
        Entry(member, float(score), envelope, record)
        for member, score, envelope, record in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
    ]


def _page(reply: list[Reply]) -> Page:
    rows = reply[1]
    if reply[0] == b"end":
        return Page(_entries(rows), None)
    if len(reply) == 4:
        # A search names the last entry that it has read, which need not be among those that match.
        score, member = reply[2:]
    else:
        # A list continues behind its last entry, whose four values end the rows.
        member, score, _, _ = rows[-4:]
    return Page(_entries(rows), (score.decode(), member))


def _groups(reply: list[Reply]) -> DeadGroups:
    skip, rows = reply
    groups = [
        DeadGroup(
            line,
            size,
            float(first),
            [(int(hour), int(count)) for hour, count in pairs(hours)],
            [(member, float(at)) for member, at in pairs(samples)],
        )
        for line, size, first, hours, *samples in rows
    ]
    return DeadGroups(groups, skip)


def _counts(reply: list[Reply]) -> Counts:
    store, due, prepare, retry, dead, oldest, owner, paused, claimed, undrained, running, unleased = reply
    return Counts(
        store=store,
        due=due,
        prepare=prepare,
        retry=retry,
        dead=dead,
        claimed=claimed,
        oldest_due_ms=int(float(oldest)) if oldest else None,
        owner=text(owner),
        paused=bool(paused),
        undrained_since_ms=moment(undrained),
        running_since_ms=moment(running),
        unleased=unleased,
    )


def _described(reply: list[Reply]) -> list[DescribeReply]:
    replies = []
    for row in reply:
        store, prepare, retry, dead, claim = (None if score is None else float(score) for score in row[:5])
        replies.append(DescribeReply(store, prepare, retry, dead, claim, *row[5:]))
    return replies


def _found(reply: list[Reply]) -> FoundReply:
    store, prepare, retry, dead, claim = (None if score is None else float(score) for score in reply[:5])
    in_flight, death, failure, owner, outcome = reply[5:]
    return FoundReply(
        store, prepare, retry, dead, claim, in_flight, death, failure, text(owner or b""), outcome
    )


def _sought(areas: Sequence[Area]) -> Callable[[list[Reply]], LocateReply]:
    def parse(reply: list[Reply]) -> LocateReply:
        members, looked = reply
        cursors = [
            None if far < 0 else area._replace(looked=far) for area, far in zip(areas, looked, strict=True)
        ]
        return LocateReply(members, cursors)

    return parse


def _heads(reply: list[bytes]) -> list[int | None]:
    return [moment(raw) for raw in reply]


def _ledger(key: bytes, reply: list[Reply]) -> Ledger:
    store, prepare, retry, dead, flat, claimed = reply
    counters = keys.counters(key, zip(flat[::2], flat[1::2], strict=True))
    return Ledger(counters, store, prepare, retry, dead, claimed)


def _order(descending: bool) -> str:
    return "descending" if descending else "ascending"


def list_messages(
    topic: Topic,
    slot: int,
    state: str,
    *,
    after: tuple[str, bytes] | None = None,
    limit: int = 100,
    descending: bool = False,
    min_score: float = float("-inf"),
    max_score: float = float("inf"),
    max_bytes: int = 4_194_304,
) -> Call[Page]:
    """List one state by score. Entries that are present throughout all pages appear exactly once."""
    bounds = number(min_score), number(max_score)
    own = (_order(descending), *bounds, *cursor(after), limit, max_bytes)
    return Call("list_messages", InState(topic, slot, state), own, _page)


def search_messages(
    topic: Topic,
    slot: int,
    state: str,
    text: bytes,
    *,
    after: tuple[str, bytes] | None = None,
    limit: int = 100,
    scan: int = 1000,
    descending: bool = False,
    min_score: float = float("-inf"),
    max_score: float = float("inf"),
    max_bytes: int = 4_194_304,
    where: str = "anywhere",
) -> Call[Page]:
    """Search for ``text`` in member, envelope or record among the next ``scan`` entries.

    ``where="error"``: search only the class of the last error, for its whole name or its last part.
    """
    bounds = number(min_score), number(max_score)
    own = (_order(descending), *bounds, *cursor(after), limit, max_bytes, scan, text, where)
    return Call("search_messages", InState(topic, slot, state), own, _page)


def group_deaths(
    topic: Topic,
    slot: int,
    *,
    skip: int = 0,
    stride: int = 1,
    run: int = 1,
    scan: int = 1000,
    min_score: float = float("-inf"),
    max_score: float = float("inf"),
    max_bytes: int = 4_194_304,
    samples: int = 3,
) -> Call[DeadGroups]:
    """Group up to ``scan`` dead messages by their errors, the last deaths first, without their bodies.

    It passes over ``skip`` messages, and of each ``stride`` from there it reads the first ``run``. Each group names up to
    ``samples`` of them.
    """
    own = (number(min_score), number(max_score), skip, stride, run, scan, max_bytes, samples)
    return Call("group_deaths", AtSlot(topic, slot), own, _groups)


def count(topic: Topic, slot: int) -> Call[Counts]:
    """Return how many messages the slot holds by state."""
    return Call("count", AtSlot(topic, slot), (), _counts)


def _counts_of_each(reply: list[Reply]) -> list[Counts | None]:
    return [None if row is None else _counts(row) for row in reply]


def count_slots(topics: Sequence[AtSlots]) -> Call[list[Counts | None]]:
    """Return what ``count`` returns for each of up to 64 slots, or None if ``count`` would be an error.

    The topics have the same type and the same TIMEOUT.
    """
    return Call("count_slots", OfTopics(topics), (), _counts_of_each, join=each_or_none)


def count_between(
    topic: Topic,
    slot: int,
    state: str,
    min_score: float = float("-inf"),
    max_score: float = float("inf"),
) -> Call[int]:
    """Return how many messages of one state have a score within these bounds."""
    return Call("count_between", InState(topic, slot, state), (number(min_score), number(max_score)), int)


def describe_messages(topic: Topic, slot: int, members: Sequence[bytes]) -> Call[list[DescribeReply]]:
    """Return what the slot knows about up to 100 members, in any state."""
    return Call("describe_messages", AtSlot(topic, slot), tuple(members), _described)


def _of_status(member: bytes | None, of: bytes | None) -> tuple[bytes, ...]:
    if member is not None:
        return digest(member), member
    return (shortened(of or b""),)


def status(topic: Topic, slot: int, member: bytes | None, of: bytes | None = None) -> Call[FoundReply]:
    """Return where a message is, its last failure, and its progress or its outcome (topics with OUTCOME_RETENTION).

    Without a ``member``, only the SHA-1 ``of`` it is known, and only its progress or outcome is returned.
    """
    return Call("status", AtSlot(topic, slot), _of_status(member, of), _found)


def ranks(topic: Topic, slot: int, state: str, members: Sequence[bytes]) -> Call[list[int | None]]:
    """Return the rank of up to 1,000 members of a state among those of the same score, or None for absent ones."""
    return Call("ranks", InState(topic, slot, state), tuple(members), same)


def rank(topic: Topic, slot: int, state: str, member: bytes) -> Call[int | None]:
    """Return the rank of a member in a state, or None if it is not there."""
    return RedisCommand("ZRANK", InState(topic, slot, state), (member,), same)


def rows(topic: Topic, slot: int, state: str, first: int, last: int) -> Call[list[bytes]]:
    """Return ``[member, score, ...]`` for the ranks ``first`` to ``last`` of a state, as Redis writes them.

    The answer does not show whether the set changed between two calls; the caller has to find out.
    """
    return RedisCommand("ZRANGE", InState(topic, slot, state), (first, last, "WITHSCORES"), _flat)


def _flat(reply: list[Reply]) -> list[Reply]:
    """Return members and scores in one list: on connections with RESP3 the server answers them in pairs."""
    if reply and isinstance(reply[0], list):
        return [part for pair in reply for part in pair]
    return reply


def _written(areas: Sequence[Area]) -> list[object]:
    rows = [
        (area.state, "" if area.score is None else number(area.score), area.rank, area.looked)
        for area in areas
    ]
    return [part for one in rows for part in one]


def find_by_digest(
    topic: Topic,
    slot: int,
    digests: Sequence[bytes],
    areas: Sequence[Area],
    *,
    scan: int = 2_000,
    max_bytes: int = 3_145_728,
) -> Call[LocateReply]:
    """Find members by their SHA-1 in up to 100 areas, examining about ``scan`` entries. The areas grow in turns."""
    return Call(
        "find_by_digest",
        AtSlot(topic, slot),
        (scan, max_bytes, b"".join(digests).hex(), *_written(areas)),
        _sought(areas),
    )


HEADS = 1_024
"""The maximum number of slots that one call of ``heads`` asks. The script refuses more."""


def heads(topic: Topic, slots: Sequence[int], *, upkeep: bool = False) -> Call[list[int | None]]:
    """Return when each of up to ``HEADS`` slots can next be taken from, in ms: 0 for now, None if nothing is waiting.

    ``upkeep``: return when the next delivery times out or the next lease of a claim ends there.
    """
    return Call("heads", AtSlots(topic, slots), (int(upkeep),), _heads, join=each_or_none)


def _any(answers: list[bool | RmqError]) -> bool:
    """Return whether any slot is in use. Slots of an unavailable node count, so that the caller asks them and gets the error."""
    return any(isinstance(answer, RmqError) or answer for answer in answers)


def any_in_use(topic: Topic, slots: Sequence[int]) -> Call[bool]:
    """Return whether anything waits, rests, is in flight or claimed in any of the slots: quicker than ``heads``."""
    return RedisCommand("EXISTS", AtSlots(topic, slots), (), bool, join=_any)


def audit_ledger(topic: Topic, slot: int) -> Call[Ledger]:
    """Return the slot's counters and depths, read atomically."""
    return Call("audit_ledger", AtSlot(topic, slot), (), OfKey("stats", _ledger))


def any_messages(topics: Sequence[AtSlots]) -> Call[bool]:
    """Return whether any of the slots of these topics holds a message in any state."""
    return RedisCommand("EXISTS", SetsOfSlots(topics), (), bool, join=_any)


def _occupied(reply: list[int]) -> list[bool | None]:
    return [word == 1 for word in reply]


def find_occupied(topics: Sequence[AtSlots]) -> Call[list[bool | None]]:
    """Return of each of up to 1,024 slots whether it holds messages, or None if its server does not answer."""
    return Call("find_occupied", OfTopics(topics), (), _occupied, join=each_or_none)


def _paused(reply: list[list[int]]) -> Pauses:
    return Pauses(*(tuple(place - 1 for place in places) for places in reply))


def _joined(answers: list[Pauses | RmqError]) -> Pauses:
    unread = [at for at, answer in enumerate(answers) if isinstance(answer, RmqError) or answer.unread]
    paused = [at for at, answer in enumerate(answers) if not isinstance(answer, RmqError) and answer.paused]
    return Pauses(tuple(paused), tuple(unread))


def find_paused(topics: Sequence[AtSlots]) -> Call[Pauses]:
    """Return which of up to 1,024 slots are paused: their places among the slots of all these topics."""
    return Call("find_paused", OfTopics(topics), (), _paused, join=_joined)
