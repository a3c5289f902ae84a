"""A stranger's view of what a broker keeps: its keys as they are, in Redis and in memory alike."""

from __future__ import annotations

import re
from typing import Any, Protocol

import redis

from django_rmq.core.cluster.cluster_broker import Cluster
from django_rmq.core.model.keys import SlotKeys
from tests.oracle.keyspace import Hash, SortedSet
from tests.support.brokers import OracleBroker

Dump = dict[bytes, dict[bytes, Any]]
Named = dict[str, bytes]
"""What a key of a slot is called -> the key."""
Found = dict[str, dict[bytes, Any]]
SETS = (
    "store", "prepare", "retry", "dead", "claimants", "claim", "outcome_times", "delivery_outcomes", "inserting",
)  # fmt: skip
_RECORD = re.compile(rb"(\d+ )(-?(?:inf|[\d.]+(?:e[+-]?\d+)?))")


def in_one_form(record: bytes) -> bytes:
    """Return a record of ``inflight_{K}`` with its score as the memory writes it. A server writes it in its own form."""
    return _RECORD.sub(lambda found: found[1] + b"%.17g" % float(found[2]), record, count=1)


class Keyspace(Protocol):
    """Reads and writes keys without asking a script."""

    def zset(self, key: bytes) -> dict[bytes, float]: ...
    def hash(self, key: bytes) -> dict[bytes, bytes]: ...
    def read(self, named: Named) -> Found:
        """Return what the keys of a slot hold, in one round trip."""
        ...

    def zadd(self, key: bytes, member: bytes, score: float) -> bool:
        """Return whether the member is new."""
        ...

    def hset(self, key: bytes, field: bytes, value: bytes) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def dump(self) -> Dump:
        """Return every key under the prefix."""
        ...


class MemoryKeyspace:
    def __init__(self, broker: OracleBroker) -> None:
        self.keys = broker.keyspace

    def zset(self, key: bytes) -> dict[bytes, float]:
        return dict(self.keys.get(key, {}))  # type: ignore[arg-type]

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        return dict(self.keys.get(key, {}))  # type: ignore[arg-type]

    def read(self, named: Named) -> Found:
        return {name: dict(self.keys.get(key, {})) for name, key in named.items()}

    def zadd(self, key: bytes, member: bytes, score: float) -> bool:
        found = self.keys.setdefault(key, SortedSet())
        assert isinstance(found, SortedSet)
        new = member not in found
        found[member] = float(score)
        return new

    def hset(self, key: bytes, field: bytes, value: bytes) -> None:
        found = self.keys.setdefault(key, Hash())
        assert isinstance(found, Hash)
        found[field] = value

    def delete(self, key: bytes) -> None:
        self.keys.pop(key, None)

    def dump(self) -> Dump:
        return {key: dict(value) for key, value in self.keys.items()}


class RedisKeyspace:
    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def zset(self, key: bytes) -> dict[bytes, float]:
        rows: Any = self.client.zrange(key, 0, -1, withscores=True)
        return dict(rows)

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        found: Any = self.client.hgetall(key)
        return found

    def read(self, named: Named) -> Found:
        pipeline = self.client.pipeline(transaction=False)
        for name, key in named.items():
            if name in SETS:
                pipeline.zrange(key, 0, -1, withscores=True)
            else:
                pipeline.hgetall(key)
        return {name: dict(value) for name, value in zip(named, pipeline.execute(), strict=True)}

    def zadd(self, key: bytes, member: bytes, score: float) -> bool:
        return bool(self.client.execute_command("ZADD", key, f"{score:.17g}", member))

    def hset(self, key: bytes, field: bytes, value: bytes) -> None:
        self.client.hset(key, field, value)

    def delete(self, key: bytes) -> None:
        self.client.delete(key)

    def dump(self) -> Dump:
        keys: list[Any] = sorted(self.client.keys(f"*{self.prefix}*"))
        pipeline = self.client.pipeline(transaction=False)
        for key in keys:
            pipeline.type(key)
        kinds = pipeline.execute()
        for key, kind in zip(keys, kinds, strict=True):
            if kind == b"zset":
                pipeline.zrange(key, 0, -1, withscores=True)
            else:
                pipeline.hgetall(key)
        return {key: dict(value) for key, value in zip(keys, pipeline.execute(), strict=True)}

    def dump_slots(self, slots: list[SlotKeys], hashes: list[bytes]) -> Dump:
        """Return the keys of these slots and more hashes in one round trip, and prove that there are no others."""
        pipeline = self.client.pipeline(transaction=False)
        pipeline.keys(f"*{self.prefix}*")
        named = [(name, key) for keys in slots for name, key in zip(SlotKeys._fields, keys, strict=True)]
        named += [("trash", key) for key in hashes]
        for name, key in named:
            if name in SETS:
                pipeline.zrange(key, 0, -1, withscores=True)
            else:
                pipeline.hgetall(key)
        existing, *values = pipeline.execute()
        found = {key: dict(value) for (_, key), value in zip(named, values, strict=True) if value}
        for key in (keys.inflight for keys in slots if keys.inflight in found):
            found[key] = {member: in_one_form(record) for member, record in found[key].items()}
        assert set(existing) == set(found)
        return found


class ClusterKeyspace:
    """Asks the node of each key; plain answers."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self.cluster = cluster
        self.prefix = prefix

    def zset(self, key: bytes) -> dict[bytes, float]:
        rows = self.cluster.execute_command("ZRANGE", key, 0, -1, "WITHSCORES")
        return dict(zip(rows[::2], map(float, rows[1::2]), strict=True))

    def hash(self, key: bytes) -> dict[bytes, bytes]:
        rows = self.cluster.execute_command("HGETALL", key)
        return dict(zip(rows[::2], rows[1::2], strict=True))

    def read(self, named: Named) -> Found:
        return {name: self.zset(key) if name in SETS else self.hash(key) for name, key in named.items()}

    def zadd(self, key: bytes, member: bytes, score: float) -> bool:
        return bool(self.cluster.execute_command("ZADD", key, f"{score:.17g}", member))

    def hset(self, key: bytes, field: bytes, value: bytes) -> None:
        self.cluster.execute_command("HSET", key, field, value)

    def delete(self, key: bytes) -> None:
        self.cluster.execute_command("DEL", key)

    def dump(self) -> Dump:
        found: Dump = {}
        for keys in self.cluster.everywhere("KEYS", f"*{self.prefix}*").values():
            for key in keys:
                is_set = self.cluster.execute_command("TYPE", key) == b"zset"
                found[key] = dict(self.zset(key) if is_set else self.hash(key))
        return found
