"""The door to Redis: one short method per Lua file, and nothing else that knows a command.

``Transitions`` turns a call into a script with its keys and arguments and turns the answer back.
``Broker`` runs each call at once; a ``Pipeline`` collects calls and runs them in one round trip.
Neither repeats a script by itself: whether that is safe is for the caller to know. The exception is
NOSCRIPT, which says that nothing ran.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from typing import Any, NamedTuple, Self
from uuid import uuid4

import redis
from hiredis import pack_command
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from django_rmq.core import scripts
from django_rmq.core.words import stored
from django_rmq.core.words.answers import (
    RECORDS,
    Acquired,
    Area,
    Claimed,
    ClaimRead,
    Counts,
    Delivery,
    Entry,
    Handover,
    Held,
    Looked,
    Loose,
    Page,
    Prepared,
    Row,
    Sent,
    Sought,
    Survey,
)
from django_rmq.core.words.bounds import BATCH
from django_rmq.core.words.failures import Failure, cut_error
from django_rmq.core.words.keys import (
    SlotKeys,
    answer_key,
    bucket_key,
    check_prefix,
    check_slots,
    events_channel,
    explicit_basis_key,
    history_keys,
    keys_of_slots,
    limits_key,
    slot_keys,
    times_key,
    topics_key,
    wake_channel,
    worker_keys,
    workers_channel,
)
from django_rmq.core.words.ledger import Ledger
from django_rmq.core.words.results import Confirmed, Durability
from django_rmq.core.words.samples import SAMPLED, TIMES, Sample, Times
from django_rmq.core.words.stored import Definitions
from django_rmq.core.words.topics import Topic, TopicType, redefined
from django_rmq.core.words.workers import Allowance, Beat, Roster, Session
from django_rmq.exceptions import (
    NodeUnavailable,
    RmqError,
    ServerFull,
    ServerRefused,
    ServerTrouble,
    ServerUnavailable,
    SlotMoved,
    Unreadable,
    WrongType,
)

_STATES = {
    "store": ("store", "failures", "body"),
    "prepare": ("prepare", "inflight", "prepare_body"),
    "retry": ("retry", "failures", "body"),
    "dead": ("dead", "deaths", "body"),
    "claim": ("claim", "failures", "claim_body"),
}
"""The set of a state, what is noted of its members, and their bodies."""
READS = frozenset(
    {
        "audit",
        "between",
        "count",
        "find",
        "heads",
        "held",
        "history/sample",
        "look",
        "peek",
        "ranks",
        "read_claim",
        "seek",
        "survey",
        "HMGET",
        "ZRANGE",
        "ZRANK",
    }
)
"""Scripts and plain commands that change nothing."""

_LOOKED_AT = ("store", "retry", "prepare", "control", "claimants")
"""Keys of each slot that tell whether and when something can be taken from it."""

_ZSETS = ("store", "prepare", "retry", "dead", "claimants")
_HARMLESS: tuple[tuple[Any, ...], ...] = (
    ("HSET", "field", 1),
    ("HSETNX", "field", 1),
    ("HINCRBY", "field", 1),
    ("HGET", "field"),
    ("HMGET", "field"),
    ("HEXISTS", "field"),
    ("HGETALL",),
    ("HLEN",),
    ("HSCAN", 0),
    ("HDEL", "field"),
    ("EXPIRE", 1),
    ("PEXPIRE", 1),
    ("EXISTS",),
    ("UNLINK",),
    ("TYPE",),
    ("ZADD", "XX", 0, "member"),
    ("ZREM", "member"),
    ("ZREMRANGEBYRANK", 0, -1),
    ("ZCARD",),
    ("ZCOUNT", 0, 0),
    ("ZMSCORE", "member"),
    ("ZSCORE", "member"),
    ("ZRANGE", 0, 0),
    ("ZRANGEBYSCORE", 0, 0),
    ("ZREVRANGE", 0, 0),
    ("ZRANK", "member"),
    ("ZREVRANK", "member"),
)
"""Every command of the scripts on a key, so that together they leave nothing behind."""

FRAMES = 16_384
"""Slots for which a broker remembers how one message is sent there."""

AT_ONCE = 65_536
"""Bytes of a pipeline that are worth a call of the operating system."""

Clock = Callable[[], int]
"""Returns microseconds since the epoch. Given by tests only: scripts ask Redis' own clock."""


class Call(NamedTuple):
    """One script with its keys and arguments (the clock is added when it is sent)."""

    script: str
    keys: Sequence[bytes]
    args: Sequence[Any]
    parse: Callable[[Any], Any]

    def read(self, reply: Any) -> Any:
        """Return what a reply means. Raises ``Unreadable`` where a stranger's value makes it mean nothing."""
        try:
            return self.parse(reply)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            of = self.keys[0].decode(errors="replace") if self.keys else "no key"
            raise Unreadable(
                f"{self.script} of {of}: the answer holds a value that is not one of RMQ's ({error})"
            ) from error


class Command(Call):
    """A plain command instead of a script, named like it: for what Redis does fastest by itself."""


def _same(reply: Any) -> Any:
    return reply


class Packed:
    """Members, or scores and members, that are written already as the server reads them; for pipelines to one server.

    As an argument of a transition it has the length of what it stands for; in its call it is one argument.
    """

    def __init__(self, count: int, width: int, data: memoryview) -> None:
        self.count = count
        self.width = width
        """Texts for each: 1, or 2 with a score."""
        self.data = data

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Packed]:
        yield self


def _bulk(argument: Any) -> bytes:
    """Return one argument of a command as it goes over the wire."""
    if not isinstance(argument, bytes):
        is_plain = isinstance(argument, (str, int, float))
        argument = str(argument).encode() if is_plain else bytes(argument)
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def _wired(command: tuple[Any, ...]) -> list[Any]:
    """Return a command that has something packed before its last argument in the pieces that go over the wire."""
    packed: Packed = command[-2]
    *before, now = map(_bulk, (*command[:-2], command[-1]))
    return [b"*%d\r\n" % (len(before) + 1 + packed.count * packed.width), *before, packed.data, now]


