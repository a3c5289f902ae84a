"""Check a Redis server before workers start: settings that may lose messages, refused writes, missing permissions.

The checks know no settings. ``strict`` also reports persistence that suffices for most uses, and values that the server hides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.server_info import ServerInfo
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerRefused

OLDEST = (6, 2)
"""The oldest supported version of Redis, which has everything the scripts use."""

TOLD = 5
"""The maximum number of refused commands that are named."""


def places(prefix: str) -> list[str]:
    """Return the rules for the keys and channels of one project. No other project's prefix may begin with its prefix."""
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


def flaws(broker: Broker, topics: Iterable[Topic], *, strict: bool = False) -> list[Flaw]:
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


def _rights(broker: Broker, topics: Iterable[Topic]) -> list[Flaw]:
    refused = broker.refused(topics)
    if not refused:
        return []
    more = f"; and {len(refused) - TOLD} more" if len(refused) > TOLD else ""
    return [
        Flaw(
            "rights",
            f"The Redis user lacks permissions that RMQ needs: {'; '.join(refused[:TOLD])}{more}.",
            f"Allow the user {' '.join(places(broker.prefix))} and the commands in docs/how-to/security.md.",
        )
    ]
