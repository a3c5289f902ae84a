"""What logs, events and traces may reveal of a message: the id by which they name it, and whether they may show its contents.

The core knows no settings, so ``django_rmq.apps`` sets the ``rules``: a topic with a FORMATTER (setting ADMIN) hides its
contents. ``core.consumer.failures`` then leaves out the texts of errors. What a person sees is decided in
``operations.authorization``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class RedactionRules(NamedTuple):
    """The rules in force. Without Django, messages are named by their slot alone and nothing is hidden."""

    name: Callable[[str, int, bytes], str] = lambda topic, slot, member: f"{slot}~"
    """Makes an id from topic, slot and member that reveals nothing of the message."""
    hides: Callable[[str], bool] = lambda topic: False
    """Whether the contents of a topic's messages are hidden, and with them errors, which quote the contents."""


rules = RedactionRules()


def opaque_name(topic: str, slot: int, member: bytes) -> str:
    """Return an id that reveals nothing of the message. Never raises, because it is called while a failure is handled."""
    try:
        return rules.name(topic, slot, member)
    except Exception:  # noqa: BLE001 - settings without a secret key, say
        return f"{slot}~"


def hides_contents(topic: str) -> bool:
    """Return whether the contents of the messages of ``topic`` are hidden, and with them errors, which quote the contents."""
    return rules.hides(topic)
