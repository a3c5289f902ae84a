"""Reads that open dashboards share: those of topics by all web processes, the others by the threads of a process.

A survey looks at every slot, and each open page asks for one every few seconds. So a survey is kept for a moment: in the
process, and in Redis for the other web processes. The longer it took, the longer it is kept, which bounds the work in Redis.
Those who ask while one is being made wait for it. An answer about all
topics is kept whole, and an actor who may not know of all of them gets a part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from django_rmq import connections
from django_rmq.core.commands import stored_results
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.changed_limits import ChangedLimits
from django_rmq.core.model.server_checks import ServerInfo
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring import history
from django_rmq.core.monitoring.history import Minute, SummedHour, SummedMinute
from django_rmq.exceptions import RmqError, ServerRefused, ServerTrouble
from django_rmq.operations import stats
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.outbox import outbox
from django_rmq.operations.schedules import ScheduleStats, schedules
from django_rmq.operations.stats import Overview, TopicCounters, TopicStats
from django_rmq.operations.topics import changed_limits
from django_rmq.operations.undeclared_topics import UndeclaredTopic, some_stranded
from django_rmq.operations.worker_overview import WorkerOverview, seen_overview, whole_overview
from django_rmq.outbox.row_lists import Waiting

KEPT_MS = 2_000
"""Milliseconds for which Redis keeps a survey: the shortest interval at which a page asks. 0: surveys are not shared."""

KEPT_FACTOR = 20
"""A survey is kept for this many times the CPU time that it took, so that surveys take about a twentieth of Redis' time."""

LONGEST_KEPT_MS = 10_000
"""Milliseconds after which a survey is too old for those who look for what is wrong, however long it took."""

KEPT_SECONDS = 1.0
"""Seconds for which a process keeps a survey without asking Redis for a newer one."""

OTHERS_SECONDS = 5.0
"""Seconds for which a process keeps the figures of the outbox, the schedules, and the reports of workers."""

STRANDED_SECONDS = 60.0
"""Seconds for which a process keeps what it has seen of topics that are not declared. They change when a project is changed."""

DEATHS_SECONDS = 2.0
"""Seconds for which a process keeps the counts of dead messages by their errors: an action changes them."""

LEASE_MS = 5_000
"""Milliseconds after which a process that makes a survey counts as dead."""

WAIT_SECONDS = 3.0
"""Seconds for which a process waits for the survey of another one; then it makes its own."""

ASK_SECONDS = 0.05
"""Seconds between two looks at whether the survey of another process is there."""

QUICK_SECONDS = 0.2
"""A server that refuses to keep a survey within this time answers, so it can be read."""

MOST_KEPT = 32
"""The number of answers that a process keeps: surveys of different topics, the outbox, the schedules."""

_COLUMNS = [one.name for one in fields(TopicStats) if one.name not in ("topic", "definition_problem")]


T = TypeVar("T")
OfTopic = TypeVar("OfTopic", Waiting, ScheduleStats)

Samples = Sequence[Minute] | RmqError
"""The samples of a topic, the newest last, or why they cannot be read."""


@dataclass(slots=True)
class _Kept:
    """The last answer to a question in this process, or the error of the last attempt."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a thread asks: the other threads wait for its answer."""
    answer: Any = None
    error: ServerTrouble | None = None
    ended: float = 0.0
    """When the last attempt ended."""


_kept: dict[tuple[object, ...], _Kept] = {}
_guard = threading.Lock()


