"""The known keys of each section of the settings: unknown keys are refused here, and all problems of a section are found.

A section is a dict of the settings, such as ``RMQ`` or the options of a topic. A class may declare its keys: each field is a
``setting`` with the parser of the value. The keys of topics are ``topic_settings.TOPIC_KEYS``. Reading goes on after a problem,
so that all are found. Options that contradict each other are found where a section is read, as in ``topic_settings``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from django_rmq.conf.parsers import InvalidSetting, kind, printable, quoting, secret

Keys = Mapping[str, tuple[str, Callable[[object], object]]]
"""Settings key -> (field of the dataclass, parser of its value)."""


def setting(parse: Callable[[object], object], default: object, *, is_secret: bool = False) -> Any:
    """Return a field whose value ``parse`` reads from the settings; neither the section nor a problem shows a secret one."""
    parse = secret(parse) if is_secret else parse
    return field(default=default, repr=not is_secret, metadata={"parse": parse})


def keys_of(section: Any) -> Keys:
    """Return the keys of a section of the settings, from the fields of its dataclass."""
    return {
        one.name.upper(): (one.name, one.metadata["parse"])
        for one in fields(section)
        if "parse" in one.metadata
    }


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown ``name``, with the nearest known name if one is near."""
    choices = {str(choice).lower(): str(choice) for choice in known}
    lowered = str(name).lower()
    # A name that is only a beginning, such as ``time`` of ``time_range``, is less alike than 0.6.
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
