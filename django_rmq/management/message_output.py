"""How commands print messages: their status, and what keeps them from being delivered."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime

from django_rmq.core.model.status import MessageStatus
from django_rmq.management.rmq_command import ago, one_line
from django_rmq.operations import Hold


def as_json(one: MessageStatus) -> dict[str, object]:
    """Return a status for JSON; times as text."""
    values = {name: _plain(value) for name, value in asdict(one).items()}
    return {**values, "took": one.took}


def lines_of_status(one: MessageStatus) -> list[str]:
    """Return a line for each fact that is known."""
    facts = {name: _plain(value) for name, value in asdict(one).items()}
    facts["took"] = None if one.took is None else f"{one.took:.3f} s"
    if one.progress is not None:
        facts["progress"] = f"{one.progress:.0%}"
    return [f"{name:14}{one_line(str(value))}" for name, value in facts.items() if value not in (None, "")]


def instant(ms: int | None) -> str:
    """Return a time in UTC. None: a dash."""
    if ms is None:
        return "-"
    return (
        datetime.fromtimestamp(ms / 1000, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    )


def line_of_hold(hold: Hold) -> str:
    """Return what keeps a message from being delivered now, as a line."""
    seconds = None if hold.since_ms is None else abs(time.time() - hold.since_ms / 1000)
    number = 0.0 if hold.count is None else hold.count
    texts = {
        "paused": "the topic is paused",
        "no_worker": "no worker serves the topic",
        "slot_unowned": "no worker owns the slot",
        "behind_failed": f"strict order, behind the failed message {hold.message_id}",
        "slot_busy": f"slot busy for {ago(seconds)}, with {number:g} in flight: {hold.message_id}",
        "claimed": f"{number:g} of the slot are claimed by Spark",
        "in_flight_limit": f"in flight limit: {number:g} are in flight (MAX_IN_FLIGHT)",
        "behind": f"behind {number:g} of its slot, first {hold.message_id}",
        "rate": f"rate: at most {number:g} per second (MAX_RATE)",
        "not_due": f"its time, in {ago(seconds)}",
    }
    return f"{'held by':14}{texts[hold.reason]}"


def _plain(value: object) -> object:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
