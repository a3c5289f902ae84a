"""How values and names of the settings are shown in problems, without passwords."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from difflib import get_close_matches

from django_rmq.core.model import limits, redis_url

_HARMLESS = (bool, int, float, timedelta, type(None))


def kind(value: object) -> str:
    """Return the kind of a value that is not shown itself."""
    return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """Return the printable form of a value that cannot be used: a URL without its login, other objects by their type."""
    text = _plain(value)
    return f"{text[:77]}..." if len(text) > 80 else text


def _plain(value: object, depth: int = 0) -> str:
    if isinstance(value, str):
        if "://" in value:
            return redis_url.shown(value)
        return "a str that may hold a password" if set("@?") & set(value) else repr(value)
    if isinstance(value, _HARMLESS):
        return limits.shown(value)
    if depth < 2 and isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(one, depth + 1) for one in value[:20])}]"
    return kind(value)


def quoting(error: Exception, value: object) -> str:
    """Return the text of an error that may quote ``value``, with the value in its printable form."""
    text = str(error)
    return text.replace(repr(value), _plain(value)) if isinstance(value, str) else text


def shown_error(error: BaseException) -> str:
    """Return the first line of an error that a module of the project raised."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{text[:157]}..." if len(text) > 160 else text


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown ``name``: the nearest known name, if one is near."""
    choices = {str(choice).lower(): str(choice) for choice in known}
    given = str(name).lower()
    near = get_close_matches(given, choices, 1, 0.6) or [
        one for one in choices if one.startswith(f"{given}_")
    ]
    return f"; did you mean {choices[near[0]]!r}?" if near else "."
