"""The broker of a Redis server: it runs one call at once, or collects several in a pipeline, and has a connection for both.

None repeats a call by itself, because only the caller knows whether that is safe. The exception is NOSCRIPT (``lua``). A write
that has to be durable waits until enough replicas have it. The byte format is the subject of ``wire``, a cluster that of
``cluster``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Protocol, Self, TypeVar

import redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from django_rmq.core.commands.script_call import (
    Answer,
    Answers,
    Call,
    RedisCommand,
    Reply,
    Single,
    pairs,
)
from django_rmq.core.model import keys
from django_rmq.core.model.keys import (
    Definitions,
    check_prefix,
    events_channel,
    explicit_basis_key,
    history_keys,
    inbox_channel,
    limits_key,
    times_key,
    topics_key,
    wake_channel,
    workers_channel,
)
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Definition, Topic, redefined
from django_rmq.core.redis import clients, wire
from django_rmq.core.redis.clients import Events, Wakeups, named, translate
from django_rmq.exceptions import RmqError, ServerUnavailable, WrongType

T = TypeVar("T")


class Connection(Protocol):
    """A connection of redis-py, as far as it is used here."""

    socket_timeout: float | None

    def pack_commands(self, commands: Iterable[wire.Command]) -> list[bytes]:
        """Return commands encoded for the wire, in pieces."""

    def send_packed_command(self, command: Sequence[bytes | memoryview]) -> None:
        """Send pieces of commands."""

    def send_command(self, *command: object) -> None:
        """Send one command."""

    def read_response(self) -> Reply:
        """Return one reply, or raise the error that the server answered."""

    def disconnect(self) -> None:
        """Close the connection."""


def _replace_definition(name: str, before: bytes, after: str) -> Call[bool]:
    """Write the definition of a topic if ``before`` is still the registered one; answer whether it was."""
    return Call("topics/redefine", Single(topics_key), (name, before, after), lambda reply: reply == b"ok")


class RedisBroker:
    """Runs calls on a Redis server, one round trip each. What a broker does is said in ``Broker``.

    ``client`` is a redis-py client that neither retries nor decodes. ``clock`` is for tests.
    """

    in_memory: ClassVar[bool] = False

    def __init__(self, client: Any, prefix: str = "", clock: wire.Clock | None = None) -> None:
        self.client = client
        self.prefix = check_prefix(prefix)
        self.exchange = ServerConnection(client, self.prefix, clock)

    def run(self, call: Call[T]) -> T:
        return self.exchange.run(call)

    def pipeline(self) -> RedisPipeline:
        return RedisPipeline(self.exchange)

    def load_scripts(self) -> None:
        self.exchange.load_scripts()

    def close(self) -> None:
        self.client.connection_pool.disconnect()

    # --- definitions of topics

    def definitions(self) -> Definitions:
        key = topics_key(self.prefix)
        try:
            reply = self.client.execute_command("HGETALL", key)
        except RedisError as error:
            raise named(key, translate(error)) from error
        # redis-py makes a dict of this reply; the client of a cluster returns it as a flat list.
        return Definitions(key, pairs(reply))

    def define(self, topic: Topic, *, replace: bool = False) -> Definition:
        return self.redefine(
            topic.name, lambda known: redefined(topic, known) if replace or not known else known
        )

    def redefine(self, name: str, change: Callable[[Definition], Definition]) -> Definition:
        key = topics_key(self.prefix)
        while True:
            try:
                before = self.client.execute_command("HGET", key, name) or b""
            except RedisError as error:
                raise named(key, translate(error)) from error
            present = keys.definition(key, name, before)
            definition = change(present)
            if definition == present:
                return present
            after = json.dumps(definition, sort_keys=True)
            # The script writes only if the definition is still the one that was read; otherwise another process was faster.
            if self.run(_replace_definition(name, before, after)):
                return definition

    def undefine(self, topic: Topic) -> None:
        # The definition is deleted last, so that the topic is still listed if the connection is lost in between.
        others = (
            *history_keys(self.prefix, topic.name),
            times_key(self.prefix, topic.name),
            limits_key(self.prefix, topic.name),
        )
        for key in others:
            self._ask("UNLINK", key)
        self._ask("HDEL", explicit_basis_key(self.prefix), topic.name)
        self._ask("HDEL", topics_key(self.prefix), topic.name)

    def note_slot_basis(self, topic: Topic) -> None:
        self._ask("HSET", explicit_basis_key(self.prefix), topic.name, 1)

    def has_slot_bases(self, topic: Topic) -> bool:
        return bool(self._ask("HEXISTS", explicit_basis_key(self.prefix), topic.name))

    # --- the server

    def ping(self) -> None:
        self._ask("PING")

    def now_ms(self) -> int:
        if self.exchange.clock is not None:
            return self.exchange.clock() // 1000
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def servers(self) -> list[ServerInfo]:
        return clients.parse_servers(self._on_all(clients.COMMANDS))

    def slow_commands(self) -> list[SlowCommand]:
        return clients.parse_slow_commands(self._on_all([clients.SLOWLOG]))

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        from django_rmq.core.commands import inspect, membership

        checked = list(topics)
        attempts: list[Callable[[], object]] = [partial(self.run, membership.roster())]
        attempts += [partial(self.run, inspect.audit_ledger(topic, 0)) for topic in checked]
        if checked:
            attempts.append(lambda: self.wakeups(checked).close())
        return clients.refused(self.prefix, checked, self._each, attempts)

    def _ask(self, *command: object) -> Reply:
        try:
            return self.client.execute_command(*command)
        except RedisError as error:
            raise self.exchange.translate(error) from error

    def _on_all(self, commands: Sequence[wire.Command]) -> dict[str, list[Reply]]:
        """Return the plain answers, or ``RedisError``, of each server, by the addresses of nodes ("": the only server)."""
        return {"": self._each(commands)}

    def _each(self, commands: Sequence[wire.Command]) -> list[Reply]:
        """Return the plain answer, or the ``RedisError``, of each command."""
        return self.exchange.each(commands)

    # --- what is published

    def inbox(self, owner: str) -> bytes:
        return inbox_channel(self.prefix, owner)

    def wakeups(self, topics: Iterable[Topic], inbox: bytes = b"") -> Wakeups:
        from django_rmq.core.commands import fetch

        channels = {wake_channel(self.prefix, topic.name): topic.name for topic in topics}
        return Wakeups(self._subscription_client(), channels, inbox, partial(fetch.pushed, self.prefix))

    def worker_changes(self) -> Wakeups:
        return Wakeups(self._subscription_client(), {workers_channel(self.prefix): ""})

    def publish_events(self, payload: bytes) -> int:
        return int(self._ask("PUBLISH", events_channel(self.prefix), payload))

    def events(self) -> Events:
        return Events(self._subscription_client(), {events_channel(self.prefix): ""})

    def _subscription_client(self) -> object:
        """Return the client used for subscriptions."""
        return self.client


def explain(call: Call[object], prefix: str, error: RmqError) -> RmqError:
    """Return the error of a call, with the name of its key if a plain command found a foreign value."""
    if not isinstance(call, RedisCommand) or not isinstance(error, WrongType):
        return error
    return named(call.keys(prefix)[0], error)


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

    def command(self, call: Call[object]) -> wire.Command:
        """Return the command that runs a call."""
        return wire.command(call, self.prefix, self.clock)

    def load_scripts(self) -> None:
        """Load every script into the server, in one round trip, so that no pipeline finds one missing."""
        if self._has_scripts:
            return
        for reply in self.each(wire.load_all_scripts()):
            if isinstance(reply, RedisError):
                raise translate(reply) from reply
        self._has_scripts = True

    def translate(self, error: RedisError) -> RmqError:
        """Return the package's error for one of the driver's. A server that refuses writes gets no more commands over the
        connections that rest: behind a fixed address they lead to the former primary, and new ones to its successor.
        """
        trouble = translate(error)
        # A node of a cluster says by itself which other one is the primary.
        is_former = isinstance(trouble, ServerUnavailable) and trouble.refuses_writes
        if is_former and isinstance(self.client, redis.Redis):
            self.client.connection_pool.disconnect(inuse_connections=False)
        return trouble

    def scripts_are_lost(self) -> None:
        """Record that the server lacks some script: the next pipeline loads all of them again."""
        self._has_scripts = False

    def packed(self, call: Call[object]) -> bytes:
        """Return the command that runs a call, encoded for the wire."""
        is_framed = call.varying and self.clock is None
        return self.frames.written(call) if is_framed else wire.packed(self.command(call))

    def pieces(self, call: Call[object]) -> Sequence[bytes | memoryview]:
        """Return the command that runs a call, encoded for the wire, in pieces."""
        return wire.pieces(self.command(call)) if wire.has_packed(call) else (self.packed(call),)

    def run(self, call: Call[T]) -> T:
        """Run a call and return the meaning of its reply."""
        try:
            reply = self._answer(call.script, self.packed(call))
        except WrongType as error:
            raise explain(call, self.prefix, error) from error
        return call.read(reply, self.prefix)

    def _answer(self, script: str, packed: bytes) -> Reply:
        try:
            try:
                return self.ask(packed)
            except NoScriptError:
                # The server does not have the script, or has lost it by a restart or a fail-over: nothing ran.
                self.client.execute_command(*wire.load_script(script))
                return self.ask(packed)
        except RedisError as error:
            raise self.translate(error) from error

    def ask(self, packed: bytes) -> Reply:
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

    def each(self, commands: Sequence[wire.Command]) -> list[Reply]:
        """Return the plain answer, or the ``RedisError``, of each command, in one round trip."""
        replies: list[Reply] = []
        try:
            connection = self.client.connection_pool.get_connection()
            try:
                connection.send_packed_command(connection.pack_commands(commands))
                replies = [read_reply(connection) for _ in commands]
            finally:
                # Replies that are left unread would be taken for those of the next commands on this connection.
                give_back(self.client, connection, broken=len(replies) < len(commands))
        except RedisError as error:
            raise translate(error) from error
        return replies


def read_reply(connection: Connection) -> Reply:
    """Return the next reply, or the error that the server answered."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def give_back(client: Any, connection: Connection, *, broken: bool = False) -> None:
    """Return a connection to the pool of its client. ``broken``: it may still get a reply that nobody reads."""
    if broken:
        connection.disconnect()
    client.connection_pool.release(connection)


