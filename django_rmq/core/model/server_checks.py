"""What a Redis server reports about itself, and its flaws: settings that may lose messages, refused writes, missing permissions.

The report has the values of INFO and CONFIG GET, which brokers read. ``flaws`` checks a server before workers start. ``strict``
also reports persistence that suffices for most uses, and values that the server hides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused

ALMOST_FULL = 0.8  # as in monitoring/alerts.yml
"""The part of its memory limit from which a server is reported, before it refuses writes."""

SETTINGS = ("maxmemory-policy", "save", "stop-writes-on-bgsave-error", "min-replicas-to-write")
"""The settings that are read with CONFIG GET, because INFO does not contain them."""


class SlowCommand(NamedTuple):
    """A command that took a server long, without its arguments, which are keys and contents."""

    node: str
    """The address of a node of a Redis Cluster; empty if there is only one server."""
    at_ms: int
    """When it ran, by the clock of the server."""
    microseconds: int
    command: str
    """The name of the command; of a script its name, too, or its digest if it is none of this version."""


class ServerInfo(NamedTuple):
    """The report of a Redis server about itself. A value that the server hides counts as good."""

    name: str
    info: Mapping[str, str]
    """The reply to INFO."""
    config: Mapping[str, str]
    """The values of ``SETTINGS`` that the user may read."""
    node: str = ""
    """The address of a node of a Redis Cluster; empty if there is only one server."""

    @property
    def policy(self) -> str:
        """The maxmemory-policy; empty if it is unknown."""
        return self.config.get("maxmemory-policy") or self.info.get("maxmemory_policy", "")

    @property
    def deletes_messages(self) -> bool:
        """Whether it deletes messages when its memory is full.

        A policy that evicts only keys with a time to live spares messages, whose keys have none. What expires anyway, such as
        the history of topics and the results of tasks, may then be lost early.
        """
        return self.policy.startswith("allkeys")

    @property
    def memory_used(self) -> int | None:
        """The bytes that count for its limit: without the buffers of replicas and of the append-only file."""
        used = self._number("used_memory")
        return None if used is None else max(0, used - (self._number("mem_not_counted_for_evict") or 0))

    @property
    def memory_limit(self) -> int | None:
        """The limit of ``memory_used``, which is ``maxmemory``. None if there is no limit, or if it is unknown."""
        return self._number("maxmemory") or None

    @property
    def memory_share(self) -> float:
        """The part of the limit that is used; 0 if there is no limit, or if it is unknown."""
        limit = self.memory_limit
        return (self.memory_used or 0) / limit if limit else 0.0

    @property
    def memory_text(self) -> str:
        """How much of its memory is used, in readable form; empty if it is unknown."""
        used, limit = self.memory_used, self.memory_limit
        if used is None:
            return ""
        if limit is None:
            return f"{size_text(used)} are used, and there is no limit"
        return f"{size_text(used)} of {size_text(limit)} are used, {self.memory_share:.0%}"

    @property
    def refusals(self) -> list[str]:
        """Why the server refuses writes; empty if it takes them."""
        if self.info.get("role") == "slave":
            # Redis checks nothing else on a replica.
            if self.info.get("slave_read_only") == "0":
                return ["it is a replica, whose writes are lost at the next synchronization"]
            return ["it is a read-only replica"]
        refusals = []
        if self.memory_share > 1 and not self.deletes_messages:
            refusals.append(f"its memory is full: {self.memory_text}. Sends fail, and consuming continues")
        # With stop-writes-on-bgsave-error, Redis refuses writes from a failed snapshot until the next one succeeds.
        if self._snapshot_failed and self._stops_after_snapshots:
            refusals.append("its last snapshot failed, and stop-writes-on-bgsave-error is on")
        if self.info.get("aof_enabled") == "1" and self.info.get("aof_last_write_status") == "err":
            refusals.append("it cannot write its append-only file")
        good = self._number("min_slaves_good_slaves")
        required = self._required_replicas
        if good is not None and good < required:
            refusals.append(
                f"{good} of the {required} replicas that min-replicas-to-write requires are connected"
            )
        return refusals

    @property
    def deleted_keys(self) -> int | None:
        """How many keys it has deleted since its start to make room; None if its present policy spares messages."""
        return self._number("evicted_keys") if self.deletes_messages else None

    @property
    def losses(self) -> list[str]:
        """Why the server deletes messages; empty if it has not deleted any by its present policy."""
        if not self.deleted_keys:
            return []
        text = (
            f"its memory was full, and it has deleted {self.deleted_keys} keys since its start, because its maxmemory-policy is "
            f"{self.policy}. Messages may be among them. Set maxmemory-policy noeviction"
        )
        return [text]

    @property
    def warnings(self) -> list[str]:
        """The problems of a server that takes writes."""
        if self.refusals:
            return []
        warnings = []
        if self.memory_share >= ALMOST_FULL:
            follows = "it deletes messages" if self.deletes_messages else "it refuses sends"
            warnings.append(f"its memory is almost full: {self.memory_text}. Above the limit {follows}")
        if self._snapshot_failed:
            warnings.append("its last snapshot failed")
        return warnings

    @property
    def _snapshot_failed(self) -> bool:
        return self.info.get("rdb_last_bgsave_status") == "err"

    @property
    def _stops_after_snapshots(self) -> bool:
        """Whether the server refuses writes after a failed snapshot: the default, unless it takes no snapshots by itself."""
        stops = self.config.get("stop-writes-on-bgsave-error", "yes")
        return stops != "no" and self.config.get("save") != ""

    @property
    def _required_replicas(self) -> int:
        """How many replicas must be connected. INFO counts them only if at least one must be."""
        setting = self.config.get("min-replicas-to-write", "")
        return int(setting) if setting.isdecimal() else 1

    def _number(self, name: str) -> int | None:
        value = self.info.get(name, "")
        return int(value) if value.isdecimal() else None


def size_text(size: int) -> str:
    """Return a number of bytes in readable form, in the largest unit of which there is at least one."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size} bytes"


