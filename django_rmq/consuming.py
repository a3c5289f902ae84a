"""Consuming from Django: which topics a worker serves, and what surrounds its listeners.

Builds the dispatcher from the settings and gives it its Django hooks; the consumer knows none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from django.db import close_old_connections
from django.db import connections as databases

from django_rmq import connections, registry
from django_rmq.conf import get_config
from django_rmq.consumer import Dispatcher, Hooks
from django_rmq.definitions import register_topics
from django_rmq.exceptions import ConfigurationError
from django_rmq.messages import Topic

logger = logging.getLogger("django_rmq.consumer")


def chosen_topics(names: Iterable[str] = (), exclude: Iterable[str] = ()) -> list[Topic]:
    """Return the topics to serve: those named, or all that have a listener, less the excluded ones.

    Imports the listeners. Raises ``ConfigurationError`` for listeners that cannot be imported and for a
    named topic without one, and ``UnknownTopic`` for a name that is not declared.
    """
    config = get_config()
    failed = registry.discover()
    if failed:
        reasons = "; ".join(f"{module}: {type(error).__name__}: {error}" for module, error in failed)
        raise ConfigurationError(f"listeners cannot be imported: {reasons}") from failed[0].error
    listeners = registry.listeners()
    for name in listeners:
        config.topic(name)
    excluded = {config.topic(name).name for name in exclude}
    named = [config.topic(name) for name in names]
    for topic in named:
        if topic.name not in listeners:
            raise ConfigurationError(
                f"topic {topic.name} has no listener: write one with @listener({topic.name!r}) "
                f"in the {config.autodiscover or 'listeners'}.py of an installed app"
            )
    wanted = named or [topic for topic in config.topics.values() if topic.name in listeners]
    chosen = [topic for topic in dict.fromkeys(wanted) if topic.name not in excluded]
    if not chosen:
        raise ConfigurationError("there is no topic to consume: no declared topic has a listener")
    without = sorted(
        topic.name
        for topic in config.topics.values()
        if topic.listener and topic.name not in listeners and not named
    )
    if without:
        logger.warning("Topics without a listener are not consumed: %s", ", ".join(without))
    return chosen


def build_dispatcher(
    topics: Iterable[Topic],
    *,
    threads: int | None = None,
    burst: bool = False,
    shutdown_timeout: float | None = None,
    max_messages: int | None = None,
    max_idle_time: float | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Dispatcher:
    """Return a dispatcher that owns every slot of ``topics``.

    Registers their definitions first: raises ``TopicMismatch`` where Redis knows another one, and
    ``ServerTrouble`` where it does not answer.
    """
    config, chosen = get_config(), list(topics)
    broker = connections.get_broker("worker")
    broker.ping()
    register_topics(broker, chosen)
    dispatcher = Dispatcher(
        broker,
        chosen,
        registry.listeners(),
        threads=threads or config.consumer.threads,
        hooks=Hooks(before=close_old_connections, after=close_old_connections, end=databases.close_all),
        burst=burst,
        shutdown_timeout=config.consumer.shutdown_timeout if shutdown_timeout is None else shutdown_timeout,
        poll_seconds=config.consumer.poll_interval,
        max_messages=max_messages,
        max_idle_time=max_idle_time,
        beat=beat,
    )
    dispatcher.own((topic.name, slot) for topic in chosen for slot in range(topic.slots))
    return dispatcher


def ready_line(topics: Iterable[Topic], threads: int) -> str:
    """Return one line that says what is being consumed."""
    parts = ", ".join(f"{topic.name} ({topic.slots} slots)" for topic in topics)
    return f"Consuming {parts} with {threads} threads"
