"""The connection that all sends of one event loop share: calls that wait at the same time go in one round trip.

A writer task takes the calls that have collected, writes them together and reads the replies; meanwhile the next calls collect.
A caller that is cancelled gives up only its own call: it is not sent if it was not written yet, otherwise its reply is dropped.
Like ``broker``, this module repeats no call, except after NOSCRIPT (``lua``).
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextvars import Context
from typing import Any, NamedTuple, TypeVar

import redis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from django_rmq.core.commands.script_call import Call, Reply
from django_rmq.core.redis import wire
from django_rmq.core.redis.broker import ServerConnection, explain
from django_rmq.core.redis.clients import set_own_options
from django_rmq.exceptions import ServerUnavailable

T = TypeVar("T")

TRIP_CALLS = 1_000
"""The maximum number of calls in a round trip. Redis runs as many within a fraction of the socket time-out."""

TRIP_BYTES = 1_048_576
"""The number of bytes from which on no further call joins a round trip."""


class _QueuedCall(NamedTuple):
    """A call that waits for its reply."""

    packed: bytes
    reply: asyncio.Future[Reply]
    """The reply of Redis, or the error of redis-py, as a value."""


def build_connection(url: str, given: Mapping[str, object], ours: Mapping[str, object]) -> object:
    """Return a connection of ``redis.asyncio`` to the server at ``url``; see ``clients.build_client``. Connects to nothing.

    The writer bounds a whole round trip, so the connection itself has no time-out of its own.
    """
    pool = ConnectionPool.from_url(url, **{**given, "protocol": ours.get("protocol")})
    set_own_options(pool, {**ours, "retry": Retry(NoBackoff(), 0), "socket_timeout": None})
    return pool.connection_class(**pool.connection_kwargs)


class SharedConnection:
    """Runs calls of one event loop; only coroutines of that loop may use it.

    ``exchange`` packs the calls, ``seconds`` is the time-out of a round trip.
    """

    def __init__(self, exchange: ServerConnection, connection: Any, seconds: float) -> None:
        self._exchange = exchange
        self._connection = connection
        self._seconds = seconds
        self._waiting: deque[_QueuedCall] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._closing: AsyncGenerator[None, None] | None = None
        self._readable: select.poll | None = None

    async def run(self, call: Call[T]) -> T:
        """Run a call and return the meaning of its reply. Raises ``RmqError``."""
        packed = self._exchange.packed(call)
        reply = await self._ask(packed)
        if isinstance(reply, NoScriptError):
            # The server does not have the script, or has lost it by a restart or a fail-over: nothing ran.
            loaded = await self._ask(wire.packed(wire.load_script(call.script)))
            reply = loaded if isinstance(loaded, RedisError) else await self._ask(packed)
        if isinstance(reply, RedisError):
            trouble = self._exchange.translate(reply)
            # After a fail-over behind a fixed address another connection leads to the present primary.
            if isinstance(trouble, ServerUnavailable) and trouble.refuses_writes:
                self._readable = None
            raise explain(call, self._exchange.prefix, trouble) from reply
        return call.read(reply, self._exchange.prefix)

    def _ask(self, packed: bytes) -> asyncio.Future[Reply]:
        """Return the future reply of a command, which is an error of redis-py if it has failed."""
        loop = asyncio.get_running_loop()
        waiting = _QueuedCall(packed, loop.create_future())
        self._waiting.append(waiting)
        if self._writer is None:
            # The writer outlives its first caller, so it must not keep the context variables of that caller.
            self._writer = loop.create_task(self._write(), context=Context())
        return waiting.reply

    async def _write(self) -> None:
        """Carry what waits, until nothing waits any more."""
        trip: list[_QueuedCall] = []
        try:
            while trip := self._next_trip():
                try:
                    async with asyncio.timeout(self._seconds) as limit:
                        look = asyncio.get_running_loop().call_later(
                            self._seconds / 2, _prolong_if_blocked, limit, self._seconds
                        )
                        try:
                            await self._carry(trip)
                        finally:
                            look.cancel()
                except TimeoutError:
                    await self._fail(trip, redis.TimeoutError("no reply within the time-out of the socket"))
                except (RedisError, OSError) as error:
                    await self._fail(trip, error)
        except BaseException:
            # The loop ends, or somebody has cancelled all of its tasks: no caller may wait for ever.
            await self._fail([*trip, *self._waiting], redis.ConnectionError("the event loop has stopped"))
            self._waiting.clear()
            raise
        finally:
            self._writer = None

    def _next_trip(self) -> list[_QueuedCall]:
        """Take the calls of the next round trip, without those whose caller was cancelled."""
        trip: list[_QueuedCall] = []
        size = 0
        while self._waiting and len(trip) < TRIP_CALLS and size < TRIP_BYTES:
            waiting = self._waiting.popleft()
            # The caller was cancelled before its call was written, so the call is not sent.
            if not waiting.reply.done():
                trip.append(waiting)
                size += len(waiting.packed)
        return trip

    async def _carry(self, trip: list[_QueuedCall]) -> None:
        connection = self._connection
        if self._readable is None or self._readable.poll(0):
            # A readable socket was closed by the server, or has a reply that no caller has read.
            await self._connect()
        await connection.send_packed_command(
            b"".join([waiting.packed for waiting in trip]), check_health=False
        )
        for waiting in trip:
            try:
                reply = await connection.read_response()
            except ResponseError as error:
                reply = error
            # A caller that was cancelled meanwhile does not wait any more.
            if not waiting.reply.done():
                waiting.reply.set_result(reply)

    async def _connect(self) -> None:
        connection = self._connection
        await connection.disconnect(nowait=True)
        await connection.connect()
        self._readable = select.poll()
        self._readable.register(
            connection._writer.get_extra_info("socket").fileno(),  # noqa: SLF001 - redis-py shows its socket nowhere else
            select.POLLIN,
        )
        if self._closing is None:
            # An event loop closes its asynchronous generators before it closes itself, and so does the collector of garbage.
            self._closing = _close_with_loop(connection)
            await anext(self._closing)

    async def _fail(self, trip: list[_QueuedCall], error: Exception) -> None:
        """Give up the connection and answer ``error`` to those that still wait."""
        self._readable = None
        # The replies may still arrive, and the next calls on this connection would take them for their own.
        await self._connection.disconnect(nowait=True)
        if not isinstance(error, RedisError):
            error = redis.ConnectionError(str(error))
        for waiting in trip:
            if not waiting.reply.done():
                waiting.reply.set_result(error)


def _prolong_if_blocked(limit: asyncio.Timeout, seconds: float) -> None:
    """Restart a time-out that was over before its loop could look: the loop was blocked, and reads replies late."""
    now, end = asyncio.get_running_loop().time(), limit.when()
    if end is not None and now >= end:
        limit.reschedule(now + seconds)  # rule: blames_the_server_for_a_blocked_loop


async def _close_with_loop(connection: Any) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await connection.disconnect(nowait=True)
