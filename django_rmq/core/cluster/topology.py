"""The topology of a Redis Cluster: which node serves which of the 16,384 hash slots.

It is read from the nodes themselves, at the first call and whenever an answer puts it in doubt. It sends no commands of callers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import RedisError

from django_rmq.core.cluster.nodes import Node

PATIENCE_SECONDS = 1.0
"""Seconds for which a call is repeated that no node has run, unless the cluster has another patience."""

REFRESH_SECONDS = 0.02
"""Seconds between two requests for the topology."""


class Topology:
    """The known topology. Callers report answers of nodes that contradict it.

    ``seeds`` are (host, port) pairs of some nodes, ``options`` those of redis-py's connections. ``patience``:
    seconds for which a call is repeated that no node has run. It connects to nothing before the first call.
    """

    def __init__(
        self,
        seeds: Iterable[tuple[str, int]],
        options: Mapping[str, Any],
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.patience = patience
        self.options = dict(options)
        self._lock = threading.Lock()
        self._nodes: dict[tuple[str, int], Node] = {}
        self._seeds = [self.node(host, port) for host, port in seeds]
        self._serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._primaries: list[Node] = []
        self._is_stale = True
        self._looked_at = float("-inf")

    def node(self, host: str, port: int) -> Node:
        """Return the node at an address."""
        found = self._nodes.get((host, port))
        # Two threads may make the node at the same time; both then use the first one.
        return found or self._nodes.setdefault((host, port), Node(host, port, self.options))

    def serving(self, hash_slot: int) -> Node:
        """Return the primary of a hash slot; raise ``RedisError`` if there is none."""
        node = self._serving[hash_slot]
        if node is None:
            self._is_stale = True
            raise redis.ConnectionError(f"no node of the cluster serves hash slot {hash_slot}")
        return node

    def primaries(self) -> list[Node]:
        """Return all nodes that serve hash slots."""
        self.refresh()
        return self._primaries

    def moved(self, hash_slot: int, node: Node) -> None:
        """Record the new node of a hash slot, and that more may have changed."""
        self._serving[hash_slot] = node
        self._is_stale = True

    def doubt(self) -> None:
        """Note that the topology may have changed: it is requested again before the next call."""
        self._is_stale = True

    def refresh(self) -> None:
        """Request the topology from the nodes in turn, if it is in doubt; raise ``RedisError`` if none has ever answered."""
        if not self._is_stale:
            return
        with self._lock:
            trouble: RedisError = redis.ConnectionError("no node of the cluster serves anything")
            # Many threads get the same MOVED at once; the first of them has just asked for all.
            if time.monotonic() - self._looked_at < REFRESH_SECONDS:
                if not self._primaries:
                    raise trouble
                return
            known = list(self._nodes.values())
            random.shuffle(known)
            for node in sorted(known, key=lambda node: node.rests):
                try:
                    rows = node.ask("CLUSTER", "SLOTS")
                except RedisError as error:
                    # Every other node knows the topology, too.
                    trouble = error
                    continue
                # A node that has not joined a cluster yet, or was reset, knows no hash slots.
                if rows:
                    self._note(node, rows)
                    self._is_stale = False
                    break
            self._looked_at = time.monotonic()
            if not self._primaries:
                raise trouble

    def _note(self, told_by: Node, rows: list[Any]) -> None:
        serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        present = set(self._seeds)
        primaries: dict[Node, None] = {}
        for first, last, *replicated in rows:
            # The primary comes first; a node that does not know its own address sends an empty one.
            nodes = [
                self.node(host.decode() if host else told_by.host, int(port)) for host, port, *_ in replicated
            ]
            present.update(nodes)
            primaries.update(dict.fromkeys(nodes[:1]))
            serving[first : last + 1] = nodes[:1] * (last + 1 - first)
        self._serving, self._primaries = serving, list(primaries)
        # Nodes that left the cluster are forgotten. The seeds stay, because their names may lead to new nodes.
        for address, node in list(self._nodes.items()):
            if node not in present:
                del self._nodes[address]
                node.client.connection_pool.disconnect(inuse_connections=False)

    def some_node(self) -> Node:
        """Return any primary, preferably one that could be reached recently."""
        nodes = self.primaries()
        return random.choice([node for node in nodes if not node.rests] or nodes)

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._nodes.values()):
            node.client.connection_pool.disconnect()
