"""What is answered, as JSON: times in milliseconds since the epoch, bodies in the form that their topic has.

Each serializer describes an answer for OpenAPI; the function beside it makes the answer.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers


class Answer(serializers.Serializer[Any]):
    """An answer; only described, for it is made as it is sent."""


def maybe(field: type[serializers.Field[Any, Any, Any, Any]] = serializers.IntegerField, **how: Any) -> Any:
    """Return a field that may be null."""
    return field(allow_null=True, **how)


__all__ = ["Answer", "maybe"]
