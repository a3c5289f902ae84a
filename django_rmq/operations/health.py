"""The health check of the command, REST and probes: a list of findings that contain no secrets.

It checks that Redis answers, that workers can be read and the assignment fits them, that every topic with a
listener has a live worker, that nothing has been due for too long, and that not too much is dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django_rmq.core.calls import workers
from django_rmq.core.calls.broker import Broker
from django_rmq.core.coordination.plan import Plan
from django_rmq.core.coordination.redis import members_of_roster
from django_rmq.core.words.topics import Topic
from django_rmq.core.words.workers import Roster
from django_rmq.exceptions import RmqError, ServerTrouble, WrongType
from django_rmq.operations import figures
from django_rmq.operations.retiring import Stranded
from django_rmq.operations.schedules import ScheduleFigures
from django_rmq.project import connections
from django_rmq.project.outbox.looking import Waiting

LOOK_AGAIN_SECONDS = 0.5
"""Seconds between two checks of an assignment that does not fit; workers that join or leave are assigned
within seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of good health. None: not checked."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """redis, coordinator, definition, workers, age, dead, outbox, schedule or undeclared."""
    topic: str
    """The topic. Empty: the finding is not about a topic."""
    is_well: bool
    text: str
    """The finding as a sentence."""

    def as_json(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {
            "check": self.name,
            "topic": self.topic or None,
            "ok": self.is_well,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """All findings."""

    findings: list[Finding]

    @property
    def is_well(self) -> bool:
        """Whether there is no trouble."""
        return all(finding.is_well for finding in self.findings)

    @property
    def troubles(self) -> list[Finding]:
        """The findings that are trouble."""
        return [finding for finding in self.findings if not finding.is_well]


def check(
    broker: Broker,
    topics: Sequence[Topic],
    coordinator: str,
    limits: Limits,
    *,
    patience: float = 0.0,
    stranded: Callable[[], Sequence[Stranded]] = list,
    outbox: Callable[[], Sequence[Waiting]] = list,
    schedules: Callable[[], Sequence[ScheduleFigures]] = list,
) -> Health:
    """Run all checks. An unavailable Redis is a finding, not an error.

    ``coordinator`` is that of the settings. ``patience``: seconds to wait for an assignment to fit its
    workers. ``stranded`` returns the registered topics that are not declared, ``outbox`` what is in the outbox,
    ``schedules`` the schedules.
    """
    kept = [] if limits.max_outbox_age is None else _outbox(outbox, limits.max_outbox_age)
    began = time.monotonic()
    try:
        broker.ping()
    except RmqError as error:
        return Health([Finding("redis", "", False, str(error)), *kept])
    findings = [
        Finding("redis", "", True, f"answers within {(time.monotonic() - began) * 1000:.0f} ms"),
        *kept,
    ]
    try:
        if coordinator == "redis":
            findings.append(_coordinator(lambda: _in_redis(broker), patience))
        elif coordinator == "zookeeper":
            findings.append(_coordinator(_in_zookeeper, patience))
        for one in figures.overview(broker, topics):
            findings += _topic(one, limits)
        if limits.max_schedule_lateness is not None:
            findings += [_schedule(one, limits.max_schedule_lateness) for one in schedules()]
        findings += [
            Finding("undeclared", one.topic.name, False, f"holds messages ({one}) and is not in the settings")
            for one in stranded()
            if one.held
        ]
    except ServerTrouble as error:
        findings.append(Finding("redis", "", False, str(error)))
    return Health(findings)


def _coordinator(look: Callable[[], tuple[int, str]], patience: float) -> Finding:
    """Return whether the workers and their assignment, which ``look`` reads, are well within the patience."""
    end = time.monotonic() + patience
    while True:
        count, flaw = look()
        if not flaw:
            return Finding(
                "coordinator", "", True, f"{count} workers, every topic that they serve is assigned"
            )
        if time.monotonic() >= end:
            return Finding("coordinator", "", False, flaw)
        time.sleep(min(LOOK_AGAIN_SECONDS, max(0.0, end - time.monotonic())))


def _in_redis(broker: Broker) -> tuple[int, str]:
    try:
        roster = broker.run(workers.roster())
    except WrongType as error:
        return 0, str(error)
    return len(members_of_roster(roster)), _flaw(roster)


def _in_zookeeper() -> tuple[int, str]:
    try:
        found = connections.survey_zookeeper()
    except RmqError as error:
        return 0, str(error)
    return (len(found.members), found.flaw if found.members else "") if found is not None else (0, "")


def _flaw(roster: Roster) -> str:
    """Return why the assignment does not fit the workers. Empty: it does."""
    workers = {member.worker.id: member.worker for member in members_of_roster(roster)}
    if not workers:
        return ""  # there are no workers, which is reported for each topic
    if not roster.plan:
        return "no slots are assigned to the live workers"
    try:
        return Plan.decode(roster.plan).flaw(workers)
    except ValueError:
        return "the assignment in Redis cannot be read"


def _outbox(outbox: Callable[[], Sequence[Waiting]], max_age: float) -> list[Finding]:
    """Return for each topic how long its oldest message has been in the outbox."""
    try:
        found = outbox()
    except RmqError as error:
        return [Finding("outbox", "", False, str(error))]
    findings = []
    for one in found:
        age = (one.oldest_ms or 0) / 1000
        text = f"the oldest of {one.messages} messages was sent {age:.0f} s ago"
        if one.refused:
            text = f"{text if one.messages else 'nothing waits'}, and {one.refused} were refused"
        findings.append(Finding("outbox", one.topic, age <= max_age, text))
    return findings or [Finding("outbox", "", True, "it is empty")]


def _schedule(one: ScheduleFigures, max_lateness: float) -> Finding:
    late = one.late_ms / 1000
    text = one.problem or (
        "is paused" if one.is_paused else f"is late by {late:.0f} s" if late else "is on time"
    )
    is_well = late <= max_lateness and not one.problem
    return Finding("schedule", one.topic, is_well, f"schedule {one.name} {text}")


def _topic(one: figures.TopicFigures, limits: Limits) -> list[Finding]:
    name = one.topic.name
    findings = [Finding("redis", name, False, problem) for problem in one.problems]
    if one.definition_problem:
        findings.append(Finding("definition", name, False, one.definition_problem))
    part = f" in {one.looked_at} of {one.topic.slots} slots" if one.is_partial else ""
    if limits.needs_workers and one.topic.listener and not one.workers_problem:
        if one.consumers:
            findings.append(Finding("workers", name, True, f"{one.consumers} live workers"))
        else:
            findings.append(Finding("workers", name, False, "no live worker serves it"))
    if limits.max_age is not None:
        age = (one.age_ms or one.undrained_ms or 0) / 1000
        paused = ", and it is paused" if one.paused_slots else ""
        told = "a slot has not been drained" if one.topic.is_priority else "the oldest message has been due"
        text = f"{told} for {age:.0f} s{part}{paused}" if age else "nothing is overdue"
        findings.append(Finding("age", name, age <= limits.max_age, text))
    if limits.max_dead is not None:
        findings.append(
            Finding("dead", name, one.dead <= limits.max_dead, f"{one.dead} messages are dead{part}")
        )
    return findings


__all__ = ["Finding", "Health", "Limits", "check"]
