"""Bodies in the JSON of requests."""

from __future__ import annotations

import binascii
from base64 import b64decode
from typing import Any

from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage


def body_for(topic: Topic, body: Any) -> Any:
    """Return a body in the form of its topic: bytes come as base64."""
    if topic.body != "bytes":
        return body
    try:
        return b64decode(body, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidMessage(f"topic {topic.name} has BODY 'bytes': body must be base64") from None


__all__ = ["body_for"]
