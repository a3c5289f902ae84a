"""Connections to a Redis server: one call or a pipeline in a round trip, and redis-py's errors as errors of this package.

No call is repeated here, except after NOSCRIPT, which means that nothing ran. A write that has to be durable waits until enough
replicas have it. The byte format is the subject of ``wire``, a cluster that of ``cluster``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Answer, Call, RedisCommand
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.redis import wire
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


def explain(call: Call[Any], prefix: str, error: RmqError) -> RmqError:
    """Return the error of a call, with the name of its key if a plain command found a foreign value."""
    if not isinstance(call, RedisCommand) or not isinstance(error, WrongType):
        return error
    return named(call.keys(prefix)[0], error)


T = TypeVar("T")


class ServerConnection:
    """Sends commands to a server over the connections of ``client``, and records whether it has the scripts.

    No call is repeated, except after NOSCRIPT, which means that nothing ran.
    """

    def __init__(self, client: Any, prefix: str, clock: wire.Clock | None) -> None:
        self.client = client
        self.prefix = prefix
        self.clock = clock
        self.frames = wire.Frames(prefix)
        self._has_scripts = False

    def command(self, call: Call[Any]) -> tuple[Any, ...]:
        """Return the command that runs a call."""
        return wire.command(call, self.prefix, self.clock)

    def load_scripts(self) -> None:
        """Load every script into the server, in one round trip, so that no pipeline finds one missing."""
        if self._has_scripts:
            return
        for reply in self.each(wire.loading()):
            if isinstance(reply, RedisError):
                raise translate(reply) from reply
        self._has_scripts = True

    def scripts_are_lost(self) -> None:
        """Record that the server lacks some script: the next pipeline loads all of them again."""
        self._has_scripts = False

    def packed(self, call: Call[Any]) -> bytes:
        """Return the command that runs a call, encoded for the wire."""
        is_framed = call.varying and self.clock is None
        return self.frames.written(call) if is_framed else wire.packed(self.command(call))

    def run(self, call: Call[T]) -> T:
        """Run a call and return the meaning of its reply."""
        try:
            reply = self._answer(call.script, self.packed(call))
        except WrongType as error:
            raise explain(call, self.prefix, error) from error
        return call.read(reply, self.prefix)

    def _answer(self, script: str, packed: bytes) -> Any:
        try:
            try:
                return self.ask(packed)
            except NoScriptError:
                # The server does not have the script, or has lost it by a restart or a fail-over: nothing ran.
                self.client.execute_command("SCRIPT LOAD", lua.load(script).text)
                return self.ask(packed)
        except RedisError as error:
            raise translate(error) from error

    def ask(self, packed: bytes) -> Any:
        """Run one command as the driver does without retries, but without its bookkeeping, which takes half of the time."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([packed])
            return connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            # The reply may still arrive, and the next user of this connection would take it for its own.
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the plain answer, or the ``RedisError``, of each command, in one round trip."""
        pool = self.client.connection_pool
        replies: list[Any] = []
        try:
            connection = pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                for _ in commands:
                    try:
                        replies.append(connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
            finally:
                # Replies that are left unread would be taken for those of the next commands on this connection.
                if len(replies) < len(commands):
                    connection.disconnect()
                pool.release(connection)
        except RedisError as error:
            raise translate(error) from error
        return replies

    def take_connection(self) -> Any:
        """Return a connection of the pool."""
        return self.client.connection_pool.get_connection()

    def give_back(self, connection: Any, *, broken: bool = False) -> None:
        """Return a connection to the pool."""
        if broken:
            connection.disconnect()
        self.client.connection_pool.release(connection)


def durability_commands(wanted: Durability, connection: Any) -> list[tuple[Any, ...]]:
    """Return the commands that wait, at the end of a connection's writes, until these are as durable as wanted."""
    # Each wait has to end well within the socket time-out, or the connection would be given up with all its answers.
    ms = int((connection.socket_timeout or 1.0) * 400)
    commands: list[tuple[Any, ...]] = []
    if wanted.replicas:
        commands.append(("WAIT", wanted.replicas, ms))
    if wanted.fsync:
        commands.append(("WAITAOF", 1, 0, ms))
    return commands


def read_confirmed(wanted: Durability, connection: Any) -> Confirmed:
    """Read the answers of ``durability_commands``. A value that the server cannot or may not report is None."""
    replicas: int | None = None
    fsynced: bool | None = None
    if wanted.replicas:
        try:
            replicas = int(connection.read_response())
        except ResponseError:
            # The user may lack the permission for WAIT. The writes have run nevertheless.
            pass
    if wanted.fsync:
        try:
            fsynced = connection.read_response()[0] >= 1
        except ResponseError:
            # A server before 7.2 does not know WAITAOF.
            fsynced = _syncs_always(connection)
    return Confirmed(replicas, fsynced)


def _syncs_always(connection: Any) -> bool:
    """Return whether a server without WAITAOF answers only after its writes are on disk: with appendfsync always."""
    found = []
    for name in ("appendonly", "appendfsync"):
        connection.send_command("CONFIG", "GET", name)
        try:
            found.append(connection.read_response()[1])
        except (ResponseError, IndexError):
            # The user may not read settings, so the durability counts as not confirmed.
            found.append(b"")
    return found == [b"yes", b"always"]


