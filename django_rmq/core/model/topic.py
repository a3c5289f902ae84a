"""A topic: its type, its slots, and how its messages are identified, delivered and retried.

The settings declare it, Redis registers the part of it that all processes must share (its definition), and everything else in
the core takes it as a value. ``BodyType`` is the interface by which it uses the type of its bodies, so that the core need not
know pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from django_rmq.core.model.bounds import abbreviated, is_whole
from django_rmq.exceptions import WrongType

Definition: TypeAlias = dict[str, Any]
"""The definition of a topic as it is registered: an object of JSON. Other versions may have written more into it."""


class BodyType(Protocol):
    """The type that a topic's BODY names. Each method raises ``ConfigurationError`` if it cannot be used."""

    @property
    def path(self) -> str:
        """The path by which BODY names it."""

    def plain(self, body: object) -> object:
        """Return an instance, or plain data, as the data to be stored as JSON. Raises ``InvalidBody``."""

    def read(self, raw: bytes) -> Any:
        """Return the instance from what is stored. Raises ``InvalidBody``."""

    def schema(self) -> dict[str, object] | None:
        """Return the JSON schema of the bodies that may be sent, or None if no schema can describe them."""


class TopicType(StrEnum):
    """How a topic's Store is ordered (article, section "three kinds of messages")."""

    RANGE_MERGE = "range_merge"
    """Due ``time_range`` after the first send. Sends until then merge and keep that time, or with DEBOUNCE put it off."""
    PRIORITY = "priority"
    """Highest priority first; the last send's priority counts."""
    FIXED_TIME = "fixed_time"
    """Due at a given instant; the last send's instant counts."""
    FIFO = "fifo"
    """Due at once or after a delay, in the order of sending."""


