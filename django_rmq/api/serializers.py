"""Serializers of answers: each makes an object of JSON of the attributes of what is shown. Times are ms since the epoch.

The serializers of requests are in ``requests``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any

from rest_framework import serializers

AnyField = serializers.Field[Any, Any, Any, Any]

Json = dict[str, object]
"""An object of JSON."""


class ResponseSerializer(serializers.Serializer[object]):
    """An answer. A field has the value of the attribute that is its ``source``, or is named like it."""

    @classmethod
    def of(cls, shown: object, **values: object) -> Json:
        """Return the answer about ``shown``. ``values``: those of fields that are no attributes of it.

        It is faster than ``to_representation``, which converts each value: attributes are as JSON takes them.
        """
        return {
            name: values[name] if name in values else read(shown)
            for name, (read, is_required) in _readers(cls).items()
            if is_required or name in values
        }


@cache
def _readers(kind: type[ResponseSerializer]) -> dict[str, tuple[Callable[[object], object], bool]]:
    """Return how each field is read, and whether every answer has it."""
    return {
        name: (_reader(field, field.source or name), field.required) for name, field in kind().fields.items()
    }


def _reader(field: AnyField, source: str) -> Callable[[object], object]:
    read = attrgetter(source)
    if isinstance(field, ResponseSerializer):
        return lambda shown: None if (value := read(shown)) is None else field.of(value)
    if isinstance(field, serializers.ListSerializer):
        child: Any = field.child
        return lambda shown: [child.of(value) for value in read(shown)]
    if isinstance(field, InstantField):
        return lambda shown: None if (value := read(shown)) is None else milliseconds(value)
    return read


class InstantField(serializers.IntegerField):
    """A time, of which the answer has the milliseconds."""


def milliseconds(when: datetime) -> int:
    """Return the milliseconds since the epoch."""
    return int(when.timestamp() * 1000)


def maybe(field: type[AnyField] = serializers.IntegerField, **how: Any) -> object:
    """Return a field that may be null."""
    return field(allow_null=True, **how)
