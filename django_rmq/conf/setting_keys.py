"""Keys of the settings: each is a field of a dataclass in capitals, and the field defines how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

Keys = Mapping[str, tuple[str, Callable[[object], Any]]]
"""Settings key -> (field of the dataclass, parser of its value)."""


def setting(parse: Callable[[object], Any], default: Any, *, is_secret: bool = False) -> Any:
    """Return a field whose value ``parse`` reads from the settings; a secret one is left out when the section is shown."""
    return field(default=default, repr=not is_secret, metadata={"parse": parse})


def keys_of(section: Any) -> Keys:
    """Return the keys of a section of the settings, from the fields of its dataclass."""
    return {
        one.name.upper(): (one.name, one.metadata["parse"])
        for one in fields(section)
        if "parse" in one.metadata
    }
