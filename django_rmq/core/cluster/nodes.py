"""The nodes of a Redis Cluster: their connections, and which of them serves which of the 16,384 hash slots.

A node that failed is not tried again for a while. Otherwise every call would wait for the time-out of a dead node, while all
others answer. Which node serves which hash slot is read from the nodes themselves, at the first call and whenever an answer
puts it in doubt. No commands of callers are sent here.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from django_rmq.core.commands.script_call import Reply
from django_rmq.core.redis import wire
from django_rmq.core.redis.broker import Connection, give_back
from django_rmq.core.redis.clients import Pool

RESTS = (0.1, 2.0)
"""Seconds for which a node that could not be reached is not tried: the first pause, and the longest."""

PROBE_SECONDS = 0.25
"""Seconds that a node which has failed may take to answer a PING before it gets more commands."""


def parse_seeds(urls: Iterable[str]) -> tuple[list[tuple[str, int]], dict[str, object]]:
    """Return the addresses from the URLs of some nodes, and the connection options of the last one.

    Raises ``ValueError`` for text that is not a Redis URL.
    """
    seeds: list[tuple[str, int]] = []
    options: dict[str, Any] = {}
    for url in urls:
        options = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
        seeds.append((options.pop("host", "localhost"), options.pop("port", 6379)))
        options.pop("db", None)
    return seeds, options


class Node:
    """One server of a cluster: its pool of connections, whether it has the scripts, and when it last failed."""

    def __init__(self, host: str, port: int, options: Mapping[str, Any]) -> None:
        self.host, self.port = host, port
        self.client = redis.Redis(connection_pool=Pool(host=host, port=port, **options))
        self.knows_scripts = False
        self._rests_until = 0.0
        self._rest = RESTS[0]
        self._trouble: RedisError | None = None
        """Why the node failed last, or None if it has answered since."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def rests(self) -> bool:
        """Whether the node failed a moment ago, so that it is not tried now."""
        return time.monotonic() < self._rests_until

    def connect(self) -> Reply:
        """Return a connection of the pool; raise ``RedisError`` without an attempt if the last one has just failed."""
        trouble = self._trouble
        if trouble is not None and self.rests:
            raise type(trouble)(f"{trouble} ({self}, a moment ago)")
        try:
            if trouble is not None:
                self._probe()
            connection = self.client.connection_pool.get_connection()
        except RedisError as error:
            self.failed(error)
            raise
        self._trouble, self._rest = None, RESTS[0]
        return connection

    def _probe(self) -> None:
        """Check that the node answers soon, because the system still accepts connections for a stopped process."""
        pool = self.client.connection_pool
        short = {"socket_timeout": PROBE_SECONDS, "socket_connect_timeout": PROBE_SECONDS}
        connection = pool.connection_class(**{**pool.connection_kwargs, **short})
        try:
            connection.connect()
            connection.send_command("PING")
            connection.read_response()
        except BusyLoadingError:
            pass  # the command that follows gets the same error
        finally:
            connection.disconnect()

    def failed(self, error: RedisError) -> None:
        """Record the error, and do not try the node for a while."""
        self._trouble = error
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(self._rest * 2, RESTS[1])

    def ask(self, *command: object) -> Reply:
        """Send one command and return the plain answer."""
        connection, broken = self.connect(), True
        try:
            connection.send_command(*command)
            reply = connection.read_response()
            broken = False
        except ResponseError:
            # The node has answered with an error, so its connection can be used again.
            broken = False
            raise
        except RedisError as error:
            self.failed(error)
            raise
        finally:
            give_back(self.client, connection, broken=broken)
        return reply

    def load_scripts(self, connection: Connection) -> None:
        """Load every script into the node."""
        commands = wire.load_all_scripts()
        connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            connection.read_response()
        self.knows_scripts = True


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
        options: Mapping[str, object],
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
        self._read_at = float("-inf")

    def node(self, host: str, port: int) -> Node:
        """Return the node at an address."""
        node = self._nodes.get((host, port))
        # Two threads may make the node at the same time; both then use the first one.
        return node or self._nodes.setdefault((host, port), Node(host, port, self.options))

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
            if time.monotonic() - self._read_at < REFRESH_SECONDS:
                if not self._primaries:
                    raise trouble
                return
            nodes = list(self._nodes.values())
            random.shuffle(nodes)
            for node in sorted(nodes, key=lambda node: node.rests):
                try:
                    rows = node.ask("CLUSTER", "SLOTS")
                except RedisError as error:
                    # Every other node knows the topology, too.
                    trouble = error
                    continue
                # A node that has not joined a cluster yet, or was reset, knows no hash slots.
                if rows:
                    self._store_topology(node, rows)
                    self._is_stale = False
                    break
            self._read_at = time.monotonic()
            if not self._primaries:
                raise trouble

    def _store_topology(self, reported_by: Node, rows: list[Reply]) -> None:
        serving: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        present = set(self._seeds)
        primaries: dict[Node, None] = {}
        for first, last, *replicated in rows:
            # The primary comes first; a node that does not know its own address sends an empty one.
            nodes = [
                self.node(host.decode() if host else reported_by.host, int(port))
                for host, port, *_ in replicated
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
        for node in list(self._nodes.values()):
            node.client.connection_pool.disconnect()
