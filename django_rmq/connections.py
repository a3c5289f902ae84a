"""Brokers and producers as the settings say; and whether Redis agrees with the settings about a topic.

Clients are redis-py's own, built from the alias's options: no retries (a repeated script is a decision,
not a habit), replies as bytes. Each process and each purpose has its own connections; after a fork
nothing is shared with the parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import redis
from django.utils.module_loading import import_string
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_rmq.broker import Broker
from django_rmq.conf import Config, RedisServer, get_config
from django_rmq.coordination import Coordinator, Slots, StaticCoordinator, Worker
from django_rmq.coordination.redis import RedisCoordinator
from django_rmq.definitions import register_topics
from django_rmq.exceptions import ConfigurationError
from django_rmq.messages import Topic, slot_counts
from django_rmq.producer import Producer

Purpose = Literal["web", "worker", "coordinator"]

SOCKET_TIMEOUTS = {"web": 1.0, "worker": 5.0, "coordinator": 1.0}
"""Seconds that a purpose waits for Redis: a page must come, a worker would rather wait, and a session is short."""


@dataclass(slots=True)
class _Built:
    """What was built from one configuration in one process."""

    config: Config
    pid: int
    replacement: Broker | None
    brokers: dict[str, Broker] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    """Topics whose registered definition has been compared with the settings."""
    slot_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of topics that were re-slotted: by which counts their messages are placed, whatever the settings say."""


_built: _Built | None = None
_replacement: Broker | None = None


def _current() -> _Built:
    """Return what was built from the present settings by this very process, or begin anew."""
    global _built  # noqa: PLW0603 - one per process
    config, built, pid = get_config(), _built, os.getpid()
    if (
        built is None
        or built.config is not config
        or built.pid != pid
        or built.replacement is not _replacement
    ):
        built = _built = _Built(config, pid, _replacement)
    return built


def get_broker(purpose: Purpose = "web") -> Broker:
    """Return this process's broker for ``purpose``. Nothing is connected before its first call.

    With ``BROKER`` "memory" there is one broker for all purposes, which lives as long as the settings do.
    """
    built = _current()
    if built.config.broker == "memory":
        purpose = "web"  # one memory, whoever asks
    broker = built.brokers.get(purpose)
    if broker is None:
        broker = built.brokers.setdefault(purpose, _build(built.config, purpose))
    return broker


def get_producer(purpose: Purpose = "web") -> Producer:
    """Return this process's producer for ``purpose``."""
    built = _current()
    producer = built.producers.get(purpose)
    if producer is None:
        producer = built.producers.setdefault(purpose, Producer(get_broker(purpose), built.slot_counts))
    return producer


def close() -> None:
    """Close this process's connections; whoever asks again gets new ones. To be called before a fork."""
    global _built
    built, _built = _built, None
    for broker in built.brokers.values() if built is not None and built.pid == os.getpid() else ():
        if isinstance(broker, Broker):
            broker.client.connection_pool.disconnect()


def in_memory() -> bool:
    """Return whether the broker lives in this process alone, so that no other process could use it."""
    return not isinstance(get_broker(), Broker)


@contextmanager
def replaced_broker(broker: Any) -> Iterator[None]:
    """For tests: let every purpose use ``broker`` (such as an ``InMemoryBroker``), whatever the settings say."""
    global _replacement  # noqa: PLW0603 - one per process
    before, _replacement = _replacement, broker
    try:
        yield
    finally:
        _replacement = before


def _build(config: Config, purpose: str) -> Broker:
    if _replacement is not None:
        return _replacement
    if config.broker == "memory":
        from django_rmq.memory import InMemoryBroker

        return cast("Broker", InMemoryBroker(config.key_prefix))
    assert config.redis is not None
    return Broker(build_client(config.redis, SOCKET_TIMEOUTS[purpose]), config.key_prefix)


