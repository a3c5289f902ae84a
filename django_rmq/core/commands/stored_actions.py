"""Calls about the records of actions: those that workers do in the background, and deletions that can be undone.

What an action does, and who may start or undo it, is decided in ``operations.bulk_actions`` and ``operations.undo``.
"""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.commands.script_call import Call, RedisCommand, Single, pairs, text
from django_rmq.core.model.keys import background_actions_key, deletions_key
from django_rmq.core.model.stored_actions import (
    FIELDS,
    ActionProgress,
    Deletion,
    decode_actions,
    decode_deletions,
)

_ACTIONS = Single(background_actions_key)


def read_actions() -> Call[list[ActionProgress]]:
    """Return the actions in the background, the oldest first."""
    return RedisCommand("HGETALL", _ACTIONS, (), lambda reply: decode_actions(pairs(reply)))


def write_action(action: str, field: str, value: str) -> Call[int]:
    """Write a field of an action: "" (the request itself), beat, stopped or ended."""
    return RedisCommand("HSET", _ACTIONS, (f"{action}:{field}", value), int)


def count_action(action: str, outcome: str, messages: int) -> Call[int]:
    """Count messages with an outcome of an action; return how many it has by now."""
    # A worker may go on after its lease, beside the next one. HINCRBY adds up what both have done.
    return RedisCommand("HINCRBY", _ACTIONS, (f"{action}:did.{outcome}", messages), int)


def read_stop(action: str) -> Call[str]:
    """Return who has stopped an action; empty if nobody has."""
    return RedisCommand("HMGET", _ACTIONS, (f"{action}:stopped",), lambda reply: text(reply[0] or b""))


def delete_action(progress: ActionProgress) -> Call[int]:
    """Forget an action."""
    fields = ["", "beat", "stopped", "ended", *(f"did.{outcome}" for outcome in progress.outcomes)]
    return RedisCommand("HDEL", _ACTIONS, tuple(f"{progress.action.id}:{field}" for field in fields), int)


_DELETIONS = Single(deletions_key)


def read_deletions() -> Call[list[Deletion]]:
    """Return the actions that have deleted messages, the oldest first."""
    return RedisCommand("HGETALL", _DELETIONS, (), lambda reply: decode_deletions(pairs(reply)))


def write_deletion(deletion: str, field: str, value: str) -> Call[int]:
    """Write a field of a deletion: "" (the record itself) or undone."""
    return RedisCommand("HSET", _DELETIONS, (f"{deletion}:{field}", value), int)


def count_deletion(deletion: str, field: str, by: int) -> Call[int]:
    """Count what is kept of a deletion: ``kept`` messages, or their ``bytes``; return how many there are by now."""
    return RedisCommand("HINCRBY", _DELETIONS, (f"{deletion}:{field}", by), int)


def forget_deletions(deletions: Sequence[str]) -> Call[int]:
    """Forget deletions. What they have kept expires by itself."""
    names = tuple(f"{one}:{field}" for one in deletions for field in FIELDS)
    return RedisCommand("HDEL", _DELETIONS, names, int)
