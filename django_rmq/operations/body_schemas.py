"""The types of bodies, for people and programs that send: their schemas, and what does not fit."""

from __future__ import annotations

from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ConfigurationError


def body_schema(topic: Topic) -> dict[str, Any] | None:
    """Return the JSON schema of what may be sent to ``topic``.

    None: it takes any body, or its type has no schema, or cannot be used; a system check says so, and what else
    there is to see of the topic is seen all the same.
    """
    try:
        return None if topic.typed is None else topic.typed.schema()
    except ConfigurationError:
        return None


__all__ = ["body_schema"]
