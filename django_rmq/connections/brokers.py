"""The brokers and producers of this process, as the settings configure them.

Each process and each purpose has its own connections. A child process shares none with its parent: two processes that
read from one socket would get each other's answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from django_rmq.conf import Config, get_config
from django_rmq.connections.client_factory import build_client, build_cluster
from django_rmq.connections.isolation import running_test
from django_rmq.core.cluster.broker import ClusterBroker
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.message import message_id
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring.events import EventStream
from django_rmq.core.producer.producer import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.server_checks import Flaw, flaws
from django_rmq.opaque_ids import LONGEST_PLAIN, sealed_id

if TYPE_CHECKING:
    from django_rmq.core.coordination.zookeeper import ZooKeeperSurvey

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
    registered: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The definitions of the topics of the settings that Redis had at a check."""
    next_look: float = 0.0
    """When to check for re-slotted topics again (monotonic)."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Topics whose registered definition could not be read at the last check, and the reason."""
    slot_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For topics that were re-slotted: the slot counts by which their messages are placed, whatever the
    settings say."""
    followed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The fields of topics that Redis has with other values than the settings of this process. Only consumers need these
    fields."""
    events: EventStream | None = None
    survey: tuple[float, ZooKeeperSurvey] | None = None
    """The last answer of ZooKeeper, and until when (monotonic) it is used."""


_built: ProcessState | None = None
_building = threading.Lock()
_replacement: Broker | None = None


def current() -> ProcessState:
    """Return the state of this process for the current settings; make a new one after a change or a fork."""
    global _built  # noqa: PLW0603 - one per process
    config, built, pid = get_config(), _built, os.getpid()
    test = running_test() if config.broker == "memory" and _replacement is None else None
    # A child process must not use the sockets of its parent, and other settings may name another server.
    if (
        built is None
        or built.config is not config
        or built.pid != pid
        or built.replacement is not _replacement
        or built.test is not test
    ):
        built = _built = ProcessState(config, pid, _replacement, test)
    return built


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


def get_producer(purpose: Purpose = "web") -> Producer:
    """Return this process's producer for ``purpose``."""
    built = current()
    producer = built.producers.get(purpose)
    if producer is None:
        made = Producer(get_broker(purpose), built.slot_counts, built.followed)
        # As in ``get_broker``: two threads may build a producer at the same time.
        producer = built.producers.setdefault(purpose, made)
    return producer


def events() -> EventStream | None:
    """Return this process's stream of events, or None if EVENTS is off."""
    if not get_config().events:
        return None
    built = current()
    # Two threads that send at the same time must not make two streams.
    with _building:
        if built.events is None:
            built.events = EventStream(get_broker("coordinator"), _told_id)
        return built.events


def _told_id(topic: str, slot: int, member: bytes) -> str:
    """Return the id published in events. It contains the message only if people may see the message as it is."""
    is_redacted = get_config().admin.formatter_of(topic) is not None
    if is_redacted or len(member) > LONGEST_PLAIN:
        return sealed_id(topic, slot, member)
    return message_id(slot, member)


def close() -> None:
    """Close this process's connections; the next use opens new ones. Call this before a fork."""
    global _built
    built, _built = _built, None
    if built is not None and built.events is not None:
        built.events.close()
    # The child of a fork has copies of its parent's sockets, and leaves them to the parent.
    for broker in built.brokers.values() if built is not None and built.pid == os.getpid() else ():
        broker.close()


def begin_test() -> None:
    """Clear the settings' broker in memory, if there is one, so that a test begins with nothing."""
    global _built  # noqa: PLW0603 - one per process
    if _built is not None and _built.config.broker == "memory":
        _built = None


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
        return ClusterBroker(build_cluster(config.redis, timeout, PATIENCE[purpose]), config.key_prefix)
    return RedisBroker(build_client(config.redis, timeout), config.key_prefix)


def server_flaws(topics: Iterable[Topic]) -> list[Flaw]:
    """Return the problems of the Redis server that DURABILITY does not accept.

    Raises ``ServerTrouble`` if it does not answer.
    """
    if in_memory():
        return []
    return flaws(get_broker("worker"), topics, strict=get_config().durability == "strict")