def _packed(command: tuple[Any, ...]) -> bytes:
    """Return a command (bytes, text and numbers) as it goes over the wire.

    As redis-py does it, which first looks whether an argument is none of these: half of its time.
    """
    packed: bytes = pack_command(command)
    return packed


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces, so that each is worth a call of the operating system."""
    together: list[bytes] = []
    size = 0
    for piece in pieces:
        together.append(piece)
        size += len(piece)
        if size > AT_ONCE:
            yield b"".join(together)
            together, size = [], 0
    if together:
        yield b"".join(together)


def _is_packed(call: Call) -> bool:
    return bool(call.args) and isinstance(call.args[-1], Packed)


def _tally(count: int) -> Callable[[Any], Counter[str]]:
    """Parse how many messages have which status."""

    def parse(reply: list[Any]) -> Counter[str]:
        _moved(reply)
        if reply[0] == b"stored":
            return Counter(stored=count)
        return Counter(word.decode() for word in reply[1])

    return parse


def _words(count: int) -> Callable[[Any], list[str]]:
    """Parse a word for each member; a single {'ok'} stands for all of them."""

    def parse(reply: list[bytes]) -> list[str]:
        if len(reply) == 1 and count > 1:
            return [reply[0].decode()] * count
        return [word.decode() for word in reply]

    return parse


def _moved(reply: list[Any]) -> None:
    if reply and reply[0] == b"moved":
        raise SlotMoved(f"the topic has {_text(reply[1])} slots by now")


def _sent(scores: Sequence[float]) -> Callable[[Any], list[Sent]]:
    def parse(reply: list[Any]) -> list[Sent]:
        _moved(reply)
        if reply[0] == b"stored":
            if len(reply) > 1:
                return [Sent("stored", float(reply[1]))] * len(scores)
            return list(map(Sent, repeat("stored"), scores))
        return [
            Sent(word.decode(), float(score) if score else math.nan)
            for word, score in zip(reply[1], reply[2], strict=True)
        ]

    return parse


def _replayed(count: int) -> Callable[[Any], list[str]]:
    def parse(reply: list[bytes]) -> list[str]:
        _moved(reply)
        return _words(count)(reply)

    return parse


def _due(raw: bytes) -> int | None:
    return int(raw) if raw else None


# A named tuple's own constructor is Python; this makes the same without a frame for each message.
_new_delivery: Callable[[tuple[Any, ...]], Delivery] = partial(tuple.__new__, Delivery)


def _prepared(max_retries: int) -> Callable[[Any], Prepared]:
    def parse(reply: list[Any]) -> Prepared:
        word = reply[0]
        if word == b"ok":
            rows, lefts, envelopes = reply[3], reply[4], reply[5]
            members, scores = rows[::2], map(float, rows[1::2])
            bodies = [envelope or None for envelope in envelopes] if envelopes else repeat(None)
            rows = zip(members, scores, lefts or repeat(max_retries), bodies, strict=False)
            deliveries = list(map(_new_delivery, rows))
            return Prepared("ok", _due(reply[1]), int(reply[2]), deliveries, is_suspect=len(reply) > 6)
        if word == b"more":
            return Prepared("more", _due(reply[1]), cursor=(reply[2].decode(), reply[3]))
        if word == b"moved":
            return Prepared("moved", slots=check_slots(int(reply[1])))
        if word == b"fenced":
            return Prepared("fenced")
        return Prepared(word.decode(), _due(reply[1]))

    return parse


def _held(reply: list[Any]) -> list[Held] | None:
    if reply[0] == b"busy":
        return None
    rows, found = reply[1], []
    for member, score, record, envelope in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True):
        receipt, original, *mark = (record or b"0 0").split(b" ")
        left = int(float(score)) % 1000
        found.append(Held(Delivery(member, float(original), left, envelope), int(receipt), bool(mark)))
    return found


def _entries(rows: list[Any]) -> list[Entry]:
    return [
        Entry(member, float(score), envelope, record)
        for member, score, envelope, record in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
    ]


def _page(reply: list[Any]) -> Page:
    rows = reply[1]
    if reply[0] == b"end":
        return Page(_entries(rows), None)
    if len(reply) == 4:
        return Page(_entries(rows), (reply[2].decode(), reply[3]))
    return Page(_entries(rows), (rows[-3].decode(), rows[-4]))


def _counts(reply: list[Any]) -> Counts:
    store, due, prepare, retry, dead, oldest, owner, paused, claimed, undrained = reply
    oldest_due_ms = int(float(oldest)) if oldest else None
    return Counts(
        store, due, prepare, retry, dead, claimed, oldest_due_ms, _text(owner), bool(paused), _due(undrained)
    )


def _looked(reply: list[Any]) -> list[Looked]:
    found = []
    for row in reply:
        store, prepare, retry, dead, claim = (None if score is None else float(score) for score in row[:5])
        found.append(Looked(store, prepare, retry, dead, claim, *row[5:]))
    return found


def _sought(areas: Sequence[Area]) -> Callable[[list[Any]], Sought]:
    def parse(reply: list[Any]) -> Sought:
        members, looked = reply
        left = [
            None if far < 0 else area._replace(looked=far) for area, far in zip(areas, looked, strict=True)
        ]
        return Sought(members, left)

    return parse


def _loose(reply: list[Any]) -> Loose:
    return Loose(reply[0].decode(), reply[1], reply[2])


def _ledger(stats: bytes) -> Callable[[list[Any]], Ledger]:
    def parse(reply: list[Any]) -> Ledger:
        store, prepare, retry, dead, flat, claimed = reply
        counters = stored.counters(stats, zip(flat[::2], flat[1::2], strict=True))
        return Ledger(counters, store, prepare, retry, dead, claimed)

    return parse


def _claimed(reply: list[Any]) -> Claimed:
    word = reply[0].decode()
    return Claimed(word, reply[1], reply[2], reply[3] == b"more") if word == "ok" else Claimed(word)


def _left(reply: list[Any]) -> tuple[str, int]:
    return reply[0].decode(), reply[1]


def _renewed(reply: list[Any]) -> int | None:
    return reply[1] if reply[0] == b"ok" else None


def _claim_read(reply: list[Any]) -> ClaimRead:
    return ClaimRead(reply[0].decode(), *reply[1:])


def _handover(reply: list[Any]) -> Handover:
    word = reply[0].decode()
    if len(reply) == 1:
        return Handover(word)
    parts = iter(reply[3])
    rows = [
        Row(state.decode(), member, score.decode(), failure, rest)
        for state, member, score, failure, rest in zip(parts, parts, parts, parts, parts, strict=True)
    ]
    return Handover(word, int(reply[1]), int(reply[2]), rows)


def _survey(reply: list[Any]) -> Survey:
    slots, reslot, shut, paused, deliveries, in_flight, claims, rescheduled, revived, ticket = reply
    return Survey(
        _due(slots),
        int(reslot or 0),
        bool(shut),
        bool(paused),
        int(deliveries or 0),
        in_flight,
        claims,
        int(rescheduled or 0),
        int(revived or 0),
        int(ticket or 0),
    )


def _acquired(reply: list[Any]) -> list[Acquired]:
    epochs, words = reply
    return [Acquired(epoch or None, word == b"asleep") for epoch, word in zip(epochs, words, strict=True)]


def _heads(reply: list[bytes]) -> list[int | None]:
    return [_due(raw) for raw in reply]


def _word(reply: bytes) -> str:
    return reply.decode()


def _text(raw: bytes) -> str:
    """Read a worker's id; what is none of ours stays recognisable."""
    return raw.decode(errors="backslashreplace")


def _beat(known_members: str, known_number: str) -> Callable[[list[Any]], Beat]:
    def parse(reply: list[Any]) -> Beat:
        status = reply[0].decode()
        if status != "ok":
            return Beat(status, rival=reply[1] if len(reply) > 1 else b"")
        members, number = _text(reply[1]), _text(reply[2])
        workers = {_text(worker): record or b"" for worker, record in zip(reply[6], reply[7], strict=True)}
        return Beat(
            status,
            members,
            number,
            int(reply[3]),
            _text(reply[4]),
            reply[5] if number != known_number else None,
            workers if members != known_members else None,
        )

    return parse


def _assigned(reply: list[bytes]) -> str | None:
    return reply[1].decode() if reply[0] == b"ok" else None


def _roster(reply: list[Any]) -> Roster:
    now, members, number, basis, plan, rows, records = reply
    sessions = [
        Session(_text(worker), float(ends), record or b"")
        for worker, ends, record in zip(rows[::2], rows[1::2], records, strict=True)
    ]
    return Roster(int(now), _text(members), _text(number), _text(basis), plan, sessions)


class Server(NamedTuple):
    """What a Redis server says of itself."""

    name: str
    info: Mapping[str, str]
    """What INFO answers."""
    config: Mapping[str, str]
    """``maxmemory-policy`` and ``save``, as far as we may see them."""


