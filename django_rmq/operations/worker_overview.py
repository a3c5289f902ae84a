"""All workers at one instant: those that live, those that vanished in the last hour, and the messages that they run.

The coordinator knows who lives, and which slots each worker has. What a worker is and does, it reports itself every few seconds;
older workers, and consumers over REST or in Spark, report nothing. A worker reads what people ask of it with each report.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from django.utils.translation import gettext as _

from django_rmq.core.commands import reports
from django_rmq.core.model.replies import Times
from django_rmq.core.model.topic import Topic
from django_rmq.core.model.worker_report import (
    MOST_STACKS,
    REPLACED,
    RunningCall,
    Stack,
    StackRequest,
    WorkerReport,
    WorkerRequest,
    encode_stack_requests,
)
from django_rmq.core.monitoring import history
from django_rmq.exceptions import OperationRefused, RmqError, ServerTrouble, ServerUnavailable
from django_rmq.message_ids import sealed_id
from django_rmq.operations import stats
from django_rmq.operations.audit_trail import record_outcomes
from django_rmq.operations.authorization import OperationContext, Permission, identified, sees_stored
from django_rmq.operations.stats import WorkerStats
from django_rmq.worker.worker_reports import FORGET_MS

MOST_VANISHED = 100
"""The maximum number of vanished workers that are returned: those that vanished last."""

SHORTEST_ID = 8
"""The number of characters of an id that name a worker; pages and commands show as many."""

MOST_RUNNING = 200
"""The maximum number of running messages that are listed: those that have run longest."""


STOPPING_MS = 15_000
"""Milliseconds after its last report after which a worker that was stopping counts as vanished."""

REQUEST_MS = 60_000
"""Milliseconds for which Redis keeps a request to a worker, which reads it with its next report."""


LONG_MS = 5_000
"""Milliseconds that a call has to take at least to be unusually long."""

LONG_UNCOUNTED_MS = 60_000
"""The same, while no call of its topic has ended."""

TIMES_USUAL = 2
"""A call is unusually long if it takes longer than 99 of 100 calls of its topic, multiplied by this."""


class ReportedWorker(NamedTuple):
    """A live worker, and its last report if it writes reports."""

    stats: WorkerStats
    report: WorkerReport | None
    serves_others: bool = False
    """Whether it also serves topics for which the actor may control no workers."""


class VanishedWorker(NamedTuple):
    """A worker that ended without leaving. Its messages time out, or its supervisor has settled them."""

    id: str
    report: WorkerReport


class StuckWorker(NamedTuple):
    """A live worker that begins no call, because calls that are unusually long have all its threads."""

    worker: WorkerStats
    since_ms: int
    """When the last of these calls began, by the clock of Redis."""


class RunningMessage(NamedTuple):
    """A message whose listener runs, as its worker reported it."""

    call: RunningCall
    topic: Topic
    worker: str
    report: WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerOverview:
    """All workers at one instant."""

    now_ms: int
    workers: list[ReportedWorker]
    """Live workers, by host and start."""
    vanished: list[VanishedWorker]
    """Those that vanished in the last hour, the last one first."""
    unserved: list[str]
    """Topics with a listener that no worker serves."""
    running: list[RunningMessage]
    """The messages that run longest in each worker, of declared topics; the one that has run longest first."""
    unreported: int = 0
    """The number of other messages that run."""
    stuck: list[StuckWorker] = field(default_factory=list)
    """Workers of up to twenty threads, all of which hang, as it seems."""


def worker_overview(context: OperationContext) -> WorkerOverview:
    """Return all workers and what they run, in one round trip. Raises ``ServerTrouble`` if the workers are unknown.

    An actor who may not know of all topics gets the part that ``seen_overview`` returns.
    """
    context.actor.require(Permission.VIEW)
    return seen_overview(context, whole_overview(context))


def seen_overview(context: OperationContext, overview: WorkerOverview) -> WorkerOverview:
    """Return the part of an overview that the actor may know of: the workers that serve its topics, with no others.

    Which topics a vanished worker had, or an unreported message has, is not known, so both are left out. The report of a
    worker is about the whole process.
    """
    running = [one._replace(call=_as_shown(context, one.call, one.topic)) for one in overview.running]
    if not context.hides_topics:
        return replace(overview, running=running)
    known, controlled = context.topics(), context.topics(Permission.CONTROL_WORKERS)
    seen = ((one, one.stats.of_topics(known)) for one in overview.workers)
    return WorkerOverview(
        overview.now_ms,
        [
            ReportedWorker(part, one.report, not _serves_only(one, controlled))
            for one, part in seen
            if part is not None
        ],
        [],
        [name for name in overview.unserved if name in known],
        [one for one in running if one.call.topic in known],
        stuck=[
            one._replace(worker=part)
            for one in overview.stuck
            if (part := one.worker.of_topics(known)) is not None
        ],
    )


def whole_overview(context: OperationContext) -> WorkerOverview:
    """Return all workers and what they run, whatever the actor may know of it: ``seen_overview`` returns that part."""
    broker, topics = context.broker, context.config.topics
    pipeline = broker.pipeline()
    asked, answer = pipeline.add(stats.roster_call(broker)), pipeline.add(reports.read_reports())
    pipeline.execute()
    roster_reply = asked.result()
    live_workers = stats.worker_list(broker, roster_reply)
    if live_workers.problem:
        # A value of another type is a conflict, and not a server that does not answer.
        raise roster_reply if isinstance(roster_reply, RmqError) else ServerUnavailable(live_workers.problem)
    report_of = answer.result()
    if isinstance(report_of, ServerTrouble):
        raise report_of
    if isinstance(report_of, RmqError):
        # Another program wrote a value of another type. The workers are known all the same.
        report_of = {}
    now_ms = broker.now_ms() if isinstance(roster_reply, RmqError) else roster_reply.now_ms
    live = {one.worker.id for one in live_workers.members}
    vanished = [
        VanishedWorker(worker, report)
        for worker, report in report_of.items()
        # A worker leaves the others when it begins to stop, and reports until its listeners have returned.
        if worker not in live
        and report.at_ms >= now_ms - FORGET_MS
        and not (report.state == "stopping" and report.at_ms >= now_ms - STOPPING_MS)
    ]
    running = [
        RunningMessage(call, topics[call.topic], worker, report)
        for worker, report in report_of.items()
        if worker in live
        for call in report.calls
        if call.topic in topics
    ]
    workers = [
        ReportedWorker(one, report_of.get(one.member.worker.id)) for one in stats.workers_of(live_workers)
    ]
    return WorkerOverview(
        now_ms,
        workers,
        sorted(vanished, key=lambda one: -one.report.at_ms)[:MOST_VANISHED],
        [
            name
            for name, topic in topics.items()
            if topic.listener and not live_workers.serving(topic).workers
        ],
        sorted(running, key=lambda one: one.call.since_ms),
        sum(report.running - len(report.calls) for worker, report in report_of.items() if worker in live),
        _stuck(context, workers),
    )


def _stuck(context: OperationContext, workers: Iterable[ReportedWorker]) -> list[StuckWorker]:
    """Return the workers that begin no call, in a round trip only if some have all their threads in calls of some seconds."""
    full = [
        (worker, report)
        for worker, report, _ in workers
        if report is not None
        and 0 < report.threads <= report.taken
        and report.threads <= len(_threads(call for call in report.calls if _took(call, report) >= LONG_MS))
    ]
    if not full:
        return []
    names = {call.topic for _, report in full for call in report.calls}
    usual = _usual_times(context, [topic for name, topic in context.config.topics.items() if name in names])
    stuck = []
    for worker, report in full:
        long = [call for call in report.calls if _took(call, report) > _longest_usual(usual.get(call.topic))]
        if report.threads <= len(_threads(long)):
            stuck.append(StuckWorker(worker, max(call.since_ms for call in long)))
    return stuck


def _threads(calls: Iterable[RunningCall]) -> set[str]:
    # A thread that was replaced keeps no other message waiting.
    return {call.thread for call in calls if not call.thread.endswith(REPLACED)}


def _took(call: RunningCall, report: WorkerReport) -> int:
    # It may have ended since the report.
    return report.at_ms - call.since_ms


def _longest_usual(usual: UsualTimes | None) -> float:
    """Return the ms from which on a call is unusually long."""
    return LONG_UNCOUNTED_MS if usual is None else max(LONG_MS, TIMES_USUAL * usual.p99_ms)


def _as_shown(context: OperationContext, call: RunningCall, topic: Topic) -> RunningCall:
    # The text is written by a listener, which may quote the body.
    if call.progress_text and not sees_stored(context.actor, topic.name):
        return call._replace(progress_text="")
    return call


def live_worker(
    context: OperationContext, worker: str, names: Collection[str] | None = None
) -> ReportedWorker:
    """Return a live worker that takes requests, by its id or the first eight or more characters of it.

    ``names``: the topics that the actor may know of; the worker must serve no other. Raises ``OperationRefused``.
    """
    context.actor.require(Permission.VIEW, Permission.CONTROL_WORKERS)
    matches = [
        one
        for one in whole_overview(context).workers
        if one.stats.member.worker.id == worker
        or (len(worker) >= SHORTEST_ID and one.stats.member.worker.id.startswith(worker))
    ]
    known = context.known(names, Permission.CONTROL_WORKERS)
    if context.hides_topics:
        # Of a worker that serves none of its topics, the actor does not even learn that it lives.
        matches = [one for one in matches if one.stats.of_topics(known or ()) is not None]
    if len(matches) != 1:
        which = (
            _("more than one live worker has the id %(id)r")
            if matches
            else _("no live worker has the id %(id)r")
        )
        raise OperationRefused(which % {"id": worker[:100]})
    (one,) = matches
    if known is not None and not _serves_only(one, known):
        raise OperationRefused(
            _("worker %(id)s also serves topics that you may not see") % {"id": worker[:8]}
        )
    if one.report is None or not one.report.state:
        raise OperationRefused(
            _("worker %(id)s takes no requests: it has not reported yet, or is older") % {"id": worker[:8]}
        )
    return one


def _serves_only(one: ReportedWorker, names: Collection[str]) -> bool:
    return all(topic.name in names for topic in one.stats.member.worker.topics)


def processes_of(overview: WorkerOverview, report: WorkerReport) -> list[ReportedWorker]:
    """Return the live workers whose command is the one of this report."""
    return [
        one
        for one in overview.workers
        if one.report and (one.report.host, one.report.parent) == (report.host, report.parent)
    ]


def ask_worker(
    context: OperationContext, worker: str, request: WorkerRequest, names: Collection[str] | None = None
) -> str:
    """Ask a live worker to be quiet, to resume or to stop; return its id.

    It obeys with its next report, within five seconds. Raises the errors of ``live_worker``.
    """
    one = live_worker(context, worker, names)
    member = one.stats.member.worker
    pipeline = context.broker.pipeline()
    # The time makes a repeated request another one.
    asked = pipeline.add(reports.ask_worker(member.id, f"{request} {context.broker.now_ms()}"))
    # The request comes first, because Redis sets no expiry for a key that is not there.
    ended = pipeline.add(reports.end_requests(REQUEST_MS))
    pipeline.execute()
    asked.get()
    ended.get()
    record_outcomes(context, request, "", {"asked": 1}, _place_of(member.id, member.pid, member.host))
    return member.id


def _place_of(worker: str, pid: int, host: str) -> str:
    """Return where a worker runs, for the audit trail."""
    return f"worker {worker}, process {pid} on {' '.join(host.split())}"


class UsualTimes(NamedTuple):
    """How long the calls of a topic's listener have taken since it was first counted, in ms."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class RunningMessages:
    """What runs at one instant, over many topics."""

    now_ms: int
    messages: list[RunningMessage]
    """Those that have run longest, at most ``MOST_RUNNING``, the one that has run longest first."""
    unlisted: int
    """The number of other messages that run, of any topic."""
    usual: dict[str, UsualTimes]
    """The topics of these messages whose calls have been counted."""

    def running_ms(self, one: RunningMessage) -> int:
        """Return for how many ms a message runs; 0 if the worker's clock is ahead of Redis'."""
        return max(0, self.now_ms - one.call.since_ms)

    def is_unusual(self, one: RunningMessage) -> bool:
        """Return whether 99 of 100 calls of the topic took less than this one had when its worker reported it."""
        usual = self.usual.get(one.call.topic)
        return usual is not None and _took(one.call, one.report) > usual.p99_ms


