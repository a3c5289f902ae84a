"""Changed limits: MAX_RATE and MAX_IN_FLIGHT of a topic as a person has changed them at run time.

They take precedence over the settings. Redis keeps them as JSON, a field for each topic, and workers read all of them with their
reports. Another program may have written a field, so every value is checked when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from django_rmq.core.model.bounds import FASTEST, LARGEST, OTHER_FORM, SLOWEST, is_number, is_whole
from django_rmq.core.model.topic import Topic

LONGEST_NAME = 200
"""Maximum length of the name of the person who changed limits."""

LIMITS = ("max_rate", "max_in_flight")
"""The fields of ``Topic`` that can be changed at run time."""


@dataclass(frozen=True, slots=True)
class ChangedLimits:
    """What a person has changed of one topic."""

    values: Mapping[str, Any]
    """Field of ``Topic`` -> the limit, or None if there is none. Fields that are missing are those of the settings."""
    by: str = ""
    at_ms: int = 0
    """When they were changed, by the clock of Redis."""

    def encode(self) -> str:
        """Return the text that Redis keeps."""
        return json.dumps(asdict(self), separators=(",", ":"))


def check_limit(name: str, value: object) -> float | int | None:
    """Return a limit, or None if there is none. Raises ``ValueError`` with what is allowed.

    ``conf.topic_settings`` has the same bounds for the settings, and the fields of forms and of REST for what people type.
    """
    if value is None:
        return None
    if name == "max_rate":
        if is_number(value) and SLOWEST <= value <= FASTEST:
            return float(value)
        raise ValueError("max_rate must be a number of messages per second from 0.000001 to 1000000, or null")
    if is_whole(value) and 1 <= value < LARGEST:
        return value
    raise ValueError("max_in_flight must be a whole number from 1, or null")


def decode_limits(text: bytes) -> ChangedLimits | None:
    """Return the limits in a text, or None if another program wrote it."""
    try:
        fields = json.loads(text)
        values = {
            name: check_limit(name, fields["values"][name]) for name in LIMITS if name in fields["values"]
        }
        by, at_ms = fields["by"], fields["at_ms"]
    except OTHER_FORM:
        return None
    if not (isinstance(by, str) and is_whole(at_ms)):
        return None
    # A lone surrogate is no valid text in a page.
    return ChangedLimits(values, by[:LONGEST_NAME].encode("utf-8", "replace").decode(), at_ms)


def limited(topic: Topic, changed: ChangedLimits | None) -> Topic:
    """Return ``topic`` with the limits in effect."""
    return replace(topic, **changed.values) if changed is not None else topic