def build_client(server: RedisServer, socket_timeout: float) -> redis.Redis:
    """Return a client of ``server`` that neither retries nor decodes."""
    ours: dict[str, Any] = {
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": socket_timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "decode_responses": False,
        "health_check_interval": 0,
        "protocol": 2,
    }
    given = dict(server.pool)
    for name in ("username", "password"):
        value = getattr(server, name)
        if value:
            given[name] = value
    try:
        if server.cluster:
            raise ConfigurationError(
                f'RMQ["REDIS"] is a Redis Cluster ({server}): the Django layer talks to a single server'
            )
        if server.sentinels:
            return _behind_sentinels(server, given, ours)
        pool = redis.ConnectionPool.from_url(server.url, **given)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"the options for Redis at {server} cannot be used: {error}") from error
    # Not passed above: what the URL says would win over it.
    pool.connection_kwargs.update(ours)
    return redis.Redis(connection_pool=pool)


def _behind_sentinels(server: RedisServer, given: dict[str, Any], ours: dict[str, Any]) -> redis.Redis:
    from_url = redis.connection.parse_url(server.url)  # type: ignore[no-untyped-call]
    service, database = str(from_url.pop("host")), from_url.get("db", given.get("db", 0))
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        server.sentinels,
        sentinel_kwargs={"socket_timeout": ours["socket_timeout"], **server.sentinel_options},
    )
    kwargs = {**given, **ours, "db": database}
    pool = SentinelConnectionPool(service, sentinel, **kwargs)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=pool)


# --- coordinators ---------------------------------------------------------------------------------


MakeCoordinator = Callable[[Worker, Callable[[Slots], None], Callable[[Slots], None], str], Coordinator]
"""From a worker, its ``own`` and ``disown``, and a token that only its own process and its parent know."""


def coordinator_maker() -> MakeCoordinator:
    """Return what makes the coordinator that the settings name, once per process and after the last fork.

    Raises ``ConfigurationError`` where there is none.
    """
    chosen = get_config().coordinator
    if in_memory():
        return lambda worker, own, disown, token: StaticCoordinator(worker, own, disown)
    if chosen == "redis":
        return lambda worker, own, disown, token: RedisCoordinator(
            get_broker("coordinator"), worker, own, disown, token=token
        )
    if chosen == "zookeeper":
        raise ConfigurationError(
            'RMQ["COORDINATOR"] is "zookeeper" (also where only RMQ["ZOOKEEPER"] is given): workers cannot come '
            'together through ZooKeeper yet; say "COORDINATOR": "redis"'
        )
    try:
        found = import_string(chosen)
    except ImportError as error:
        raise ConfigurationError(f'RMQ["COORDINATOR"] is {chosen!r}: {error}') from error
    return lambda worker, own, disown, token: cast(
        "Coordinator", found(get_broker("coordinator"), worker, own, disown)
    )


def end_session(worker: str, token: str) -> None:
    """Let others take over at once what a dead worker owned. Raises ``ServerTrouble``."""
    if get_config().coordinator == "redis" and not in_memory():
        get_broker("coordinator").leave(worker, token)


# --- definitions ------------------------------------------------------------------------------------


def agree(topic: Topic) -> None:
    """Make sure, once per process, that Redis has the same definition of ``topic`` (or none yet).

    Raises ``TopicMismatch``, or ``ServerTrouble`` if nobody can tell now.
    """
    built = _current()
    if topic.name not in built.agreed:
        registered = register_topics(get_broker(), [topic])[topic.name]
        if "reslot" in registered:
            built.slot_counts[topic.name] = slot_counts(registered)
        built.agreed.add(topic.name)


def is_agreed(topic: Topic) -> bool:
    """Return whether ``agree`` would ask nobody."""
    return topic.name in _current().agreed


def forget(topic: Topic) -> None:
    """Compare the definition anew before the next send."""
    _current().agreed.discard(topic.name)


__all__ = [
    "Purpose",
    "agree",
    "build_client",
    "close",
    "coordinator_maker",
    "end_session",
    "forget",
    "get_broker",
    "get_producer",
    "in_memory",
    "is_agreed",
    "register_topics",
    "replaced_broker",
]