def _info(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _allowance(reply: list[Any]) -> Allowance:
    tokens, wait_us, permits, waiting = reply
    return Allowance(tokens, wait_us, permits, waiting == b"yes")


def _begun(reply: list[bytes]) -> tuple[str, bytes]:
    return reply[0].decode(), reply[1] if len(reply) > 1 else b""


def _sample(reply: list[Any]) -> Sample:
    slots, store, due, prepare, retry, dead, oldest, sums, undrained = reply
    counters = dict(zip(SAMPLED, sums, strict=True))
    return Sample(slots, store, due, prepare, retry, dead, _due(oldest), counters, _due(undrained))


def _number(value: float) -> str:
    """Write a score so that no digit is lost."""
    return str(value) if isinstance(value, int) else f"{value:.17g}"


def _cursor(after: tuple[str, bytes] | None) -> tuple[str, bytes]:
    return ("", b"") if after is None else after


class Transitions(ABC):
    """Every transition of a slot. Where a call names several members, all belong to ``slot``."""

    prefix: str

    @abstractmethod
    def _run(self, call: Call) -> Any:
        """Run or collect a call."""

    def _keys(self, topic: Topic, slot: int) -> SlotKeys:
        return slot_keys(self.prefix, topic.name, slot)

    def _channel(self, topic: Topic) -> bytes:
        return wake_channel(self.prefix, topic.name)

    @staticmethod
    def _room(topic: Topic) -> int:
        return 1 if topic.serial else topic.max_prepared

    @staticmethod
    def _acting_keys(keys: SlotKeys) -> list[bytes]:
        return [
            keys.store,
            keys.prepare,
            keys.inflight,
            keys.dead,
            keys.deaths,
            keys.failures,
            keys.body,
            keys.stats,
            keys.control,
            keys.retry,
        ]

    @classmethod
    def _ending_keys(cls, keys: SlotKeys) -> list[bytes]:
        return [*cls._acting_keys(keys), keys.prepare_body]

    @classmethod
    def _claim_keys(cls, keys: SlotKeys) -> list[bytes]:
        claims = (keys.claimants, keys.claim, keys.claims, keys.claim_body)
        return [*cls._acting_keys(keys), *claims, keys.prepare_body]

    # --- sending

    def send_merge(
        self,
        topic: Topic,
        slot: int,
        range_ms: int,
        members: Sequence[bytes] | Packed,
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send range_merge messages due ``range_ms`` from now; what waits already keeps its time."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "send_merge",
                (keys.store, keys.retry, keys.body, keys.stats, keys.control),
                (
                    self._channel(topic),
                    topic.slots,
                    topic.slot_backlog,
                    range_ms,
                    len(members),
                    *members,
                    *envelopes,
                ),
                _tally(len(members)) if isinstance(members, Packed) else _sent([math.nan] * len(members)),
            )
        )

    def send_replace(
        self,
        topic: Topic,
        slot: int,
        scores: Sequence[int],
        members: Sequence[bytes] | Packed,
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send priority or fixed_time messages; of several sends of a member the last score counts."""
        keys = self._keys(topic, slot)
        pairs: list[Any] = list(members)
        if not isinstance(members, Packed):
            pairs = [None] * (2 * len(members))
            pairs[::2], pairs[1::2] = scores, members
        return self._run(
            Call(
                "send_replace",
                (keys.store, keys.retry, keys.body, keys.stats, keys.control),
                (
                    self._channel(topic),
                    topic.slots,
                    topic.slot_backlog,
                    topic.type.value,
                    topic.max_retries,
                    len(members),
                    *pairs,
                    *envelopes,
                ),
                _tally(len(members)) if isinstance(members, Packed) else _sent(scores),
            )
        )

    def ensure(
        self,
        topic: Topic,
        slot: int,
        scores: Sequence[int],
        members: Sequence[bytes],
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send what neither waits, rests nor runs. ``scores``: range_ms on range_merge topics."""
        keys = self._keys(topic, slot)
        pairs: list[Any] = [None] * (2 * len(members))
        pairs[::2], pairs[1::2] = scores, members
        merge = topic.type is TopicType.RANGE_MERGE
        return self._run(
            Call(
                "ensure",
                (keys.store, keys.retry, keys.body, keys.stats, keys.control, keys.prepare, keys.claim),
                (
                    self._channel(topic),
                    topic.slots,
                    topic.slot_backlog,
                    topic.type.value,
                    topic.max_retries,
                    len(members),
                    *pairs,
                    *envelopes,
                ),
                _sent([math.nan] * len(members) if merge else scores),
            )
        )

    # --- consuming

    def acquire(self, topic: Topic, slot: int) -> int:
        """Begin to own the slot: return the new epoch, which fences every older prepare."""
        return self._run(Call("acquire", (self._keys(topic, slot).control,), (), int))

    def acquire_all(self, topic: Topic, slots: Sequence[int]) -> list[Acquired]:
        """Begin to own up to 1,024 slots, and fall asleep at once in those that hold nothing.

        A pipeline to a Redis Cluster has an ``RmqError`` in the place of each slot whose node does not answer.
        """
        keys = keys_of_slots(self.prefix, topic.name, slots, _LOOKED_AT)
        return self._run(
            Call("acquire_all", keys, (topic.slots, topic.timeout, topic.max_retries), _acquired)
        )

    def held(
        self, topic: Topic, slot: int, owner: str, offset: int = 0, limit: int = 1000
    ) -> list[Held] | None:
        """Return what Prepare holds for ``owner``; None: another owner holds it."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "held",
                (keys.prepare, keys.inflight, keys.prepare_body, keys.control),
                (owner, offset, limit),
                _held,
            )
        )

    def prepare(
        self,
        topic: Topic,
        slot: int,
        owner: str,
        epoch: int | None,
        limit: int,
        max_bytes: int = 16_777_216,
        after: tuple[str, bytes] | None = None,
    ) -> Prepared:
        """Phase one: take up to ``limit`` messages, after the slot's upkeep. ``epoch`` None: not fenced."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "prepare",
                self._claim_keys(keys),
                (
                    self._channel(topic),
                    self._room(topic),
                    topic.type.value,
                    topic.slots,
                    topic.retry_priority,
                    topic.backoff.base_ms,
                    topic.backoff.cap_ms,
                    topic.timeout,
                    topic.max_retries,
                    int(topic.serial),
                    owner,
                    "" if epoch is None else epoch,
                    limit,
                    max_bytes,
                    *_cursor(after),
                ),
                _prepared(topic.max_retries),
            )
        )

    def commit(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Phase two, success. Answers ok or stale for each member."""
        return self._run(
            Call(
                "commit",
                self._ending_keys(self._keys(topic, slot)),
                (self._channel(topic), self._room(topic), topic.type.value, receipt, *members),
                _words(len(members)),
            )
        )

    def rollback(self, topic: Topic, slot: int, receipt: int, failures: Sequence[Failure]) -> list[str]:
        """Phase two, failure. Answers ok or stale for each."""
        flat: list[Any] = []
        for member, kind, delay_ms, error in failures:
            flat += (member, kind, "" if delay_ms is None else delay_ms, cut_error(error))
        return self._run(
            Call(
                "rollback",
                self._ending_keys(self._keys(topic, slot)),
                (
                    self._channel(topic),
                    self._room(topic),
                    topic.type.value,
                    receipt,
                    topic.retry_priority,
                    topic.backoff.base_ms,
                    topic.backoff.cap_ms,
                    *flat,
                ),
                _words(len(failures)),
            )
        )

    def release(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Give deliveries back with nothing spent. Answers ok or stale for each."""
        return self._run(
            Call(
                "release",
                self._ending_keys(self._keys(topic, slot)),
                (self._channel(topic), self._room(topic), topic.type.value, receipt, *members),
                _words(len(members)),
            )
        )

    def extend(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Begin the time-out anew. Answers ok or stale for each."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "extend",
                (keys.prepare, keys.inflight, keys.stats, keys.control),
                (receipt, *members),
                _words(len(members)),
            )
        )

    def expire(self, topic: Topic, slot: int, limit: int = 1000) -> int:
        """Time out deliveries whose heartbeat stopped; return how many."""
        return self._run(
            Call(
                "expire",
                self._claim_keys(self._keys(topic, slot)),
                (
                    self._channel(topic),
                    self._room(topic),
                    topic.type.value,
                    topic.retry_priority,
                    topic.backoff.base_ms,
                    topic.backoff.cap_ms,
                    topic.timeout,
                    topic.max_retries,
                    limit,
                ),
                int,
            )
        )

    def promote(self, topic: Topic, slot: int, limit: int = 1000) -> int:
        """Return to Store what has rested long enough; return how many."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "promote",
                (keys.store, keys.retry, keys.failures, keys.stats, keys.control),
                (self._channel(topic), topic.type.value, topic.retry_priority, topic.max_retries, limit),
                int,
            )
        )

    # --- claims: what a Spark consumer holds

    def claim(
        self,
        topic: Topic,
        slot: int,
        consumer: str,
        number: int,
        lease_ms: int,
        limit: int,
        max_bytes: int = 16_777_216,
    ) -> Claimed:
        """Move up to ``limit`` messages into claim ``number`` of ``consumer``, after the slot's upkeep.

        Where they have to be moved one by one, 2,500 at most, or 1,000 where each has to be looked at. Repeated with the
        number of an open claim it takes more. After a lost reply ask ``read_claim``.
        """
        return self._run(
            Call(
                "claim",
                self._claim_keys(self._keys(topic, slot)),
                (
                    self._channel(topic),
                    self._room(topic),
                    topic.type.value,
                    topic.slots,
                    topic.retry_priority,
                    topic.backoff.base_ms,
                    topic.backoff.cap_ms,
                    topic.timeout,
                    topic.max_retries,
                    int(topic.serial),
                    consumer,
                    number,
                    lease_ms,
                    limit,
                    max_bytes,
                ),
                _claimed,
            )
        )

    def renew(
        self, topic: Topic, slot: int, consumer: str, number: int, lease_ms: int, *, seal: bool = False
    ) -> int | None:
        """Let the lease of a claim begin anew; return what it holds, or None: it is no longer there.

        ``seal``: it takes nothing more from now on, whatever request is still on its way. Only a sealed
        claim is read and acknowledged.
        """
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "renew",
                (keys.stats, keys.control, keys.claimants, keys.claim, keys.claims),
                (consumer, number, lease_ms, int(seal)),
                _renewed,
            )
        )

    def ack(self, topic: Topic, slot: int, consumer: str, number: int, limit: int = 1000) -> tuple[str, int]:
        """Forget what a sealed claim held. Answers ok, open or stale, and how much is left: ask again until 0."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "ack",
                (
                    keys.store,
                    keys.prepare,
                    keys.failures,
                    keys.stats,
                    keys.control,
                    keys.retry,
                    keys.claimants,
                    keys.claim,
                    keys.claims,
                    keys.claim_body,
                ),
                (self._channel(topic), self._room(topic), consumer, number, limit),
                _left,
            )
        )

    def return_claim(
        self, topic: Topic, slot: int, consumer: str, number: int, *, spent: bool = False, limit: int = 1000
    ) -> tuple[str, int]:
        """Give back what a claim holds. Answers ok or stale, and how much is left: ask again until 0.

        ``spent``: a retry is spent, as after a time-out; else it is as if the claim had never been.
        """
        return self._run(
            Call(
                "return_claim",
                self._claim_keys(self._keys(topic, slot)),
                (
                    self._channel(topic),
                    self._room(topic),
                    topic.type.value,
                    topic.retry_priority,
                    topic.backoff.base_ms,
                    topic.backoff.cap_ms,
                    topic.max_retries,
                    consumer,
                    number,
                    int(spent),
                    limit,
                ),
                _left,
            )
        )

    def read_claim(
        self, topic: Topic, slot: int, consumer: str, number: int = 0, offset: int = 0, limit: int = 0
    ) -> ClaimRead:
        """Return the state of the consumer's newest claim and, of a sealed one, rows from rank ``offset`` on.

        With a ``number``, a claim that is no longer the newest reads as none.
        """
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "read_claim",
                (keys.claim, keys.claims, keys.claim_body),
                (consumer, number, offset, limit),
                _claim_read,
            )
        )

    # --- persons and programs

    def replay(
        self, topic: Topic, slot: int, members: Sequence[bytes], envelopes: Sequence[bytes] = ()
    ) -> list[str]:
        """Send dead messages again with their full budget. Answers replayed, merged or not_found.

        ``envelopes``: new bodies of keyed messages, empty where the body stays.
        """
        keys = self._keys(topic, slot)
        given = envelopes or [b""] * len(members)
        flat = [part for pair in zip(members, given, strict=True) for part in pair]
        return self._run(
            Call(
                "replay",
                [*self._acting_keys(keys), keys.claim],
                (self._channel(topic), topic.slots, topic.type.value, topic.max_retries, *flat),
                _replayed(len(members)),
            )
        )

    def bury(self, topic: Topic, slot: int, members: Sequence[bytes], why: str = "") -> list[str]:
        """Put messages into Dead by hand. Answers what each was found as."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "bury",
                [*self._acting_keys(keys), keys.claim],
                (topic.type.value, topic.max_retries, cut_error(why), *members),
                _words(len(members)),
            )
        )

    def remove(self, topic: Topic, slot: int, members: Sequence[bytes], which: str = "any") -> list[str]:
        """Delete messages by hand: ``live``, ``dead``, or ``any`` (live, else dead). Answers as bury."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "remove",
                [*self._acting_keys(keys), keys.claim],
                (topic.type.value, which, *members),
                _words(len(members)),
            )
        )

    def discard(
        self, topic: Topic, slot: int, scores: Sequence[float], members: Sequence[bytes]
    ) -> list[str]:
        """Delete dead messages that died at ``scores`` (ms). Answers dead, changed (died again since) or not_found."""
        keys = self._keys(topic, slot)
        flat = [
            part for score, member in zip(scores, members, strict=True) for part in (_number(score), member)
        ]
        return self._run(Call("discard", (keys.dead, keys.deaths, keys.stats), flat, _words(len(members))))

    def reschedule(
        self, topic: Topic, slot: int, scores: Sequence[int], members: Sequence[bytes]
    ) -> list[str]:
        """Give waiting messages a new due time or priority. Answers what each was found as, or refused."""
        keys = self._keys(topic, slot)
        flat = [part for pair in zip(scores, members, strict=True) for part in pair]
        return self._run(
            Call(
                "reschedule",
                (keys.store, keys.retry, keys.prepare, keys.stats, keys.control, keys.claim),
                (self._channel(topic), topic.type.value, topic.max_retries, *flat),
                _words(len(members)),
            )
        )

    def purge(
        self,
        topic: Topic,
        slot: int,
        state: str,
        up_to: float = float("inf"),
        limit: int = 1000,
        *,
        min_score: float = float("-inf"),
    ) -> int:
        """Delete up to ``limit`` of store, retry or dead with scores to ``up_to``; return how many."""
        if state not in ("store", "retry", "dead"):
            raise ValueError(f"cannot purge {state!r}: only store, retry and dead")
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "purge",
                (
                    keys.store,
                    keys.retry,
                    keys.dead,
                    keys.prepare,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.stats,
                    keys.claim,
                    keys.control,
                ),
                (topic.type.value, state, _number(min_score), _number(up_to), limit),
                int,
            )
        )

    def pause(self, topic: Topic, slot: int, paused: bool = True) -> str:
        """Stop handing out (or go on). Answers paused, resumed or unchanged."""
        return self._run(
            Call(
                "pause",
                (self._keys(topic, slot).control,),
                (self._channel(topic), slot, int(paused)),
                _word,
            )
        )

    def configure(self, topic: Topic, slot: int, apply: bool = True) -> str:
        """Give the slot its topic's time-out, retries and slot count. Answers ok or refused."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "configure",
                (keys.store, keys.prepare, keys.retry, keys.control, keys.claim),
                (topic.type.value, topic.slots, topic.timeout, topic.max_retries, int(apply)),
                _word,
            )
        )

    def adopt(self, topic: Topic, slot: int, drift: int, foreign: int) -> str:
        """Book ``drift`` messages beyond the account as foreign, if ``foreign`` are so far. Answers ok or changed."""
        return self._run(Call("adopt", (self._keys(topic, slot).stats,), (drift, foreign), _word))

    def retire(self, topic: Topic, slot: int) -> str:
        """Forget an empty slot of a topic that nobody uses any more. Answers retired, or holds: nothing is changed."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "retire",
                (
                    keys.store,
                    keys.prepare,
                    keys.retry,
                    keys.dead,
                    keys.claimants,
                    keys.leaving,
                    keys.inflight,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.prepare_body,
                    keys.claims,
                    keys.claim,
                    keys.claim_body,
                    keys.arrived,
                    keys.stats,
                    keys.control,
                ),
                (),
                _word,
            )
        )

    def loose(self, topic: Topic, slot: int, kind: str, cursor: str = "0", repair: bool = False) -> Loose:
        """Look through some records of a kind for those that belong to no message."""
        if kind not in RECORDS:
            raise ValueError(f"{kind!r} are no records")
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "loose",
                (
                    keys.store,
                    keys.prepare,
                    keys.retry,
                    keys.dead,
                    keys.inflight,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.claim,
                    keys.claim_body,
                    keys.prepare_body,
                ),
                (kind, cursor, int(repair)),
                _loose,
            )
        )

    # --- re-slotting: `reslotting` says in which order

    def shut(
        self, topic: Topic, slot: int, reslot: int, *, fresh: bool = False, only_empty: bool = False
    ) -> str:
        """Give the slot the count of ``topic`` and hand nothing out. Answers shut, known, stale or holds."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "shut",
                (keys.control, keys.store, keys.prepare, keys.retry, keys.dead, keys.claimants),
                (
                    self._channel(topic),
                    slot,
                    topic.slots,
                    reslot,
                    int(fresh),
                    topic.timeout,
                    topic.max_retries,
                    int(only_empty),
                ),
                _word,
            )
        )

    def reopen(
        self, topic: Topic, slot: int, reslot: int, *, deliveries: int = 0, paused: bool = False
    ) -> str:
        """Hand out again, with receipts above ``deliveries``. Answers open, known or stale."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "reopen",
                (keys.control, keys.arrived),
                (self._channel(topic), slot, reslot, deliveries, int(paused)),
                _word,
            )
        )

    def survey(self, topic: Topic, slot: int) -> Survey:
        """Return how far a re-slotting is with the slot."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "survey", (keys.control, keys.prepare, keys.claimants, keys.stats, keys.leaving), (), _survey
            )
        )

    def move_out(
        self,
        topic: Topic,
        slot: int,
        reslot: int,
        target: int,
        members: Sequence[tuple[str, bytes]] = (),
        *,
        arrived: int = 0,
        max_bytes: int = 1_048_576,
    ) -> Handover:
        """Take up to 250 (state, member) out for slot ``target``, once what left before has ``arrived``."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "move_out",
                (
                    keys.store,
                    keys.prepare,
                    keys.retry,
                    keys.dead,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.stats,
                    keys.control,
                    keys.claimants,
                    keys.leaving,
                ),
                (
                    reslot,
                    arrived or "",
                    target,
                    max_bytes,
                    topic.type.value,
                    *(part for pair in members for part in pair),
                ),
                _handover,
            )
        )

    def move_in(
        self, topic: Topic, slot: int, reslot: int, source: int, ticket: int, rows: Sequence[Row]
    ) -> str:
        """Take in what left slot ``source`` with ``ticket``, once. Answers in, known or stale."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "move_in",
                (
                    keys.store,
                    keys.retry,
                    keys.dead,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.stats,
                    keys.control,
                    keys.arrived,
                ),
                (
                    reslot,
                    source,
                    ticket,
                    topic.type.value,
                    topic.max_retries,
                    *(part for row in rows for part in row),
                ),
                _word,
            )
        )

    # --- looking, changing nothing

    def peek(
        self,
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
    ) -> Page:
        """List one state by score. Entries present throughout all pages appear exactly once."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "peek",
                tuple(getattr(keys, name) for name in _STATES[state]),
                (
                    "descending" if descending else "ascending",
                    _number(min_score),
                    _number(max_score),
                    *_cursor(after),
                    limit,
                    max_bytes,
                ),
                _page,
            )
        )

    def find(
        self,
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
    ) -> Page:
        """Look for ``text`` in member, envelope or record among the next ``scan`` entries.

        ``where`` ``error``: only for the class of the last error, whole or its last part.
        """
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "find",
                tuple(getattr(keys, name) for name in _STATES[state]),
                (
                    "descending" if descending else "ascending",
                    _number(min_score),
                    _number(max_score),
                    *_cursor(after),
                    limit,
                    max_bytes,
                    scan,
                    text,
                    where,
                ),
                _page,
            )
        )

    def count(self, topic: Topic, slot: int) -> Counts:
        """Return how many messages the slot holds by state."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "count",
                (keys.store, keys.prepare, keys.retry, keys.dead, keys.control, keys.claim),
                (topic.type.value,),
                _counts,
            )
        )

    def between(
        self,
        topic: Topic,
        slot: int,
        state: str,
        min_score: float = float("-inf"),
        max_score: float = float("inf"),
    ) -> int:
        """Return how many messages of one state have a score in these bounds."""
        members = getattr(self._keys(topic, slot), _STATES[state][0])
        return self._run(Call("between", (members,), (_number(min_score), _number(max_score)), int))

    def look(self, topic: Topic, slot: int, members: Sequence[bytes]) -> list[Looked]:
        """Return what the slot knows of up to 100 members, in whatever states they are."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "look",
                (
                    keys.store,
                    keys.prepare,
                    keys.inflight,
                    keys.retry,
                    keys.dead,
                    keys.deaths,
                    keys.failures,
                    keys.body,
                    keys.claim,
                    keys.claim_body,
                    keys.prepare_body,
                ),
                tuple(members),
                _looked,
            )
        )

    def ranks(self, topic: Topic, slot: int, state: str, members: Sequence[bytes]) -> list[int | None]:
        """Return where up to 1,000 members of a state stand among those of their score; None: not there."""
        key = getattr(self._keys(topic, slot), _STATES[state][0])
        return self._run(Call("ranks", (key,), tuple(members), _same))

    def seek(
        self,
        topic: Topic,
        slot: int,
        digests: Sequence[bytes],
        areas: Sequence[Area],
        *,
        scan: int = 2_000,
        max_bytes: int = 3_145_728,
    ) -> Sought:
        """Find members by their SHA-1 in up to 100 areas, looking at about ``scan`` entries; all areas grow in turns."""
        keys = self._keys(topic, slot)
        told = [
            (area.state, "" if area.score is None else _number(area.score), area.rank, area.looked)
            for area in areas
        ]
        return self._run(
            Call(
                "seek",
                (keys.store, keys.prepare, keys.retry, keys.dead, keys.claim),
                (
                    scan,
                    max_bytes,
                    b"".join(digests).hex(),
                    *(part for one in told for part in one),
                ),
                _sought(areas),
            )
        )

    def heads(self, topic: Topic, slots: Sequence[int], *, upkeep: bool = False) -> list[int | None]:
        """Return when each of up to 1,024 slots can next be taken from (ms; 0: now; None: nothing waits).

        ``upkeep``: when next a delivery times out or the lease of a claim ends there.
        """
        keys = keys_of_slots(self.prefix, topic.name, slots, _LOOKED_AT)
        return self._run(Call("heads", keys, (topic.type.value, topic.timeout, int(upkeep)), _heads))

    def audit(self, topic: Topic, slot: int) -> Ledger:
        """Return the slot's counters and depths, read in one instant."""
        keys = self._keys(topic, slot)
        return self._run(
            Call(
                "audit",
                (keys.store, keys.prepare, keys.retry, keys.dead, keys.stats, keys.claim),
                (),
                _ledger(keys.stats),
            )
        )