SCORE_OPTIONS = {
    TopicType.RANGE_MERGE: "time_range",
    TopicType.PRIORITY: "priority",
    TopicType.FIXED_TIME: "fixed_time",
    TopicType.FIFO: "delay",
}
"""Type of a topic -> the option of a send that gives the due time or the priority of its message."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long a failed message rests: ``base_ms`` doubling to ``cap_ms``, jittered by up to half.

    Equal base and cap mean that constant time without jitter; 0 means no rest, as in the article.
    ``function`` (failures so far, from 1 → seconds) takes precedence after a listener's failure; time-outs
    always use the numbers. The script of a failure computes the rest (``lua/slot/_retries.lua``, section ``backoff``).
    """

    base_ms: int = 1_000
    cap_ms: int = 600_000
    function: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. ``conf`` validates the values of settings, and ``registered`` those of a definition."""

    name: str
    type: TopicType
    slots: int = 16
    time_range_ms: int | None = None
    """range_merge: how long a message waits unless the send gives another time."""
    debounce: bool = False
    """range_merge: whether each send starts the wait again."""
    max_wait_ms: int | None = None
    """With ``debounce``: how long a message waits at most after its first send."""
    accumulate: int | None = None
    """range_merge with keys: the bodies of up to this many merged sends are kept. None if only the last body counts."""
    body: str = "json"
    """How bodies are encoded: json, text or bytes."""
    typed: BodyType | None = None
    """The type of the bodies, which are then JSON. None if any body is allowed. It is not registered in Redis."""
    identity: str = "body"
    """What identifies a message: its body or its key."""
    slot_basis: str | None = None
    """The field of the body whose value chooses the slot, so that messages with equal values are consumed
    serially."""
    serial: bool = True
    """Whether at most one consumer at a time takes from a slot."""
    timeout: int = 30
    """Seconds from prepare or extend until a delivery counts as timed out."""
    max_retries: int = 16
    """How often a message that fails is tried again before it dies: with 16, it fails at most 17 times. Deliveries that are
    given back before they begin do not count. A message may have a lower limit of its own (``retries_of``). ``lua/slot/ack`` has
    the default, too, for a slot without it."""
    backoff: BackOff = field(default_factory=BackOff)
    default_priority: int | None = None
    """priority topics: the priority of a send that gives none. None if each send must give one."""
    retry_priority: str = "original"
    """priority topics: ``original`` retries at its own priority, ``lowest`` below all (the article's)."""
    order: str = "strict"
    """fifo topics: ``strict`` holds a slot behind a message that failed, ``loose`` does not."""
    on_duplicate: str = "keep"
    """fifo topics: whether a send that meets a waiting message with its key is left out (``keep``), or replaces its body."""
    max_runtime: float = 3600.0
    """Seconds a listener may run before its heartbeat stops."""
    hard_timeout: float | None = None
    """Seconds after which a listener that still runs is ended. None if it is never ended."""
    prefetch: int = 512
    """Messages prepared at once for one slot."""
    max_body: int = 262_144
    max_backlog: int | None = None
    max_rate: float | None = None
    slot_rate: float | None = None
    """Deliveries per second of each slot: MAX_RATE "per" slot."""
    max_in_flight: int | None = None
    max_prepared: int = 1_000
    """``serial=False``: messages in flight per slot."""
    flow: str | None = None
    concurrency: int = 100
    """The number of calls of an async listener that may run at the same time in one process."""
    dead_retention: float | None = None
    """Seconds after which Dead is trimmed; None keeps it."""
    listener: bool = True
    """Whether workers consume the topic. If not, only REST or Spark does."""
    origin: bool = False
    """Whether each send gives its message an origin, by which a listener with ``once`` recognises it."""
    outbox: bool = False
    """Whether a send in a database transaction is written to that database, too, until Redis has it."""
    outcome_retention_ms: int | None = None
    """For how long Redis keeps how a message ended (OUTCOME_RETENTION). None if it does not keep it."""

    is_fifo: bool = field(init=False, compare=False, repr=False)
    """Whether its type is FIFO: computed once, because each send and each delivery depends on it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_fifo", self.type == TopicType.FIFO)

    @property
    def is_priority(self) -> bool:
        return self.type == TopicType.PRIORITY

    @property
    def is_strict(self) -> bool:
        """Whether nothing is delivered from a slot while something in it is in flight or rests."""
        return self.is_fifo and self.order == "strict"

    @property
    def collects(self) -> bool:
        """Whether the bodies of merged sends are kept (ACCUMULATE)."""
        return self.accumulate is not None

    @property
    def takes_instants(self) -> bool:
        """Whether the score of a waiting message is its due time."""
        return self.type in (TopicType.FIXED_TIME, TopicType.RANGE_MERGE)

    @property
    def keyed(self) -> bool:
        return self.identity == "key"

    @property
    def debounce_ms(self) -> int:
        """How long a message waits at most, if each send starts the wait again; 0 if the first send decides."""
        return (self.max_wait_ms or 0) if self.debounce and self.type is TopicType.RANGE_MERGE else 0

    @property
    def min_priority(self) -> int:
        """The smallest priority that a send may use: a score below it is read as a retry.

        It is one above ``floor_priority`` of the scripts (``lua/slot/_scores.lua``).
        """
        return max(16, self.max_retries) + 1

    def retries_of(self, own: int | None) -> int:
        """Return how often a message with its ``own`` limit may be tried again: at most as often as the topic allows.

        The scripts decide it by ``own_limits`` (``lua/slot/_retries.lua``).
        """
        return self.max_retries if own is None else min(own, self.max_retries)

    @property
    def slot_backlog(self) -> int:
        """The maximum number of messages waiting in one slot.

        0 if there is no limit. It is per slot because no script crosses slots.
        """
        return math.ceil(self.max_backlog / self.slots) if self.max_backlog else 0

    @property
    def slot_each_us(self) -> int:
        """The µs between two deliveries of a slot; 0 if there is no limit."""
        return math.ceil(1e6 / self.slot_rate) if self.slot_rate else 0

    def definition(self) -> Definition:
        """Return the definition registered in Redis: everything that decides how a message is treated once it is there."""
        return {
            "slots": self.slots,
            "type": self.type.value,
            "body": self.body,
            "identity": self.identity,
            "slot_basis": self.slot_basis,
            "serial": self.serial,
            "timeout": self.timeout,
            "max_retries": self.max_retries,
            # The scripts cannot call ``function``, so a time-out, which they settle, uses these numbers.
            "backoff": [self.backoff.base_ms, self.backoff.cap_ms],
            "retry_priority": self.retry_priority,
            "max_prepared": self.max_prepared,
            # These entries are written only where they apply, so that other topics keep the definition that Redis has.
            **({"origin": True} if self.origin else {}),
            **({"debounce": True, "max_wait_ms": self.max_wait_ms} if self.debounce else {}),
            **({"accumulate": self.accumulate} if self.accumulate else {}),
            **({"order": self.order, "on_duplicate": self.on_duplicate} if self.is_fifo else {}),
        }

    @classmethod
    def registered(cls, name: str, definition: Mapping[str, Any], slots: int) -> Topic:
        """Return a topic built from its ``definition`` in Redis, with ``slots`` slots.

        Raises ``WrongType`` if a part is missing, or has a value that this version does not know.
        """
        parts = {part: definition[part] for part in _IS_VALID if part in definition}
        if missing := _IS_VALID.keys() - parts.keys() - _OPTIONAL:
            raise WrongType(
                f"the definition of topic {name} in Redis has no {' and no '.join(sorted(missing))}"
            )
        for part, value in parts.items():
            if not _IS_VALID[part](value):
                raise WrongType(
                    f"the definition of topic {name} in Redis has the {part} {abbreviated(value)}"
                )
        kind, (base_ms, cap_ms) = TopicType(parts.pop("type")), parts.pop("backoff")
        return cls(name, kind, slots=slots, backoff=BackOff(base_ms, cap_ms), **parts)


def _is_count(value: object) -> bool:
    return is_whole(value) and value >= 0


def _is_one_of(*values: str) -> Callable[[object], bool]:
    return lambda value: value in values


def _is_a(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "type": _is_one_of(*TopicType),
    "body": _is_one_of("json", "text", "bytes"),
    "identity": _is_one_of("body", "key"),
    "slot_basis": lambda value: value is None or isinstance(value, str),
    "serial": _is_a(bool),
    "timeout": _is_count,
    "max_retries": _is_count,
    "backoff": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)),
    "retry_priority": _is_one_of("original", "lowest"),
    "max_prepared": _is_count,
    "origin": _is_a(bool),
    "debounce": _is_a(bool),
    "max_wait_ms": lambda value: value is None or _is_count(value),
    "accumulate": _is_count,
    "order": _is_one_of("strict", "loose"),
    "on_duplicate": _is_one_of("keep", "replace"),
}
"""For each part of a definition from which ``Topic.registered`` builds a topic, whether a value is one that the part may have."""

_OPTIONAL = {"origin", "debounce", "max_wait_ms", "accumulate", "order", "on_duplicate"}
"""The parts that a definition has only where they apply."""


def slot_counts(definition: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the slot counts by which the messages of a registered topic are placed, in the order in which to try them.

    While a topic is being re-slotted there are two: a slot that refuses the old one has been given the new
    one, and every slot found by the new one accepts it.
    """
    coming = definition.get("reslot", {}).get("to")
    return (definition["slots"],) if coming is None else (definition["slots"], coming)


def former_slot_counts(definition: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the earlier slot counts of a registered topic."""
    return tuple(definition.get("reslot", {}).get("former", ()))


def redefined(topic: Topic, known: Mapping[str, object]) -> dict[str, object]:
    """Return the definition of ``topic`` with the re-slottings that the ``known`` definition records."""
    noted = {"reslot": known["reslot"]} if "reslot" in known else {}
    return {**topic.definition(), **noted}
