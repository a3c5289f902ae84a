"""The schemas of typed bodies, for people and programs that send."""

from __future__ import annotations

from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError


def body_schema(topic: Topic) -> dict[str, Any] | None:
    """Return the JSON schema of what may be sent to ``topic``.

    Return None if the topic takes any body, or its type has no schema, or cannot be used. A system check reports an
    unusable type, and everything else about the topic is shown all the same.
    """
    try:
        return None if topic.typed is None else topic.typed.schema()
    except ConfigurationError:
        return None


__all__ = ["body_schema"]