def running_messages(context: OperationContext, names: Collection[str] | None = None) -> RunningMessages:
    """Return the messages that run, of all topics or of those named, beside how long their topics usually take.

    It takes two round trips, and reads no slot. Raises ``ServerTrouble`` if the workers are unknown.
    """
    overview = worker_overview(context)
    known = [one for one in overview.running if names is None or one.call.topic in names]
    listed = known[:MOST_RUNNING]
    topics = list({one.call.topic: one.topic for one in listed}.values())
    unlisted = overview.unreported + len(known) - len(listed)
    return RunningMessages(overview.now_ms, listed, unlisted, _usual_times(context, topics))


def _usual_times(context: OperationContext, topics: Sequence[Topic]) -> dict[str, UsualTimes]:
    """Return how long calls usually take, of the topics whose calls have been counted."""
    times = history.times(context.broker, topics) if topics else []
    # A value of another type in place of the counts hides no message.
    return {
        topic.name: _usual(one)
        for topic, one in zip(topics, times, strict=True)
        if isinstance(one, Times) and any(one.took)
    }


def _usual(times: Times) -> UsualTimes:
    counted = history.Lateness(times.took)
    return UsualTimes(counted.percentile(0.5), counted.percentile(0.99))


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """What is known about the stack of a message in one worker that runs it, or was asked for it."""

    worker: str
    report: WorkerReport
    call: RunningCall | None
    """The message in the last report; None: it runs there no longer, or is not among the twenty longest."""
    asked_ms: int | None
    """When the worker was last asked; None: not in the last minutes."""
    stack: Stack | None
    """The last answer."""

    @property
    def is_awaited(self) -> bool:
        """Whether the worker has not answered the last request."""
        return self.asked_ms is not None and (self.stack is None or self.stack.asked_ms < self.asked_ms)


