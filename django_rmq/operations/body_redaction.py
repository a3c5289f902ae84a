"""Redaction: a topic's formatter replaces bodies that must not be shown as they are.

``RMQ["ADMIN"]["FORMATTER"]`` names the formatters; everything that shows bodies to people uses this module.
Consumers get the original bodies.
"""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from django.utils.module_loading import import_string

from django_rmq.conf import get_config
from django_rmq.core.model.body_codec import decode_body, encode_json, exact_body
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidMessage, OperationRefused
from django_rmq.operations.actors import Actor, Permission
from django_rmq.operations.message_view import MessageCopy

logger = logging.getLogger("django_rmq.operations")

Formatter = Callable[[str, Any], Any]
"""Returns what is shown in place of a body, from a topic's name and the decoded body (bytes if it cannot be
decoded)."""


def formatter_of(topic: Topic) -> Formatter | None:
    """Return the configured formatter of ``topic``. Raises ``ImportError`` if there is none."""
    path = _path(topic)
    return None if path is None else import_string(path)


def is_redacted(topic: Topic) -> bool:
    """Return whether a formatter redacts the bodies of ``topic``."""
    return _path(topic) is not None


def may_search(actor: Actor, topic: Topic) -> bool:
    """Return whether ``actor`` may search bodies: a search reveals what they contain, letter by letter.

    An actor with all permissions (a shell) sees the stored bytes anyway.
    """
    return actor.permits is None or (actor.may(Permission.VIEW_BODIES) and not is_redacted(topic))


def is_withheld(actor: Actor, topic: Topic) -> bool:
    """Return whether ``actor`` sees the formatter's output for messages of ``topic``; a shell sees what is stored."""
    return actor.permits is not None and is_redacted(topic)


def as_shown(actor: Actor, topic: Topic, copies: list[MessageCopy]) -> list[MessageCopy]:
    """Return copies as ``actor`` may see them."""
    return [redacted(copy) for copy in copies] if is_withheld(actor, topic) else copies


def require_search(actor: Actor, topic: Topic) -> None:
    """Raise ``NotPermitted`` or ``OperationRefused`` unless ``actor`` may search the bodies of ``topic``."""
    actor.require(Permission.VIEW_BODIES)
    if not may_search(actor, topic):
        raise OperationRefused(f"the bodies of topic {topic.name} are redacted, and cannot be searched")


def format_body(topic: Topic, raw: bytes) -> Any:
    """Return the formatter's output for the body ``raw`` of ``topic``; its errors are raised."""
    formatter = formatter_of(topic)
    assert formatter is not None
    try:
        body = decode_body(topic, raw)
    except (ValueError, RecursionError):
        body = raw
    return formatter(topic.name, body)


def shown_body(copy: MessageCopy) -> tuple[Any, str]:
    """Return a copy's body as it may be shown, in a form that JSON can carry, and its kind.

    ``json``, ``text``, or ``base64`` for anything else; ``hidden`` without the permission to see it, and ``withheld``
    if the formatter failed. The formatter's output replaces the body of a redacted topic.
    """
    if copy.raw is None:
        return None, "hidden"
    return (
        _formatted(copy.topic, copy.raw) if is_redacted(copy.topic) else readable_body(copy.topic, copy.raw)
    )


def readable_body(topic: Topic, raw: bytes) -> tuple[Any, str]:
    """Return a body in a form that JSON can carry, and its kind: json, text, or base64 for anything else."""
    if topic.body != "bytes":
        try:
            body = exact_body(topic, raw)
            # Foreign programs may have sent values that Python reads and JSON does not have.
            encode_json(body)
            return body, topic.body
        except (ValueError, RecursionError, InvalidMessage):
            pass
    return b64encode(raw).decode(), "base64"


def _formatted(topic: Topic, raw: bytes) -> tuple[Any, str]:
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


def redacted(copy: MessageCopy) -> MessageCopy:
    """Return a copy of a redacted topic with the formatter's output for key, headers, slot basis and error.

    A formatter that is an object may have a method for each: ``key``, ``headers``, ``slot_basis``, ``error``,
    called with the topic's name and the stored value. A part without a method, or whose method fails, is
    withheld. The body is not changed: the caller uses ``format_body``.
    """
    name = copy.topic.name
    try:
        formatter = formatter_of(copy.topic)
    except Exception:
        logger.exception("The formatter of topic %s cannot be imported; nothing is shown.", name)
        formatter = None
    shown: dict[str, Any] = {}
    for part, (kind, nothing) in _PARTS.items():
        shown[part], stored, method = nothing, getattr(copy, part), getattr(formatter, part, None)
        if not stored or method is None:
            continue
        try:
            shown[part] = kind(method(name, stored))
        except Exception:
            logger.exception("The formatter of topic %s failed; the %s is withheld.", name, part)
    return replace(copy, **shown)


_PARTS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "key": (str, None),
    "headers": (lambda headers: {str(name): str(value) for name, value in headers.items()}, {}),
    "slot_basis": (str, None),
    "error": (str, ""),
}
"""Part of a copy → its type, and the replacement if it is withheld."""


def _path(topic: Topic) -> str | None:
    return get_config().admin.formatter_of(topic.name)


__all__ = [
    "Formatter",
    "as_shown",
    "format_body",
    "formatter_of",
    "is_redacted",
    "is_withheld",
    "may_search",
    "readable_body",
    "redacted",
    "require_search",
    "shown_body",
]
