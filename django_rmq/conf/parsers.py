"""Parsers of values of the settings, and the printable form of what they refuse, which reveals no password.

A parser returns the value, or raises ``InvalidSetting`` with the required form. ``known_keys`` applies the parsers, and refuses
unknown keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from types import MappingProxyType

from django_rmq.core.model import bounds, redis_url
from django_rmq.core.model.bounds import LARGEST, is_whole
from django_rmq.core.model.keys import check_prefix
from django_rmq.durations import (
    LONGEST,
    AmbiguousDuration,
    InvalidDuration,
    duration_text,
    milliseconds,
    parse_duration,
)
from django_rmq.exceptions import ConfigurationError


def secret(parse: Callable[[object], object]) -> Callable[[object], object]:
    """Return a parser of a value that no problem shows, because a password may stand there, if only by mistake."""

    def parse_secret(value: object) -> object:
        try:
            return parse(value)
        except InvalidSetting as wanted:
            wanted.is_secret = True
            raise

    return parse_secret


class InvalidSetting(Exception):
    """Carries the required form of a value, the id of the problem, and a hint if there is one."""

    def __init__(self, what: str, problem_id: str = "E003", hint: str = "") -> None:
        super().__init__(what)
        self.problem_id = problem_id
        self.hint = hint
        self.is_secret = False


def boolean(value: object) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise InvalidSetting("True or False")
    return value


def whole(low: int, high: int | None = None) -> Callable[[object], int]:
    """Return a parser of a whole number."""
    rule = f"a whole number from {low} to {high}" if high is not None else f"a whole number of at least {low}"

    def parse(value: object) -> int:
        if not is_whole(value) or not low <= value <= (LARGEST if high is None else high):
            raise InvalidSetting(rule)
        return value

    return parse


def duration(
    least: timedelta, most: timedelta = LONGEST, *, is_short: bool = False
) -> Callable[[object], timedelta]:
    """Return a parser of a duration within bounds; see ``parse_duration``."""

    def parse(value: object) -> timedelta:
        try:
            return parse_duration(value, least, most, is_short=is_short)
        except AmbiguousDuration as error:
            raise InvalidSetting(str(error), "E105", error.hint) from None
        except InvalidDuration as error:
            raise InvalidSetting(str(error)) from None

    return parse


def seconds(least: float = 0.001, most: timedelta = LONGEST) -> Callable[[object], float]:
    """Return a parser of a duration of at least ``least`` seconds, as seconds."""
    parse = duration(timedelta(seconds=least), most)
    return lambda value: parse(value).total_seconds()


WHOLE_FORMS = 'whole seconds, a timedelta or text such as "2s", "15m" or "7d"'


def whole_seconds(most: timedelta) -> Callable[[object], int]:
    """Return a parser of a duration of whole seconds, from 1."""
    parse = duration(timedelta(seconds=1), most)

    def parse_whole(value: object) -> int:
        try:
            whole = parse(value)
        except InvalidSetting:
            # The error below says that the seconds must be whole, which the error of ``parse`` does not say.
            whole = timedelta()
        if not whole or whole % timedelta(seconds=1):
            raise InvalidSetting(f"{WHOLE_FORMS}, from 1s to {duration_text(most)}")
        return int(whole.total_seconds())

    return parse_whole


def in_ms(least: timedelta, most: timedelta = LONGEST, *, is_short: bool = False) -> Callable[[object], int]:
    """Return a parser of a duration within bounds, as milliseconds."""
    parse = duration(least, most, is_short=is_short)
    return lambda value: milliseconds(parse(value))


def optional(parse: Callable[[object], object]) -> Callable[[object], object]:
    """Return a parser that also accepts None."""

    def parse_optional(value: object) -> object:
        if value is None:
            return None
        try:
            return parse(value)
        except InvalidSetting as wanted:
            raise InvalidSetting(f"{wanted}; or None", wanted.problem_id, wanted.hint) from None

    return parse_optional


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a parser of one of ``choices``."""
    *first, last = map(repr, choices)
    sentence = f"{', '.join(first)} or {last}" if first else last

    def parse(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return str(value)
        raise InvalidSetting(sentence)

    return parse


def text(value: object) -> str:
    """Return text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidSetting("non-empty text")
    return value


def module_names(value: object) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, (list, tuple)) else (None,)
    if not all(isinstance(one, str) and all(map(str.isidentifier, one.split("."))) for one in names):
        raise InvalidSetting("a list of names of modules such as 'shop.orders'")
    return names


def matching(pattern: str, wanted: str) -> Callable[[object], str]:
    """Return a parser of text of this form."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise InvalidSetting(wanted)
        return value

    return parse


dotted_path = matching(r"[^\W\d]\w*(\.[^\W\d]\w*)+", "a dotted path such as 'shop.rules.backoff'")

module_name = matching(
    r"[^\W\d]\w*(\.[^\W\d]\w*)*", "the name of a module within an app, such as 'listeners'"
)

address = matching(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]*):\d{1,5}", "'host:port'")

