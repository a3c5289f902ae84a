"""Starting: chooses the topics of a worker, and checks before any fork whether workers could start.

``worker_process`` makes the worker of a process, ``core.worker_processes.supervisor`` starts and replaces processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from django_rmq import connections, schedules
from django_rmq import typed_bodies as validating
from django_rmq.conf import get_config
from django_rmq.connections import coordinators
from django_rmq.core.log import safe_logger
from django_rmq.core.model.topic import Topic
from django_rmq.core.topic_registration import register_topics
from django_rmq.database_access import ask_each
from django_rmq.exceptions import ConfigurationError, ServerUnavailable
from django_rmq.tasks.task_modules import import_tasks
from django_rmq.worker import listener_registry, once

logger = safe_logger("django_rmq.consumer")

WAITING_LINE_SECONDS = 30.0
"""Seconds between two lines of the log while the command waits for its server."""

NAMED = 10
"""The number of topics that are named in one line of the log."""

READY = "Consuming "
"""The beginning of the log line that lists what is consumed."""


def chosen_topics(names: Iterable[str] = (), exclude: Iterable[str] = ()) -> list[Topic]:
    """Return the topics to serve: those named, or all that have a listener, without the excluded ones.

    Imports the listeners and the tasks. Raises ``ConfigurationError`` for listeners that cannot be imported and for
    a named topic without one, and ``UnknownTopic`` for a name that is not declared.
    """
    config = get_config()
    failed = listener_registry.discover()
    if failed:
        reasons = "; ".join(f"{one.module}: {one.reason}" for one in failed)
        raise ConfigurationError(f"listeners cannot be imported: {reasons}") from failed[0].error
    import_tasks()
    listeners = listener_registry.listeners()
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
    topics = named or [topic for topic in config.topics.values() if topic.name in listeners]
    chosen = [topic for topic in dict.fromkeys(topics) if topic.name not in excluded]
    if not chosen:
        raise ConfigurationError("nothing to consume: no declared topic has a listener")
    without = sorted(
        topic.name
        for topic in config.topics.values()
        if topic.listener and topic.name not in listeners and not named
    )
    if without:
        more = f" and {len(without) - NAMED} more" if len(without) > NAMED else ""
        names = ", ".join(without[:NAMED])
        logger.warning("Topics without a listener are not consumed: %s%s", names, more)
    return chosen


def check_start(topics: Iterable[Topic]) -> list[Topic]:
    """Check, before any process is forked, that workers could start; return the topics that they can consume.

    A topic whose registered definition cannot be read is left out, with an error in the log.

    Raises ``ConfigurationError`` if workers could not use the coordinator, a strict DURABILITY is not met, the
    type of a body cannot be used, a listener could not keep what ``once`` promises or a schedule could not
    run; ``TopicMismatch`` if Redis has
    another definition, and ``ServerTrouble`` if Redis or ZooKeeper does not answer.
    """
    chosen = list(topics)
    coordinators.check_coordinator()
    broker = connections.get_broker("worker")
    broker.ping()
    _check_server(chosen)
    known = broker.definitions()
    for topic in chosen:
        if topic.name in known.unreadable:
            logger.error(
                "Topic %s is not consumed: %s",
                topic.name,
                known.problem(topic.name),
                extra={"rmq_event": "unreadable", "rmq_topic": topic.name},
            )
    readable = [topic for topic in chosen if topic.name not in known.unreadable]
    if not readable:
        raise ConfigurationError(
            "no topic can be consumed, because none of their definitions in Redis can be read"
        )
    _check_bodies(readable)
    _check_once(readable)
    # A worker that the checks above refuse must not register its definitions.
    register_topics(broker, readable)
    schedules.declare()
    return readable


class StartCheck:
    """Prepares ``topics`` for workers when it is called, and leaves out those that cannot be consumed.

    It returns False while a server is unreachable, if ``waits``. A server that refuses the worker is an error at once.
    """

    def __init__(self, topics: list[Topic], *, waits: bool) -> None:
        self._topics, self._waits = topics, waits
        self._waiting_since: float | None = None
        self._next_line = 0.0

    def __call__(self) -> bool:
        """Check whether workers can start; return False while a server is unreachable. Raises the errors of ``check_start``."""
        try:
            # The worker processes are forked with this very list, so it is changed in place.
            self._topics[:] = check_start(self._topics)
        # An orchestrator may start the worker before its server. Ending would make it pause longer with each attempt.
        except ServerUnavailable as error:
            if not self._waits:
                raise
            self._log_waiting(error)
            return False
        if self._waiting_since is not None:
            logger.info(
                "The server answers after %.0f s; worker processes start now",
                time.monotonic() - self._waiting_since,
                extra={"rmq_event": "server_back"},
            )
        return True

    def _log_waiting(self, error: ServerUnavailable) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now >= self._next_line:
            self._next_line = now + WAITING_LINE_SECONDS
            logger.warning(
                "No worker process starts, because a server is unreachable: %s. The command tries again every second",
                error,
                extra={"rmq_event": "waiting"},
            )


def _check_bodies(topics: list[Topic]) -> None:
    """Raise ``ConfigurationError`` if the type of a topic's bodies cannot be used. The types are imported once, here."""
    flaws = [problem for topic in topics for problem in validating.problems(topic)]
    if flaws:
        raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}".strip() for problem in flaws))


def _check_once(topics: list[Topic]) -> None:
    """Raise ``ConfigurationError`` if the effects of a listener with ``once`` could happen more than once."""
    listeners = listener_registry.listeners()
    served = [listeners[topic.name] for topic in topics if topic.name in listeners]
    chosen = [each for each in served if each.using is not None]
    flaws = [problem for each in chosen for problem in once.problems(get_config(), each)]
    if not flaws:
        # A database that is not in DATABASES is such a flaw, and Django could make no connection to it.
        given, problems = ask_each(sorted({each.using for each in chosen if each.using}), once.missing_table)
        flaws += [problem for answer in given.values() for problem in answer]
        for alias, problem in problems.items():
            # Other topics need not wait for this database, and a message whose listener needs it is tried again.
            logger.warning(
                "Database %s cannot be asked whether its migrations are applied: %s",
                alias,
                problem,
                extra={"rmq_event": "unknown_migrations"},
            )
    if flaws:
        raise ConfigurationError(" ".join(f"{problem.message} {problem.hint}" for problem in flaws))


def _check_server(topics: list[Topic]) -> None:
    """Warn about settings of the server that may lose messages, and raise an error if DURABILITY is strict.

    A server that refuses writes is no reason not to start: consuming may be what makes room in it.
    """
    flaws = connections.server_flaws(topics)
    lasting = [flaw for flaw in flaws if flaw.is_lasting]
    if lasting and get_config().durability == "strict":
        reasons = " ".join(f"{flaw.message} {flaw.hint}" for flaw in lasting)
        raise ConfigurationError(f'RMQ["DURABILITY"] is "strict": {reasons}')
    for flaw in flaws:
        logger.warning("%s %s", flaw.message, flaw.hint, extra={"rmq_event": "server_flaw"})


def ready_line(topics: Iterable[Topic], threads: int, processes: int = 1) -> str:
    """Return one line that names what is consumed."""
    parts = ", ".join(f"{topic.name} ({topic.slots} slots)" for topic in topics)
    several = f" in each of {processes} processes" if processes > 1 else ""
    return f"{READY}{parts} with {threads} threads{several}"
