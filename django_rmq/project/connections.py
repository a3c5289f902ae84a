"""Brokers and producers as the settings say; and whether Redis agrees with the settings about a topic.

Clients are redis-py's own, built from the alias's options: no retries (a repeated script is a decision,
not a habit), replies as bytes. Each process and each purpose has its own connections; after a fork
nothing is shared with the parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import redis
from django.utils.module_loading import import_string
from django.views.decorators.debug import sensitive_variables
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from django_rmq.core.cluster.broker import Cluster, ClusterBroker
from django_rmq.core.cluster.nodes import parse_seeds
from django_rmq.core.coordination import Coordinator, Slots, StaticCoordinator, Worker
from django_rmq.core.coordination.redis import RedisCoordinator
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import Broker
from django_rmq.core.redis.pool import Pool, RenewingPool
from django_rmq.core.telling.events import EventStream
from django_rmq.core.topics.definitions import as_registered, register_topics
from django_rmq.core.topics.durability import Flaw, flaws
from django_rmq.core.words import addresses
from django_rmq.core.words.messages import Topic, message_id, slot_counts
from django_rmq.exceptions import ConfigurationError, ServerTrouble, WrongType
from django_rmq.project.isolating import running_test
from django_rmq.project.sealing import LONGEST_PLAIN, sealed_id
from django_rmq.project.settings.config import Config, RedisServer, get_config

if TYPE_CHECKING:
    from django_rmq.core.coordination.zookeeper import Ensemble, Survey

Purpose = Literal["web", "worker", "coordinator"]

SOCKET_TIMEOUTS = {"web": 1.0, "worker": 5.0, "coordinator": 1.0}
"""Seconds that a purpose waits for Redis: a page must come, a worker would rather wait, and a session is short."""

PATIENCE = {"web": 1.0, "worker": 0.05, "coordinator": 0.5}
"""Seconds for which a purpose repeats what no node of a cluster has run: a worker has other slots to look after."""


LOOK_SECONDS = 5.0
"""Between two looks for topics that were re-slotted."""

SURVEY_SECONDS = 2.0
"""How old an answer of ZooKeeper may be that people look at."""


@dataclass(slots=True)
class _Built:
    """What was built from one configuration in one process."""

    config: Config
    pid: int
    replacement: Broker | None
    test: object | None = None
    """With a broker in memory: the test case that runs."""
    brokers: dict[str, Broker] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    """Topics whose registered definition has been compared with the settings."""
    next_look: float = 0.0
    """When to look for re-slotted topics again (monotonic)."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Topics whose registered definition could not be read at the last look, and why."""
    slot_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of topics that were re-slotted: by which counts their messages are placed, whatever the settings say."""
    events: EventStream | None = None
    survey: tuple[float, Survey] | None = None
    """What ZooKeeper said last, and until when (monotonic) that will do."""


_built: _Built | None = None
_building = threading.Lock()
_replacement: Broker | None = None


def _current() -> _Built:
    """Return what was built from the present settings by this very process, or begin anew."""
    global _built  # noqa: PLW0603 - one per process
    config, built, pid = get_config(), _built, os.getpid()
    test = running_test() if config.broker == "memory" and _replacement is None else None
    if (
        built is None
        or built.config is not config
        or built.pid != pid
        or built.replacement is not _replacement
        or built.test is not test
    ):
        built = _built = _Built(config, pid, _replacement, test)
    return built


def get_broker(purpose: Purpose = "web") -> Broker:
    """Return this process's broker for ``purpose``. Nothing is connected before its first call.

    With ``BROKER`` "memory" there is one broker for all purposes, which lives as long as the settings do, or as the
    test that is running.
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


def events() -> EventStream | None:
    """Return this process's stream of events; None where EVENTS is off."""
    if not get_config().events:
        return None
    built = _current()
    with _building:
        if built.events is None:
            built.events = EventStream(get_broker("coordinator"), _told_id)
        return built.events


def _told_id(topic: str, slot: int, member: bytes) -> str:
    """Return the id that events tell: one that holds the message only where people may see it as it is."""
    is_redacted = get_config().admin.formatter_of(topic) is not None
    if is_redacted or len(member) > LONGEST_PLAIN:
        return sealed_id(topic, slot, member)
    return message_id(slot, member)


