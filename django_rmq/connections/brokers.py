"""The brokers and producers of this process, as the settings configure them, and the check of topic definitions.

Each process and each purpose has its own connections. A child process shares none with its parent: two processes that
read from one socket would get each other's answers. The clients are those of redis-py, for one server, one behind
Sentinels, or a Redis Cluster; errors of their options become ``ConfigurationError``, without the passwords in them.

The process and Redis have to agree on the definition of a topic, and on the slot counts of its messages. A sender
compares the definition once in its process, and notices a re-slotting by a look every few seconds.

A broker in memory is cleared when another test begins. With pytest, this package's plugin calls ``connections.begin_test``.
The runners of unittest and Django have no such hook, but while a test case runs, its method ``run`` is on the stack.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import redis
from django.views.decorators.debug import sensitive_variables

from django_rmq.conf import Config, RedisServer, get_config
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log import safe_logger
from django_rmq.core.model import redis_url
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.keys import Definitions
from django_rmq.core.model.topic import Definition, Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis import clients
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.redis.clients import Pool
from django_rmq.exceptions import ConfigurationError, ServerTrouble, WrongType
from django_rmq.message_ids import LONGEST_PLAIN, sealed_id

if TYPE_CHECKING:
    from django_rmq.core.cluster.cluster_broker import Cluster
    from django_rmq.core.coordination.zookeeper import ZooKeeperSurvey
    from django_rmq.core.model.server_checks import Flaw
    from django_rmq.core.monitoring.events import EventStream
    from django_rmq.core.redis.shared_connection import SharedConnection


def running_test() -> object | None:
    """Return the ``unittest.TestCase`` that runs in this thread, or else the one in the main thread, or None."""
    if "unittest" not in sys.modules:
        return None
    from unittest import TestCase

    stacks = [inspect.currentframe()]
    # A thread that a test has started, such as that of a live server, belongs to the test of the main thread.
    if threading.current_thread() is not threading.main_thread():
        stacks.append(sys._current_frames().get(threading.main_thread().ident or 0))
    for frame in stacks:
        while frame is not None:
            if frame.f_code.co_name == "run" and isinstance(case := frame.f_locals.get("self"), TestCase):
                return case
            frame = frame.f_back
    return None


# Django's error pages show the local variables of each frame, which have the password here.
@sensitive_variables()
def build_cluster(server: RedisServer, socket_timeout: float, patience: float) -> Cluster:
    """Return a client of a Redis Cluster, which repeats for ``patience`` seconds a call that no node has run."""
    from django_rmq.core.cluster.cluster_broker import Cluster
    from django_rmq.core.cluster.nodes import parse_seeds

    # A node that is down must not delay the calls to the other nodes, so a connection has less time than a call.
    ours = {**clients.own_options(), **clients.timeouts(socket_timeout, min(socket_timeout, 1.0))}
    options: dict[str, object] = {}
    try:
        seeds, options = parse_seeds(server.cluster)
        clients.checked(Pool(**{**options, **ours}))
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(redis_url.unusable(str(server), options, error)) from None
    return Cluster(seeds, {**options, **ours}, patience=patience)


def _given_options(server: RedisServer) -> dict[str, object]:
    """Return the options of a connection that the settings give."""
    logins = {name: value for name in redis_url.LOGIN if (value := getattr(server, name))}
    return {**server.pool, **logins}


@sensitive_variables()
def build_client(server: RedisServer, socket_timeout: float) -> redis.Redis:
    """Return a client of ``server`` that neither retries nor decodes."""
    ours = {**clients.own_options(), **clients.timeouts(socket_timeout)}
    options = _given_options(server)
    names = {*options, *server.sentinel_options}
    try:
        names |= set(redis_url.without_login(server.url).options)
        if server.sentinels:
            return clients.build_client_behind_sentinels(
                server.url, server.sentinels, server.sentinel_options, options, ours
            )
        return clients.build_client(server.url, options, ours)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise ConfigurationError(redis_url.unusable(str(server), names, error)) from None


Purpose = Literal["web", "worker", "coordinator"]

SOCKET_TIMEOUTS = {"web": 1.0, "worker": 5.0, "coordinator": 1.0}
"""Seconds for which a purpose waits for Redis. A page must load soon, a worker can wait longer, and a session is
short."""

PATIENCE = {"web": 1.0, "worker": 0.05, "coordinator": 0.5}
"""Seconds for which a purpose repeats a call that no node of a cluster has run. A worker has other slots to serve."""


@dataclass(slots=True)
class ProcessState:
    """Objects built from one configuration in one process."""

    config: Config
    pid: int
    replacement: Broker | None
    test: object | None = None
    """The running test case; used with a broker in memory."""
    brokers: dict[str, Broker] = field(default_factory=dict)
    producers: dict[str, Producer] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
    """Topics whose registered definition has been compared with the settings."""
    registered: dict[str, Definition] = field(default_factory=dict)
    """The definitions of the topics of the settings that Redis had at a check."""
    next_look: float = 0.0
    """When to check for re-slotted topics again (monotonic)."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Topics whose registered definition could not be read at the last check, and the reason."""
    slot_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For topics that were re-slotted: the slot counts by which their messages are placed, whatever the
    settings say."""
    shared: dict[asyncio.AbstractEventLoop, SharedConnection | None] = field(default_factory=dict)
    """The connection of each event loop that sends; None after the first send of a loop."""
    followed: dict[str, Definition] = field(default_factory=dict)
    """The fields of topics that Redis has with other values than the settings of this process. Only consumers need these
    fields."""
    events: list[EventStream] = field(default_factory=list)
    """The first one publishes the events of this process; see ``events``."""
    survey: tuple[float, ZooKeeperSurvey] | None = None
    """The last answer of ZooKeeper, and until when (monotonic) it is used."""


_states: dict[tuple[int, ...], ProcessState] = {}
"""The state of this process, by the ids of what it was made for; see ``current``."""

_replacement: Broker | None = None


def current() -> ProcessState:
    """Return the state of this process for the current settings; make a new one after a change or a fork."""
    config, pid = get_config(), os.getpid()
    test = running_test() if config.broker == "memory" and _replacement is None else None
    # A child process must not use the sockets of its parent, and other settings may name another server. A state keeps its
    # objects alive, so no others have their ids.
    made_for = (id(config), pid, id(_replacement), id(test))
    state = _states.get(made_for)
    if state is None:
        # Two threads may make a state at the same time, and both use the one that was stored first.
        state = _states.setdefault(made_for, ProcessState(config, pid, _replacement, test))
        for other in list(_states):
            if other != made_for:
                _states.pop(other, None)
    return state


def get_broker(purpose: Purpose = "web") -> Broker:
    """Return this process's broker for ``purpose``. It connects to nothing before its first call.

    With ``BROKER`` "memory" there is one broker for all purposes, which exists as long as the settings, or
    the running test.
    """
    built = current()
    if built.config.broker == "memory":
        purpose = "web"  # one memory for all purposes
    broker = built.brokers.get(purpose)
    if broker is None:
        # Two threads may build a broker at the same time, and both use the one that was stored first.
        broker = built.brokers.setdefault(purpose, _build(built.config, purpose))
    return broker


_PLAIN = (str, bytes, int, float, bool, dict, type(None))
"""Types of options of a pool that have the same meaning for ``redis.asyncio``."""


def get_shared_connection() -> SharedConnection | None:
    """Return the connection that the sends of the running event loop share, or None if its thread has to send.

    A thread sends to a Redis Cluster, behind Sentinels and with options that are objects of redis-py's blocking client. It also
    makes the first send of each loop: loops such as those of ``async_to_sync`` often send once, which pays for no connection.
    """
    built = current()
    loop = asyncio.get_running_loop()
    if loop in built.shared:
        connection = built.shared[loop]
        if connection is None:
            connection = built.shared[loop] = _build_shared(built)
        return connection
    server = built.config.redis
    broker = get_broker()
    if (
        server is not None
        and type(broker) is RedisBroker
        and broker is not _replacement
        and not server.sentinels
        and all(isinstance(value, _PLAIN) for value in server.pool.values())
    ):
        # The dict keeps its loops alive, so closed ones would pile up with their connections.
        for other in list(built.shared):
            if other.is_closed():
                built.shared.pop(other, None)
        built.shared[loop] = None
    return None


@sensitive_variables()
def _build_shared(built: ProcessState) -> SharedConnection:
    from django_rmq.core.redis.shared_connection import SharedConnection, build_connection

    broker, server = built.brokers["web"], built.config.redis
    assert isinstance(broker, RedisBroker)
    assert server is not None
    seconds = SOCKET_TIMEOUTS["web"]
    ours = {**clients.own_options(), **clients.timeouts(seconds)}
    return SharedConnection(
        broker.exchange, build_connection(server.url, _given_options(server), ours), seconds
    )


def get_producer(purpose: Purpose = "web") -> Producer:
    """Return this process's producer for ``purpose``."""
    built = current()
    producer = built.producers.get(purpose)
    if producer is None:
        new = Producer(get_broker(purpose), built.slot_counts, built.followed)
        # As in ``get_broker``: two threads may build a producer at the same time.
        producer = built.producers.setdefault(purpose, new)
    return producer


