"""What a load needs: memory of Redis, slots, worker processes, threads and connections. It contacts no server.

The memory is that of Redis 7.0 with jemalloc and its default limits for listpacks. A test compares it with a
real server.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from django_rmq.core.words.keys import MAX_SLOTS, check_slots
from django_rmq.exceptions import ConfigurationError

FEWEST_SLOTS = 16
"""The default of SLOTS."""

SLOTS_PER_THREAD = 4
"""Slots for each thread. One thread at a time works on a slot, so with fewer a deep slot leaves threads without work."""

HEADROOM = 1.5
"""``maxmemory`` divided by the memory of waiting messages. The rest is for messages in flight, retries, Dead and buffers."""

CONNECTIONS = 9
"""The most connections of a worker process to Redis: 2 of the dispatcher, 2 of the coordinator, and 1 each for wake-ups, for
the heartbeat, for duties, for the relay of the outbox, and for what is asked at the start. Each thread whose listener sends
has one more at most."""

_LISTPACK_ENTRIES, _LISTPACK_VALUE = 128, 64
"""The largest listpack: entries, and bytes of each. Above it Redis uses a skip list or a table."""

_NODE = 54
"""Bytes of a node of a skip list, averaged over its heights."""

_ENTRY = 32
"""Bytes of an entry of a dictionary."""

_ENVELOPE = 5
"""Bytes before the body of a keyed message."""

_SLOT, _LARGE_SLOT = 600, 1_100
"""Bytes of a slot and its ledger without the messages: as a listpack, and as a skip list."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a topic must carry."""

    messages: int
    """The largest number that waits at the same time. On merging topics only different messages count."""
    body_bytes: int
    """Bytes of one body as it is stored."""
    rate: float = 0.0
    """Messages consumed per second."""
    seconds: float = 0.0
    """Time that a listener takes for one message."""
    cpu_seconds: float = 0.0
    """The part of ``seconds`` in which Python computes."""
    key_bytes: int = 0
    """Bytes of a key, with IDENTITY "key". 0: messages have no key."""
    threads: int = 8
    """Threads of a worker process."""
    utilisation: float = 0.7
    """The part of the time in which threads are busy, above 0 and up to 1. The rest is for peaks."""
    slots: int = 0
    """Slots of an existing topic. 0: as many as the threads need."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load needs."""

    slots: int
    busy_threads: int
    processes: int
    message_bytes: int
    """Memory of one message that waits."""
    waiting_bytes: int
    """Memory of all messages that wait, with their slots."""
    maxmemory: int
    redis_connections: int
    """Connections of all worker processes, if every listener sends."""
    database_connections: int
    """Connections of all worker processes, if every listener uses one database, which also has the outbox."""


def plan(load: Load) -> Plan:
    """Return what ``load`` needs. Raises ``ConfigurationError`` for a load that one topic cannot carry."""
    if not 0 < load.utilisation <= 1:
        raise ConfigurationError(f"the utilisation must be above 0 and at most 1, got {load.utilisation}")
    busy = max(1, _whole(load.rate * load.seconds / load.utilisation))
    processes = max(ceil(busy / load.threads), _whole(load.rate * load.cpu_seconds / load.utilisation))
    threads = processes * load.threads
    slots = (
        check_slots(load.slots)
        if load.slots
        else _power_of_two(max(FEWEST_SLOTS, SLOTS_PER_THREAD * threads))
    )
    if slots > MAX_SLOTS:
        raise ConfigurationError(
            f"{busy} threads need {slots} slots, and a topic has at most {MAX_SLOTS}: use several topics"
        )
    waiting = _waiting_bytes(load, slots)
    return Plan(
        slots=slots,
        busy_threads=busy,
        processes=processes,
        message_bytes=round(_message_bytes(load, slots)),
        waiting_bytes=waiting,
        maxmemory=round(waiting * HEADROOM),
        redis_connections=processes * (CONNECTIONS + load.threads),
        database_connections=threads + processes,
    )


def _whole(number: float) -> int:
    """Return ``number`` rounded up, without the error of floating point: 7 * 0.1 / 0.7 is 1."""
    return ceil(number - 1e-9)


def _waiting_bytes(load: Load, slots: int) -> int:
    used = min(slots, load.messages)
    per_slot = (
        _SLOT if _is_listpack(load.messages / slots, load.key_bytes or load.body_bytes) else _LARGE_SLOT
    )
    return round(load.messages * _message_bytes(load, slots) + used * per_slot)


def _message_bytes(load: Load, slots: int) -> float:
    """Return what one message takes in the sorted set of its slot, and with a key in the hash of bodies."""
    in_slot = max(1.0, load.messages / slots)
    member = load.key_bytes or load.body_bytes
    if _is_listpack(in_slot, member):
        size = float(_packed(member) + 10)  # the score is a number of eight bytes
    else:
        size = _allocated_text(member) + _NODE + _ENTRY + _bucket(in_slot)
    if load.key_bytes:
        body = load.body_bytes + _ENVELOPE
        if _is_listpack(in_slot, max(load.key_bytes, body)):
            size += _packed(load.key_bytes) + _packed(body)
        else:
            size += _allocated_text(load.key_bytes) + _allocated_text(body) + _ENTRY + _bucket(in_slot)
    return size


def _is_listpack(entries: float, value: int) -> bool:
    return entries <= _LISTPACK_ENTRIES and value <= _LISTPACK_VALUE


def _packed(length: int) -> int:
    """Return the bytes of a text in a listpack: a head of one or two bytes, the text, and its length again."""
    return length + (2 if length < 64 else 3)


def _bucket(entries: float) -> float:
    """Return the share of one entry in the table of its dictionary, which has a power of two of places."""
    return 8 * _power_of_two(ceil(entries)) / entries


def _allocated_text(length: int) -> int:
    """Return what a text takes: its head and end, rounded up as the allocator does."""
    head = 1 if length < 32 else 3 if length < 256 else 5 if length < 65_536 else 9
    return _allocated(length + head + 1)


def _allocated(size: int) -> int:
    """Return the size class of jemalloc: steps of 16 bytes up to 128, then four between two powers of two."""
    if size <= 8:
        return 8
    step = 16 if size <= 128 else _power_of_two(size) // 8
    return ceil(size / step) * step


def _power_of_two(number: int) -> int:
    """Return ``number`` rounded up to a power of two."""
    return 1 << max(0, number - 1).bit_length()


__all__ = ["Load", "Plan", "plan"]