token = matching(
    r"[A-Za-z0-9._~+/=-]{16,512}", "16 to 512 of A-Z a-z 0-9 . _ ~ + / = -, as a bearer token is written"
)

_PER = "/(s|sec|m|min|h|hour|d|day)"

send_rate = matching(r"[1-9]\d{0,8}" + _PER, "a rate such as '600/min' (per s, min, hour or day)")

byte_rate = matching(
    r"[1-9]\d{0,8}(kB|MB|GB)?" + _PER,
    "a rate such as '16MB/min' (bytes, kB, MB or GB per s, min, hour or day)",
)


def opentelemetry(value: object) -> bool:
    """Return True if spans and metrics can be made."""
    # ``opentelemetry`` alone is a namespace package: any plugin of OpenTelemetry brings it, without the API.
    is_on, spec = boolean(value), None
    # ``find_spec`` imports the parent package first, and fails where opentelemetry-api is not installed.
    with suppress(ImportError):
        spec = find_spec("opentelemetry.trace")
    if is_on and spec is None:
        raise InvalidSetting(
            "False where opentelemetry-api is not installed", hint='pip install "django-redis-rmq[otel]".'
        )
    return is_on


def formatter(value: object) -> str | Mapping[str, str]:
    """Return a path, or the path of each topic."""
    if not isinstance(value, Mapping):
        return dotted_path(value)
    try:
        return MappingProxyType({str(topic): dotted_path(path) for topic, path in value.items()})
    except InvalidSetting:
        raise InvalidSetting("a dotted path, or a dict from topic to dotted path") from None


MOST_COLUMNS = 5

LONGEST_PATH = 100


def columns(value: object) -> tuple[str, ...] | Mapping[str, tuple[str, ...]]:
    """Return the paths of the columns of all topics, or of each topic."""
    if isinstance(value, Mapping):
        return MappingProxyType({str(topic): _column_paths(paths) for topic, paths in value.items()})
    return _column_paths(value)


def _column_paths(value: object) -> tuple[str, ...]:
    paths = tuple(value) if isinstance(value, (list, tuple)) else (None,)
    for one in paths:
        if not isinstance(one, str) or len(one) > LONGEST_PATH or not all(one.split(".")):
            raise InvalidSetting(
                "a list of paths in bodies such as 'customer.city', or a dict from topic to such a list"
            )
    if len(paths) > MOST_COLUMNS or len(set(paths)) < len(paths):
        raise InvalidSetting(f"at most {MOST_COLUMNS} different paths for a topic")
    return paths


def prefix(value: object) -> str:
    try:
        return check_prefix(value)
    except ConfigurationError:
        raise InvalidSetting("printable text without braces") from None


_SIZES = {"": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
_PERIODS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def count_and_seconds(rate: str) -> tuple[int, float]:
    """Return a rate that ``send_rate`` or ``byte_rate`` has accepted, as a number and its seconds."""
    count, _, period = rate.partition("/")
    digits = count.rstrip("kMGB")
    return int(digits) * _SIZES[count[len(digits) :]], _PERIODS[period[0]]


# The text of any other object, such as a URL object or a dict, may contain a password.
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
        return bounds.abbreviated(value)
    # A list may be very long, or contain itself.
    if depth < 2 and isinstance(value, (list, tuple)):
        return f"[{', '.join(_plain(one, depth + 1) for one in value[:20])}]"
    return kind(value)


def quoting(error: Exception, value: object) -> str:
    """Return the text of an error that may quote ``value``, with the value in its printable form."""
    text = str(error)
    return text.replace(repr(value), _plain(value)) if isinstance(value, str) else text