def shared_survey(context: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``survey``, up to three seconds old: all dashboards share one."""
    context.actor.require(Permission.VIEW)
    survey = shared_survey_of(context.broker, context.present_all(names))
    if context.hides_topics and not survey.problem:
        # They may have become unknown since the figures were read.
        with contextlib.suppress(RmqError):
            survey = survey._replace(workers=len(shared_workers(context).workers))
    return survey


def shared_survey_of(broker: Broker, topics: Sequence[Topic]) -> Overview:
    """Return the figures of ``topics`` as they were at most three seconds ago. Raises ``ServerTrouble``.

    A survey that takes long is kept for up to eleven seconds.
    """
    if connections.in_memory():
        return stats.survey_topics(broker, topics)
    return share_answer((broker, *topics), partial(_survey_kept_in_redis, broker, topics), KEPT_SECONDS)


def shared_flow(context: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return the same as ``flow``, up to a second ago: all dashboards share one answer."""
    context.actor.require(Permission.VIEW)
    broker, topics = context.broker, context.present_all(names)
    if connections.in_memory():
        return stats.read_counters(broker, topics)
    return share_answer(("flow", broker, *topics), partial(stats.read_counters, broker, topics), KEPT_SECONDS)


def shared_outbox(context: OperationContext) -> list[Waiting]:
    """Return how much is in the outbox, up to five seconds ago: all dashboards share one answer."""
    return _known_of(context, "outbox", partial(outbox, context.of_all_topics()))


def shared_schedules(context: OperationContext) -> list[ScheduleStats]:
    """Return the schedules, up to five seconds ago: all dashboards share one answer."""
    return _known_of(context, "schedules", partial(schedules, context.of_all_topics()))


def _known_of(context: OperationContext, what: str, ask: Callable[[], list[OfTopic]]) -> list[OfTopic]:
    """Return a shared answer about all topics, as far as the actor may know of them."""
    context.actor.require(Permission.VIEW)
    rows = share_answer((what, id(context.config), context.broker), ask, OTHERS_SECONDS)
    known = context.known(None)
    return rows if known is None else [one for one in rows if one.topic in known]


def read_servers(context: OperationContext) -> list[ServerInfo] | None:
    """Return what each Redis server reports about itself, or None if the user of Redis may not ask."""
    context.actor.require(Permission.VIEW)
    try:
        return context.broker.servers()
    except ServerRefused:
        return None


def shared_servers(context: OperationContext) -> list[ServerInfo]:
    """Return what each Redis server reports about itself, up to a second ago; empty also if it is unknown."""
    context.actor.require(Permission.VIEW)
    return share_answer(
        ("servers", id(context.config), context.broker), lambda: read_servers(context) or [], KEPT_SECONDS
    )


def shared_limits(context: OperationContext) -> dict[str, ChangedLimits]:
    """Return the limits that were changed at run time, as of at most five seconds ago. Raises ``ServerTrouble``."""
    return share_answer(("limits", context.broker), partial(changed_limits, context.broker), OTHERS_SECONDS)


def shared_workers(context: OperationContext) -> WorkerOverview:
    """Return what ``worker_overview`` returned at most five seconds ago. Raises ``ServerTrouble``."""
    context.actor.require(Permission.VIEW)
    ask = partial(whole_overview, context)
    overview = share_answer(("workers", id(context.config), context.broker), ask, OTHERS_SECONDS)
    return seen_overview(context, overview)


def shared_stranded(context: OperationContext) -> list[UndeclaredTopic]:
    """Return what ``some_stranded`` returned at most a minute ago. Raises ``ServerTrouble``, and ``NotPermitted``."""
    context.require_all_topics()
    return share_answer(
        ("stranded", id(context.config), context.broker), partial(some_stranded, context), STRANDED_SECONDS
    )


def shared_hour(context: OperationContext, topics: Sequence[Topic]) -> list[SummedMinute]:
    """Return the sums of what was sampled of ``topics`` in the last hour, up to five seconds late. Raises ``ServerTrouble``.

    A process reads each minute once.
    """
    context.actor.require(Permission.VIEW)
    names = [topic.name for topic in topics]
    hour = share_answer(("hour of", context.broker, *names), lambda: SummedHour(topics), float("inf"))
    return share_answer(("hour", context.broker, *names), partial(hour.read, context.broker), OTHERS_SECONDS)


@dataclass(slots=True)
class _MadeInMinute:
    """What was made of samples of one minute since the epoch: (topic, number of minutes) -> it."""

    minute: int = 0
    made: dict[tuple[str, int], Any] = field(default_factory=dict)


def shared_last_minutes(
    context: OperationContext, wanted: Mapping[Topic, int], minute: int, make: Callable[[Samples], T]
) -> dict[str, T]:
    """Return what ``make`` makes of the last samples of each topic, by its name.

    ``wanted``: topic -> number of minutes, up to an hour. Topics are sampled once a minute, so what was made of the sample of
    ``minute`` (since the epoch) is kept until the next one. ``make`` gets an error in place of samples that cannot be read.
    """
    context.actor.require(Permission.VIEW)
    shared = share_answer(("last minutes", context.broker, make), _MadeInMinute, float("inf"))
    if shared.minute != minute:
        shared.minute, shared.made = minute, {}
    made, minutes_of, unread = shared.made, dict[str, T](), dict[Topic, int]()
    for topic, minutes in wanted.items():
        if (topic.name, minutes) in made:
            minutes_of[topic.name] = made[topic.name, minutes]
        else:
            unread[topic] = minutes
    for topic, samples in history.read_last(context.broker, unread).items():
        minutes_of[topic.name] = make(samples)
        if not isinstance(samples, RmqError) and samples[-1].depth and samples[-1].at_ms // 60_000 == minute:
            made[topic.name, unread[topic]] = minutes_of[topic.name]
    return minutes_of


def shared_deaths(broker: Broker, topic: Topic, limit: int, count: Callable[[], T]) -> T:
    """Return what ``count`` found out about up to ``limit`` dead messages at most two seconds ago. Raises ``ServerTrouble``."""
    return share_answer(("deaths", broker, topic, limit), count, DEATHS_SECONDS)


def share_answer(key: tuple[object, ...], ask: Callable[[], T], seconds: float) -> T:
    """Return the answer of ``ask``, or one to the same question that is not older than ``seconds``."""
    if not KEPT_MS:
        return ask()
    began = time.monotonic()
    shared = _of(key)
    with shared.lock:
        # A thread that has waited gets the answer of the attempt that it waited for, also an error. Otherwise every waiting
        # thread would find out by itself, one after the other, that Redis does not answer.
        if shared.error is not None and shared.ended > began:
            # Each thread raises an error of its own, because raising one changes its traceback.
            raise type(shared.error)(str(shared.error)) from shared.error
        if shared.answer is not None and shared.ended + seconds > began:
            answer: T = shared.answer
            return answer
        # Whatever this attempt raises, the last answer has become too old.
        shared.answer = shared.error = None
        try:
            answer = shared.answer = ask()
        except ServerTrouble as error:
            shared.error = error
            raise
        finally:
            shared.ended = time.monotonic()
        return answer


def _of(question: tuple[object, ...]) -> _Kept:
    with _guard:
        # A lock that another thread held at a fork is never released in the child, so each process has locks of its own.
        key = (os.getpid(), *question)
        # The newest question is last. A thread that waits for a forgotten one still has its lock.
        shared = _kept.pop(key, None) or _Kept()
        _kept[key] = shared
        for old in list(_kept)[:-MOST_KEPT]:
            del _kept[old]
        return shared


def _survey_kept_in_redis(broker: Broker, topics: Sequence[Topic]) -> Overview:
    """Return the survey that Redis keeps, or make one and let Redis keep it.

    The store of the answers to REST's requests that run only once serves as the cache: ``begin_request`` gives one process the
    lease to make the survey, and the others its answer.
    """
    name, token, began = _name(topics), uuid4().hex, time.monotonic()
    word = "running"
    while word == "running" and time.monotonic() - began < WAIT_SECONDS:
        asked = time.monotonic()
        try:
            word, stored = broker.run(stored_results.begin_request(name, name, token, LEASE_MS))
        except RmqError:
            if time.monotonic() - asked > QUICK_SECONDS:
                raise
            # A full Redis, a replica, or a user that may only read, refuses to keep the survey. It is then not shared.
            return stats.survey_topics(broker, topics)
        if word == "done":
            try:
                return _parsed(stored, topics)
            except (TypeError, ValueError):
                break  # Another program, or another version, has stored something else.
        if word == "running":
            time.sleep(ASK_SECONDS)
    made = b""
    try:
        # Redis works for about as long as this thread. The time on the clock would also grow with what others do.
        worked = time.thread_time()
        overview = stats.survey_topics(broker, topics)
        overview = overview._replace(took_ms=round((time.thread_time() - worked) * 1000))
        made = _written(overview)
        return overview
    finally:
        # This process has the lease, and the others wait for its answer. An empty answer reports a failure.
        if word == "new":
            _keep(broker, name, token, made, kept_ms(overview) if made else KEPT_MS)


def kept_ms(overview: Overview) -> int:
    """Return for how many ms Redis keeps a survey."""
    return max(KEPT_MS, min(KEPT_FACTOR * overview.took_ms, LONGEST_KEPT_MS)) if KEPT_MS else 0


def _keep(broker: Broker, name: str, token: str, made: bytes, ms: int) -> None:
    try:
        broker.run(stored_results.store_answer(name, token, made, ms))
    except RmqError:
        pass  # The other processes make a survey of their own after the lease.


def _name(topics: Sequence[Topic]) -> str:
    """Return the name of a survey. Processes of another version, or with other topics, share none with this one."""
    described = json.dumps(
        [Overview._fields, _COLUMNS, [(topic.name, topic.slots, topic.type.value) for topic in topics]]
    )
    return hashlib.sha256(f"survey\n{described}".encode()).hexdigest()[:32]


def _written(overview: Overview) -> bytes:
    rows = [[getattr(one, name) for name in _COLUMNS] for one in overview.topics]
    return json.dumps(
        [overview.workers, overview.problem, overview.now_ms, overview.took_ms, rows], separators=(",", ":")
    ).encode()


def _parsed(stored: bytes, topics: Sequence[Topic]) -> Overview:
    workers, problem, now_ms, took_ms, rows = json.loads(stored)
    topics_stats = []
    for topic, row in zip(topics, rows, strict=True):
        columns = dict(zip(_COLUMNS, row, strict=True))
        columns["problems"] = tuple(columns["problems"])
        # Only this process knows whether it can read the definition of a topic.
        topics_stats.append(TopicStats(topic, **columns, definition_problem=connections.unreadable(topic)))
    return Overview(topics_stats, workers, problem, now_ms, took_ms)
