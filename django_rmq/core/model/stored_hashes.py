"""Read hashes in Redis to which any program may have written: definitions of topics, and counters.

An unreadable value affects only its own topic or figure, and the error names the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from django_rmq.core.model.keys import check_slots
from django_rmq.exceptions import ConfigurationError, WrongType

LARGEST = (1 << 63) - 1
"""The largest value of a Redis counter."""


class Definitions(dict[str, dict[str, Any]]):
    """The registered definitions of all topics that can be read.

    ``key`` is the hash in Redis, ``fields`` its content.
    """

    def __init__(self, key: bytes, fields: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._key = key
        self.unreadable: set[str] = set()
        """Topics whose definition cannot be read. Their definitions are never overwritten."""
        for raw_name, text in fields:
            name = raw_name.decode(errors="backslashreplace")
            try:
                self[name] = parse(text)
            except ValueError:
                self.unreadable.add(name)

    def of(self, name: str) -> dict[str, Any] | None:
        """Return the definition of a topic, or None if none is registered. Raises ``WrongType`` if it cannot be read."""
        if name in self.unreadable:
            raise unreadable(self._key, name)
        return self.get(name)

    def problem(self, name: str) -> str:
        """Return why the definition of a topic cannot be read; empty if it can be read, or if there is none."""
        return str(unreadable(self._key, name)) if name in self.unreadable else ""


def unreadable(key: bytes, name: str) -> WrongType:
    """Return the error for an unreadable definition in the hash ``key``."""
    return WrongType(
        f"the definition of topic {name} cannot be read: field {name!r} of the hash {key.decode()!r} in "
        "Redis is not a definition. Correct the field, or delete it; the next process then registers "
        "its settings"
    )


def definition(key: bytes, name: str, text: bytes) -> dict[str, Any]:
    """Return the definition of one topic, or an empty one if none is registered. Raises ``WrongType``."""
    try:
        return parse(text) if text else {}
    except ValueError:
        raise unreadable(key, name) from None


def parse(text: bytes) -> dict[str, Any]:
    """Return a definition. Raises ``ValueError`` if the parts by which slots are found are not valid."""
    try:
        found = json.loads(text)
        noted = found.get("reslot", {})
        counts = [found["slots"], *noted.get("former", ())]
        if noted.get("to") is not None:
            counts.append(noted["to"])
            if not isinstance(noted["number"], int):
                raise TypeError
        for count in counts:
            check_slots(count)
    except (AttributeError, ConfigurationError, KeyError, RecursionError, TypeError, ValueError):
        raise ValueError("not a definition of a topic") from None
    return cast("dict[str, Any]", found)


def counters(key: bytes, fields: Iterable[tuple[bytes, bytes | None]]) -> dict[str, int]:
    """Return fields of the hash ``key`` as whole numbers; a missing field is 0. Raises ``WrongType``."""
    found = {}
    for raw_name, value in fields:
        name = raw_name.decode(errors="backslashreplace")
        try:
            found[name] = int(value or 0)
            if not -LARGEST <= found[name] <= LARGEST:
                raise ValueError
        except ValueError:
            raise WrongType(
                f"field {name!r} of the hash {key.decode()!r} in Redis is not a whole number"
            ) from None
    return found


__all__ = ["Definitions", "counters", "definition", "parse", "unreadable"]
