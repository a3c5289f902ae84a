"""Calls that put a tick of a schedule into its slot, and take it back."""

from __future__ import annotations

from django_rmq.core.commands.script_call import AtSlot, Call, moved, word
from django_rmq.core.model.topic import Topic


def _field(name: str) -> str:
    """Return the field of ``control_{K}`` that holds the latest tick of a schedule."""
    return f"tick:{name}"


def _tick(reply: list[bytes]) -> str:
    moved(reply)
    return reply[0].decode()


def put_tick(
    topic: Topic, slot: int, name: str, generation: int, instant: int, member: bytes, envelope: bytes
) -> Call[str]:
    """Put a tick into its slot. Answers stored, known (it was put there before), stale (of an earlier generation) or full.

    Raises ``SlotMoved``.
    """
    own = (_field(name), generation, instant, member, envelope)
    return Call("put_tick", AtSlot(topic, slot), own, _tick)


def retract(topic: Topic, slot: int, name: str, generation: int, instant: int, member: bytes) -> Call[str]:
    """Take back a tick that waits, and refuse those of earlier generations from now on.

    Answers removed, written (a consumer has taken it) or unwritten.
    """
    return Call("retract", AtSlot(topic, slot), (_field(name), generation, instant, member), word)
