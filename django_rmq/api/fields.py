"""Strict fields: no ``"1"`` for 1, no 1 for ``"1"``, no unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.http import QueryDict
from django.utils.dateparse import parse_datetime
from rest_framework import serializers
from rest_framework.settings import api_settings

from django_rmq.api.schema import shaped
from django_rmq.core.model.limits import LARGEST, is_number, is_whole
from django_rmq.core.model.status import STATE_OF

EARLIEST_MS, LATEST_MS = -LARGEST + 1, LARGEST - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The bounds of whole numbers that every client can represent."""


class Strict(serializers.Serializer[Any]):
    """Refuses unknown keys."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the validated values."""
        if isinstance(data, QueryDict):
            # The parameter that chooses the renderer is not one of ours.
            data = {name: value for name, value in data.items() if name != api_settings.URL_FORMAT_OVERRIDE}
        if isinstance(data, Mapping):
            unknown = [str(name) for name in data if name not in self.fields]
            if unknown:
                raise serializers.ValidationError(
                    {name[:100]: ["There is no such field."] for name in unknown[:10]}, "unknown_field"
                )
        return super().to_internal_value(data)


class Whole(serializers.IntegerField):
    """A whole number in JSON."""

    def to_internal_value(self, data: Any) -> int:
        """Return the number."""
        if not is_whole(data):
            self.fail("invalid")
        return data


class Number(serializers.FloatField):
    """A number in JSON."""

    def to_internal_value(self, data: Any) -> float:
        """Return the number."""
        if not is_number(data):
            self.fail("invalid")
        return float(data)


class State(serializers.ChoiceField):
    """A state of messages; the name of its queue is taken, too."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the state."""
        return super().to_internal_value(STATE_OF.get(data, data) if isinstance(data, str) else data)


class Flag(serializers.BooleanField):
    """True or false in JSON."""

    def to_internal_value(self, data: Any) -> bool:
        """Return the flag."""
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


class Text(serializers.CharField):
    """A text in JSON, unchanged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"trim_whitespace": False, **options})

    def to_internal_value(self, data: Any) -> str:
        """Return the text."""
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Uuid(serializers.UUIDField):
    """A UUID as text."""

    def to_internal_value(self, data: Any) -> UUID:
        """Return the UUID."""
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class Seconds(serializers.FloatField):
    """Seconds in an address."""

    def to_internal_value(self, data: Any) -> float:
        """Return the number."""
        found = super().to_internal_value(data)
        if not is_number(found):
            self.fail("invalid")
        return found


@shaped(
    {
        "oneOf": [
            {"type": "integer", "minimum": EARLIEST_MS, "maximum": LATEST_MS},
            {"type": "string", "format": "date-time"},
        ]
    }
)
class Instant(serializers.Field[Any, Any, Any, Any]):
    """An instant: milliseconds since the epoch, or ISO 8601 with an offset (``2026-01-31T12:00:00Z``)."""

    default_error_messages = {
        "invalid": "Give whole milliseconds since the epoch, or a time as 2026-01-31T12:00:00Z."
    }

    def to_internal_value(self, data: Any) -> datetime:
        """Return an aware datetime."""
        with suppress(ValueError, OverflowError):
            if isinstance(data, int) and not isinstance(data, bool):
                return _EPOCH + timedelta(milliseconds=data)
            if isinstance(data, str) and len(data) <= 40:
                found = parse_datetime(data)
                if found is not None and found.tzinfo is not None:
                    found.timestamp()
                    return found
        raise serializers.ValidationError(self.error_messages["invalid"], "invalid")


@shaped({})
class Anything(serializers.Field[Any, Any, Any, Any]):
    """Any JSON."""

    def to_internal_value(self, data: Any) -> Any:
        """Return it as it is."""
        return data


@shaped({"oneOf": [{"type": "string", "minLength": 1}, {"type": "integer"}]})
class Scalar(serializers.Field[Any, Any, Any, Any]):
    """A text or a whole number."""

    default_error_messages = {"invalid": "Give a text or a whole number."}

    def to_internal_value(self, data: Any) -> str | int:
        """Return it as it is."""
        if isinstance(data, bool) or not isinstance(data, (str, int)) or data == "":
            self.fail("invalid")
        return data


__all__ = ["Anything", "Flag", "Instant", "Number", "Scalar", "Seconds", "Strict", "Text", "Uuid", "Whole"]
