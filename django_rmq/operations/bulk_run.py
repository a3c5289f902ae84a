"""Long operations in small steps: their progress, their limits and their speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from django_rmq.core.model.limits import is_number, shown
from django_rmq.exceptions import InvalidRequest, RmqError, ServerTrouble


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """The progress of an operation."""

    done: int
    """The number of messages (pause and resume: slots) processed."""
    total: int
    """The number at the beginning; for a search, how many may match."""
    outcomes: dict[str, int]
    """Outcome → number of messages."""
    is_complete: bool = False
    """False at the end: it was stopped by its limits, or given up."""
    problems: tuple[str, ...] = ()
    """Slots that could not be processed, and the reasons."""


class BulkRun:
    """An operation that advances as it is iterated over; ``result`` completes it."""

    def __init__(self, steps: Iterator[BulkProgress]) -> None:
        self._steps = steps
        self.progress = BulkProgress(0, 0, {})
        """The current progress."""

    def __iter__(self) -> Iterator[BulkProgress]:
        for progress in self._steps:
            self.progress = progress
            yield progress

    def result(self) -> BulkProgress:
        """Complete the operation, and return its final progress."""
        for _ in self:
            pass
        return self.progress

    def close(self) -> None:
        """Give up; what has been done stays done, and is recorded."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop before the end, and the maximum speed. None: no limit."""

    messages: int | None = None
    seconds: float | None = None
    rate: float | None = None
    """Messages per second."""

    def check(self) -> None:
        """Raise ``InvalidRequest`` for an invalid limit."""
        for name in ("messages", "seconds", "rate"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InvalidRequest(f"{name} must be a number above 0, got {shown(value)}")


@dataclass(slots=True)
class BulkTally:
    """The results of an operation so far."""

    total: int
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def failed(self, slot: int, error: RmqError) -> None:
        """Record a slot's error. Raises ``ServerTrouble``, which concerns all slots."""
        if isinstance(error, ServerTrouble):
            raise error
        self.problems.append(f"slot {slot}: {error}")

    def progress(self, *, is_complete: bool = False) -> BulkProgress:
        """Return the current progress."""
        return BulkProgress(self.done, self.total, dict(self.outcomes), is_complete, tuple(self.problems))


class BulkPace:
    """Applies the limits of an operation."""

    def __init__(self, limits: Limits, sleep: Callable[[float], None]) -> None:
        self.limits = limits
        self._sleep = sleep
        self._began = time.monotonic()

    def is_over(self, done: int) -> bool:
        """Whether a limit is reached."""
        messages, seconds = self.limits.messages, self.limits.seconds
        if messages is not None and done >= messages:
            return True
        return seconds is not None and time.monotonic() - self._began >= seconds

    def step(self, done: int, most: int) -> int:
        """Return how many messages may be taken at once: those of a quarter of a second, if there is a rate."""
        if self.limits.messages is not None:
            most = min(most, self.limits.messages - done)
        if self.limits.rate is not None:
            most = min(most, round(self.limits.rate / 4))
        return max(1, most)

    def wait(self, done: int) -> None:
        """Wait until ``done`` messages may have been processed."""
        if self.limits.rate is not None:
            ahead = done / self.limits.rate - (time.monotonic() - self._began)
            if ahead > 0:
                self._sleep(ahead)


__all__ = ["BulkPace", "BulkProgress", "BulkRun", "BulkTally", "Limits"]
