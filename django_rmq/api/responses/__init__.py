"""Answers as JSON: times in milliseconds since the epoch, bodies in the form of their topic.

Each serializer describes an answer for OpenAPI; the function beside it makes the answer.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers


class ResponseSerializer(serializers.Serializer[Any]):
    """An answer. The serializer only describes it; the data is sent unchanged."""


def maybe(field: type[serializers.Field[Any, Any, Any, Any]] = serializers.IntegerField, **how: Any) -> Any:
    """Return a field that may be null."""
    return field(allow_null=True, **how)


__all__ = ["ResponseSerializer", "maybe"]
