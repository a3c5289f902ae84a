"""The problems in the settings: all are collected, each as one sentence, before any is reported.

The sentences show values, and the nearest known names, without revealing passwords. ``did_you_mean`` also ends sentences of
other modules about an unknown name.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches
from typing import NamedTuple

from django_rmq.core.model import limits, redis_url

_HARMLESS = (bool, int, float, timedelta, type(None))


def kind(value: object) -> str:
    """Return the kind of a value that is not shown itself."""
    return f"a {type(value).__name__}"


def printable(value: object) -> str:
    """Return the printable form of a value that cannot be used: a URL without its login, other objects by their type."""
    text = _plain(value)
    return f"{text[:77]}..." if len(text) > 80 else text


def _plain(value: object, depth: int = 0) -> str:
    if isinstance(value, str):
        if "://" in value:
            return redis_url.printable_url(value)
        # An address that lacks its scheme may still have a login before @, or a password after ?.
        return "a str that may hold a password" if set("@?") & set(value) else repr(value)
    if isinstance(value, _HARMLESS):
        return limits.abbreviated(value)
    if depth < 2 and isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(one, depth + 1) for one in value[:20])}]"
    return kind(value)


def quoting(error: Exception, value: object) -> str:
    """Return the text of an error that may quote ``value``, with the value in its printable form."""
    text = str(error)
    return text.replace(repr(value), _plain(value)) if isinstance(value, str) else text


def printable_error(error: BaseException) -> str:
    """Return the first line of an error that a module of the project raised."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text[:157]}..." if len(text) > 160 else text


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown ``name``, with the nearest known name if one is near."""
    choices = {str(choice).lower(): str(choice) for choice in known}
    lowered = str(name).lower()
    near = get_close_matches(lowered, choices, 1, 0.6) or [
        one for one in choices if one.startswith(f"{lowered}_")
    ]
    return f"; did you mean {choices[near[0]]!r}?" if near else "."


class SettingsProblem(NamedTuple):
    """A problem in the settings, as a sentence with the value found and the value required."""

    id: str
    message: str
    hint: str = ""


class Problems(list[SettingsProblem]):
    """Collects problems."""

    def report(self, problem_id: str, message: str, hint: str = "") -> None:
        self.append(SettingsProblem(f"django_rmq.{problem_id}", message, hint))
