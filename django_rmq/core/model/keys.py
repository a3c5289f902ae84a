"""The names of all keys and channels in Redis, the numbers of wake-ups, and the content of definitions and counters.

No other module builds the name of a key. What a key of a slot holds is in ``lua/slot/_keys.lua``, and the
states of a message in ``docs/state_machine.md``. The names of topics, prefixes and slot counts are checked here, too. The slot
of a message is the part of ``producer.placement``. The keys of a slot share a hash tag, so that one node of a Redis Cluster
holds all of them and a script can use them. Any program may have written to a hash: an unreadable value affects only its own
topic or figure, and the error names the key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

from django_rmq.core.model.bounds import abbreviated
from django_rmq.core.model.topic import Definition
from django_rmq.exceptions import ConfigurationError, WrongType


def read_wakeup(number: int) -> tuple[str, int]:
    """Return the meaning of a published number (``wake``, ``paused`` or ``look_again``), and the slot.

    A script publishes the slot where something can be taken, -1 - slot where it was paused, and -1 - ``MAX_SLOTS`` - slot
    where a delivery was cancelled (lua/slot/operate.lua): the slot's owner then extends all of them.
    """
    if number >= 0:
        return "wake", number
    slot = -1 - number
    return ("paused", slot) if slot < MAX_SLOTS else ("look_again", slot - MAX_SLOTS)


MAX_SLOTS = 1 << 20
TOPIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
NAME_WANTED = "1 to 100 of A-Z a-z 0-9 . _ - that begin with a letter or digit"
"""What ``TOPIC_NAME`` matches, for errors."""


class SlotKeys(NamedTuple):
    """All keys of one slot, as bytes ready for the wire."""

    store: bytes
    prepare: bytes
    inflight: bytes
    retry: bytes
    dead: bytes
    deaths: bytes
    failures: bytes
    body: bytes
    stats: bytes
    control: bytes
    claims: bytes
    claimants: bytes
    claim: bytes
    claim_body: bytes
    claim_failed: bytes
    leaving: bytes
    arrived: bytes
    prepare_body: bytes
    outcomes: bytes
    outcome_times: bytes
    delivery_outcomes: bytes
    inserting: bytes


class WorkerKeys(NamedTuple):
    """All keys of workers and their assignment, on one node of a Redis Cluster."""

    sessions: bytes
    workers: bytes
    assignment: bytes


class HistoryKeys(NamedTuple):
    """The keys of a topic's history, on one node of a Redis Cluster."""

    minutes: bytes
    pending: bytes


# A topic may have a million slots, so the names of all of them would take too much memory.
@lru_cache(maxsize=1 << 14)
def slot_keys(prefix: str, topic: str, slot: int) -> SlotKeys:
    """Return the keys of slot ``slot`` of ``topic`` under ``prefix``."""
    store = f"{prefix}{topic}_{slot}"
    tagged = [f"{kind}_{{{store}}}".encode() for kind in SlotKeys._fields[1:]]
    return SlotKeys(store.encode(), *tagged)


def trash_key(prefix: str, topic: str, slot: int, act: str) -> bytes:
    """Return the hash that keeps what the act ``act`` (letters and digits) has deleted from a slot, on the node of the slot."""
    return f"trash_{act}_{{{prefix}{topic}_{slot}}}".encode()


def keys_of_slots(prefix: str, topic: str, slots: Iterable[int], kinds: Sequence[str]) -> list[bytes]:
    """Return some keys of each of many slots, slot by slot: quicker than all keys of each."""
    base = f"{prefix}{topic}_".encode()
    forms = [b"%b" if kind == "store" else kind.encode() + b"_{%b}" for kind in kinds]
    stores = [base + b"%d" % slot for slot in slots]
    return [form % store for store in stores for form in forms]


def topics_key(prefix: str) -> bytes:
    """Return the hash that holds the definition of every topic."""
    return f"{prefix}rmq:topics".encode()


def explicit_basis_key(prefix: str) -> bytes:
    """Return the hash of topics that hold messages whose slot cannot be computed again."""
    return topics_key(prefix) + b":explicit_basis"


def worker_keys(prefix: str) -> WorkerKeys:
    """Return the keys of workers and assignment under ``prefix``."""
    tag = workers_channel(prefix)
    return WorkerKeys(*(b"%s_{%s}" % (kind.encode(), tag) for kind in WorkerKeys._fields))