def durability_commands(wanted: Durability, connection: Connection) -> list[wire.Command]:
    """Return the commands that wait, at the end of a connection's writes, until these are as durable as wanted."""
    # Each wait has to end well within the socket time-out, or the connection would be given up with all its answers.
    ms = int((connection.socket_timeout or 1.0) * 400)
    commands: list[wire.Command] = []
    if wanted.replicas:
        commands.append(("WAIT", wanted.replicas, ms))
    if wanted.fsync:
        commands.append(("WAITAOF", 1, 0, ms))
    return commands


def read_confirmed(wanted: Durability, connection: Connection) -> Confirmed:
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


def _syncs_always(connection: Connection) -> bool:
    """Return whether a server without WAITAOF answers only after its writes are on disk: with appendfsync always."""
    settings = []
    for name in ("appendonly", "appendfsync"):
        connection.send_command("CONFIG", "GET", name)
        try:
            settings.append(connection.read_response()[1])
        except (ResponseError, IndexError):
            # The user may not read settings, so the durability counts as not confirmed.
            settings.append(b"")
    return settings == [b"yes", b"always"]


class RedisPipeline:
    """Collects calls for one round trip to a server. What a pipeline does is said in ``BrokerPipeline``."""

    def __init__(self, exchange: ServerConnection) -> None:
        self.prefix = exchange.prefix
        self._exchange = exchange
        self._calls: list[Call[object]] = []
        self._answers: list[Answer[Any]] = []
        self._connection: Any = None
        self._wanted: Durability | None = None
        self._in_order = False
        self.confirmed: Confirmed | None = None

    def add(self, call: Call[T]) -> Answer[T]:
        answer: Answer[T] = Answer()
        self._calls.append(call)
        self._answers.append(answer)
        return answer

    def confirm(self, wanted: Durability) -> None:
        self._wanted = wanted

    def keep_order(self) -> None:
        self._in_order = True

    def __len__(self) -> int:
        return len(self._calls)

    def execute(self) -> Answers:
        return self.send().receive() if self._calls else []

    def send(self) -> Self:
        exchange = self._exchange
        exchange.load_scripts()
        connection = None
        try:
            connection = exchange.client.connection_pool.get_connection()
            waits = durability_commands(self._wanted, connection) if self._wanted is not None else []
            # A generator: the words of a command are garbage as soon as it is encoded.
            pieces = chain(chain.from_iterable(map(exchange.pieces, self._calls)), map(wire.packed, waits))
            connection.send_packed_command(list(wire.chunks(pieces)))
        except BaseException as error:
            # A part of the commands may have been sent, so the connection cannot be used again.
            if connection is not None:
                give_back(exchange.client, connection, broken=True)
            if isinstance(error, RedisError):
                raise translate(error) from error
            raise
        self._connection = connection
        return self

    def receive(self) -> Answers:
        connection, self._connection = self._connection, None
        calls, answers = self._take_calls()
        try:
            replies = [read_reply(connection) for _ in calls]
            if self._wanted is not None:
                self.confirmed = read_confirmed(self._wanted, connection)
        except BaseException as error:
            # Replies that are left unread would be taken for those of the next commands on this connection.
            give_back(self._exchange.client, connection, broken=True)
            if isinstance(error, RedisError):
                raise translate(error) from error
            raise
        give_back(self._exchange.client, connection)
        # The server lost its scripts between the loading and this pipeline: a fail-over, a restart or SCRIPT FLUSH.
        if any(isinstance(reply, NoScriptError) for reply in replies):
            self._exchange.scripts_are_lost()
            self._repeat_behind(calls, replies)
        return self._set_answers(answers, [self._result(*both) for both in zip(calls, replies, strict=True)])

    def _take_calls(self) -> tuple[list[Call[object]], list[Answer[object]]]:
        """Return the collected calls and their answers, and start collecting again."""
        calls_and_answers = self._calls, self._answers
        self._calls, self._answers = [], []
        return calls_and_answers

    def _repeat_behind(self, calls: list[Call[object]], replies: list[Reply]) -> None:
        """Repeat the reads that follow a call that has to be repeated, or everything that follows it if in order."""
        if self.confirmed is not None:
            # The repeated calls run after the confirmation, so it does not cover them.
            self.confirmed = Confirmed(None, False if self.confirmed.fsynced is not None else None)
        first = next(i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError))
        for i in range(first + 1, len(calls)):
            if self._in_order or calls[i].reads:
                replies[i] = NoScriptError()

    def _result(self, call: Call[object], reply: Reply) -> object:
        try:
            if isinstance(reply, NoScriptError):
                return self._run_again(call)
            if isinstance(reply, RedisError):
                return explain(call, self.prefix, self._exchange.translate(reply))
            return call.read(reply, self.prefix)
        except RmqError as error:
            return error

    def _run_again(self, call: Call[object]) -> object:
        # Only a pipeline can write arguments that are encoded already.
        if not wire.has_packed(call):
            return self._exchange.run(call)
        again = RedisPipeline(self._exchange)
        again.add(call)
        return again.execute()[0]

    @staticmethod
    def _set_answers(answers: list[Answer[object]], results: list[object]) -> list[object]:
        """Return the results, and set the answer of each call."""
        for answer, result in zip(answers, results, strict=True):
            answer.become(result)
        return results
