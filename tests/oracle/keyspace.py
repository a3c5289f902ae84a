"""The keys as Redis would hold them, with the clock, the channels and the lock that every transition needs.

Also numbers as Redis and Lua write, round and limit them.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from django_rmq.core.commands.broker_interface import Woken
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import check_prefix
from django_rmq.core.model.replies import Pushed
from django_rmq.exceptions import WrongType


def score_text(score: float) -> str:
    """Write a score like Redis and Lua's ``%.17g``, with all digits."""
    return f"{score:.17g}"


def floor(value: float) -> float:
    """Round down; infinities and NaN stay as they are."""
    return math.floor(value) if math.isfinite(value) else value


def ceil(value: float) -> float:
    """Round up; infinities and NaN stay as they are."""
    return math.ceil(value) if math.isfinite(value) else value


def bounded(value: float, low: float, high: float) -> int:
    """Return ``value`` as an integer within its bounds; a value that is not a number becomes ``low``."""
    return int(low if math.isnan(value) else max(low, min(high, value)))


_Told = TypeVar("_Told")


class Channels:
    """The subscriptions of this memory by channel."""

    def __init__(self) -> None:
        self._listening: list[Subscription[Any]] = []
        self._lock = threading.Lock()

    def add(self, subscription: Subscription[_Told]) -> None:
        with self._lock:
            self._listening.append(subscription)

    def forget(self, subscription: Subscription[_Told]) -> None:
        with self._lock:
            self._listening = [other for other in self._listening if other is not subscription]

    def publish(self, channel: bytes, told: Any) -> int:
        """Deliver an item to the subscriptions of ``channel``; return their number."""
        with self._lock:
            hearing = [listening for listening in self._listening if channel in listening.channels]
            for listening in hearing:
                listening.put(told)
        return len(hearing)


class Subscription(Generic[_Told]):
    """A subscription to channels that is active until ``close``."""

    def __init__(self, heard: Channels, channels: set[bytes]) -> None:
        self.channels = channels
        self._heard = heard
        self._told: deque[_Told] = deque()
        self._changed = threading.Condition()
        heard.add(self)

    def put(self, told: _Told) -> None:
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def fileno(self) -> int:
        """Raise ``OSError``: there is no socket to select on; call ``get`` with a time-out."""
        raise OSError("wake-ups in memory have no file descriptor")

    def get(self, timeout: float = 0.0) -> list[_Told]:
        """Return what was published; wait at most ``timeout`` seconds for the first item."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._told), timeout)
            told = list(self._told)
            self._told.clear()
        return told

    def close(self) -> None:
        self._heard.forget(self)


class Wakeups(Subscription[Woken]):
    """A subscription to wake-ups: (topic, slot) pairs, and to what sends push to ``inbox``, if that has a name."""

    def __init__(self, heard: Channels, channels: set[bytes], inbox: bytes = b"") -> None:
        super().__init__(heard, channels | ({inbox} - {b""}))
        self._inbox = inbox

    def check(self) -> None:
        """Do nothing: a subscription in memory has no connection that may be dead."""

    def stop_pushes(self) -> None:
        """Refuse pushes from now on. ``get`` returns those that were made before."""
        self.channels = self.channels - {self._inbox}

    @property
    def has_pushes(self) -> bool:
        """Whether ``get`` may still return what a send has pushed."""
        return self._inbox in self.channels or any(isinstance(told, Pushed) for told in self._told)


class Events(Subscription[bytes]): ...


class SortedSet(dict[bytes, float]):
    """A zset: member -> score, read in the order of (score, member)."""

    kind = "zset"

    def rows(self, *, descending: bool = False) -> list[tuple[bytes, float]]:
        """Return (member, score) in order; equal scores by the members' bytes."""
        return sorted(self.items(), key=lambda row: (row[1], row[0]), reverse=descending)


class Hash(dict[bytes, bytes]):
    """A hash: field -> value."""

    kind = "hash"


_Kind = TypeVar("_Kind", SortedSet, Hash)


class Memory:
    """The keyspace, the clock, the channels, and the lock that makes every transition atomic.

    ``clock`` returns microseconds since the epoch; by default the time of this machine. Tests may read and
    write ``keyspace``, as a foreign program would read and write Redis.
    """

    def __init__(self, prefix: str = "", clock: Callable[[], int] | None = None) -> None:
        self.prefix = check_prefix(prefix)
        self.keyspace: dict[bytes, SortedSet | Hash] = {}
        self.channels = Channels()
        self.lock = threading.RLock()
        self.queued: Call[Any] | None = None
        """The command that the present transaction runs: the parts of an insertion are calls of their own."""
        self._clock = clock or (lambda: time.time_ns() // 1000)

    def micros(self) -> int:
        return self._clock()

    def now_ms(self) -> int:
        return self._clock() // 1000

    def get(self, key: bytes, kind: type[_Kind]) -> _Kind:
        """Return the value at ``key``; if there is none, an empty one that is not stored yet."""
        found = self.keyspace.get(key)
        if found is None:
            return kind()
        if not isinstance(found, kind):
            raise WrongType(f"WRONGTYPE {key.decode()} is a {found.kind}, not a {kind.kind}")
        return found

    def keep(self, key: bytes, value: SortedSet | Hash) -> None:
        """Store ``value`` at ``key``. Like Redis, an empty value is not kept."""
        if value:
            self.keyspace[key] = value
        else:
            self.keyspace.pop(key, None)

    @contextmanager
    def hash(self, key: bytes) -> Iterator[Hash]:
        with self.lock:
            found = self.get(key, Hash)
            yield found
            self.keep(key, found)