class RedisPipeline:
    """Collects calls; ``execute`` runs them and returns results, errors in their places.

    ``send`` and ``receive`` are the halves of ``execute``: between them, Redis and the caller work at the same time. A failed
    connection fails every call of the pipeline, because it is unknown which of them ran.
    """

    def __init__(self, exchange: ServerConnection) -> None:
        self.prefix = exchange.prefix
        self._exchange = exchange
        self._calls: list[Call[Any]] = []
        self._answers: list[Answer[Any]] = []
        self._connection: Any = None
        self._wanted: Durability | None = None
        self._in_order = False
        self.confirmed: Confirmed | None = None
        """The durability that ``confirm`` has reached; available after ``receive``."""

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return an object that holds its answer after the pipeline has run."""
        answer: Answer[T] = Answer()
        self._calls.append(call)
        self._answers.append(answer)
        return answer

    def confirm(self, wanted: Durability) -> None:
        """Wait, after the collected calls, until they are as durable as ``wanted``.

        Waits at most two fifths of the socket time-out for each kind of confirmation.
        """
        self._wanted = wanted

    def keep_order(self) -> None:
        """Run everything after a call again if that call has to be repeated. All calls must be safe to run twice."""
        self._in_order = True

    def __len__(self) -> int:
        return len(self._calls)

    def execute(self) -> list[Any]:
        """Run the collected calls and return a result or an ``RmqError`` for each."""
        return self.send().receive() if self._calls else []

    def send(self) -> Self:
        """Send the collected calls. Raises ``ServerTrouble``; ``receive`` must not be called then."""
        exchange = self._exchange
        exchange.load_scripts()
        connection = None
        try:
            connection = exchange.take_connection()
            commands = [exchange.command(call) for call in self._calls]
            if self._wanted is not None:
                commands += durability_commands(self._wanted, connection)
            connection.send_packed_command(wire.chunks(commands))
        except RedisError as error:
            self._give_up(connection)
            raise translate(error) from error
        except BaseException:
            # A part of the commands may have been sent, so the connection cannot be used again.
            self._give_up(connection)
            raise
        self._connection = connection
        return self

    def receive(self) -> list[Any]:
        """Return a result or an ``RmqError`` for each call, in order."""
        connection, self._connection = self._connection, None
        calls, answers = self._take_calls()
        try:
            replies = [self._reply(connection) for _ in calls]
            if self._wanted is not None:
                self.confirmed = read_confirmed(self._wanted, connection)
        except RedisError as error:
            self._give_up(connection)
            raise translate(error) from error
        except BaseException:
            # Replies that are left unread would be taken for those of the next commands on this connection.
            self._give_up(connection)
            raise
        self._exchange.give_back(connection)
        # The server lost its scripts between the loading and this pipeline: a fail-over, a restart or SCRIPT FLUSH.
        if any(isinstance(reply, NoScriptError) for reply in replies):
            self._exchange.scripts_are_lost()
            self._repeat_behind(calls, replies)
        return self._set_answers(answers, [self._result(*both) for both in zip(calls, replies, strict=True)])

    def _take_calls(self) -> tuple[list[Call[Any]], list[Answer[Any]]]:
        """Return the collected calls and their answers, and start collecting again."""
        taken = self._calls, self._answers
        self._calls, self._answers = [], []
        return taken

    @staticmethod
    def _reply(connection: Any) -> Any:
        try:
            return connection.read_response()
        except ResponseError as error:
            return error

    def _repeat_behind(self, calls: list[Call[Any]], replies: list[Any]) -> None:
        """Repeat the reads that follow a call that has to be repeated, or everything that follows it if in order."""
        if self.confirmed is not None:
            # The repeated calls run after the confirmation, so it does not cover them.
            self.confirmed = Confirmed(None, False if self.confirmed.fsynced is not None else None)
        first = next(i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError))
        for i in range(first + 1, len(calls)):
            if self._in_order or calls[i].reads:
                replies[i] = NoScriptError()

    def _result(self, call: Call[Any], reply: Any) -> Any:
        try:
            if isinstance(reply, NoScriptError):
                return self._run_again(call)
            if isinstance(reply, RedisError):
                return explain(call, self.prefix, translate(reply))
            return call.read(reply, self.prefix)
        except RmqError as error:
            return error

    def _run_again(self, call: Call[Any]) -> Any:
        # Only a pipeline can write arguments that are encoded already.
        if not wire.has_packed(call):
            return self._exchange.run(call)
        again = RedisPipeline(self._exchange)
        again.add(call)
        return again.execute()[0]

    @staticmethod
    def _set_answers(answers: list[Answer[Any]], results: list[Any]) -> list[Any]:
        """Return the results, and set the answer of each call."""
        for answer, result in zip(answers, results, strict=True):
            answer.become(result)
        return results

    def _give_up(self, connection: Any) -> None:
        if connection is not None:
            self._exchange.give_back(connection, broken=True)