def reports_key(prefix: str) -> bytes:
    """Return the hash of what workers report about themselves."""
    return b"reports_{%s}" % workers_channel(prefix)


def code_versions_key(prefix: str) -> bytes:
    """Return the hash of the versions of the project's code that workers have reported."""
    return b"versions_{%s}" % workers_channel(prefix)


def worker_requests_key(prefix: str) -> bytes:
    """Return the hash of what people ask of workers."""
    return b"requests_{%s}" % workers_channel(prefix)


def stacks_key(prefix: str) -> bytes:
    """Return the hash of the stacks that people asked workers for."""
    return b"stacks_{%s}" % workers_channel(prefix)


def background_actions_key(prefix: str) -> bytes:
    """Return the hash of the actions that workers do in the background."""
    return b"actions_{%s}" % workers_channel(prefix)


def deletions_key(prefix: str) -> bytes:
    """Return the hash of the actions whose deleted messages can be brought back."""
    return b"deletions_{%s}" % workers_channel(prefix)


def changed_limits_key(prefix: str) -> bytes:
    """Return the hash of the limits of topics that people have changed at run time."""
    return b"changed_limits_{%s}" % workers_channel(prefix)


def history_keys(prefix: str, topic: str) -> HistoryKeys:
    """Return the keys of the history of ``topic``."""
    return HistoryKeys(*(f"{kind}_{{{prefix}rmq:history:{topic}}}".encode() for kind in HistoryKeys._fields))


def times_key(prefix: str, topic: str) -> bytes:
    """Return the hash that counts lateness and time in listeners of ``topic``."""
    return f"times_{{{prefix}rmq:history:{topic}}}".encode()


def limits_key(prefix: str, topic: str) -> bytes:
    """Return the hash by which workers share the limits of ``topic``."""
    return f"limits_{{{prefix}rmq:limits:{topic}}}".encode()


def bucket_key(prefix: str, spender: str) -> bytes:
    """Return the hash that holds how much ``spender`` (letters and digits) has spent of its rate."""
    return f"bucket_{{{prefix}rmq:bucket:{spender}}}".encode()


def answer_key(prefix: str, request: str) -> bytes:
    """Return the hash that keeps the answer to ``request`` (letters and digits), which runs only once."""
    return f"answer_{{{prefix}rmq:answer:{request}}}".encode()


def result_key(prefix: str, task: str) -> bytes:
    """Return the hash that keeps what became of ``task``."""
    return f"result_{{{prefix}rmq:result:{task}}}".encode()


def consumer_key(prefix: str, consumer: str) -> bytes:
    """Return the hash that holds which driver has the name of a Spark consumer (``TOPIC:NAME``)."""
    return f"consumer_{{{prefix}rmq:consumer:{consumer}}}".encode()


def schedules_key(prefix: str) -> bytes:
    """Return the hash of all schedules."""
    return f"{prefix}rmq:schedules".encode()


def workers_channel(prefix: str) -> bytes:
    """Return the channel on which scripts publish that membership or assignment changed."""
    return f"{prefix}rmq:workers".encode()


def events_channel(prefix: str) -> bytes:
    """Return the channel on which senders and workers publish events."""
    return f"{prefix}rmq:events".encode()


def wake_channel(prefix: str, topic: str) -> bytes:
    """Return the channel on which scripts publish the numbers that ``read_wakeup`` reads."""
    return f"{prefix}rmq:wake:{topic}".encode()


def inbox_channel(prefix: str, owner: str) -> bytes:
    """Return the channel to which sends push single messages for a worker that sleeps."""
    return f"{prefix}rmq:inbox:{owner}".encode()


def rights_key(prefix: str) -> bytes:
    """Return the key that never exists, on which the rights of the user are tried."""
    return f"{prefix}rmq:rights".encode()


def read_store_key(store: bytes, prefix: str) -> tuple[str, int]:
    """Return the topic and the slot of the Store with this key. Raises ``ValueError`` if it is none under ``prefix``."""
    # The name of a topic may have underscores, too.
    name, _, slot = store.decode().removeprefix(prefix).rpartition("_")
    return name, int(slot)