def close() -> None:
    """Close this process's connections; whoever asks again gets new ones. To be called before a fork."""
    global _built
    built, _built = _built, None
    if built is not None and built.events is not None:
        built.events.close()
    for broker in built.brokers.values() if built is not None and built.pid == os.getpid() else ():
        if isinstance(broker, Broker):
            broker.close()


def begin_test() -> None:
    """Forget what the settings' broker in memory holds, if there is one: a test begins with nothing."""
    global _built  # noqa: PLW0603 - one per process
    if _built is not None and _built.config.broker == "memory":
        _built = None


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
        from django_rmq.core.memory.broker import InMemoryBroker

        return cast("Broker", InMemoryBroker(config.key_prefix))
    assert config.redis is not None
    timeout = SOCKET_TIMEOUTS[purpose]
    if config.redis.cluster:
        return ClusterBroker(build_cluster(config.redis, timeout, PATIENCE[purpose]), config.key_prefix)
    return Broker(build_client(config.redis, timeout), config.key_prefix)


def _own_options(socket_timeout: float) -> dict[str, Any]:
    """Return what every connection of ours has, whatever was given."""
    return {
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


@sensitive_variables()
def build_cluster(server: RedisServer, socket_timeout: float, patience: float) -> Cluster:
    """Return a client of a Redis Cluster, which repeats for ``patience`` seconds what no node has run."""
    # A node that is gone must not keep the others waiting.
    ours = {**_own_options(socket_timeout), "socket_connect_timeout": min(socket_timeout, 1.0)}
    options: dict[str, Any] = {}
    try:
        seeds, options = parse_seeds(server.cluster)
        _checked(Pool(**{**options, **ours}))
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(addresses.unusable(str(server), options, error)) from None
    return Cluster(seeds, {**options, **ours}, patience=patience)


@sensitive_variables()
def build_client(server: RedisServer, socket_timeout: float) -> redis.Redis:
    """Return a client of ``server`` that neither retries nor decodes."""
    ours = _own_options(socket_timeout)
    given = dict(server.pool)
    for name in addresses.LOGIN:
        value = getattr(server, name)
        if value:
            given[name] = value
    names = {*given, *server.sentinel_options}
    try:
        names |= set(addresses.without_login(server.url).options)
        if server.sentinels:
            return _behind_sentinels(server, given, ours)
        # Credentials that change are renewed as redis-py's own pool takes a connection back.
        kind = RenewingPool if "credential_provider" in given else Pool
        pool = kind.from_url(server.url, **given)
        # Not passed above: what the URL says would win over it.
        pool.connection_kwargs.update(ours)
        return redis.Redis(connection_pool=_checked(pool))
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(addresses.unusable(str(server), names, error)) from None


def _checked(pool: redis.ConnectionPool) -> redis.ConnectionPool:
    """Return ``pool``, whose options make a connection; else raise what redis-py does. Connects nothing."""
    pool.connection_class(**pool.connection_kwargs)
    return pool


@sensitive_variables()
def _behind_sentinels(server: RedisServer, given: dict[str, Any], ours: dict[str, Any]) -> redis.Redis:
    from_url = redis.connection.parse_url(server.url)  # type: ignore[no-untyped-call]
    service, database = str(from_url.pop("host")), from_url.get("db", given.get("db", 0))
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        server.sentinels,
        sentinel_kwargs={"socket_timeout": ours["socket_timeout"], **server.sentinel_options},
    )
    kwargs = {**given, **ours, "db": database}
    pool = SentinelConnectionPool(service, sentinel, **kwargs)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=_checked(pool))


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
        return _through_zookeeper
    try:
        found = import_string(chosen)
    except ImportError as error:
        raise ConfigurationError(f'RMQ["COORDINATOR"] is {chosen!r}: {error}') from error
    return lambda worker, own, disown, token: cast(
        "Coordinator", found(get_broker("coordinator"), worker, own, disown)
    )


def _through_zookeeper(
    worker: Worker, own: Callable[[Slots], None], disown: Callable[[Slots], None], token: str
) -> Coordinator:
    from django_rmq.core.coordination.zookeeper import ZooKeeperCoordinator

    config, broker = get_config(), get_broker("coordinator")
    assert config.zookeeper is not None
    return ZooKeeperCoordinator(
        build_ensemble(config),
        worker,
        own,
        disown,
        registered=broker.definitions,
        token=token,
        is_strict=config.zookeeper.when_away == "stop",
    )