class Readings(Transitions):
    """What is read of a topic as a whole, at once or in a pipeline."""

    def sample(self, topic: Topic, slots: Sequence[int]) -> Sample:
        """Return what up to 256 slots hold and have counted, in sums."""
        keys: list[bytes] = []
        for slot in slots:
            slot_ = self._keys(topic, slot)
            keys += (slot_.store, slot_.prepare, slot_.retry, slot_.dead, slot_.stats, slot_.control)
        return self._run(Call("history/sample", keys, (topic.type.value,), _sample))

    def times(self, topic: Topic) -> Times:
        """Return all that ``note_times`` was ever told of ``topic``. Raises ``WrongType`` for what are no numbers."""
        key = times_key(self.prefix, topic.name)

        def parse(values: list[Any]) -> Times:
            return Times.of(stored.counters(key, zip(TIMES, values, strict=True)))

        return self._run(Command("HMGET", (key,), TIMES, parse))

    def minutes(self, topic: Topic, first: int, last: int) -> list[bytes | None]:
        """Return the records of up to 1,000 minutes, ``first`` to ``last``; None: nobody sampled."""
        key = history_keys(self.prefix, topic.name).minutes
        return self._run(Command("HMGET", (key,), tuple(range(first, last + 1)), _same))


_WRAPPED = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
"""How Redis 6 shows the code of an error that a command met inside a script."""