@dataclass(frozen=True, slots=True)
class MessageStacks:
    """The stacks of one message, in each worker that runs it; usually there is one."""

    now_ms: int
    workers: list[WorkerStack]


def ask_for_stacks(context: OperationContext, name: str, message_id: str) -> list[str]:
    """Ask each worker that runs a message where its listener is; return the ids of these workers.

    They answer with their next report, within five seconds, and Redis keeps the answers for five minutes. Raises
    ``OperationRefused`` if no worker reports that it runs the message, and ``InvalidRequest`` for what is no id.
    """
    context.actor.require(Permission.VIEW, Permission.VIEW_STACK)
    sealed = _sealed(context, name, message_id)
    calling = [one for one in worker_overview(context).running if _names(one.call, name, sealed)]
    asked = {one.worker: one for one in calling if one.report.state}
    if not asked:
        reason = (
            _("the worker that runs it takes no requests: it is older")
            if calling
            else _("no worker reports that it runs this message")
        )
        raise OperationRefused(reason)
    earlier = context.broker.run(reports.read_stack_requests(list(asked)))
    now_ms = context.broker.now_ms()
    pipeline = context.broker.pipeline()
    answers = []
    for (worker, one), requests in zip(asked.items(), earlier, strict=True):
        # A request that the worker has not read yet stays.
        others = [
            other
            for other in requests
            if other.id != one.call.id and now_ms - REQUEST_MS < other.asked_ms <= now_ms
        ]
        chosen = [*others, StackRequest(one.call.id, now_ms)][-MOST_STACKS:]
        answers.append(pipeline.add(reports.ask_for_stacks(worker, encode_stack_requests(chosen))))
    answers.append(pipeline.add(reports.end_requests(REQUEST_MS)))
    pipeline.execute()
    for answer in answers:
        answer.get()
    for worker, one in asked.items():
        place = _place_of(worker, one.report.pid, one.report.host)
        record_outcomes(context, "show stack", name, {"asked": 1}, f"message {one.call.id}, {place}")
    return list(asked)