def build_ensemble(config: Config) -> Ensemble:
    """Return what the settings say of ZooKeeper, for those who connect to it."""
    from django_rmq.core.coordination.zookeeper import Ensemble

    given = config.zookeeper
    assert given is not None
    return Ensemble(
        given.hosts,
        given.root,
        given.session_timeout,
        given.auth,
        is_closed=given.acl == "creator",
        tls=given.tls,
        key_prefix=config.key_prefix,
    )


def check_coordinator() -> None:
    """Make sure that workers could come together.

    Raises ``ConfigurationError`` where the coordinator cannot be made, or ZooKeeper holds something else at ROOT, and
    ``ServerTrouble`` where ZooKeeper does not answer or refuses us.
    """
    coordinator_maker()
    if _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.check(build_ensemble(get_config()))


def end_session(worker: str, token: str) -> None:
    """Let others take over at once what a dead worker owned. Raises ``ServerTrouble``."""
    if _coordinator() == "redis":
        get_broker("coordinator").leave(worker, token)
    elif _coordinator() == "zookeeper":
        from django_rmq.core.coordination import zookeeper

        zookeeper.end_session(build_ensemble(get_config()), worker, token)


def survey_zookeeper() -> Survey | None:
    """Return who comes together in ZooKeeper and who owns what; None where Redis' roster tells. Raises ``ServerTrouble``.

    The answer may be ``SURVEY_SECONDS`` old: it takes a session, and pages are looked at again and again.
    """
    if _coordinator() != "zookeeper":
        return None
    from django_rmq.core.coordination import zookeeper

    built = _current()
    if built.survey is None or time.monotonic() >= built.survey[0]:
        found = zookeeper.survey(build_ensemble(get_config()), SOCKET_TIMEOUTS["web"])
        built.survey = time.monotonic() + SURVEY_SECONDS, found
    return built.survey[1]


def _coordinator() -> str:
    """Return which coordinator is in use: with a broker in memory there is none to ask."""
    return "" if in_memory() else get_config().coordinator


def server_flaws(topics: Iterable[Topic]) -> list[Flaw]:
    """Return what of Redis may lose messages or stand in our way, by the measure of DURABILITY.

    Raises ``ServerTrouble`` where it does not answer.
    """
    if in_memory():
        return []
    return flaws(get_broker("worker"), topics, strict=get_config().durability == "strict")


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


def present(topic: Topic, broker: Broker | None = None) -> Topic:
    """Return ``topic`` with all slots that may hold messages of it by now, whatever the settings say.

    Redis is asked every few seconds (where a ``broker`` is given, that one, each time); while it is away nothing is news.
    """
    if broker is not None:
        return as_registered(topic, broker.definitions().get(topic.name, {}))
    built, now = _current(), time.monotonic()
    if now >= built.next_look:
        try:
            definitions = get_broker().definitions()
        except WrongType as error:
            built.unreadable = dict.fromkeys(built.config.topics, str(error))
        except ServerTrouble:
            pass
        else:
            built.unreadable = {name: definitions.problem(name) for name in definitions.unreadable}
            built.slot_counts.update(
                {name: slot_counts(found) for name, found in definitions.items() if "reslot" in found}
            )
        built.next_look = now + LOOK_SECONDS
    return replace(topic, slots=max(built.slot_counts.get(topic.name, (topic.slots,))))


def unreadable(topic: Topic) -> str:
    """Return why the registered definition of ``topic`` could not be read at the last look; empty: it could."""
    return _current().unreadable.get(topic.name, "")


def is_agreed(topic: Topic) -> bool:
    """Return whether ``agree`` would ask nobody."""
    return topic.name in _current().agreed


def forget(topic: Topic) -> None:
    """Compare the definition anew before the next send."""
    _current().agreed.discard(topic.name)


__all__ = [
    "Purpose",
    "agree",
    "begin_test",
    "build_client",
    "build_cluster",
    "build_ensemble",
    "check_coordinator",
    "close",
    "coordinator_maker",
    "end_session",
    "events",
    "forget",
    "get_broker",
    "get_producer",
    "in_memory",
    "is_agreed",
    "present",
    "register_topics",
    "replaced_broker",
    "server_flaws",
    "survey_zookeeper",
    "unreadable",
]
