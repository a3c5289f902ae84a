"""What a transition refuses before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from django_rmq.core.memory.scores import is_fresh
from django_rmq.core.memory.slot import Slot
from django_rmq.core.words.bounds import BATCH, GATE
from django_rmq.exceptions import ServerRefused, SlotMoved

LONGEST_LEASE_MS = 86_400_000
"""A day: what a claim's consumer may be away at most."""


def check_batch(items: Sequence[object], at_least: int = 0) -> None:
    """Refuse more than a script takes."""
    if not at_least <= len(items) <= BATCH:
        raise ServerRefused("ERR n is out of bounds" if at_least else "ERR too many members")


def check_lease(lease_ms: int, number: int = 1) -> None:
    """Refuse a lease or the number of a claim that no consumer of ours gives."""
    if not (1 <= lease_ms <= LONGEST_LEASE_MS and 1 <= number < GATE):
        raise ServerRefused("ERR number or lease is out of bounds")


def check_fresh(slot: Slot, scores: Sequence[float]) -> None:
    """Refuse what a retry reads as, and what is no score."""
    for score in scores:
        if not is_fresh(slot, score):
            raise ServerRefused(f"ERR score {score} is out of bounds")


def check_not_moved(slot: Slot) -> None:
    """Refuse a caller with another slot count."""
    if slot.moved_to is not None:
        raise SlotMoved(f"the topic has {slot.moved_to} slots by now")