def check_topic_name(name: object) -> str:
    """Return ``name`` if it may name a topic, else raise ``ConfigurationError``."""
    if not isinstance(name, str) or not TOPIC_NAME.fullmatch(name):
        raise ConfigurationError(f"topic name {name!r} is not allowed: it must be {NAME_WANTED}")
    return name


def check_prefix(prefix: object) -> str:
    """Return ``prefix`` if it may stand before every key, else raise ``ConfigurationError``."""
    if not isinstance(prefix, str) or "{" in prefix or "}" in prefix or not prefix.isprintable():
        raise ConfigurationError(
            f"key prefix {prefix!r} is not allowed: it must be printable text without braces, "
            "which would move the keys of a slot to different nodes of a Redis Cluster"
        )
    return prefix


def check_slots(slots: object) -> int:
    """Return ``slots`` if it is a power of two from 1 to 2**20, else raise ``ConfigurationError``."""
    if isinstance(slots, int) and not isinstance(slots, bool) and 1 <= slots <= MAX_SLOTS:
        if slots & (slots - 1) == 0:
            return slots
        below = 1 << (slots.bit_length() - 1)
        raise ConfigurationError(
            f"slot count must be a power of two, got {slots} (nearest: {below} or {min(below * 2, MAX_SLOTS)})"
        )
    raise ConfigurationError(
        f"slot count must be a power of two from 1 to {MAX_SLOTS}, got {abbreviated(slots)}"
    )


LARGEST_COUNT = (1 << 63) - 1
"""The largest value of a Redis counter."""


class Definitions(dict[str, Definition]):
    """The registered definitions of all topics that can be read.

    ``key`` is the hash in Redis, ``fields`` its content.
    """

    def __init__(self, key: bytes, fields: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._key = key
        self.unreadable: set[str] = set()
        """Topics whose definition cannot be read. Their definitions are never overwritten."""
        for raw_name, text in fields:
            name = raw_name.decode(errors="backslashreplace")
            try:
                self[name] = parse(text)
            except ValueError:
                self.unreadable.add(name)

    def of(self, name: str) -> Definition | None:
        """Return the definition of a topic, or None if none is registered. Raises ``WrongType`` if it cannot be read."""
        if name in self.unreadable:
            raise unreadable(self._key, name)
        return self.get(name)

    def problem(self, name: str) -> str:
        """Return why the definition of a topic cannot be read; empty if it can be read, or if there is none."""
        return str(unreadable(self._key, name)) if name in self.unreadable else ""


def unreadable(key: bytes, name: str) -> WrongType:
    """Return the error for an unreadable definition in the hash ``key``."""
    return WrongType(
        f"the definition of topic {name} cannot be read: field {name!r} of the hash {key.decode()!r} in "
        "Redis is not a definition. Correct the field, or delete it; the next process then registers "
        "its settings"
    )


def definition(key: bytes, name: str, text: bytes) -> Definition:
    """Return the definition of one topic, or an empty one if none is registered. Raises ``WrongType``."""
    try:
        return parse(text) if text else {}
    except ValueError:
        raise unreadable(key, name) from None


def parse(text: bytes) -> Definition:
    """Return a definition. Raises ``ValueError`` if the parts by which slots are found are not valid."""
    try:
        definition = json.loads(text)
        noted = definition.get("reslot", {})
        counts = [definition["slots"], *noted.get("former", ())]
        if noted.get("to") is not None:
            counts.append(noted["to"])
            if not isinstance(noted["number"], int):
                raise TypeError
        # Slots are found by these counts: with a wrong one, messages would go where no worker looks.
        for count in counts:
            check_slots(count)
    except (AttributeError, ConfigurationError, KeyError, RecursionError, TypeError, ValueError):
        raise ValueError("not a definition of a topic") from None
    return cast("Definition", definition)


def counters(key: bytes, fields: Iterable[tuple[bytes, bytes | None]]) -> dict[str, int]:
    """Return fields of the hash ``key`` as whole numbers; a missing field is 0. Raises ``WrongType``."""
    counts = {}
    for raw_name, value in fields:
        name = raw_name.decode(errors="backslashreplace")
        try:
            counts[name] = int(value or 0)
            if not -LARGEST_COUNT <= counts[name] <= LARGEST_COUNT:
                raise ValueError
        except ValueError:
            raise WrongType(
                f"field {name!r} of the hash {key.decode()!r} in Redis is not a whole number"
            ) from None
    return counts
