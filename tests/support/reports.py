"""Workers of which Redis knows that they are there, and what they report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django_rmq.conf import get_config
from django_rmq.core.commands import membership
from django_rmq.core.commands.reports import write_report
from django_rmq.core.coordination import Worker as Member
from django_rmq.core.coordination import topic_slots
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.worker_report import RunningCall, WorkerReport
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


def report(broker: Any, worker: str, **changed: Any) -> None:
    broker.run(write_report(worker, replace(REPORT, **{"at_ms": broker.now_ms(), **changed})))
