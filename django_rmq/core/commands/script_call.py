"""The call of a script (``Call``), which the functions of the other modules here make, and brokers run.

A call has a place, which finds the keys that the header of the script names (``AtSlot`` and others), arguments, of which some are
facts of the topic (``FACTS``), and a function that reads the reply. Functions that several calls read replies with are here, too.
``RedisCommand`` is a call of a plain command. A pipeline gives an ``Answer`` for each call. ``Packed`` stands for arguments that
Spark has encoded already, which only a pipeline can send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

from django_rmq.core import lua
from django_rmq.core.lua import SECOND
from django_rmq.core.model.keys import (
    SlotKeys,
    history_keys,
    keys_of_slots,
    slot_keys,
    trash_key,
    wake_channel,
    worker_keys,
    workers_channel,
)
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, SlotMoved, Unreadable

_STATES = {
    "store": {"set": "store", "records": "failures", "body": "body"},
    "prepare": {"set": "prepare", "records": "inflight", "body": "prepare_body"},
    "retry": {"set": "retry", "records": "failures", "body": "body"},
    "dead": {"set": "dead", "records": "deaths", "body": "body"},
    "claim": {"set": "claim", "records": "failures", "body": "claim_body"},
    "claimants": {"set": "claimants"},
}
"""State -> its set, the hash of records about its members, and the hash of their bodies."""


Reply: TypeAlias = Any
"""What a server answers: data from outside. The header of its script says what it is made of."""

Answers: TypeAlias = list[Any]
"""The answers of several calls, in order: what each means, or an ``RmqError``."""


class KeyPlace(Protocol):
    """Finds the keys of a call by their names."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys with these names."""


@cache
def _chosen(names: tuple[str, ...]) -> Callable[[tuple[bytes, ...]], tuple[bytes, ...]]:
    """Return a function that picks the keys with these names from all keys of a slot."""
    places = [SlotKeys._fields.index(name) for name in names]
    # ``itemgetter`` of a single place returns the key itself, and not a tuple.
    if len(places) == 1:
        (place,) = places
        return lambda keys: (keys[place],)
    return itemgetter(*places)


class AtSlot(NamedTuple):
    """One slot."""

    topic: Topic
    slot: int

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the slot's keys with these names."""
        return _chosen(names)(slot_keys(prefix, self.topic.name, self.slot))


class InTrash(NamedTuple):
    """One slot, and what an act deletes from it. An act without a name keeps nothing."""

    topic: Topic
    slot: int
    act: str = ""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the slot's keys with these names; ``trash`` is that of the act."""
        keys = slot_keys(prefix, self.topic.name, self.slot)
        trash = trash_key(prefix, self.topic.name, self.slot, self.act)
        return [trash if name == "trash" else getattr(keys, name) for name in names]


class AtSlots(NamedTuple):
    """Many slots of one topic."""

    topic: Topic
    slots: Sequence[int]

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys with these names, slot by slot."""
        return keys_of_slots(prefix, self.topic.name, self.slots, names)

    def parts(self) -> list[AtSlots]:
        """Return a place for each slot, since one node of a Redis Cluster holds all of a slot."""
        return [self._replace(slots=(slot,)) for slot in self.slots]


class OfTopics(NamedTuple):
    """Slots of several topics. The facts that the script takes from a topic are the same for all of them."""

    topics: Sequence[AtSlots]

    @property
    def topic(self) -> Topic:
        """The topic whose facts the script gets."""
        return self.topics[0].topic

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys with these names, slot by slot."""
        return list(chain.from_iterable(each.keys(prefix, names) for each in self.topics))

    def parts(self) -> list[Self]:
        """Return a place for each slot, since one node of a Redis Cluster holds all of a slot."""
        return [self._replace(topics=[part]) for each in self.topics for part in each.parts()]


class SetsOfSlots(OfTopics):
    """The sets of slots of several topics, which exist while they hold messages."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the keys of the sets, slot by slot, whatever the ``names``."""
        return super().keys(prefix, ("store", "prepare", "retry", "dead", "claim"))


class InState(NamedTuple):
    """One state of a slot: its set, the records about its members, and their bodies."""

    topic: Topic
    slot: int
    state: str

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the state's keys with these names."""
        state, keys = _STATES[self.state], slot_keys(prefix, self.topic.name, self.slot)
        return [getattr(keys, state[name]) for name in names]


class OfWorkers(NamedTuple):
    """The keys of workers and of their assignment."""

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the workers' keys with these names."""
        keys = worker_keys(prefix)
        return [getattr(keys, name) for name in names]


class OfHistory(NamedTuple):
    """The history of a topic."""

    topic: Topic

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the history's keys with these names."""
        keys = history_keys(prefix, self.topic.name)
        return [getattr(keys, name) for name in names]


