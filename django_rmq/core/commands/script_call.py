"""The values that a broker runs: a script or a plain command with its keys, its arguments and the decoder of its reply.

A call is independent of the broker's prefix and its connections. Which keys and arguments it needs, it reads from the header of
the script, so that no call declares them again. The numbers, cursors and words that all commands share are here as well. How a
call is written for the wire is the subject of ``redis/wire``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

from django_rmq.core import lua
from django_rmq.core.commands.script_keys import FACTS, AtSlots, KeyPlace
from django_rmq.core.lua import SECOND
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, SlotMoved, Unreadable


def number(value: float) -> str:
    """Write a score without losing a digit."""
    return str(value) if isinstance(value, int) else f"{value:.17g}"


def cursor(after: tuple[str, bytes] | None) -> tuple[str, bytes]:
    """Write a cursor: the entry after which to continue, or None to start from the beginning."""
    return ("", b"") if after is None else after


def same(reply: Any) -> Any:
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


def words(count: int) -> Callable[[Any], list[str]]:
    """Parse one word per member; a single {'ok'} stands for all of them."""

    def parse(reply: list[bytes]) -> list[str]:
        # Scripts answer a single ok if every receipt was valid.
        if len(reply) == 1 and count > 1:
            return [reply[0].decode()] * count
        return [word.decode() for word in reply]

    return parse


def moved(reply: list[Any]) -> None:
    """Raise ``SlotMoved`` if the slot's topic now has another slot count."""
    if reply and reply[0] == b"moved":
        raise SlotMoved(f"the topic now has {text(reply[1])} slots")


_COMMANDS = {
    "ZRANGE": ("set",),
    "ZRANK": ("set",),
    "HLEN": ("claims",),
    "EXISTS": ("store", "retry", "prepare", "claimants"),
    "ZADD": ("inserting",),
}
"""The keys of plain commands whose place has several keys."""

_OF_TRANSACTIONS = {"MULTI", "EXEC", "ZADD", "TIME"}
"""Plain commands that must not be repeated one by one; all others only read."""

_OTHER = {("loose", "kind")}
"""Arguments that share a name with a fact of the topic but mean something else: here, a kind of records."""


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
        return Signature(_COMMANDS.get(script, ()), (), script not in _OF_TRANSACTIONS)
    declared = lua.declaration(script)
    named = [argument.name for argument in declared.arguments]
    facts = [name if name in FACTS and (script, name) not in _OTHER else "" for name in named]
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
    decode: Callable[[bytes, Any], Any]


class Call(NamedTuple, Generic[T_co]):
    """One script with its place, independent of the broker's prefix. The clock is added when the call is sent."""

    script: str
    place: KeyPlace
    own: Sequence[Any]
    """The arguments, except those that are facts of the topic."""
    decode: Callable[[Any], T_co] | OfKey
    join: Callable[[list[Any]], T_co] | None = None
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

    def arguments(self, prefix: str) -> Sequence[Any]:
        """Return the arguments, in the order of the script's header. The facts of the topic are taken from the topic."""
        facts = signature(self.script).facts
        if not facts:
            return self.own
        own, place = iter(self.own), self.place
        found = [FACTS[fact](prefix, place) if fact else next(own) for fact in facts]
        found += own
        return found

    def parts(self) -> list[Self]:
        """Return one call for each slot; a call at one place returns itself."""
        if not isinstance(self.place, AtSlots):
            return [self]
        return [self._replace(place=place) for place in self.place.parts()]

    def read(self, reply: Any, prefix: str) -> T_co:
        """Return the meaning of a reply. Raises ``Unreadable`` if a foreign value makes it meaningless."""
        try:
            decode = self.decode
            if isinstance(decode, OfKey):
                found: T_co = decode.decode(self.place.keys(prefix, (decode.key,))[0], reply)
                return found
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

    def become(self, found: T | RmqError) -> None:
        """Set the answer of the call, or the error in its place."""
        self._found, self._is_known = found, True

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
        found = self.result()
        if isinstance(found, RmqError):
            raise found
        return found


def form(script: str, topic: Topic) -> str:
    """Return the name of ``script``, in its second form if ``topic`` keeps how messages end (OUTCOME_RETENTION)."""
    return script + SECOND if topic.outcome_retention_ms else script
