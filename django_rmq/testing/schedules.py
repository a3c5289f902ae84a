"""Schedules in a test: started as by a worker, and run by the clock of the test."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from django_rmq.core.commands import registry as calls
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.schedules.stepper import next_run
from django_rmq.exceptions import UnknownSchedule


class ScheduleState(NamedTuple):
    """What is known about a schedule."""

    next_run: datetime | None
    """When it is due next. None: it is paused, or never due again."""
    last_run: datetime | None
    """When it was due last. None: not yet."""
    is_paused: bool


def start_schedules() -> None:
    """Start the project's schedules in the broker of this test, as a worker does.

    From then on ``drain()`` sends the ticks that are due by the clock of the test, and runs their listeners.
    Raises ``ConfigurationError`` for a schedule that cannot run.
    """
    from django_rmq import schedules
    from django_rmq.worker import listener_registry

    listener_registry.autodiscover()
    schedules.declare()


def schedule_state(name: str) -> ScheduleState:
    """Return when a schedule was and is due. Raises ``UnknownSchedule`` if it was not started, or is not declared."""
    from django_rmq import connections

    broker = connections.get_broker("worker")
    now_ms = broker.now_ms()
    for record in broker.run(calls.read_schedules()):
        if record.name == name:
            return ScheduleState(
                _instant(next_run(record, now_ms)), _instant(record.last_run(now_ms)), record.is_paused
            )
    raise UnknownSchedule(
        f"no schedule {name[:100]!r} is known: start_schedules() starts those of the project"
    )


def send_ticks(broker: Broker) -> None:
    """Send the ticks that are due; on a server that is left to its workers."""
    from django_rmq import schedules

    if broker.in_memory:
        schedules.stepper("worker").settle()


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
