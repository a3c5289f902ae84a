"""What log lines, spans and texts of objects may say of messages. The Django app puts here what its settings say."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Rules(NamedTuple):
    """Without Django, messages are named by their slot alone and nothing is hidden."""

    name: Callable[[str, int, bytes], str] = lambda topic, slot, member: f"{slot}~"
    """From topic, slot and member to an id that holds nothing of the message."""
    hides: Callable[[str], bool] = lambda topic: False
    """Whether nothing may be told of what the messages of a topic hold, nor of errors, which quote it."""


rules = Rules()


def name(topic: str, slot: int, member: bytes) -> str:
    """Return an id that holds nothing of the message. Never raises: it is asked for while a failure is settled."""
    try:
        return rules.name(topic, slot, member)
    except Exception:  # noqa: BLE001 - settings without a secret key, say
        return f"{slot}~"


def hides(topic: str) -> bool:
    """Return whether nothing may be told of what the messages of ``topic`` hold, nor of errors, which quote it."""
    return rules.hides(topic)


__all__ = ["Rules", "hides", "name"]