def message_stacks(context: OperationContext, name: str, message_id: str) -> MessageStacks:
    """Return where the listener of a message is, as far as workers that run it were asked and have answered.

    Raises ``InvalidRequest`` for what is no id.
    """
    context.actor.require(Permission.VIEW, Permission.VIEW_STACK)
    sealed = _sealed(context, name, message_id)
    overview = worker_overview(context)
    calls = {one.worker: one.call for one in overview.running if _names(one.call, name, sealed)}
    report_of = {one.stats.member.worker.id: one.report for one in overview.workers if one.report}
    if not report_of:
        return MessageStacks(overview.now_ms, [])
    pipeline = context.broker.pipeline()
    requests = pipeline.add(reports.read_stack_requests(list(report_of)))
    stacks = pipeline.add(reports.read_stacks(list(report_of)))
    pipeline.execute()
    worker_stacks = []
    for (worker, report), asked, answered in zip(
        report_of.items(), requests.get(), stacks.get(), strict=True
    ):
        request = next((one for one in asked if _ends_with(one.id, sealed)), None)
        stack = next((one for one in answered if _ends_with(one.id, sealed)), None)
        asked_ms = request.asked_ms if request else stack.asked_ms if stack else None
        if worker in calls or asked_ms is not None:
            worker_stacks.append(WorkerStack(worker, report, calls.get(worker), asked_ms, stack))
    return MessageStacks(overview.now_ms, worker_stacks)


def _sealed(context: OperationContext, name: str, message_id: str) -> str:
    """Return what follows the tilde in the sealed id of a message; nothing matches a plain id that the actor may not use."""
    topic = context.declared(name)
    identity = identified(context, topic, message_id)
    if identity.member is not None:
        message_id = sealed_id(name, identity.slot, identity.member)
    return message_id.rpartition("~")[2]


def _ends_with(sealed_message_id: str, sealed: str) -> bool:
    return sealed_message_id.rpartition("~")[2] == sealed


def _names(call: RunningCall, topic: str, sealed: str) -> bool:
    return call.topic == topic and _ends_with(call.id, sealed)
