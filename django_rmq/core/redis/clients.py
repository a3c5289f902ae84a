"""Clients of redis-py: their pools, options and errors, what their server reports and permits, and subscriptions.

The places that know the quirks of redis-py's objects are here and in ``broker``; the settings are validated elsewhere.
"""

from __future__ import annotations

import os
import re
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_rmq.core import forked_copies, lua
from django_rmq.core.commands.broker_interface import Woken
from django_rmq.core.commands.script_call import Reply
from django_rmq.core.model.keys import MAX_SLOTS, SlotKeys, rights_key, slot_keys, wake_channel
from django_rmq.core.model.replies import Pushed
from django_rmq.core.model.server_checks import SETTINGS, ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic
from django_rmq.core.redis.wire import Command
from django_rmq.exceptions import RmqError, ServerFull, ServerRefused, ServerUnavailable, WrongType

_WRAPPED = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
"""The form in which Redis 6 wraps the code of an error that a command got inside a script."""

_UNAVAILABLE = ("READONLY", "LOADING", "BUSY", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN")
_UNWRITABLE = ("READONLY", "NOREPLICAS")
_UNAVAILABLE_ERRORS = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,  # includes MASTERDOWN
    redis.exceptions.TryAgainError,
    NoScriptError,  # the script was loaded just before, so the server has lost it by a restart or a fail-over
)


def translate(error: RedisError) -> RmqError:
    """Return the package's error for one of the driver's.

    The driver removes the code from some answers and uses a class instead; Redis 6 wraps the code if a script
    got the error.
    """
    text = str(error).removesuffix(".")  # more text may follow, and some of the driver's texts are sentences
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        if isinstance(error, (redis.AuthenticationError, redis.exceptions.AuthorizationError)):
            return ServerRefused(f"Redis denies access: {text}")
        return ServerUnavailable(f"Redis does not answer: {text}")
    wrapped = _WRAPPED.search(text)
    word = wrapped[1] if wrapped else text.split(" ", 1)[0]
    if word == "WRONGTYPE":
        return WrongType(text)
    if word in ("OOM", "MISCONF") or isinstance(error, redis.exceptions.OutOfMemoryError):
        if word == "MISCONF":
            return ServerFull(f"Redis refuses writes: {text}")
        return ServerFull("Redis is full: its used memory is above 'maxmemory'. Consuming still works")
    if word in ("NOPERM", "NOAUTH", "WRONGPASS") or isinstance(error, redis.exceptions.NoPermissionError):
        return ServerRefused(f"Redis denies access: {text}")
    if word in _UNAVAILABLE or isinstance(error, _UNAVAILABLE_ERRORS):
        unavailable = ServerUnavailable(f"Redis cannot answer now: {text}")
        unavailable.refuses_writes = word in _UNWRITABLE or isinstance(error, redis.exceptions.ReadOnlyError)
        return unavailable
    return ServerRefused(f"Redis answered: {text}")


def named(key: bytes, error: RmqError) -> RmqError:
    """Return ``error``; if a plain command found a foreign value, with the name of the key.

    Scripts name the key themselves.
    """
    if not isinstance(error, WrongType):
        return error
    return WrongType(
        f"the key {key.decode(errors='backslashreplace')!r} holds data that RMQ did not write: {error}"
    )


def _reader_of(connection: Any) -> Any:
    """Return what parses the replies of a connection, if all that has come is there or in the socket; else None."""
    # TLS has buffers of its own, and so has redis-py without hiredis.
    is_plain = type(connection._sock) is socket.socket  # noqa: SLF001 - redis-py shows its socket nowhere else
    return getattr(connection._parser, "_reader", None) if is_plain else None  # noqa: SLF001


def _can_read(connection: Any) -> bool:
    """Return whether a connection has something to read, in half the time of redis-py."""
    reader = _reader_of(connection)
    if reader is None:
        return bool(connection.can_read(0))
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)  # noqa: SLF001
    return bool(reader.has_data() or poll.poll(0))


class RenewingPool(redis.ConnectionPool):
    """redis-py's own pool, whose text shows the address but not the options of its connections."""

    def __repr__(self) -> str:
        options = self.connection_kwargs
        where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        return f"<{type(self).__name__} {where}/{options.get('db', 0)}>"


