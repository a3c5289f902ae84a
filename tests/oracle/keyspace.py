"""The keys as Redis would hold them, with the clock, channels and lock that every transition needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import check_prefix
from django_rmq.exceptions import WrongType
from tests.oracle.channels import Channels


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
        """Return the clock in microseconds."""
        return self._clock()

    def now_ms(self) -> int:
        """Return the clock in ms."""
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
        """Open one hash for a transition."""
        with self.lock:
            found = self.get(key, Hash)
            yield found
            self.keep(key, found)