class Named(NamedTuple):
    """One key, found by the name of a topic, a spender or a request."""

    key: Callable[[str, str], bytes]
    name: str

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the key."""
        return (self.key(prefix, self.name),)


class Single(NamedTuple):
    """One key that the deployment has once, under its prefix."""

    key: Callable[[str], bytes]

    def keys(self, prefix: str, names: tuple[str, ...]) -> Sequence[bytes]:
        """Return the key."""
        return (self.key(prefix),)


def _channel(prefix: str, place: AtSlot | OfWorkers) -> bytes:
    return workers_channel(prefix) if isinstance(place, OfWorkers) else wake_channel(prefix, place.topic.name)


FACTS: dict[str, Callable[[str, Any], object]] = {
    "channel": _channel,
    "slot_capacity": lambda _, place: 1 if place.topic.serial else place.topic.max_prepared,
    "backlog": lambda _, place: place.topic.slot_backlog,
    "topic_type": lambda _, place: place.topic.type.value,
    "slots": lambda _, place: place.topic.slots,
    "retry_priority": lambda _, place: place.topic.retry_priority,
    "backoff_base": lambda _, place: place.topic.backoff.base_ms,
    "backoff_cap": lambda _, place: place.topic.backoff.cap_ms,
    "timeout": lambda _, place: place.topic.timeout,
    "max_retries": lambda _, place: place.topic.max_retries,
    "serial": lambda _, place: int(place.topic.serial),
    "max_wait": lambda _, place: place.topic.debounce_ms,
    "accumulate": lambda _, place: place.topic.accumulate or 0,
    "max_body": lambda _, place: place.topic.max_body,
    "slot_each_us": lambda _, place: place.topic.slot_each_us,
    "strict": lambda _, place: int(place.topic.is_strict),
    "on_duplicate": lambda _, place: place.topic.on_duplicate,
    "outcome_retention_ms": lambda _, place: place.topic.outcome_retention_ms or 0,
}
"""The arguments of scripts that are facts of the topic, by their names in the headers."""


def number(value: float) -> str:
    """Write a score without losing a digit."""
    return str(value) if isinstance(value, int) else f"{value:.17g}"


def cursor(after: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """Write a cursor: the entry after which to continue, or None to start from the beginning."""
    return ("", b"") if after is None else after


def same(reply: Reply) -> Reply:
    """Return the reply unchanged."""
    return reply


def moment(raw: bytes) -> int | None:
    """Read an optional time in ms."""
    return int(raw) if raw else None


def text(raw: bytes) -> str:
    """Read a worker's id; a foreign value stays recognisable."""
    return raw.decode(errors="backslashreplace")


def word(reply: bytes) -> str:
    """Read one word."""
    return reply.decode()


def words(count: int) -> Callable[[Reply], list[str]]:
    """Parse one word per member; a single {'ok'} stands for all of them."""

    def parse(reply: list[bytes]) -> list[str]:
        # Scripts answer a single ok if every receipt was valid.
        if len(reply) == 1 and count > 1:
            return [reply[0].decode()] * count
        return [word.decode() for word in reply]

    return parse


def moved(reply: list[Reply]) -> None:
    """Raise ``SlotMoved`` if the slot's topic now has another slot count."""
    if reply and reply[0] == b"moved":
        error = SlotMoved(f"the topic now has {text(reply[1])} slots")
        error.slots = int(reply[1])
        raise error


_COMMANDS = {
    "ZRANGE": ("set",),
    "ZRANK": ("set",),
    "HLEN": ("claims",),
    "EXISTS": ("store", "retry", "prepare", "claimants"),
    "ZADD": ("inserting",),
}
"""The keys of plain commands whose place has several keys."""

_READERS = {"EXISTS", "HGETALL", "HLEN", "HMGET", "ZRANGE", "ZRANK"}
"""The plain commands that may run twice, because they change nothing and belong to no transaction."""


class Signature(NamedTuple):
    """The names of a script's keys, in order, and of the topic's facts among its arguments."""

    keys: tuple[str, ...]
    """The names of the keys; for a script of many slots, those of each slot."""
    facts: tuple[str, ...]
    """The name of the fact for each argument up to the last fact; empty if the argument belongs to the call."""
    reads: bool
    """Whether the script changes nothing."""


@cache
def signature(script: str) -> Signature:
    """Return the signature in the header of ``script``, or that of a plain command."""
    if script not in lua.all_names():
        # rule: repeats_plain_writes
        return Signature(_COMMANDS.get(script, ()), (), script in _READERS)
    declared = lua.declaration(script)
    names = [argument.name for argument in declared.arguments]
    facts = [name if name in FACTS else "" for name in names]
    while facts and not facts[-1]:
        facts.pop()
    return Signature(tuple(key.name for key in declared.keys), tuple(facts), declared.reads)


