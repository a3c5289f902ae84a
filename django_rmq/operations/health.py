"""The health of the queues: findings about Redis, the coordinator, topics, the outbox and schedules, worst first.

A finding is bad, a note or OK. A bad one needs a person now: a server that does not answer or refuses writes, a topic
without a worker, a figure above its limit. A note waits for a person's decision, such as dead messages and paused
topics, unless the caller has set a limit for it. Findings contain no secrets. ``check_health`` reads what it checks, for
commands and programs; ``shared_health`` judges what open pages have read, in the language of their reader. Both list the judges
that they ask, so a new one belongs into both. The probes of a worker process itself are judged by
``worker_processes.supervisor``; what ``/ready`` asks for is chosen in ``api.probes``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, override

from django_rmq.connections import coordinators
from django_rmq.core.commands import membership
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import members_of_roster
from django_rmq.core.model.replies import Roster
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.database_access import ParallelReads
from django_rmq.exceptions import RmqError, ServerFull, ServerTrouble, WrongType
from django_rmq.operations import stats, undeclared_topics
from django_rmq.operations.authorization import OperationContext, Permission
from django_rmq.operations.outbox import outbox_as_known
from django_rmq.operations.schedules import ScheduleStats, schedules
from django_rmq.operations.shared_reads import (
    read_servers,
    shared_outbox,
    shared_schedules,
    shared_servers,
    shared_stranded,
    shared_workers,
)
from django_rmq.operations.stats import TopicStats
from django_rmq.operations.undeclared_topics import UndeclaredTopic
from django_rmq.operations.worker_overview import WorkerOverview, worker_overview
from django_rmq.outbox.row_lists import Waiting

TOTAL_SECONDS = 7.0
"""Maximum duration of a check: probes wait ten seconds, and a command needs one or two to start."""

PATIENCE_MARGIN = 1.0
"""Seconds by which a check may take longer than the patience for an assignment."""

LOOK_AGAIN_SECONDS = 0.5
"""Seconds between two checks of an assignment that does not fit; workers that join or leave are assigned
within seconds."""


class Severity(IntEnum):
    """How bad a finding is."""

    OK = 0
    NOTE = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class HealthThresholds:
    """The limits above which something is bad. Where the caller has chosen none (None), ``USUAL_LIMITS`` hold.

    A figure above a usual limit is a note; for lateness ``lateness`` says how bad it is.
    """

    max_age: float | None = None
    """Maximum seconds for which the oldest message of a topic may have been due, or a slot of a priority
    topic not been empty."""
    max_dead: int | None = None
    """Maximum number of dead messages of a topic."""
    needs_workers: bool = True
    """Whether every topic with a listener must have a live worker."""
    max_outbox_age: float | None = None
    """Maximum seconds for which a message of a topic may have been in the outbox."""
    max_schedule_lateness: float | None = None
    """Maximum seconds by which a schedule may be late."""
    max_running: float | None = None
    """Maximum seconds for which the longest delivery of a topic may have run."""
    lateness: Severity = Severity.NOTE
    """How bad it is if messages, the outbox or schedules are later than usual limits permit."""


USUAL_LIMITS = HealthThresholds(
    max_age=300.0, max_dead=0, max_outbox_age=300.0, max_schedule_lateness=600.0, max_running=900.0
)
"""The limits where the caller has chosen no others. monitoring/alerts.yml has the same, except for dead messages: it alerts
about new ones."""

DEFAULT_THRESHOLDS = HealthThresholds(lateness=Severity.BAD)
"""The limits of ``rmqhealth`` without options, and of the pages of the admin."""

USUAL_UNOWNED = 30.0
"""Seconds for which a message may have been due in a slot without a worker. Slots that move to another worker have none
for some seconds."""

USUAL_UNDRAINED = 3600.0
"""Instead of ``max_age``, the usual limit for slots of priority topics, which new messages may keep from being empty.
monitoring/alerts.yml has the same."""


class Check(NamedTuple):
    """Where people see more about the findings of a check."""

    page: str
    """The page of the admin: dashboard, servers, workers, outbox, running, schedules, topic, or a tab."""
    docs: str
    """The section of the documentation that says what to do."""


CHECKS = {
    "redis": Check("servers", "deploy/runbooks.md#rmqredisunavailable"),
    "writes": Check("servers", "deploy/runbooks.md#rmqredisrefuseswrites"),
    "eviction": Check("servers", "deploy/runbooks.md#rmqredisdeletes"),
    "coordinator": Check("dashboard", "deploy/runbooks.md#rmqslotsunowned"),
    "workers": Check("slots", "deploy/runbooks.md#rmqnoworkers"),
    "unowned": Check("slots", "deploy/runbooks.md#rmqslotsunowned"),
    "vanished": Check("workers", "deploy/runbooks.md#rmqnoworkers"),
    "unreadable": Check("slots", "deploy/runbooks.md#rmqunreadable"),
    "definition": Check("topic", "deploy/runbooks.md#rmqunreadable"),
    "age": Check("store", "deploy/runbooks.md#rmqlate"),
    "running": Check("running", "deploy/runbooks.md#rmqlistenershang"),
    "outbox": Check("outbox", "deploy/runbooks.md#rmqoutboxold"),
    "schedule": Check("schedules", "deploy/runbooks.md#rmqscheduleoverdue"),
    "dead": Check("dead", "deploy/runbooks.md#rmqdead"),
    "paused": Check("topic", "deploy/runbooks.md#rmqpaused"),
    "undeclared": Check("dashboard", "how-to/change-topics.md#remove-or-rename-a-topic"),
}
"""All checks. Of findings of one severity, those of the first check come first, unless they delay nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """One of ``CHECKS``."""
    topic: str
    """The topic; empty if the finding is not about one."""
    severity: Severity
    text: str
    """The finding as a sentence."""
    weight: float = 0.0
    """How bad it is among the findings of its check: seconds, or messages."""
    is_intended: bool = False
    """Whether it follows from what a person has done on purpose, such as a pause."""
    delays_nothing: bool = False
    """Whether no message waits because of it. Those of its severity that delay messages are worse."""
    runbook: str = ""
    """The runbook that says what to do, if it is not that of its check."""

    @property
    def is_well(self) -> bool:
        """Whether it is not bad."""
        return self.severity < Severity.BAD

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at it. What a person has done on purpose needs no attention."""
        return self.severity > Severity.OK and not self.is_intended

    @property
    def check(self) -> Check:
        """Where people see more about it."""
        return CHECKS[self.name]

    @property
    def docs(self) -> str:
        """The section of the documentation that says what to do."""
        return f"deploy/runbooks.md#{self.runbook}" if self.runbook else self.check.docs

    def as_json(self) -> dict[str, object]:
        """Return the finding for JSON."""
        return {
            "check": self.name,
            "topic": self.topic or None,
            "ok": self.is_well,
            "severity": self.severity.name.lower(),
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """All findings, worst first."""

    findings: list[Finding]

    @property
    def is_well(self) -> bool:
        """Whether no finding is bad."""
        return all(finding.is_well for finding in self.findings)

    @property
    def troubles(self) -> list[Finding]:
        """The findings that are bad."""
        return [finding for finding in self.findings if not finding.is_well]


def check_health(
    context: OperationContext,
    limits: HealthThresholds,
    names: Collection[str] | None = None,
    *,
    patience: float = 0.0,
) -> Health:
    """Check the health of all topics (or those named). An unavailable server is a finding, not an error.

    Without topics (an empty ``names``), only the servers are checked. ``patience``: seconds to wait for an
    assignment to fit its workers. It takes at most ``TOTAL_SECONDS``, or a little longer than the patience: a server that
    does not answer in this time is a bad finding.
    """
    context.actor.require(Permission.VIEW)
    names = context.known(names)
    seconds = max(TOTAL_SECONDS, patience + PATIENCE_MARGIN)
    end = time.monotonic() + seconds
    parts = [ParallelReads("redis", partial(_in_english, _check_redis, context, limits, names, patience))]
    if context.config.coordinator == "zookeeper":
        look = partial(_in_english, _check_coordinator, _in_zookeeper, patience)
        parts.append(ParallelReads("coordinator", look))
    for part in parts:
        part.start()
    findings = list[Finding]()
    if (names is None or names) and (context.config.uses_outbox or limits.max_outbox_age is not None):
        findings += _in_english(_check_outbox, context, limits, names, seconds)
    for part in parts:
        is_complete = part.wait(end)
        findings += part.answers
        # The thread that waits for a hung server cannot be ended. Its findings until now count.
        if not is_complete:
            text = f"the check did not end within {seconds:.0f} s"
            findings.append(Finding(part.name, "", Severity.BAD, text))
    return sorted_by_severity(findings)


def shared_health(
    context: OperationContext, figures: Sequence[TopicStats], problem: str = "", *, only_these: bool = True
) -> Health:
    """Return what ``rmqhealth`` finds wrong with its default limits, for topics whose figures were read before.

    Only what dashboards share is read: the servers, the workers, undeclared topics, the outbox and the schedules. Whether the
    assignment fits the workers is not checked. ``problem``: why the workers are unknown. ``only_these``: without vanished
    workers and undeclared topics, and without schedules and rows of other topics. The texts are in the language of this thread.
    """
    context.actor.require(Permission.VIEW)
    names = {one.topic.name for one in figures}
    findings = [
        finding for one in figures for finding in judge_topic(one, DEFAULT_THRESHOLDS, least=Severity.NOTE)
    ]
    if problem:
        findings.append(Finding("coordinator", "", Severity.BAD, problem))
    for server in shared_servers(context):
        findings += judge_server(server)
    if not problem:
        # They may have become unknown since the figures were read.
        with contextlib.suppress(RmqError):
            findings += judge_workers(shared_workers(context), names if only_these else None)
    if not only_these:
        with contextlib.suppress(RmqError):
            for undeclared in shared_stranded(context):
                findings += judge_undeclared(undeclared)
    if context.config.uses_outbox:
        try:
            waiting = shared_outbox(context)
        except RmqError as error:
            findings.append(Finding("outbox", "", Severity.BAD, str(error)))
        else:
            findings += [judge_waiting(one, DEFAULT_THRESHOLDS) for one in waiting]
    try:
        kept_schedules = shared_schedules(context)
    except RmqError as error:
        findings.append(Finding("schedule", "", Severity.BAD, str(error)))
    else:
        findings += [judge_schedule(one, DEFAULT_THRESHOLDS) for one in kept_schedules]
    chosen = [
        one for one in findings if one.severity and (not only_these or not one.topic or one.topic in names)
    ]
    return sorted_by_severity(chosen)


def sorted_by_severity(findings: Collection[Finding]) -> Health:
    """Return the health with these findings, worst first."""
    order = {name: at for at, name in enumerate(CHECKS)}
    return Health(
        sorted(findings, key=lambda one: (-one.severity, one.delays_nothing, order[one.name], -one.weight))
    )


def _in_english(check: Callable[..., Iterator[Finding]], *arguments: object) -> Iterator[Finding]:
    """Yield the findings of a check in English, because programs read them, whatever the language of the thread."""
    findings = check(*arguments)
    while True:
        # A generator that were suspended within the override would leave its language to its caller.
        with override(None):
            try:
                finding = next(findings)
            except StopIteration:
                return
        yield finding


def _check_redis(
    context: OperationContext, limits: HealthThresholds, names: Collection[str] | None, patience: float
) -> Iterator[Finding]:
    broker, began, refusal = context.broker, time.monotonic(), ""
    try:
        try:
            broker.ping()
        except ServerFull as error:  # A server that cannot write to its disk refuses even PING.
            refusal = str(error)
        yield _ok("redis", f"answers within {(time.monotonic() - began) * 1000:.0f} ms")
        # A probe of a web process asks for no topics. It serves on, although Redis has deleted messages.
        is_probe = not (names is None or names)
        yield from (
            finding
            for finding in _check_writes(context, refusal)
            if not (is_probe and finding.name == "eviction")
        )
        if not is_probe:
            figures = stats.survey(context, names)
            for one in figures.topics:
                yield from judge_topic(one, limits)
            try:
                yield from [judge_schedule(one, limits) for one in schedules(context, names)]
            except WrongType as error:
                # A key that another program has written hides no other finding.
                yield Finding("schedule", "", Severity.BAD, str(error))
            # Workers that are unknown are a finding of the coordinator. A ZooKeeper that hangs is not waited for again.
            with contextlib.suppress(RmqError):
                yield from () if figures.problem else judge_workers(worker_overview(context), names)
        if names is None:
            try:
                for left in undeclared_topics.stranded(context):
                    yield from judge_undeclared(left)
            except WrongType as error:
                yield Finding("undeclared", "", Severity.BAD, str(error))
        if context.config.coordinator == "redis":
            # The checks of the topics have used a part of the patience.
            spent = time.monotonic() - began
            yield from _check_coordinator(partial(_in_redis, broker), patience - spent)
    except ServerTrouble as error:
        yield Finding("redis", "", Severity.BAD, str(error))


def slow_commands(context: OperationContext) -> list[SlowCommand]:
    """Return the commands in the slow logs of the servers, without arguments. Raises ``ServerRefused`` if not permitted."""
    context.actor.require(Permission.VIEW)
    return context.broker.slow_commands()


def _check_writes(context: OperationContext, refusal: str) -> Iterator[Finding]:
    """Find servers that refuse writes, or will soon, although they answer.

    ``refusal`` is the error with which a server answered a command; empty if none did.
    """
    servers = read_servers(context)
    # A server has refused a command for a reason that its INFO does not show, so the error is the finding.
    if refusal and not any(server.refusals for server in servers or ()):
        yield Finding("writes", "", Severity.BAD, refusal)
        return
    for server in servers or ():
        yield from judge_server(server)
    if servers is None or not all("role" in server.info for server in servers):
        text = "it is unknown whether Redis takes writes, because its user may not read INFO"
        yield Finding("writes", "", Severity.NOTE, text)
    elif servers and not any(server.refusals or server.warnings for server in servers):
        fullest = max(servers, key=lambda server: server.memory_share)
        where = f" of {fullest.name}" if fullest.node else ""
        yield _ok("writes", f"are accepted; of the memory{where} {fullest.memory_text}")


def judge_server(server: ServerInfo) -> Iterator[Finding]:
    """Find why a server refuses writes, or will soon, or deletes messages to make room."""
    for reason in server.refusals:
        text = _("%(server)s refuses writes: %(reason)s") % {"server": server.name, "reason": reason}
        yield Finding("writes", "", Severity.BAD, text, server.memory_share)
    for name, severity, reasons in (
        ("eviction", Severity.BAD, server.losses),
        ("writes", Severity.NOTE, server.warnings),
    ):
        for reason in reasons:
            text = _("%(server)s: %(reason)s") % {"server": server.name, "reason": reason}
            yield Finding(name, "", severity, text, server.memory_share)


def judge_workers(overview: WorkerOverview, names: Collection[str] | None = None) -> Iterator[Finding]:
    """Find whether listeners that seem to hang have all threads of workers, and whether workers vanished in the last hour.

    ``names``: only of workers that serve one of these topics. Which ones a worker had that vanished is not known.
    """
    stuck = [
        one
        for one in overview.stuck
        if names is None or any(topic.name in names for topic in one.worker.member.worker.topics)
    ]
    if stuck:
        age = max(0, overview.now_ms - max(one.since_ms for one in stuck)) / 1000
        text = ngettext(
            "%(count)s worker is stuck: all its threads are in calls that take unusually long, the shortest %(age)s",
            "%(count)s workers are stuck: all their threads are in calls that take unusually long, the shortest %(age)s",
            len(stuck),
        ) % {"count": _grouped(len(stuck)), "age": readable_duration(age)}
        yield Finding("running", "", Severity.NOTE, text, age)
    if names is None and overview.vanished:
        age = max(0, overview.now_ms - overview.vanished[0].report.at_ms) / 1000
        text = ngettext(
            "%(count)s worker vanished in the last hour: it reported last %(age)s ago",
            "%(count)s workers vanished in the last hour: the last of them reported %(age)s ago",
            len(overview.vanished),
        ) % {"count": _grouped(len(overview.vanished)), "age": readable_duration(age)}
        yield Finding("vanished", "", Severity.NOTE, text, len(overview.vanished))


def judge_undeclared(one: UndeclaredTopic) -> Iterator[Finding]:
    """Find whether a topic that the settings do not declare holds messages, or cannot be read."""
    for problem in one.problems:
        yield Finding("undeclared", one.topic.name, Severity.BAD, problem, runbook="rmqunreadable")
    if one.held:
        text = _("holds messages (%(messages)s) and is not in the settings") % {"messages": one}
        yield Finding("undeclared", one.topic.name, Severity.BAD, text, one.held)


def _check_coordinator(look: Callable[[], tuple[int, str]], patience: float) -> Iterator[Finding]:
    """Find whether the workers and their assignment, which ``look`` reads, fit within the patience."""
    end = time.monotonic() + patience
    while True:
        try:
            count, flaw = look()
        except RmqError as error:
            yield Finding("coordinator", "", Severity.BAD, str(error))
            return
        if not flaw:
            yield _ok("coordinator", f"{count} workers, every topic that they serve is assigned")
            return
        if time.monotonic() >= end:
            yield Finding("coordinator", "", Severity.BAD, flaw)
            return
        time.sleep(min(LOOK_AGAIN_SECONDS, max(0.0, end - time.monotonic())))


def _in_redis(broker: Broker) -> tuple[int, str]:
    roster = broker.run(membership.roster())
    return len(members_of_roster(roster)), _flaw(roster)


def _in_zookeeper() -> tuple[int, str]:
    members = coordinators.survey_zookeeper()
    # Without workers there is no assignment to fit, and their absence is reported for each topic.
    return (len(members.members), members.flaw if members.members else "") if members is not None else (0, "")


def _flaw(roster: Roster) -> str:
    """Return why the assignment does not fit the workers; empty if it does."""
    workers = {member.worker.id: member.worker for member in members_of_roster(roster)}
    if not workers:
        return ""  # Missing workers are reported for each topic.
    if not roster.plan:
        return "no slots are assigned to the live workers"
    try:
        return AssignmentPlan.decode(roster.plan).flaw(workers)
    except ValueError:
        return "the assignment in Redis cannot be read"


def _check_outbox(
    context: OperationContext, limits: HealthThresholds, names: Collection[str] | None, seconds: float
) -> Iterator[Finding]:
    """Find for each topic how long its oldest message has been in the outbox."""
    waits, problems = outbox_as_known(context, names, seconds=seconds)
    for problem in problems:
        yield Finding("outbox", "", Severity.BAD, problem)
    for one in waits:
        yield judge_waiting(one, limits)
    if not (waits or problems):
        yield _ok("outbox", "it is empty")


def is_old_in_outbox(seconds: float) -> bool:
    """Return whether a message has been in the outbox for longer than is usual."""
    return _is_beyond(seconds, USUAL_LIMITS.max_outbox_age)


def judge_waiting(one: Waiting, limits: HealthThresholds) -> Finding:
    """Find how long the oldest message of a topic has been in the outbox, and whether any was refused."""
    age = (one.oldest_ms or 0) / 1000
    text = ngettext(
        "%(count)s message is in the outbox, and was sent %(age)s ago",
        "the oldest of %(count)s messages in the outbox was sent %(age)s ago",
        one.messages,
    ) % {"count": _grouped(one.messages), "age": readable_duration(age)}
    severity = _severity(age, limits.max_outbox_age, USUAL_LIMITS.max_outbox_age, limits.lateness)
    if one.refused:
        refused = ngettext(
            "%(count)s message in the outbox was refused",
            "%(count)s messages in the outbox were refused",
            one.refused,
        ) % {"count": _grouped(one.refused)}
        text = (
            _("%(finding)s, and %(more)s") % {"finding": text, "more": refused} if one.messages else refused
        )
        severity = max(severity, Severity.NOTE)
    runbook = "rmqoutboxrefused" if one.refused and severity == Severity.NOTE else ""
    return Finding("outbox", one.topic, severity, text, age, runbook=runbook)


def is_schedule_late(one: ScheduleStats) -> bool:
    """Return whether a schedule is later than is usual."""
    return _is_beyond(one.late_ms / 1000, USUAL_LIMITS.max_schedule_lateness)


def judge_schedule(one: ScheduleStats, limits: HealthThresholds) -> Finding:
    """Find whether a schedule is late, missing or unreadable, or its latest run died."""
    late = one.late_ms / 1000
    name = {"name": one.name}
    if one.is_missing:
        text = _("schedule %(name)s is declared, and Redis does not know it: no worker runs that declares it")
        severity = limits.lateness if limits.needs_workers else Severity.NOTE
        if limits.max_schedule_lateness is not None:
            severity = Severity.BAD
        return Finding("schedule", one.topic, severity, text % name, runbook="rmqschedulemissing")
    if one.problem:
        text = _("schedule %(name)s %(problem)s") % {**name, "problem": one.problem}
    elif one.is_paused:
        text = _("schedule %(name)s is paused") % name
    elif late:
        text = _("schedule %(name)s is late by %(age)s") % {**name, "age": readable_duration(late)}
    else:
        text = _("schedule %(name)s is on time") % name
    usual = USUAL_LIMITS.max_schedule_lateness
    severity = _severity(late, limits.max_schedule_lateness, usual, limits.lateness)
    is_dead = one.outcome == "dead"
    if one.problem:
        severity = Severity.BAD
    elif one.is_paused or is_dead:
        severity = max(severity, Severity.NOTE)
    if is_dead:
        more = _("the latest of its runs that ended is dead")
        if severity > Severity.NOTE or late or one.is_paused:
            text = _("%(finding)s, and %(more)s") % {"finding": text, "more": more}
        else:
            text = _("schedule %(name)s: %(problem)s") % {**name, "problem": more}
    is_intended = one.is_paused and not is_dead and severity == Severity.NOTE
    runbook = "rmqscheduledies" if is_dead and severity == Severity.NOTE else ""
    return Finding("schedule", one.topic, severity, text, late, is_intended, runbook=runbook)


def is_late(one: TopicStats) -> bool:
    """Return whether messages of a topic have been due for longer than is usual."""
    age, usual = _age_of(one)
    return _is_beyond(age, usual)


def _age_of(one: TopicStats) -> tuple[float, float | None]:
    """Return how long the oldest message of a topic has been due, or a slot not been empty, and what is usual (seconds)."""
    usual = USUAL_UNDRAINED if one.topic.is_priority else USUAL_LIMITS.max_age
    return (one.age_ms or one.undrained_ms or 0) / 1000, usual


def runs_too_long(seconds: float) -> bool:
    """Return whether a delivery has run for longer than is usual, so that its listener may hang."""
    return _is_beyond(seconds, USUAL_LIMITS.max_running)


def judge_topic(
    one: TopicStats, limits: HealthThresholds, least: Severity = Severity.OK
) -> Iterator[Finding]:
    """Find whether a topic can be read, has workers, is late, hangs, has dead messages, or is paused.

    ``least``: how bad a finding must be to be returned. There may be many topics, most of which are well. Pauses and slots
    without a worker are always returned.
    """
    name = one.topic.name
    for problem in one.problems:
        yield Finding("unreadable", name, Severity.BAD, problem)
    if one.definition_problem:
        yield Finding("definition", name, Severity.BAD, one.definition_problem)
    # If the workers are unknown, none of them counts as missing.
    if limits.needs_workers and one.topic.listener and not one.workers_problem:
        if not one.consumers:
            yield _judge_unserved(one)
        elif least == Severity.OK:
            yield _ok("workers", f"{one.consumers} live workers", name)
    part = ""
    if one.is_partial:
        part = _(" in %(looked)s of %(slots)s slots") % {"looked": one.looked_at, "slots": one.topic.slots}
    waits = (one.unowned_ms or 0) / 1000
    if waits > USUAL_UNOWNED:
        yield Finding("unowned", name, Severity.NOTE, _unowned_text(one, waits, part), one.unowned_due)
    age, usual = _age_of(one)
    severity = _severity(age, limits.max_age, usual, limits.lateness)
    if one.is_paused:
        # A person has paused the topic on purpose, and the alerts do not report its lateness either.
        severity = min(severity, Severity.NOTE)
    if severity >= least:
        yield Finding("age", name, severity, _age_text(one, age, part), age, one.is_paused)
    ran = (one.running_ms or 0) / 1000
    severity = _severity(ran, limits.max_running, USUAL_LIMITS.max_running, Severity.NOTE)
    if severity >= least:
        yield Finding("running", name, severity, _running_text(ran, part), ran)
    severity = _severity(one.dead, limits.max_dead, USUAL_LIMITS.max_dead, Severity.NOTE)
    if severity >= least:
        yield Finding("dead", name, severity, _dead_text(one.dead, part), one.dead)
    if one.paused_slots:
        text = _("is paused")
        if not one.is_paused:
            text = _("is paused in %(paused)s of %(slots)s slots") % {
                "paused": one.paused_slots,
                "slots": one.looked_at,
            }
        yield Finding("paused", name, Severity.NOTE, text, is_intended=True)


def _judge_unserved(one: TopicStats) -> Finding:
    text = _("no live worker serves it")
    if one.due:
        due = ngettext("%(count)s message is due", "%(count)s messages are due", one.due) % {
            "count": _grouped(one.due)
        }
        text = _("%(finding)s, and %(more)s") % {"finding": text, "more": due}
    return Finding("workers", one.topic.name, Severity.BAD, text, one.due, delays_nothing=not one.due)


def _age_text(one: TopicStats, age: float, part: str) -> str:
    if not age:
        return "nothing is overdue"
    waits = (
        _("a slot has not been drained for %(age)s%(part)s")
        if one.topic.is_priority
        else _("the oldest message has been due for %(age)s%(part)s")
    )
    text = waits % {"age": readable_duration(age), "part": part}
    if one.paused_slots:
        text = _("%(finding)s, and %(more)s") % {"finding": text, "more": _("it is paused")}
    return text


def _running_text(ran: float, part: str) -> str:
    if not ran:
        return "nothing has run for long"
    age = readable_duration(ran)
    return _("the longest delivery has run for %(age)s%(part)s") % {"age": age, "part": part}


def _dead_text(dead: int, part: str) -> str:
    if not dead:
        return "no message is dead"
    text = ngettext("%(count)s message is dead%(part)s", "%(count)s messages are dead%(part)s", dead)
    return text % {"count": _grouped(dead), "part": part}


def _unowned_text(one: TopicStats, waits: float, part: str) -> str:
    return ngettext(
        "%(count)s message is due in slots that no worker has, for up to %(age)s%(part)s",
        "%(count)s messages are due in slots that no worker has, for up to %(age)s%(part)s",
        one.unowned_due,
    ) % {"count": _grouped(one.unowned_due), "age": readable_duration(waits), "part": part}


def _severity(value: float, limit: float | None, usual: float | None, beyond_usual: Severity) -> Severity:
    """Return how bad a value is: bad above a chosen limit; without one, ``beyond_usual`` above the usual limit."""
    if limit is not None:
        return Severity.BAD if value > limit else Severity.OK
    return beyond_usual if _is_beyond(value, usual) else Severity.OK


def _is_beyond(value: float, usual: float | None) -> bool:
    return usual is not None and value > usual


def _ok(name: str, text: str, topic: str = "") -> Finding:
    return Finding(name, topic, Severity.OK, text)


def readable_duration(seconds: float | None) -> str:
    """Return a length of time in one unit, with two digits or more: 85 ms, 4.2 s, 12 min, 3 h, 15 d."""
    if seconds is None:
        return ""
    seconds = abs(seconds)
    if seconds == 0:
        return _("%(number)s s") % {"number": 0}
    if seconds < 1:
        return _("%(number)s ms") % {"number": _short(seconds * 1000)}
    if seconds < 100:
        return _("%(number)s s") % {"number": _short(seconds)}
    if seconds < 6000:
        return _("%(number)s min") % {"number": _short(seconds / 60)}
    if seconds < 172_800:
        return _("%(number)s h") % {"number": _short(seconds / 3600)}
    return _("%(number)s d") % {"number": _short(seconds / 86_400)}


def _grouped(number: int) -> str:
    """Return a number as the language of this thread groups its digits; in texts for programs they are not."""
    return number_format(number, use_l10n=True, force_grouping=True)


def _short(number: float) -> str:
    return number_format(round(number, 1) if number < 9.95 else round(number), use_l10n=True)
