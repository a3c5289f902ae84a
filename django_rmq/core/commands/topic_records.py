"""The call that changes the definition of a topic."""

from __future__ import annotations

from django_rmq.core.commands.script_call import Call
from django_rmq.core.commands.script_keys import Named
from django_rmq.core.model.keys import topics_key


def _key(prefix: str, _: str) -> bytes:
    return topics_key(prefix)


def _is_ok(reply: bytes) -> bool:
    return reply == b"ok"


def redefine(topic: str, before: bytes, after: str) -> Call[bool]:
    """Write a definition if ``before`` is still the registered one; return whether it was."""
    return Call("topics/redefine", Named(_key, topic), (topic, before, after), _is_ok)
