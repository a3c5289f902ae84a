"""The priority of a task's message, from the priority of the task (-100 to 100) and the time since when it waits."""

from __future__ import annotations

from django_rmq.tasks.jobs import Job

_LOWEST = 1_024
"""Larger than any score that a priority topic interprets as a retry."""

_LEVEL = 1 << 35
"""The number of places that a priority has."""

_STEP_MS = 20

_SINCE_MS = 1_767_225_600_000
"""2026-01-01. The places of a priority last until 2047; later tasks share the last place."""


def message_priority(job: Job) -> int:
    """Return the priority of the message of a task: higher ones of tasks first, then longer waits, in steps of 20 ms."""
    since = job.run_after or job.enqueued_at
    # Django's priorities reach from -100 to 100, so the largest result is below MAX_PRIORITY, which is 2 ** 43.
    steps = (round(since.timestamp() * 1000) - _SINCE_MS) // _STEP_MS
    return _LOWEST + (job.priority + 101) * _LEVEL - 1 - min(max(steps, 0), _LEVEL - 1)
