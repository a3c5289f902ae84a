"""The broker of a Redis server: it runs one call at once, or collects several in a pipeline.

Neither repeats a call by itself, because only the caller knows whether that is safe. The exception is
NOSCRIPT, which means that nothing ran.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from redis.exceptions import RedisError

from django_rmq.core.commands.script_call import Call
from django_rmq.core.model import keys
from django_rmq.core.model.keys import (
    Definitions,
    check_prefix,
    events_channel,
    explicit_basis_key,
    history_keys,
    limits_key,
    times_key,
    topics_key,
    wake_channel,
    workers_channel,
)
from django_rmq.core.model.server_info import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic, redefined
from django_rmq.core.redis import clients
from django_rmq.core.redis.clients import Events, Wakeups
from django_rmq.core.redis.connection import RedisPipeline, ServerConnection, named, translate
from django_rmq.core.redis.wire import Clock

T = TypeVar("T")


class RedisBroker:
    """Runs calls on a Redis server, one round trip each.

    ``client`` is a redis-py client that neither retries nor decodes. ``clock`` is for tests.
    """

    in_memory: ClassVar[bool] = False

    def __init__(self, client: Any, prefix: str = "", clock: Clock | None = None) -> None:
        self.client = client
        self.prefix = check_prefix(prefix)
        self.exchange = ServerConnection(client, self.prefix, clock)

    def run(self, call: Call[T]) -> T:
        """Run a call and return its answer. Raises ``RmqError``."""
        return self.exchange.run(call)

    def pipeline(self) -> RedisPipeline:
        """Return a pipeline, which collects calls; ``execute`` runs all of them in one round trip."""
        return RedisPipeline(self.exchange)

    def load_scripts(self) -> None:
        """Load every script into the server, so that no pipeline finds one missing."""
        self.exchange.load_scripts()

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.client.connection_pool.disconnect()

    # --- definitions of topics

    def definitions(self) -> Definitions:
        """Return the registered definition of every topic.

        Raises ``WrongType`` if the key of the definitions holds another type.
        """
        key = topics_key(self.prefix)
        try:
            found = self.client.execute_command("HGETALL", key)
        except RedisError as error:
            raise named(key, translate(error)) from error
        # redis-py makes a dict of this reply; the client of a cluster returns it as a flat list.
        pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return Definitions(key, pairs)

    def define(self, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
        """Register ``topic`` unless it is registered already; return the definition that is registered afterwards.

        ``replace`` overwrites the definition but keeps what it records about re-slottings.
        """
        return self.redefine(
            topic.name,
            lambda known: redefined(topic, known) if replace or not known else known,
        )

    def redefine(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Replace a definition by the result of ``change``, and return it; an unregistered topic has an empty definition.

        The change is atomic: if another process changes the definition meanwhile, ``change`` is called again.
        Raises ``WrongType`` if the key holds another type.
        """
        from django_rmq.core.commands import registry

        key = topics_key(self.prefix)
        while True:
            try:
                before = self.client.execute_command("HGET", key, name) or b""
            except RedisError as error:
                raise named(key, translate(error)) from error
            known = keys.definition(key, name, before)
            wanted = change(known)
            if wanted == known:
                return known
            after = json.dumps(wanted, sort_keys=True)
            # The script writes only if the definition is still the one that was read; otherwise another process was faster.
            if self.run(registry.redefine(name, before, after)):
                return wanted

    def undefine(self, topic: Topic) -> None:
        """Delete the definition of a topic, its counters and its history. Not atomic, but it can be repeated.

        The definition is deleted last, so that the topic is still listed if the connection is lost in between.
        """
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
        """Record that ``topic`` has messages whose slot cannot be computed from their stored form."""
        self._ask("HSET", explicit_basis_key(self.prefix), topic.name, 1)

    def has_slot_bases(self, topic: Topic) -> bool:
        """Return whether ``note_slot_basis`` was ever called for ``topic``."""
        return bool(self._ask("HEXISTS", explicit_basis_key(self.prefix), topic.name))

    # --- the server

    def ping(self) -> None:
        """Raise ``ServerTrouble`` unless the server answers and is ready."""
        self._ask("PING")

    def now_ms(self) -> int:
        """Return the server's clock in ms."""
        if self.exchange.clock is not None:
            return self.exchange.clock() // 1000
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def servers(self) -> list[ServerInfo]:
        """Return the report of the server about itself; on a cluster, the report of each primary. One round trip.

        Raises ``ServerRefused`` if INFO is not permitted.
        """
        return clients.parse_servers(self._on_all(clients.COMMANDS))

    def slow_commands(self) -> list[SlowCommand]:
        """Return the commands in the slow logs of the servers, the slowest first. One round trip.

        Raises ``ServerRefused`` if SLOWLOG is not permitted.
        """
        return clients.parse_slow_commands(self._on_all([clients.SLOWLOG]))

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return which of the required commands the server refuses. Each is tried in a way that changes nothing."""
        from django_rmq.core.commands import inspect, registry

        chosen = list(topics)
        attempts: list[Callable[[], Any]] = [partial(self.run, registry.roster())]
        attempts += [partial(self.run, inspect.audit(topic, 0)) for topic in chosen]
        if chosen:
            attempts.append(lambda: self.wakeups(chosen).close())
        return clients.refused(self.prefix, chosen, self._each, attempts)

    def _ask(self, *command: Any) -> Any:
        try:
            return self.client.execute_command(*command)
        except RedisError as error:
            raise translate(error) from error

    def _on_all(self, commands: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
        """Return the plain answers, or ``RedisError``, of each server, by the addresses of nodes ("": the only server)."""
        return {"": self._each(commands)}

    def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the plain answer, or the ``RedisError``, of each command."""
        return self.exchange.each(commands)

    # --- what is published

    def wakeups(self, topics: Iterable[Topic]) -> Wakeups:
        """Subscribe to the wake-ups of ``topics``."""
        return Wakeups(self._ear(), {wake_channel(self.prefix, topic.name): topic.name for topic in topics})

    def worker_changes(self) -> Wakeups:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""
        return Wakeups(self._ear(), {workers_channel(self.prefix): ""})

    def publish_events(self, payload: bytes) -> int:
        """Publish events; return how many subscribers received them (on a cluster: those of one node)."""
        return int(self._ask("PUBLISH", events_channel(self.prefix), payload))

    def events(self) -> Events:
        """Subscribe to the events of messages."""
        return Events(self._ear(), {events_channel(self.prefix): ""})

    def _ear(self) -> Any:
        """Return the client used for subscriptions."""
        return self.client
