"""The problems in the settings: all are collected, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from django_rmq.conf.setting_keys import Keys
from django_rmq.conf.value_text import (
    did_you_mean,
    kind,
    quoting,
    shown,
)
from django_rmq.conf.values import InvalidSetting

_SECRET = ("ACL", "AUTH", "HOSTS", "TLS", "TOKEN")
"""Keys whose values are not shown: credentials, and settings into which credentials are written by mistake."""


class SettingsProblem(NamedTuple):
    """A problem in the settings, as a sentence with the value found and the value required."""

    id: str
    message: str
    hint: str = ""


class Problems(list[SettingsProblem]):
    """Collects problems. Its methods read parts of the settings, and go on after a problem."""

    def report(self, problem_id: str, message: str, hint: str = "") -> None:
        """Add a problem."""
        self.append(SettingsProblem(f"django_rmq.{problem_id}", message, hint))

    def section(self, place: str, given: object, keys: Iterable[str]) -> dict[str, Any]:
        """Return ``given`` without unknown keys; report those, and a value that is not a dict."""
        if not isinstance(given, Mapping):
            self.report("E001", f"{place} is {kind(given)}: it must be a dict.")
            return {}
        known = list(keys)
        for key in given:
            if key not in known:
                self.report(
                    "E002",
                    f"{place} has the unknown key {shown(key)}{did_you_mean(key, known)}",
                    f"Allowed here: {', '.join(sorted(known))}.",
                )
        return {key: value for key, value in given.items() if key in known}

    def values(self, place: str, given: object, keys: Keys) -> dict[str, Any]:
        """Return the parsed values by field; report those that cannot be used."""
        found = {}
        for key, value in self.section(place, given, keys).items():
            name, parse = keys[key]
            try:
                found[name] = parse(value)
            except InvalidSetting as wanted:
                seen = f"{kind(value)} that cannot be used" if key in _SECRET else shown(value)
                message = f'{place}["{key}"] is {seen}: it must be {quoting(wanted, value)}.'
                self.report(wanted.problem_id, message, wanted.hint)
        return found