def events() -> EventStream | None:
    """Return this process's stream of events, or None if EVENTS is off."""
    if not get_config().events:
        return None
    built = current()
    if not built.events:
        from django_rmq.core.monitoring.events import EventStream

        # As in ``get_broker``: two threads may make a stream at the same time; the second one stays without a thread. A lock that
        # another thread held during a fork would never be released in the child process.
        built.events.append(EventStream(get_broker("coordinator"), _published_id))
    return built.events[0]


def _published_id(topic: str, slot: int, member: bytes) -> str:
    """Return the id published in events. It contains the message only if people may see the message as it is."""
    is_redacted = get_config().admin.formatter_of(topic) is not None
    if is_redacted or len(member) > LONGEST_PLAIN:
        return sealed_id(topic, slot, member)
    return message_id(slot, member)


def close() -> None:
    """Close this process's connections, but not those that event loops share; the next use opens new ones.

    Call this before a fork.
    """
    states = list(_states.values())
    _states.clear()
    for state in states:
        for stream in state.events:
            stream.close()
        # The child of a fork has copies of its parent's sockets, and leaves them to the parent.
        for broker in state.brokers.values() if state.pid == os.getpid() else ():
            broker.close()


def begin_test() -> None:
    """Clear the settings' broker in memory, if there is one, so that a test begins with nothing."""
    for made_for, state in list(_states.items()):
        if state.config.broker == "memory":
            _states.pop(made_for, None)