class Pool(RenewingPool):
    """A pool that keeps connections after use and returns them again as they are, the last one first.

    redis-py counts them as in use (in its own metrics too) until ``disconnect``, and makes a new one only if none rests, so
    ``max_connections`` applies. A connection that was closed or has something to read goes back to redis-py, which connects it
    again. This pool is not for connections that Sentinels or a token replace while they rest: those need redis-py's own pools.
    """

    _resting: list[Any]

    def reset(self) -> None:
        """Forget all connections, as after a fork."""
        self._resting = []
        super().reset()

    def get_connection(self, *_: object, **__: object) -> Any:
        """Return a connection that is ready to send. Raises ``redis.ConnectionError`` if none can be made."""
        try:
            connection = self._resting.pop()
        except IndexError:
            return super().get_connection()
        # A socket that a fork has copied belongs to the parent process. A readable socket was closed by the server, or has a
        # reply that no caller has read.
        if connection.pid == os.getpid() and connection._sock is not None:  # noqa: SLF001
            try:
                if not _can_read(connection):
                    return connection
            except (redis.RedisError, OSError):
                # The connection broke while it was not used; redis-py connects it again.
                pass
        connection.disconnect()
        super().release(connection)
        return super().get_connection()

    def release(self, connection: Any) -> None:
        """Take a connection back."""
        # A connection that broke in use, or that a fork has inherited, goes back to redis-py.
        if connection._sock is None or connection.pid != self.pid:  # noqa: SLF001
            super().release(connection)
        else:
            self._resting.append(connection)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close all connections, or only those that rest."""
        # Other threads take connections from the list meanwhile.
        with suppress(IndexError):
            while True:
                super().release(self._resting.pop())
        super().disconnect(inuse_connections)


COMMANDS: list[tuple[str, ...]] = [("INFO",), *(("CONFIG", "GET", name) for name in SETTINGS)]
"""The commands whose answers describe a server. Redis 6 takes one setting per CONFIG GET."""


SLOWLOG: tuple[str, ...] = ("SLOWLOG", "GET", "16")
"""The command that reads the newest entries of the slow log of a server."""


def parse_servers(replies: Mapping[str, Sequence[Reply]]) -> list[ServerInfo]:
    """Return what each server reports about itself. Raises ``ServerRefused`` if INFO is not permitted.

    ``replies`` are the plain answers of each server to ``COMMANDS``, or a ``RedisError``, by the addresses of
    nodes. Servers that did not answer are left out, unless none did.
    """
    servers = []
    for node, (info, *configs) in replies.items():
        if not isinstance(info, RedisError):
            name = f"the node {node}" if node else "Redis"
            servers.append(ServerInfo(name, _parse_info(info), _parse_settings(configs), node))
    if not servers:
        error = next(info for info, *_ in replies.values())
        raise translate(error) from error
    return servers


def parse_slow_commands(replies: Mapping[str, Sequence[Reply]]) -> list[SlowCommand]:
    """Return the entries of slow logs, the slowest first. Raises ``ServerRefused`` if no server permits it.

    ``replies`` are the plain answers of each server to ``SLOWLOG``, or a ``RedisError``, by the addresses of nodes.
    """
    commands, errors = list[SlowCommand](), list[RedisError]()
    for node, (log,) in replies.items():
        if isinstance(log, RedisError):
            errors.append(log)
            continue
        for _number, at, microseconds, arguments, *_client in log:
            # The arguments are keys and contents of messages; only the name or digest of a script may be shown.
            command = arguments[0].decode(errors="replace")
            if command.upper() == "EVALSHA":
                command += f" {lua.name_of(arguments[1]) or arguments[1].decode(errors='replace')}"
            commands.append(SlowCommand(node, int(at) * 1000, int(microseconds), command))
    if errors and len(errors) == len(replies):
        raise translate(errors[0]) from errors[0]
    return sorted(commands, key=lambda one: -one.microseconds)


def _parse_info(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _parse_settings(replies: Sequence[Reply]) -> dict[str, str]:
    """Return the settings, without those that the user may not read or the server does not have."""
    return {
        name: reply[1].decode()
        for name, reply in zip(SETTINGS, replies, strict=True)
        if not isinstance(reply, RedisError) and len(reply) == 2
    }


_ZSETS = ("store", "prepare", "retry", "dead", "claimants")
_HARMLESS: tuple[tuple[str | int, ...], ...] = (
    ("HSET", "field", 1),
    ("HSETNX", "field", 1),
    ("HINCRBY", "field", 1),
    ("HGET", "field"),
    ("HMGET", "field"),
    ("HEXISTS", "field"),
    ("HGETALL",),
    ("HLEN",),
    ("HSCAN", 0),
    ("HDEL", "field"),
    ("EXPIRE", 1),
    ("PEXPIRE", 1),
    ("EXISTS",),
    ("UNLINK",),
    ("TYPE",),
    ("ZADD", "XX", 0, "member"),
    ("ZREM", "member"),
    ("ZREMRANGEBYRANK", 0, -1),
    ("ZCARD",),
    ("ZCOUNT", 0, 0),
    ("ZMSCORE", "member"),
    ("ZSCORE", "member"),
    ("ZRANGE", 0, 0),
    ("ZRANGEBYSCORE", 0, 0),
    ("ZREVRANGE", 0, 0),
    ("ZRANK", "member"),
    ("ZREVRANK", "member"),
)
"""Every command of the scripts on a key, in an order that leaves nothing behind."""


def _tries(prefix: str, topics: Iterable[Topic]) -> list[tuple[str, bytes, *tuple[object, ...]]]:
    """Return commands that need every permission, and change nothing."""
    scratch, nobody = rights_key(prefix), uuid4().hex.encode()
    tries: list[tuple[str, bytes, *tuple[object, ...]]] = [
        (str(command[0]), scratch, *command[1:]) for command in _HARMLESS
    ]
    tries += [("ZRANGESTORE", scratch, scratch, 0, 0), ("RENAME", scratch, scratch)]
    for topic in topics:
        for name, key in zip(SlotKeys._fields, slot_keys(prefix, topic.name, 0), strict=True):
            tries.append(("ZREM" if name in _ZSETS else "HDEL", key, nobody))
        # No topic has a slot of this number, so no worker wakes up.
        tries.append(("PUBLISH", wake_channel(prefix, topic.name), b"%d" % MAX_SLOTS))
        tries.append(("PUBSUB", b"NUMSUB", wake_channel(prefix, topic.name)))
    return tries


def refused(
    prefix: str,
    topics: Iterable[Topic],
    each: Callable[[Sequence[Command]], list[Reply]],
    attempts: Iterable[Callable[[], object]],
) -> list[str]:
    """Return the commands that the server refuses; a node that does not answer refuses nothing.

    ``each`` runs commands and returns the plain answers, errors in their places; ``attempts`` are calls that
    raise.
    """
    tries = _tries(prefix, topics)
    refusals = dict.fromkeys(
        f"{command[0]} {command[1].decode(errors='replace')}: {reply}"
        for command, reply in zip(tries, each(tries), strict=True)
        if isinstance(reply, NoPermissionError)
    )
    for attempt in attempts:
        try:
            attempt()
        except ServerRefused as error:
            refusals[str(error)] = None
        except (WrongType, ServerUnavailable):
            pass  # The server refused nothing: a key has a foreign type, or a node is unavailable.
    return list(refusals)


def own_options() -> dict[str, Any]:
    """Return the options that every connection of this package has, whatever options were given.

    redis-py must not retry: it would repeat a call whose reply was lost, although only the caller knows whether that is safe.
    """
    return {
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "decode_responses": False,
        "health_check_interval": 0,
        "protocol": 2,
    }


def timeouts(seconds: float, connect: float | None = None) -> dict[str, object]:
    """Return the options for waiting ``seconds`` for Redis, and ``connect`` seconds for a connection."""
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds if connect is None else connect}


def build_client(
    url: str, given: Mapping[str, object], ours: Mapping[str, object], kind: type[RenewingPool] | None = None
) -> redis.Redis:
    """Return a client of the server at ``url`` with the options ``given``; ``ours`` take precedence over all others.

    Raises the errors of redis-py about invalid options. Connects to nothing.
    """
    if kind is None:
        # Credentials that change are renewed when redis-py's own pool takes a connection back.
        kind = RenewingPool if "credential_provider" in given else Pool
    # For another protocol redis-py would prepare notifications that need hiredis.
    pool = kind.from_url(url, **{**given, "protocol": ours.get("protocol")})
    set_own_options(pool, ours)
    return redis.Redis(connection_pool=checked(pool))


def set_own_options(pool: Any, ours: Mapping[str, object]) -> None:
    """Let ``ours`` take precedence over the other options of a pool, those of its URL among them."""
    pool.connection_kwargs.update(ours)
    if "path" in pool.connection_kwargs:
        # redis-py knows this option of TCP connections only, and not of Unix sockets.
        pool.connection_kwargs.pop("socket_keepalive", None)


def build_client_behind_sentinels(
    url: str,
    sentinels: Sequence[tuple[str, int]],
    sentinel_options: Mapping[str, object],
    given: Mapping[str, object],
    ours: Mapping[str, object],
) -> redis.Redis:
    """Return a client of the primary that ``sentinels`` report for the service that ``url`` names."""
    from_url = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    service, database = str(from_url.pop("host")), from_url.get("db", given.get("db", 0))
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={"socket_timeout": ours["socket_timeout"], **sentinel_options}
    )
    kwargs = {**given, **ours, "db": database}
    pool = SentinelConnectionPool(service, sentinel, **kwargs)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=checked(pool))


def checked(pool: redis.ConnectionPool) -> redis.ConnectionPool:
    """Return ``pool`` if its options make a connection; otherwise raise redis-py's error. Connects to nothing."""
    pool.connection_class(**pool.connection_kwargs)
    return pool