_UNAVAILABLE = ("READONLY", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN")
_UNAVAILABLE_ERRORS = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # MASTERDOWN as well
    redis.exceptions.TryAgainError,
    NoScriptError,  # it was loaded a moment ago: the server has just lost it
)


def translate(error: RedisError) -> RmqError:
    """Return our own error for one of the driver's.

    The driver takes the code off some answers and keeps a class instead; Redis 6 wraps it where a script met it.
    """
    text = str(error)
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        if isinstance(error, (redis.AuthenticationError, redis.exceptions.AuthorizationError)):
            return ServerRefused(f"Redis refuses us: {text}")
        return ServerUnavailable(f"Redis does not answer: {text}")
    wrapped = _WRAPPED.search(text)
    word = wrapped[1] if wrapped else text.split(" ", 1)[0]
    if word == "WRONGTYPE":
        return WrongType(text)
    if word in ("OOM", "MISCONF") or isinstance(error, redis.exceptions.OutOfMemoryError):
        if word == "MISCONF":
            return ServerFull(f"Redis refuses writes: {text}")
        return ServerFull(
            "Redis is full: its used memory is above 'maxmemory'. What drains the queue still works"
        )
    if word in ("NOPERM", "NOAUTH", "WRONGPASS") or isinstance(error, redis.exceptions.NoPermissionError):
        return ServerRefused(f"Redis refuses us: {text}")
    if word in _UNAVAILABLE or isinstance(error, _UNAVAILABLE_ERRORS):
        return ServerUnavailable(f"Redis cannot answer now: {text}")
    return ServerRefused(f"Redis answered: {text}")


def _named(key: bytes, error: RmqError) -> RmqError:
    """Return ``error``; where a plain command met something that is not ours, with the name of the key.

    Scripts name it themselves.
    """
    if not isinstance(error, WrongType):
        return error
    return WrongType(
        f"the key {key.decode(errors='backslashreplace')!r} holds something else than RMQ keeps there: {error}"
    )


