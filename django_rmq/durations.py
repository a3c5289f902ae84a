"""Durations, in the one form that sends, settings, schedules, commands and tests take.

A duration is a number of seconds, also as text, a ``timedelta``, or text with units: ``"250ms"``, ``"2s"``, ``"1h30m"``.
The times of a send, instants too, become milliseconds in ``core.producer.placement``.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TypeAlias

Duration: TypeAlias = float | timedelta | str
"""Seconds, a ``timedelta``, or text such as ``"90"`` (seconds), ``"250ms"``, ``"2s"``, ``"15m"`` or ``"7d"``."""

FORMS = 'seconds, a timedelta or text such as "250ms", "2s", "15m" or "7d"'
"""The accepted forms, for errors."""

TYPED_FORMS = "a duration such as 90, 250ms, 15m or 7d"
"""The same where everything is text: in commands, forms and options of Spark."""

LONGEST = timedelta(days=36_525)
"""The longest duration accepted anywhere: a hundred years."""

AMBIGUOUS = 1000
"""From this number on, a short wait has to be given with its unit: other queues take it in milliseconds."""

_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
# Without ``re.ASCII``, ``\d`` matches the digits of every script.
_TEXT = re.compile(
    "".join(rf"(?:{_NUMBER}\s*{unit}\s*)?" for unit in ("d", "h", "m(?:in)?", "s", "ms")), re.ASCII
)
_SECONDS = re.compile(rf"[+-]?{_NUMBER}", re.ASCII)


class InvalidDuration(ValueError):
    """Says which durations are accepted, for the sentence "it must be …, got …" of the caller."""

    def __init__(self, wanted: str, typed: str, value: object, hint: str = "") -> None:
        super().__init__(wanted)
        self.typed = typed
        """The same as the text of the error, where durations are typed as text."""
        self.hint = hint
        try:
            self.given = f"{value!r:.80}"
        except Exception:  # noqa: BLE001 - an integer of thousands of digits, or an object whose repr fails
            self.given = f"a {type(value).__name__} that cannot be shown"


class AmbiguousDuration(InvalidDuration):
    """A number that may be meant in milliseconds; ``hint`` asks which, and names both forms."""

    def __init__(self, number: float) -> None:
        message = "a duration with a unit, because numbers are seconds"
        seconds = f"{number / 1000:.15g}"
        hint = (
            f'In milliseconds? Say {seconds} or "{seconds}s". For {number:.15g} seconds say "{number:.15g}s".'
        )
        super().__init__(message, message, number, hint)


def parse_duration(
    value: object, least: timedelta = timedelta(), most: timedelta = LONGEST, *, is_short: bool = False
) -> timedelta:
    """Return the duration that ``value`` gives, to the microsecond.

    ``is_short``: the duration is usually well below ``AMBIGUOUS`` seconds, so a plain number from there on is refused.

    Raises ``InvalidDuration``, whose text names the accepted forms and bounds.
    """
    number = _number(value)
    # A number beyond LONGEST in milliseconds is no duration in either unit, so nobody is asked which one is meant.
    if is_short and number is not None and AMBIGUOUS <= number <= LONGEST.total_seconds() * 1000:
        raise AmbiguousDuration(number)
    duration = _duration(value, number)
    if duration is None or not least <= duration <= most:
        bounds = f"from {duration_text(least)} to {duration_text(most)}"
        raise InvalidDuration(f"{FORMS}, {bounds}", f"{TYPED_FORMS}, {bounds}", value)
    return duration


def milliseconds(duration: timedelta) -> int:
    """Return a duration in milliseconds, rounded."""
    return round(duration / _UNITS["ms"])


def duration_text(duration: timedelta) -> str:
    """Return the text of a duration in the largest unit of which it is a whole number: ``90m``, ``1500ms``."""
    for unit, size in _UNITS.items():
        if duration and not duration % size:
            return f"{duration // size}{unit}"
    return f"{duration / _UNITS['ms']!r}ms" if duration else "0s"


def _number(value: object) -> float | None:
    """Return the seconds that ``value`` gives as a number, or as text without a unit. None: it has another form."""
    if isinstance(value, str):
        return float(value) if _SECONDS.fullmatch(value.strip()) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _duration(value: object, number: float | None) -> timedelta | None:
    """Return the duration that ``value`` gives, which has the ``number`` if it has no unit. None: it is not one."""
    if isinstance(value, timedelta):
        return value
    if number is not None:
        try:
            return timedelta(seconds=number)
        # NaN is the ValueError.
        except (OverflowError, ValueError):
            return None
    match = _TEXT.fullmatch(value.strip().lower()) if isinstance(value, str) and value.strip() else None
    if match is None:
        return None
    try:
        return sum(
            (
                float(count) * size
                for count, size in zip(match.groups(), _UNITS.values(), strict=True)
                if count
            ),
            timedelta(),
        )
    except OverflowError:
        return None


__all__ = [
    "AMBIGUOUS",
    "FORMS",
    "LONGEST",
    "AmbiguousDuration",
    "Duration",
    "InvalidDuration",
    "duration_text",
    "milliseconds",
    "parse_duration",
]
