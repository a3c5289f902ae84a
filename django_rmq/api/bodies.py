"""Bodies in the JSON of requests and answers."""

from __future__ import annotations

import binascii
import logging
from base64 import b64decode, b64encode
from typing import Any

from django_rmq.core.words.bodies import decode_body, encode_json
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import InvalidMessage
from django_rmq.operations.redaction import format_body

logger = logging.getLogger("django_rmq.api")


def body_for(topic: Topic, body: Any) -> Any:
    """Return a body in the form of its topic: bytes come as base64."""
    if topic.body != "bytes":
        return body
    try:
        return b64decode(body, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidMessage(f"topic {topic.name} has BODY 'bytes': body must be base64") from None


def body_of(topic: Topic, raw: bytes) -> tuple[Any, str]:
    """Return a body in a form that JSON can carry, and its kind: json, text, or base64 for anything else."""
    if topic.body != "bytes":
        try:
            body = decode_body(topic, raw)
            # Foreign programs may have sent values that Python reads and JSON does not have.
            encode_json(body)
            return body, topic.body
        except (ValueError, RecursionError, InvalidMessage):
            pass
    return b64encode(raw).decode(), "base64"


def formatted(topic: Topic, raw: bytes) -> tuple[Any, str]:
    """Return the formatter's output for a body; one that fails withholds it."""
    try:
        shown = format_body(topic, raw)
        if isinstance(shown, bytes):
            return b64encode(shown).decode(), "base64"
        encode_json(shown)
        return shown, "text" if isinstance(shown, str) else "json"
    except Exception:
        logger.exception("The formatter of topic %s failed; its bodies are withheld.", topic.name)
        return None, "withheld"


__all__ = ["body_for", "body_of", "formatted"]