class _Subscription:
    """A subscription to channels."""

    def __init__(self, client: Any, channels: dict[bytes, str]) -> None:
        self._topics = channels
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            self._pubsub.subscribe(*channels)
            # The server answers SUBSCRIBE once per channel. What is published before the last answer may be missed.
            for _ in channels:
                self._pubsub.parse_response(block=True)
        except RedisError as error:
            self.close()
            raise translate(error) from error
        forked_copies.keep_from_copies(self)

    def fileno(self) -> int:
        """Return the socket's descriptor, for ``select``. Raises ``OSError`` in memory."""
        sock = self._socket
        if sock is None:
            raise OSError("this subscription has no socket")
        return sock.fileno()

    @property
    def _socket(self) -> socket.socket | None:
        """The socket of the connection; None in memory, and when the connection has broken."""
        sock = getattr(self._pubsub.connection, "_sock", None)
        return sock if isinstance(sock, socket.socket) else None

    def _read(self, timeout: float) -> tuple[bytes, Any] | None:
        """Return the channel and the data of the next message, or None if none comes within ``timeout`` seconds.

        The data is a number if it answers UNSUBSCRIBE.

        The connection is read without ``get_message``, which takes as long again for reconnecting and metrics. A broken
        connection ends the subscription, because what is published until the next one is lost.
        """
        connection, sock = self._pubsub.connection, self._socket
        if not timeout or sock is None:
            if not connection.can_read(timeout):
                return None
        elif timeout != sock.gettimeout():
            # redis-py would ask first whether there is something to read, which takes half as long again.
            sock.settimeout(timeout)
        try:
            # The answer to PING has no channel: it is the word and an empty text.
            channel, data = connection.read_response(disconnect_on_error=False, push_request=True)[-2:]
        except redis.TimeoutError:
            return None
        return channel, data

    def close(self) -> None:
        try:
            self._pubsub.close()
        except (RedisError, OSError):
            # The connection may have broken already.
            pass