class Packed:
    """Members or scores and members, then envelopes, already encoded for the server; for pipelines to one server.

    Its length is that of the values it stands for; in its call it is one argument.
    """

    def __init__(self, count: int, width: int, *data: memoryview) -> None:
        self.count = count
        self.width = width
        """The number of texts for each message: its member, and perhaps a score and an envelope."""
        self.data = data

    def __len__(self) -> int:
        return self.count


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class OfKey(NamedTuple):
    """A decoder that receives the key and the reply, so that its error can name the key of an unreadable value."""

    key: str
    decode: Callable[[bytes, Reply], Any]


class Call(NamedTuple, Generic[T_co]):
    """One script with its place, independent of the broker's prefix. The clock is added when the call is sent."""

    script: str
    place: KeyPlace
    own: Sequence[object]
    """The arguments, except those that are facts of the topic."""
    decode: Callable[[Reply], T_co] | OfKey
    join: Callable[[Answers], T_co] | None = None
    """Combines the answers of the parts into one. None if the call has one part."""
    varying: int = 0
    """How many of the last arguments differ from message to message; 0 if no two calls are alike."""

    @property
    def reads(self) -> bool:
        """Whether the call changes nothing."""
        return signature(self.script).reads

    def keys(self, prefix: str) -> Sequence[bytes]:
        """Return the keys, in the order of the script's header."""
        return self.place.keys(prefix, signature(self.script).keys)

    def arguments(self, prefix: str) -> Sequence[object]:
        """Return the arguments, in the order of the script's header. The facts of the topic are taken from the topic."""
        facts = signature(self.script).facts
        if not facts:
            return self.own
        own, place = iter(self.own), self.place
        arguments = [FACTS[fact](prefix, place) if fact else next(own) for fact in facts]
        arguments += own
        return arguments

    def parts(self) -> list[Self]:
        """Return one call for each slot; a call at one place returns itself."""
        if not isinstance(self.place, (AtSlots, OfTopics)):
            return [self]
        return [self._replace(place=place) for place in self.place.parts()]

    def read(self, reply: Reply, prefix: str) -> T_co:
        """Return the meaning of a reply. Raises ``Unreadable`` if a foreign value makes it meaningless."""
        try:
            decode = self.decode
            if isinstance(decode, OfKey):
                value: T_co = decode.decode(self.place.keys(prefix, (decode.key,))[0], reply)
                return value
            return decode(reply)
        # Any program may write to the keys, and a reply with its values must not end the thread that reads it.
        # rule: a_foreign_value_ends_the_process
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            keys = self.keys(prefix)
            of = keys[0].decode(errors="replace") if keys else "no key"
            raise Unreadable(
                f"{self.script} of {of}: the answer from Redis holds a value that RMQ did not write ({error})"
            ) from error


class RedisCommand(Call[T_co]):
    """A plain command instead of a script, for operations that Redis runs fastest by itself."""


class Answer(Generic[T]):
    """The answer of one call of a pipeline, available after the pipeline has run."""

    __slots__ = ("_found", "_is_known")

    def __init__(self) -> None:
        self._is_known = False
        self._found: T | RmqError | None = None

    def become(self, answer: T | RmqError) -> None:
        """Set the answer of the call, or the error in its place."""
        self._found, self._is_known = answer, True

    def result(self) -> T | RmqError:
        """Return the answer of the call, or the error in its place.

        Raises ``RuntimeError`` before the pipeline has run.
        """
        if not self._is_known:
            raise RuntimeError("the pipeline has not run yet, so there is no answer")
        return cast("T | RmqError", self._found)

    def get(self) -> T:
        """Return the answer of the call, or raise the error in its place.

        Raises ``RuntimeError`` before the pipeline has run.
        """
        answer = self.result()
        if isinstance(answer, RmqError):
            raise answer
        return answer


def each_or_none(answers: Answers) -> Answers:
    """Return the one answer in each part's list, or None for a part that has an error: the others can still be used."""
    return [None if isinstance(answer, RmqError) else answer[0] for answer in answers]


def each_or_error(answers: Answers) -> Answers:
    """Return the one answer in each part's list, or the part's error in its place."""
    return [answer if isinstance(answer, RmqError) else answer[0] for answer in answers]


def form(script: str, topic: Topic) -> str:
    """Return the name of ``script``, in its second form if ``topic`` keeps how messages end (OUTCOME_RETENTION)."""
    return script + SECOND if topic.outcome_retention_ms else script


def pairs(reply: Reply) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields and values of a hash: on connections with RESP3 the reply is a map, otherwise a flat list."""
    return reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
