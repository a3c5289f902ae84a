"""Long work in small steps: how far it is, when it is to stop, and how fast it may go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from django_rmq.core.words.bounds import is_number, shown
from django_rmq.exceptions import InvalidRequest, RmqError, ServerTrouble


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a work is."""

    done: int
    """Messages (pause and resume: slots) that have been dealt with."""
    total: int
    """How many there were at the beginning; of a search: how many may match."""
    outcomes: dict[str, int]
    """Outcome → how many."""
    is_complete: bool = False
    """False at the end: it was stopped by its limits, or given up."""
    problems: tuple[str, ...] = ()
    """Slots that could not be worked, and why."""


class Run:
    """A work that goes on as far as somebody iterates over it; ``result`` brings it to its end."""

    def __init__(self, steps: Iterator[Progress]) -> None:
        self._steps = steps
        self.progress = Progress(0, 0, {})
        """How far it is."""

    def __iter__(self) -> Iterator[Progress]:
        for progress in self._steps:
            self.progress = progress
            yield progress

    def result(self) -> Progress:
        """Do what is left, and return how it ended."""
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
    """When to stop before the end, and how fast to go; None: not."""

    messages: int | None = None
    seconds: float | None = None
    rate: float | None = None
    """Messages per second."""

    def check(self) -> None:
        """Raise ``InvalidRequest`` for what is no limit."""
        for name in ("messages", "seconds", "rate"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise InvalidRequest(f"{name} must be a number above 0, got {shown(value)}")


@dataclass(slots=True)
class Tally:
    """What a work has come to so far."""

    total: int
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def failed(self, slot: int, error: RmqError) -> None:
        """Note a slot's error. Raises ``ServerTrouble``: that is one of all slots."""
        if isinstance(error, ServerTrouble):
            raise error
        self.problems.append(f"slot {slot}: {error}")

    def progress(self, *, is_complete: bool = False) -> Progress:
        """Return how far the work is."""
        return Progress(self.done, self.total, dict(self.outcomes), is_complete, tuple(self.problems))


class Pace:
    """Keeps to the limits of a work."""

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
        """Return how many messages may be taken at once: a quarter of a second's, where there is a rate."""
        if self.limits.messages is not None:
            most = min(most, self.limits.messages - done)
        if self.limits.rate is not None:
            most = min(most, round(self.limits.rate / 4))
        return max(1, most)

    def wait(self, done: int) -> None:
        """Wait until ``done`` messages may have been dealt with."""
        if self.limits.rate is not None:
            ahead = done / self.limits.rate - (time.monotonic() - self._began)
            if ahead > 0:
                self._sleep(ahead)


__all__ = ["Limits", "Pace", "Progress", "Run", "Tally"]
