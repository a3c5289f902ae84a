"""Checks before a transition changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.model.limits import BATCH
from django_rmq.exceptions import ServerRefused, SlotMoved
from tests.oracle.bounds import GATE
from tests.oracle.scores import is_fresh
from tests.oracle.slot import Slot

LONGEST_LEASE_MS = 86_400_000
"""The maximum lease of a claim's consumer in ms: a day."""


def check_batch(items: Sequence[object], at_least: int = 0) -> None:
    """Refuse more messages than a script takes."""
    if not at_least <= len(items) <= BATCH:
        raise ServerRefused("ERR n is out of bounds" if at_least else "ERR too many members")


def check_lease(lease_ms: int, number: int = 1) -> None:
    """Refuse a lease or a claim number that no RMQ consumer uses."""
    if not (1 <= lease_ms <= LONGEST_LEASE_MS and 1 <= number < GATE):
        raise ServerRefused("ERR number or lease is out of bounds")


def check_fresh(slot: Slot, scores: Sequence[float]) -> None:
    """Refuse a score that would be read as a retry, and a value that is not a score."""
    for score in scores:
        if not is_fresh(slot, score):
            raise ServerRefused(f"ERR score {score} is out of bounds")


def check_not_moved(slot: Slot) -> None:
    """Refuse a caller with another slot count."""
    if slot.moved_to is not None:
        raise SlotMoved(f"the topic now has {slot.moved_to} slots")