OLDEST = (6, 2)
"""The oldest supported version of Redis, which has everything the scripts use."""

NAMED_COMMANDS = 5
"""The maximum number of refused commands that are named."""


def places(prefix: str) -> list[str]:
    """Return the rules for the keys and channels of one project. No other project's prefix may begin with its prefix."""
    # The rules of an ACL are patterns, in which these signs have a meaning.
    plain = re.sub(r"([*?\[\]\\])", r"\\\1", prefix)
    return [f"~{plain}*", f"~*_{{{plain}*", f"&{plain}*"]


class Flaw(NamedTuple):
    """A problem of a server."""

    name: str
    """eviction, persistence, version, rights, writes, or memory."""
    message: str
    hint: str

    @property
    def is_lasting(self) -> bool:
        """Whether the problem stays until a person changes the configuration. The others may end when workers consume."""
        return self.name not in ("writes", "memory")


class ServerAccess(Protocol):
    """The part of a broker that the checks ask."""

    @property
    def prefix(self) -> str: ...
    def servers(self) -> list[ServerInfo]: ...
    def refused(self, topics: Iterable[Topic]) -> list[str]: ...


def flaws(broker: ServerAccess, topics: Iterable[Topic], *, strict: bool = False) -> list[Flaw]:
    """Check the server (of a cluster: each primary) and return its problems.

    Changes nothing. Raises ``ServerTrouble`` if it does not answer.
    """
    flaws: list[Flaw] = []
    try:
        for server in broker.servers():
            flaws += _eviction(server)
            flaws += _persistence(server, strict)
            flaws += _version(server)
            flaws += _writes(server)
    except ServerRefused as error:
        if strict:
            flaws.append(
                Flaw(
                    "persistence",
                    f"It is unknown whether Redis may lose messages: {error}.",
                    "Allow the Redis user the command INFO.",
                )
            )
    return [*flaws, *_rights(broker, topics)]


def _eviction(server: ServerInfo) -> list[Flaw]:
    if not server.deletes_messages:
        return []
    evicted = int(server.info.get("evicted_keys", "0"))
    already = f"; it has deleted {evicted} keys since its start" if evicted else ""
    return [
        Flaw(
            "eviction",
            f"{server.name} has the maxmemory-policy {server.policy}: it deletes messages when its memory is full{already}.",
            "Set maxmemory-policy noeviction. When the memory is full, sends are then refused and "
            "consuming continues.",
        )
    ]


def _persistence(server: ServerInfo, strict: bool) -> list[Flaw]:
    if server.info.get("aof_enabled") == "1":
        return []
    hint = "Set appendonly yes: a power cut then loses about one second of sends, or none with appendfsync always."
    snapshots = server.config.get("save")
    if snapshots == "":
        lost = f"{server.name} stores nothing on disk: when its process ends, all messages are lost."
    elif not strict:
        return []
    elif snapshots is None:
        lost = f"{server.name} has no append-only file: when its process ends, messages since the last snapshot are lost."
    else:
        lost = f"{server.name} stores only snapshots: when its process ends, messages since the last one are lost."
    return [Flaw("persistence", lost, hint)]


def _version(server: ServerInfo) -> list[Flaw]:
    version = server.info.get("redis_version", "")
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not parts or parts >= OLDEST:
        return []
    return [Flaw("version", f"{server.name} is Redis {version}: RMQ needs 6.2 or newer.", "Update it.")]


def _writes(server: ServerInfo) -> list[Flaw]:
    hint = "See docs/deploy/runbooks.md#rmqredisrefuseswrites."
    refused = [Flaw("writes", f"{server.name} refuses writes: {reason}.", hint) for reason in server.refusals]
    warnings = [] if server.deletes_messages else server.warnings
    return refused + [Flaw("memory", f"{server.name}: {reason}.", hint) for reason in warnings]


def _rights(broker: ServerAccess, topics: Iterable[Topic]) -> list[Flaw]:
    refused = broker.refused(topics)
    if not refused:
        return []
    more = f"; and {len(refused) - NAMED_COMMANDS} more" if len(refused) > NAMED_COMMANDS else ""
    return [
        Flaw(
            "rights",
            f"The Redis user lacks permissions that RMQ needs: {'; '.join(refused[:NAMED_COMMANDS])}{more}.",
            f"Allow the user {' '.join(places(broker.prefix))} and the commands in docs/how-to/security.md.",
        )
    ]