def explain(call: Call, error: RmqError) -> RmqError:
    """Return the error of a call with the key that it is about, as far as there is one."""
    return _named(call.keys[0], error) if isinstance(call, Command) else error


_BLANK: Any = [object()]
"""Instead of one score, member or envelope."""

_sent_merge = _sent([math.nan])


class _Frame(NamedTuple):
    """A command as it goes over the wire, but for some arguments in the middle."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, command: Sequence[Any]) -> _Frame:
        """Return the frame of a command whose blanks are one behind the other."""
        first = command.index(*_BLANK)
        behind = first + command.count(*_BLANK)
        before = b"".join(map(_bulk, command[:first]))
        return cls(b"*%d\r\n%b" % (len(command), before), b"".join(map(_bulk, command[behind:])))

    def around(self, *arguments: bytes | int) -> bytes:
        """Return the whole command."""
        return b"".join((self.before, *map(_bulk, arguments), self.after))


class _Calls(Transitions):
    """Answers with the call that would be made."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def _run(self, call: Call) -> Any:
        return call


@cache
def _calls(prefix: str) -> Any:
    return _Calls(prefix)


class Broker(Readings):
    """Runs every transition on a Redis server, one round trip each.

    ``client`` is a redis-py client that does not retry and does not decode. ``clock`` is for tests.
    """

    def __init__(self, client: Any, prefix: str = "", clock: Clock | None = None) -> None:
        self.client = client
        self.prefix = check_prefix(prefix)
        self._clock = clock
        self._loaded = False
        self._frames: dict[tuple[Any, ...], _Frame] = {}

    def load_scripts(self) -> None:
        """Give the server every script once, so that no pipeline stumbles over a missing one."""
        if self._loaded:
            return
        try:
            for name in scripts.all_names():
                self.client.execute_command("SCRIPT LOAD", scripts.load(name).text)
        except RedisError as error:
            raise translate(error) from error
        self._loaded = True

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.client.connection_pool.disconnect()

    def pipeline(self) -> Pipeline:
        """Return a pipeline: its methods collect, ``execute`` runs all in one round trip."""
        return Pipeline(self)

    def _command(self, call: Call) -> tuple[Any, ...]:
        if isinstance(call, Command):
            return (call.script, *call.keys, *call.args)
        now = b"" if self._clock is None else self._clock()
        return ("EVALSHA", scripts.load(call.script).sha, len(call.keys), *call.keys, *call.args, now)

    def _run(self, call: Call) -> Any:
        try:
            reply = self._answer(call.script, _packed(self._command(call)))
        except WrongType as error:
            raise explain(call, error) from error
        return call.read(reply)

    def _answer(self, script: str, packed: bytes) -> Any:
        try:
            try:
                return self._ask(packed)
            except NoScriptError:
                self.client.execute_command("SCRIPT LOAD", scripts.load(script).text)
                return self._ask(packed)
        except RedisError as error:
            raise translate(error) from error

    def _ask(self, packed: bytes) -> Any:
        """Run one command as the driver does for a client that does not retry, without its bookkeeping of half the time."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([packed])
            return connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    # --- one message, in a command that is written already but for what differs from message to message

    def send_merge(
        self,
        topic: Topic,
        slot: int,
        range_ms: int,
        members: Sequence[bytes] | Packed,
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send range_merge messages due ``range_ms`` from now; what waits already keeps its time."""
        if not self._is_written(topic, members):
            return super().send_merge(topic, slot, range_ms, members, envelopes)
        key = (topic.name, slot, topic.slots, topic.max_backlog, range_ms, len(envelopes))
        frame = self._frames.get(key) or self._frame(
            key, _calls(self.prefix).send_merge(topic, slot, range_ms, _BLANK, _BLANK[: len(envelopes)])
        )
        return _sent_merge(self._answer("send_merge", frame.around(*members, *envelopes)))

    def send_replace(
        self,
        topic: Topic,
        slot: int,
        scores: Sequence[int],
        members: Sequence[bytes] | Packed,
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send priority or fixed_time messages; of several sends of a member the last score counts."""
        if not self._is_written(topic, members):
            return super().send_replace(topic, slot, scores, members, envelopes)
        key = (
            topic.name,
            slot,
            topic.slots,
            topic.max_backlog,
            topic.type,
            topic.max_retries,
            len(envelopes),
        )
        frame = self._frames.get(key) or self._frame(
            key, _calls(self.prefix).send_replace(topic, slot, _BLANK, _BLANK, _BLANK[: len(envelopes)])
        )
        packed = frame.around(*scores, *members, *envelopes)
        return _sent(scores)(self._answer("send_replace", packed))

    def _is_written(self, topic: Topic, members: Sequence[bytes] | Packed) -> bool:
        # Of more slots than are remembered most would be forgotten before they are used again.
        one = len(members) == 1 and not isinstance(members, Packed)
        return one and self._clock is None and topic.slots <= FRAMES

    def _frame(self, key: tuple[Any, ...], call: Any) -> _Frame:
        if len(self._frames) >= FRAMES:
            self._frames.clear()
        frame = self._frames[key] = _Frame.of(self._command(call))
        return frame

    # --- what belongs to no slot

    def definitions(self) -> Definitions:
        """Return the registered definition of every topic.

        Raises ``WrongType`` where there is something else in the place of all of them.
        """
        key = topics_key(self.prefix)
        try:
            found = self.client.execute_command("HGETALL", key)
        except RedisError as error:
            raise _named(key, translate(error)) from error
        pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return Definitions(key, pairs)

    def define(self, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
        """Register ``topic`` unless it is registered already; return what is registered then.

        ``replace`` keeps what is noted of the topic's re-slottings.
        """
        return self.redefine(
            topic.name,
            lambda known: redefined(topic, known) if replace or not known else known,
        )

    def redefine(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Replace a definition by what ``change`` makes of it (nothing is known: of an empty one); return that.

        Nobody else changes it between: then ``change`` is asked anew. Raises ``WrongType`` where there is something else.
        """
        key = topics_key(self.prefix)
        while True:
            try:
                before = self.client.execute_command("HGET", key, name) or b""
            except RedisError as error:
                raise _named(key, translate(error)) from error
            known = stored.definition(key, name, before)
            wanted = change(known)
            if wanted == known:
                return known
            after = json.dumps(wanted, sort_keys=True)
            if self._run(Call("topics/redefine", (key,), (name, before, after), _word)) == "ok":
                return wanted

    def undefine(self, topic: Topic) -> None:
        """Forget the definition of a topic, what it counted and its history."""
        others = (
            *history_keys(self.prefix, topic.name),
            times_key(self.prefix, topic.name),
            limits_key(self.prefix, topic.name),
        )
        try:
            for key in others:
                self.client.execute_command("UNLINK", key)
            self.client.execute_command("HDEL", explicit_basis_key(self.prefix), topic.name)
            self.client.execute_command("HDEL", topics_key(self.prefix), topic.name)
        except RedisError as error:
            raise translate(error) from error

    def note_slot_basis(self, topic: Topic) -> None:
        """Note that ``topic`` has messages whose slot nobody can compute again from what is stored."""
        try:
            self.client.execute_command("HSET", explicit_basis_key(self.prefix), topic.name, 1)
        except RedisError as error:
            raise translate(error) from error

    def has_slot_bases(self, topic: Topic) -> bool:
        """Return whether ``note_slot_basis`` was ever told of ``topic``."""
        try:
            found = self.client.execute_command("HEXISTS", explicit_basis_key(self.prefix), topic.name)
        except RedisError as error:
            raise translate(error) from error
        return bool(found)

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless the server answers and is ready."""
        try:
            self.client.execute_command("PING")
        except RedisError as error:
            raise translate(error) from error

    def now_ms(self) -> int:
        """Return the server's clock in ms."""
        if self._clock is not None:
            return self._clock() // 1000
        try:
            seconds, micros = self.client.execute_command("TIME")
        except RedisError as error:
            raise translate(error) from error
        return int(seconds) * 1000 + int(micros) // 1000

    def servers(self) -> list[Server]:
        """Return what the server says of itself; on a cluster, each primary. Raises ``ServerRefused`` without INFO."""
        answers = self._on_all("INFO")
        told = {name: raw for name, raw in answers.items() if not isinstance(raw, RedisError)}
        if not told:
            error = next(iter(answers.values()))
            raise translate(error) from error
        configs: dict[str, dict[str, str]] = {name: {} for name in told}
        for setting in ("maxmemory-policy", "save"):
            for name, reply in self._on_all("CONFIG", "GET", setting).items():
                if not isinstance(reply, RedisError) and len(reply) == 2 and name in configs:
                    configs[name][setting] = reply[1].decode()
        return [Server(name, _info(raw), configs[name]) for name, raw in told.items()]

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return what the server refuses us of what we need, by trying all of it in ways that change nothing."""
        scratch, nobody = f"{self.prefix}rmq:rights".encode(), uuid4().hex.encode()
        tries: list[tuple[Any, ...]] = [(command[0], scratch, *command[1:]) for command in _HARMLESS]
        tries += [("ZRANGESTORE", scratch, scratch, 0, 0), ("RENAME", scratch, scratch)]
        chosen = list(topics)
        for topic in chosen:
            keys = self._keys(topic, 0)
            for name, key in zip(SlotKeys._fields, keys, strict=True):
                tries.append(("ZREM" if name in _ZSETS else "HDEL", key, nobody))
            # Slot -1 is nobody's.
            tries.append(("PUBLISH", self._channel(topic), b"-1"))
        refused = dict.fromkeys(
            f"{command[0]} {command[1].decode(errors='replace')}: {reply}"
            for command, reply in zip(tries, self._each(tries), strict=True)
            if isinstance(reply, NoPermissionError)
        )
        attempts: list[Callable[[], Any]] = [
            self.roster,
            *(partial(self.audit, topic, 0) for topic in chosen),
        ]
        if chosen:
            attempts.append(lambda: self.wakeups(chosen).close())
        for attempt in attempts:
            try:
                attempt()
            except ServerRefused as error:
                refused[str(error)] = None
            except (WrongType, NodeUnavailable):
                pass
        return list(refused)

    def _on_all(self, *command: Any) -> dict[str, Any]:
        """Return the plain answer of each server, or its ``RedisError``, by a name for people."""
        (reply,) = self._each([command])
        return {"Redis": reply}

    def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the plain answer, or the ``RedisError``, of each command, in one round trip."""
        pool = self.client.connection_pool
        replies: list[Any] = []
        try:
            connection = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                for _ in commands:
                    try:
                        replies.append(connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
            finally:
                if len(replies) < len(commands):
                    connection.disconnect()
                pool.release(connection)
        except RedisError as error:
            raise translate(error) from error
        return replies

    def wakeups(self, topics: Iterable[Topic]) -> Wakeups:
        """Subscribe to the wake-ups of ``topics``."""
        return Wakeups(self._ear(), {self._channel(topic): topic.name for topic in topics})

    def _ear(self) -> Any:
        """Return the client that hears what is published."""
        return self.client

    # --- workers and what is assigned to them

    def beat(
        self,
        worker: str,
        token: str,
        session_ms: int,
        *,
        record: str = "",
        known_members: str = "",
        known_number: str = "",
    ) -> Beat:
        """Renew the session of ``worker``, or join with a ``record`` that begins with ``token``."""
        return self._run(
            Call(
                "workers/beat",
                worker_keys(self.prefix),
                (
                    workers_channel(self.prefix),
                    worker,
                    token,
                    record,
                    session_ms,
                    known_members,
                    known_number,
                ),
                _beat(known_members, known_number),
            )
        )

    def leave(self, worker: str, token: str) -> str:
        """End the session of ``worker``. Answers left or absent."""
        return self._run(
            Call(
                "workers/leave",
                worker_keys(self.prefix),
                (workers_channel(self.prefix), worker, token),
                _word,
            )
        )

    def assign(self, members: str, number: str, plan: str) -> str | None:
        """Write ``plan`` if ``members`` and ``number`` are still current; return its number, else None."""
        keys = worker_keys(self.prefix)
        return self._run(
            Call(
                "workers/assign",
                (keys.assignment,),
                (workers_channel(self.prefix), members, number, plan),
                _assigned,
            )
        )

    def roster(self) -> Roster:
        """Return all workers and what is assigned to them, without being one."""
        return self._run(Call("workers/roster", worker_keys(self.prefix), (), _roster))

    def allow(
        self, topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
    ) -> Allowance:
        """Ask for a part of what MAX_RATE and MAX_IN_FLIGHT of ``topic`` leave, and say what is in use.

        ``tokens``: deliveries to begin, negative to give back; ``wanted``: messages that could be in flight.
        """
        return self._run(
            Call(
                "limits/allow",
                (limits_key(self.prefix, topic.name),),
                (
                    worker,
                    _number(topic.max_rate or 0),
                    tokens,
                    topic.max_in_flight or 0,
                    in_use,
                    wanted,
                    lease_ms,
                ),
                _allowance,
            )
        )

    def end_permits(self, topic: Topic, worker: str, ended: int, lease_ms: int = 0) -> int:
        """Count ``ended`` messages less for what ``worker`` has in flight; return what it has left.

        ``lease_ms``: what is left is kept for so long from now on; 0: as long as before.
        """
        key = limits_key(self.prefix, topic.name)
        return self._run(Call("limits/ended", (key,), (worker, ended, lease_ms), int))

    def spend(self, spender: str, each_us: float, size: int, wanted: int) -> int:
        """Spend ``wanted`` of a bucket of ``size`` that gains one each ``each_us``, or nothing; below 0: give back.

        Returns 0, or us until there is enough. ``spender``: letters and digits.
        """
        key = bucket_key(self.prefix, spender)
        return self._run(Call("limits/spend", (key,), (_number(each_us), size, wanted), int))

    # --- requests that shall be done once

    def begin_answer(self, request: str, content: str, token: str, lease_ms: int) -> tuple[str, bytes]:
        """Begin ``request`` (letters and digits) with this ``content`` (a print of it), as attempt ``token``.

        Answers new, running or other with nothing, or done with what was kept.
        """
        key = answer_key(self.prefix, request)
        return self._run(Call("answers/begin", (key,), (content, token, lease_ms), _begun))

    def keep_answer(self, request: str, token: str, kept: bytes, keep_ms: int) -> str:
        """Keep what came of a request; empty: forget that it was begun. Answers ok or stale."""
        key = answer_key(self.prefix, request)
        return self._run(Call("answers/keep", (key,), (token, kept, keep_ms), _word))

    # --- history

    def claim_minute(self, topic: Topic, minute: int) -> bool:
        """Return whether we are the one who samples ``topic`` in this minute (since the epoch)."""
        call = Call("history/claim", history_keys(self.prefix, topic.name), (minute,), _word)
        return self._run(call) == "ok"

    def note_late(self, topic: Topic, counts: Sequence[int]) -> int:
        """Count deliveries by class of lateness; return how many classes were raised."""
        keys = history_keys(self.prefix, topic.name)
        return self._run(Call("history/note", (keys.pending,), (" ".join(map(str, counts)),), int))

    def note_times(
        self, topic: Topic, late: Sequence[int], late_ms: int, took: Sequence[int], took_us: int
    ) -> int:
        """Count deliveries by lateness and calls by duration, for good; return how many classes were raised."""
        args = (" ".join(map(str, late)), late_ms, " ".join(map(str, took)), took_us)
        return self._run(Call("history/times", (times_key(self.prefix, topic.name),), args, int))

    def keep_minute(self, topic: Topic, minute: int, record: str, keep: int) -> str:
        """Keep the record of a minute, and so many minutes in all. Answers kept or present."""
        keys = history_keys(self.prefix, topic.name)
        return self._run(Call("history/keep", keys, (minute, record, keep), _word))

    def minutes(self, topic: Topic, first: int, last: int) -> list[bytes | None]:
        """Return the records of the minutes ``first`` to ``last``; None: nobody sampled."""
        found: list[bytes | None] = []
        for start in range(first, last + 1, BATCH):
            found += super().minutes(topic, start, min(start + BATCH - 1, last))
        return found

    def worker_changes(self) -> Wakeups:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""
        return Wakeups(self._ear(), {workers_channel(self.prefix): ""})

    # --- events

    def publish_events(self, payload: bytes) -> int:
        """Publish what happened to messages; return how many subscribers heard it (on a cluster: of one node)."""
        try:
            return int(self.client.execute_command("PUBLISH", events_channel(self.prefix), payload))
        except RedisError as error:
            raise translate(error) from error

    def events(self) -> Events:
        """Subscribe to what is published of messages."""
        return Events(self._ear(), {events_channel(self.prefix): ""})


def durability_commands(wanted: Durability, connection: Any) -> list[tuple[Any, ...]]:
    """Return the commands that wait, at the end of a connection's writes, until these are as safe as wanted."""
    # Each has to end well within the time that the socket may be silent.
    ms = int((connection.socket_timeout or 1.0) * 400)
    commands: list[tuple[Any, ...]] = []
    if wanted.replicas:
        commands.append(("WAIT", wanted.replicas, ms))
    if wanted.fsync:
        commands.append(("WAITAOF", 1, 0, ms))
    return commands


def read_confirmed(wanted: Durability, connection: Any) -> Confirmed:
    """Read the answers of ``durability_commands``. What the server cannot or may not say is not known."""
    replicas: int | None = None
    fsynced: bool | None = None
    if wanted.replicas:
        try:
            replicas = int(connection.read_response())
        except ResponseError:
            pass
    if wanted.fsync:
        try:
            fsynced = connection.read_response()[0] >= 1
        except ResponseError:
            fsynced = _syncs_always(connection)
    return Confirmed(replicas, fsynced)


def _syncs_always(connection: Any) -> bool:
    """Whether every answer of this server, which knows no WAITAOF (7.2), comes after what it confirms is on disk."""
    found = []
    for name in ("appendonly", "appendfsync"):
        connection.send_command("CONFIG", "GET", name)
        try:
            found.append(connection.read_response()[1])
        except (ResponseError, IndexError):
            found.append(b"")
    return found == [b"yes", b"always"]


class Pipeline(Readings):
    """Collects calls; each returns its index. ``execute`` returns results, errors in their places.

    ``send`` and ``receive`` are the halves of ``execute``: between them Redis works, and so can we.
    A connection that fails fails every call of the pipeline, for nobody knows what ran.
    """

    def __init__(self, broker: Broker) -> None:
        self.prefix = broker.prefix
        self._broker = broker
        self._calls: list[Call] = []
        self._connection: Any = None
        self._wanted: Durability | None = None
        self._in_order = False
        self.confirmed: Confirmed | None = None
        """After ``receive``: what ``confirm`` has come to."""

    def confirm(self, wanted: Durability) -> None:
        """Wait, behind what is collected, until it is as safe as ``wanted``, or for two fifths of the socket time-out each."""
        self._wanted = wanted

    def keep_order(self) -> None:
        """Run again whatever stands behind a call that has to be repeated; all calls must be of a kind that may run twice."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self._calls)

    def _run(self, call: Call) -> Any:
        self._calls.append(call)
        return len(self._calls) - 1

    def roster(self) -> int:
        """Ask for all workers and what is assigned to them."""
        return self._run(Call("workers/roster", worker_keys(self.prefix), (), _roster))

    def rows(self, topic: Topic, slot: int, state: str, first: int, last: int) -> int:
        """Ask for ``[member, score, ...]`` of the ranks ``first`` to ``last`` of a state, as Redis writes them.

        Nothing says whether the set has changed between two calls: that is for the caller to see.
        """
        key = getattr(self._keys(topic, slot), _STATES[state][0])
        return self._run(Command("ZRANGE", (key,), (first, last, "WITHSCORES"), _same))

    def rank(self, topic: Topic, slot: int, state: str, member: bytes) -> int:
        """Ask for the rank of a member in a state; None: it is not there."""
        key = getattr(self._keys(topic, slot), _STATES[state][0])
        return self._run(Command("ZRANK", (key,), (member,), _same))

    def send(self) -> Self:
        """Send what was collected. Raises ``ServerTrouble``; then nothing more is to be received."""
        self._broker.load_scripts()
        pool = self._broker.client.connection_pool
        connection = None
        try:
            connection = pool.get_connection()
            commands = [self._broker._command(call) for call in self._calls]  # noqa: SLF001 - a pipeline is its broker's other half
            if self._wanted is not None:
                commands += durability_commands(self._wanted, connection)
            if any(_is_packed(call) for call in self._calls):
                pieces = [piece for command in commands for piece in self._pieces(command)]
                packed = [b"".join(pieces)]
            else:
                packed = list(_gathered(map(_packed, commands)))
            connection.send_packed_command(packed)
        except RedisError as error:
            self._give_back(connection, broken=True)
            raise translate(error) from error
        except BaseException:
            self._give_back(connection, broken=True)
            raise
        self._connection = connection
        return self

    @staticmethod
    def _pieces(command: tuple[Any, ...]) -> list[Any]:
        return _wired(command) if isinstance(command[-2], Packed) else [_packed(command)]

    def receive(self) -> list[Any]:
        """Return a result or an ``RmqError`` for each call, in order."""
        connection, self._connection = self._connection, None
        calls, self._calls = self._calls, []
        replies: list[Any] = []
        try:
            for _ in calls:
                try:
                    replies.append(connection.read_response())
                except ResponseError as error:
                    replies.append(error)
            if self._wanted is not None:
                self.confirmed = read_confirmed(self._wanted, connection)
        except RedisError as error:
            self._give_back(connection, broken=True)
            raise translate(error) from error
        except BaseException:
            self._give_back(connection, broken=True)
            raise
        self._give_back(connection)
        if self.confirmed is not None and any(isinstance(reply, NoScriptError) for reply in replies):
            # These run below, behind what was waited for.
            self.confirmed = Confirmed(None, False if self.confirmed.fsynced is not None else None)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            self._repeat_behind(calls, replies)
        return [self._result(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def _repeat_behind(self, calls: list[Call], replies: list[Any]) -> None:
        """Let what only reads run again behind a call that has to: it was collected behind it. In order: everything."""
        first = next(i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError))
        for i in range(first + 1, len(calls)):
            if self._in_order or calls[i].script in READS:
                replies[i] = NoScriptError()

    def execute(self) -> list[Any]:
        """Run what was collected and return a result or an ``RmqError`` for each call."""
        return self.send().receive() if self._calls else []

    def _give_back(self, connection: Any, *, broken: bool = False) -> None:
        if connection is None:
            return
        if broken:
            connection.disconnect()
        self._broker.client.connection_pool.release(connection)

    def _result(self, call: Call, reply: Any) -> Any:
        try:
            if isinstance(reply, NoScriptError):
                self._broker._loaded = False  # noqa: SLF001 - the next pipeline loads them all again
                if _is_packed(call):
                    again = self._broker.pipeline()
                    again._run(call)  # noqa: SLF001 - one of our own kind
                    return again.execute()[0]
                return self._broker._run(call)  # noqa: SLF001 - a pipeline is its broker's other half
            if isinstance(reply, RedisError):
                return explain(call, translate(reply))
            return call.read(reply)
        except RmqError as error:
            return error


class _Subscription:
    """Channels that are listened to."""

    def __init__(self, client: Any, channels: dict[bytes, str]) -> None:
        self._topics = channels
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            self._pubsub.subscribe(*channels)
            # SUBSCRIBE is answered once per channel: only then nothing is missed any more.
            for _ in channels:
                self._pubsub.parse_response(block=True)
        except RedisError as error:
            self.close()
            raise translate(error) from error

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``."""
        return int(self._pubsub.connection._sock.fileno())  # noqa: SLF001 - redis-py shows its socket nowhere else

    def close(self) -> None:
        """End the subscription."""
        try:
            self._pubsub.close()
        except (RedisError, OSError):
            pass


class Wakeups(_Subscription):
    """A subscription to wake-ups: which slots can be taken from earlier than was announced."""

    def get(self, timeout: float = 0.0) -> list[tuple[str, int]]:
        """Return the (topic, slot) pairs woken, waiting at most ``timeout`` seconds for the first.

        ``-1 - slot``: the slot was paused.
        """
        woken: list[tuple[str, int]] = []
        try:
            while message := self._pubsub.get_message(timeout=0.0 if woken else timeout):
                woken.append((self._topics[message["channel"]], int(message["data"])))
        except RedisError as error:
            raise translate(error) from error
        except (ValueError, KeyError):
            pass
        return woken


class Events(_Subscription):
    """A subscription to what happens to messages."""

    def get(self, timeout: float = 0.0) -> list[bytes]:
        """Return what was published (up to 100 at a time), waiting at most ``timeout`` seconds for the first."""
        found: list[bytes] = []
        try:
            while len(found) < 100 and (
                message := self._pubsub.get_message(timeout=0.0 if found else timeout)
            ):
                found.append(message["data"])
        except RedisError as error:
            raise translate(error) from error
        return found


__all__ = [
    "BATCH",
    "Broker",
    "Events",
    "Pipeline",
    "ServerTrouble",
    "Transitions",
    "Wakeups",
    "explain",
    "translate",
]
