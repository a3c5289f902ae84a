"""The servers of a Redis Cluster and their connections: a node that failed is not tried again for a while.

Otherwise every call would wait for the time-out of a dead node, while all others answer. Which node serves which hash slot is
the subject of ``topology``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import redis
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from django_rmq.core.redis import wire
from django_rmq.core.redis.clients import Pool

RESTS = (0.1, 2.0)
"""Seconds for which a node that could not be reached is not tried: the first pause, and the longest."""

PROBE_SECONDS = 0.25
"""Seconds that a node which has failed may take to answer a PING before it gets more commands."""


def parse_seeds(urls: Iterable[str]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
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

    def connect(self) -> Any:
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

    def give_back(self, connection: Any, *, broken: bool = False) -> None:
        """Return a connection to the pool."""
        if broken:
            connection.disconnect()
        self.client.connection_pool.release(connection)

    def ask(self, *command: Any) -> Any:
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
            self.give_back(connection, broken=broken)
        return reply

    def load_scripts(self, connection: Any) -> None:
        """Load every script into the node."""
        commands = wire.loading()
        connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            connection.read_response()
        self.knows_scripts = True