def in_memory() -> bool:
    """Return whether the broker exists only in this process, so that no other process can use it."""
    return get_broker().in_memory


@contextmanager
def replaced_broker(broker: Broker) -> Iterator[None]:
    """For tests: make every purpose use ``broker`` (for example an ``InMemoryBroker``), whatever the settings say."""
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
        from django_rmq.core.redis.in_memory import InMemoryBroker

        return InMemoryBroker(config.key_prefix)
    assert config.redis is not None
    timeout = SOCKET_TIMEOUTS[purpose]
    if config.redis.cluster:
        from django_rmq.core.cluster.cluster_broker import ClusterBroker

        return ClusterBroker(build_cluster(config.redis, timeout, PATIENCE[purpose]), config.key_prefix)
    return RedisBroker(build_client(config.redis, timeout), config.key_prefix)


def server_flaws(topics: Iterable[Topic]) -> list[Flaw]:
    """Return the problems of the Redis server that DURABILITY does not accept.

    Raises ``ServerTrouble`` if it does not answer.
    """
    if in_memory():
        return []
    from django_rmq.core.model.server_checks import flaws

    return flaws(get_broker("worker"), topics, strict=get_config().durability == "strict")


logger = safe_logger("django_rmq")

LOOK_SECONDS = 5.0
"""Seconds between two checks for topics that were re-slotted."""


def agree(topic: Topic) -> None:
    """Check, once per process, that Redis has the same definition of ``topic`` (or none yet), as far as senders need it.

    A different slot count after a re-slotting, and different options of its consumers, are taken from Redis.
    Raises ``TopicMismatch``, or ``ServerTrouble`` if Redis is unavailable.
    """
    built = current()
    if topic.name not in built.agreed:
        from django_rmq.core.topic_registration import register_topics

        registered = register_topics(get_broker(), [topic], sends_only=True)[topic.name]
        # After a re-slotting the settings of this process may still have the former count, so that of Redis is used.
        if _follow(built, topic, registered) or "reslot" in registered:
            built.slot_counts[topic.name] = slot_counts(registered)
        built.agreed.add(topic.name)
    elif built.followed:
        # What Redis has may become what the settings have.
        refresh_definitions()


