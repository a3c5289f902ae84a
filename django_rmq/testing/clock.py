"""A time set by a test."""

from __future__ import annotations

from datetime import timedelta

from django_rmq.durations import Duration, parse_duration


class Clock:
    """A time for tests: microseconds since the epoch, changed only by ``advance``."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._micros = start_ms * 1000

    def __call__(self) -> int:
        return self._micros

    def advance(self, by: Duration) -> None:
        """Move on by a duration, to the microsecond. A negative one stands for a clock that was set back."""
        self._micros += parse_duration(by, timedelta.min, timedelta.max) // timedelta(microseconds=1)
