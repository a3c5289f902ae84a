"""Workers of which Redis knows that they are there, what they report, and what metrics and commands say."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

from django.core.management import call_command

from django_rmq.conf import get_config
from django_rmq.core.commands import membership
from django_rmq.core.commands.reports import write_report
from django_rmq.core.coordination import Worker as Member
from django_rmq.core.coordination import topic_slots
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.worker_report import RunningCall, WorkerReport
from django_rmq.metrics.collector import RmqCollector
from tests.support.workers import LONG

REPORT = WorkerReport(
    at_ms=1_000,
    host="alpha",
    pid=41,
    version="0.1.0",
    python="3.12.1",
    code="2026.11",
    load=0.5,
    memory_mib=80.5,
    threads=4,
    taken=1,
    messages=3,
    running=1,
    calls=(
        RunningCall("timed", "1~sealed", 900, 1, "rmq-executor-0"),
        RunningCall("timed", "1~other", 950, 1, "rmq-executor-1", 0.25, "page 1"),
    ),
)


def join(broker: Any, worker: str, *names: str, pid: int = 41) -> None:
    """Let a worker of these topics live for a long time."""
    topics = topic_slots(get_config().topic(name) for name in names)
    member = Member(worker, "alpha", pid, 1_700_000_000.0, 4, topics)
    session_ms = round(5 * LONG * 1000)
    assert (
        broker.run(membership.beat(worker, "t", session_ms, record=write_record("t", member))).status == "ok"
    )


def samples() -> dict[tuple[str, ...], float]:
    """Each sample of RMQ's metrics: its name and the values of its labels, and its value."""
    families = RmqCollector().collect()
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def printed(*arguments: str) -> str:
    """Return what a command prints."""
    output = StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue()


def report(broker: Any, worker: str, **changed: Any) -> None:
    broker.run(write_report(worker, replace(REPORT, **{"at_ms": broker.now_ms(), **changed})))