def _follow(built: ProcessState, topic: Topic, registered: Definition) -> bool:
    """Use Redis' values of what only consumers need; return whether any differs from the settings."""
    from django_rmq.core.topic_registration import consumer_fields

    followed = consumer_fields(topic, registered)
    if followed:
        built.followed[topic.name] = followed
    else:
        built.followed.pop(topic.name, None)
    return bool(followed)


def with_present_slots(topic: Topic, broker: Broker | None = None, *, at_once: bool = False) -> Topic:
    """Return ``topic`` with all slots that may currently hold its messages, whatever the settings say.

    The definitions are those of ``refresh_definitions``, or read from ``broker`` if one is given.
    """
    if broker is not None:
        from django_rmq.core.topic_registration import as_registered

        return as_registered(topic, broker.definitions().get(topic.name, {}))
    refresh_definitions(at_once=at_once)
    built = current()
    slots, followed = max(built.slot_counts.get(topic.name, (topic.slots,))), built.followed.get(topic.name)
    return replace(topic, slots=slots, **(followed or {})) if followed or slots != topic.slots else topic


def with_former_slots(topic: Topic, most: int) -> Topic:
    """Return ``topic`` with its present slots, and up to ``most`` of those before a re-slotting, which still have counters."""
    present = with_present_slots(topic)
    former = former_slot_counts(current().registered.get(topic.name, {}))
    return replace(present, slots=max(present.slots, min(most, max(former, default=0))))


def refresh_definitions(*, at_once: bool = False) -> None:
    """Read the definitions of all topics from Redis, if the last time is more than a few seconds ago, or ``at_once``.

    While Redis is unavailable, the last known ones stay.
    """
    built, now = current(), time.monotonic()
    if not at_once and now < built.next_look:
        return
    try:
        definitions = get_broker().definitions()
        # A server that was flushed, or restarted without its data, has lost the definitions that it had.
        if built.registered and not definitions and not definitions.unreadable:
            definitions = _register_again(built.registered)
    except WrongType as error:
        # Another program has put a value of another type in place of the definitions, so none of them can be read.
        built.unreadable = dict.fromkeys(built.config.topics, str(error))
    except ServerTrouble:
        pass  # Perhaps it answers reads and refuses writes, as an empty replica that is still read-only does.
    else:
        present = {name: definitions[name] for name in built.config.topics if name in definitions}
        for name in built.agreed & present.keys():
            if present[name] != built.registered.get(name):  # rule: follows_what_redis_had
                _follow(built, built.config.topics[name], present[name])
        built.registered.update(present)
        built.unreadable = {name: definitions.problem(name) for name in definitions.unreadable}
        built.slot_counts.update(
            {
                name: slot_counts(definition)
                for name, definition in definitions.items()
                if "reslot" in definition
            }
        )
    # Also after a failure, or each page would wait for an unavailable server again.
    built.next_look = now + LOOK_SECONDS


def _register_again(registered: Mapping[str, Definition]) -> Definitions:
    """Register the definitions that Redis had before it lost all of them, and return those that it has then.

    Without them, processes that start would place messages of a re-slotted topic by the SLOTS of their settings,
    and those that have been running by its present slot count.
    """
    broker = get_broker()
    for name, definition in registered.items():
        broker.redefine(name, partial(_or_else, definition))
    logger.warning(
        "Redis has lost the definitions of all topics; %d of them are registered again",
        len(registered),
        extra={"rmq_event": "definitions_lost"},
    )
    return broker.definitions()


def _or_else(definition: Definition, registered: Definition) -> Definition:
    # Another process may have registered a definition meanwhile. That one stays.
    return registered or definition


def slots_now(topic: Topic) -> tuple[int, ...]:
    """Return the slot counts by which messages of ``topic`` are placed; see ``refresh_definitions``."""
    refresh_definitions()
    return current().slot_counts.get(topic.name, (topic.slots,))


def unreadable(topic: Topic) -> str:
    """Return why the definition of ``topic`` could not be read at the last check, or an empty text if it could."""
    return current().unreadable.get(topic.name, "")


def is_agreed(topic: Topic) -> bool:
    """Return whether ``agree`` would need no request."""
    return topic.name in current().agreed


def forget(topic: Topic) -> None:
    """Compare the definition again before the next send."""
    current().agreed.discard(topic.name)
