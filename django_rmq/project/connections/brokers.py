"""Brokers and producers as the settings say, for this process and its purposes.

Each process and each purpose has its own connections; after a fork nothing is shared with the parent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from django_rmq.core.calls.broker import Broker
from django_rmq.core.cluster.broker import ClusterBroker
from django_rmq.core.producer.sending import Producer
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.telling.events import EventStream
from django_rmq.core.topics.durability import Flaw, flaws
from django_rmq.core.words.messages import message_id
from django_rmq.core.words.topics import Topic
from django_rmq.project.connections.clients import build_client, build_cluster
from django_rmq.project.isolating import running_test
from django_rmq.project.sealing import LONGEST_PLAIN, sealed_id
from django_rmq.project.settings import Config, get_config

if TYPE_CHECKING:
    from django_rmq.core.coordination.zookeeper import Survey

Purpose = Literal["web", "worker", "coordinator"]

SOCKET_TIMEOUTS = {"web": 1.0, "worker": 5.0, "coordinator": 1.0}
"""Seconds that a purpose waits for Redis: a page must come, a worker would rather wait, and a session is short."""

PATIENCE = {"web": 1.0, "worker": 0.05, "coordinator": 0.5}
"""Seconds for which a purpose repeats what no node of a cluster has run: a worker has other slots to look after."""


@dataclass(slots=True)
class Built:
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


_built: Built | None = None
_building = threading.Lock()
_replacement: Broker | None = None


def current() -> Built:
    """Return what was built from the present settings by this very process, or start again."""
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
        built = _built = Built(config, pid, _replacement, test)
    return built


def get_broker(purpose: Purpose = "web") -> Broker:
    """Return this process's broker for ``purpose``. Nothing is connected before its first call.

    With ``BROKER`` "memory" there is one broker for all purposes, which lives as long as the settings do, or as the
    test that is running.
    """
    built = current()
    if built.config.broker == "memory":
        purpose = "web"  # one memory, whoever asks
    broker = built.brokers.get(purpose)
    if broker is None:
        broker = built.brokers.setdefault(purpose, _build(built.config, purpose))
    return broker


def get_producer(purpose: Purpose = "web") -> Producer:
    """Return this process's producer for ``purpose``."""
    built = current()
    producer = built.producers.get(purpose)
    if producer is None:
        producer = built.producers.setdefault(purpose, Producer(get_broker(purpose), built.slot_counts))
    return producer


def events() -> EventStream | None:
    """Return this process's stream of events; None where EVENTS is off."""
    if not get_config().events:
        return None
    built = current()
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
        if isinstance(broker, RedisBroker):
            broker.close()


def begin_test() -> None:
    """Forget what the settings' broker in memory holds, if there is one: a test begins with nothing."""
    global _built  # noqa: PLW0603 - one per process
    if _built is not None and _built.config.broker == "memory":
        _built = None


def in_memory() -> bool:
    """Return whether the broker lives in this process alone, so that no other process could use it."""
    return not isinstance(get_broker(), RedisBroker)


@contextmanager
def replaced_broker(broker: Broker) -> Iterator[None]:
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

        return InMemoryBroker(config.key_prefix)
    assert config.redis is not None
    timeout = SOCKET_TIMEOUTS[purpose]
    if config.redis.cluster:
        return ClusterBroker(build_cluster(config.redis, timeout, PATIENCE[purpose]), config.key_prefix)
    return RedisBroker(build_client(config.redis, timeout), config.key_prefix)


def server_flaws(topics: Iterable[Topic]) -> list[Flaw]:
    """Return what of Redis may lose messages or stand in our way, by the measure of DURABILITY.

    Raises ``ServerTrouble`` where it does not answer.
    """
    if in_memory():
        return []
    return flaws(get_broker("worker"), topics, strict=get_config().durability == "strict")
