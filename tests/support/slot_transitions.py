"""Checks in every test that a dispatcher makes no transition of a slot that the tables do not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from django_rmq.core.consumer import slots
from django_rmq.core.consumer.slots import ConsumedSlot

Transition = tuple[Enum, Enum]

TABLE: frozenset[Transition] = frozenset(
    (before, after)
    for table in (slots.SLOT_TRANSITIONS, slots.FETCH_TRANSITIONS)
    for before, followers in table.items()
    for after in followers
)

made: set[Transition] = set()
"""The transitions that this process has made."""


def check_transitions(report: Path | None = None) -> None:
    """Fail the dispatcher that makes an illegal transition from now on; append it to the file ``report``, if given."""
    tables: tuple[tuple[str, str, Mapping[Any, Any]], ...] = (
        ("change_state", "state", slots.SLOT_TRANSITIONS),
        ("change_fetch", "fetch", slots.FETCH_TRANSITIONS),
    )
    for method, attribute, table in tables:
        setattr(ConsumedSlot, method, _checking(attribute, table, report))


def _checking(
    attribute: str, table: Mapping[Any, Any], report: Path | None
) -> Callable[[ConsumedSlot, Any], None]:
    def change(slot: ConsumedSlot, after: Any) -> None:
        before = getattr(slot, attribute)
        if after not in table[before]:
            text = f"illegal transition of {slot.key}: {before} -> {after}"
            if report is not None:
                with report.open("a") as file:
                    file.write(f"{text}\n")
            raise AssertionError(text)
        made.add((before, after))
        setattr(slot, attribute, after)

    return change
