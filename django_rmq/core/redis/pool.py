"""Pools of connections that avoid most of what redis-py does around each call."""

from __future__ import annotations

import os
from typing import Any

import redis


class RenewingPool(redis.ConnectionPool):
    """redis-py's own pool, whose text shows the address but not the options of its connections."""

    def __repr__(self) -> str:
        options = self.connection_kwargs
        where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        return f"<{type(self).__name__} {where}/{options.get('db', 0)}>"


class Pool(RenewingPool):
    """A pool whose connections rest here after use and are handed out again as they are, the last one first.

    redis-py counts them as in use (in its own metrics too) until ``disconnect``, and makes a new one only if
    none rests, so ``max_connections`` applies. A connection that was closed or has something to read goes
    back to redis-py, which connects it again. This pool is not for connections that a server behind Sentinels
    or a token replaces while they rest: those need redis-py's own pools.
    """

    _resting: list[Any]

    def reset(self) -> None:
        """Forget all connections, as after a fork."""
        self._resting = []
        super().reset()

    def get_connection(self, *_: Any, **__: Any) -> Any:
        """Return a connection that is ready to send. Raises ``redis.ConnectionError`` if none can be made."""
        try:
            connection = self._resting.pop()
        except IndexError:
            return super().get_connection()
        if connection.pid == os.getpid() and connection._sock is not None:  # noqa: SLF001 - redis-py shows its socket nowhere else
            try:
                if not connection.can_read():
                    return connection
            except (redis.RedisError, OSError):
                pass
        connection.disconnect()
        super().release(connection)
        return super().get_connection()

    def release(self, connection: Any) -> None:
        """Take a connection back."""
        if connection._sock is None or connection.pid != self.pid:  # noqa: SLF001
            super().release(connection)
        else:
            self._resting.append(connection)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close all connections, or only those that rest."""
        while self._resting:
            super().release(self._resting.pop())
        super().disconnect(inuse_connections)
