"""How a section of the settings is read: unknown keys are reported, and every value is parsed.

The reader continues after a problem, so that all are found. ``parsers`` reads each value, and ``problems`` has the sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django_rmq.conf.parsers import InvalidSetting, Keys
from django_rmq.conf.problems import Problems, did_you_mean, kind, printable, quoting

Values = dict[str, Any]
"""Values of a section of the settings: as the project has written them by key, or parsed by field."""


def read_section(problems: Problems, place: str, given: object, keys: Iterable[str]) -> Values:
    """Return ``given`` without unknown keys; report those, and a value that is not a dict."""
    if not isinstance(given, Mapping):
        problems.report("E001", f"{place} is {kind(given)}: it must be a dict.")
        return {}
    allowed = list(keys)
    for key in given:
        if key not in allowed:
            problems.report(
                "E002",
                f"{place} has the unknown key {printable(key)}{did_you_mean(key, allowed)}",
                f"Allowed here: {', '.join(sorted(allowed))}.",
            )
    return {key: value for key, value in given.items() if key in allowed}


def read_values(problems: Problems, place: str, given: object, keys: Keys) -> Values:
    """Return the parsed values by field; report those that cannot be used."""
    values = {}
    for key, value in read_section(problems, place, given, keys).items():
        name, parse = keys[key]
        try:
            values[name] = parse(value)
        except InvalidSetting as wanted:
            seen = f"{kind(value)} that cannot be used" if wanted.is_secret else printable(value)
            message = f'{place}["{key}"] is {seen}: it must be {quoting(wanted, value)}.'
            problems.report(wanted.problem_id, message, wanted.hint)
    return values