class Wakeups(_Subscription):
    """A subscription to wake-ups, and to ``inbox`` if that has a name; see ``WakeupSubscription``.

    ``read_push`` returns what a send has published to the inbox.
    """

    def __init__(
        self,
        client: Any,
        channels: dict[bytes, str],
        inbox: bytes = b"",
        read_push: Callable[[bytes], Pushed] | None = None,
    ) -> None:
        super().__init__(client, channels | {inbox: ""} if inbox else channels)
        self._inbox, self._read_push = inbox, read_push
        self._awaits_answer = False
        self.has_pushes = bool(inbox)

    def check(self) -> None:
        # A router or a firewall may forget a connection that is idle. Then neither end gets an error, and what is published is
        # lost, also what was pushed.
        if self._awaits_answer:
            raise ServerUnavailable("Redis does not answer on the connection of the subscription")
        try:
            self._pubsub.connection.send_command("PING")
        except RedisError as error:
            raise translate(error) from error
        self._awaits_answer = True

    def stop_pushes(self) -> None:
        try:
            if self.has_pushes:
                self._pubsub.unsubscribe(self._inbox)
        except RedisError as error:
            raise translate(error) from error

    def get(self, timeout: float = 0.0) -> list[Woken]:
        """Return the (topic, slot) pairs woken so far, or wait at most ``timeout`` seconds for the next ones that come together.

        ``-1 - slot``: the slot was paused. Among them is what was pushed.
        """
        woken: list[Woken] = []
        try:
            while message := self._read(timeout):
                self._awaits_answer = False
                channel, data = message
                # Any program may publish on the channel; the slow poll finds what its notice may have meant.
                with suppress(ValueError, KeyError):
                    if channel != self._inbox:
                        woken.append((self._topics[channel], int(data)))
                    elif isinstance(data, int):
                        # The answer to UNSUBSCRIBE comes after all that was published before.
                        self.has_pushes = False
                    elif self._read_push is not None:
                        woken.append(self._read_push(data))
                # Most wake-ups come alone, and to ask the system whether there is another takes as long as to read one.
                if timeout and not self._has_received():
                    break
        except RedisError as error:
            raise translate(error) from error
        return woken

    def _has_received(self) -> bool:
        """Return whether more was received with the last message than it."""
        reader = _reader_of(self._pubsub.connection)
        return bool(self._pubsub.connection.can_read(0) if reader is None else reader.has_data())


class Events(_Subscription):
    """A subscription to the events of messages."""

    def get(self, timeout: float = 0.0) -> list[bytes]:
        """Return what was published (up to 100 at a time); wait at most ``timeout`` seconds for the first."""
        texts: list[bytes] = []
        try:
            while len(texts) < 100 and (message := self._read(0.0 if texts else timeout)):
                texts.append(message[1])
        except RedisError as error:
            raise translate(error) from error
        return texts
