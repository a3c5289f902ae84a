"""What the sources say becomes what we know: the newest event of a source counts, whenever it comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction

from example_project.selection.models import Batch, Item
from example_project.selection.sources import SOURCES

LARGEST_SKU = 2**31 - 1
KEPT = 10_000
"""Batches of a query that are kept to look at; to know the last one would do."""


class Event(NamedTuple):
    """The newest that one source said of one item in a batch; `value` as text."""

    source: str
    sku: int
    version: int
    value: str


def take_in(events: Iterable[Event]) -> int:
    """Write events down, and return how many say what an item cannot be; those are left out.

    An event that is no newer than what is known changes nothing: a batch may be taken in again.
    """
    fields = {source.name: source.field for source in SOURCES}
    unusable = 0
    events = list(events)
    with transaction.atomic():
        items = Item.objects.in_bulk({event.sku for event in events})
        changed = {}
        for event in events:
            field = fields[event.source]
            told = Item(sku=event.sku, **{field: event.value})
            try:
                told.clean_fields(exclude=set(fields.values()) - {field})
            except ValidationError:
                unusable += 1
                continue
            item = items.setdefault(event.sku, Item(sku=event.sku))
            if event.version > getattr(item, f"{field}_version"):
                setattr(item, field, getattr(told, field))
                setattr(item, f"{field}_version", event.version)
                changed[event.sku] = item
        Item.objects.bulk_create(
            changed.values(),
            update_conflicts=True,
            unique_fields=["sku"],
            update_fields=[name for field in fields.values() for name in (field, f"{field}_version")],
        )
    return unusable


def is_noted(query: str, number: int) -> bool:
    """Whether this batch has been done."""
    return Batch.objects.filter(query=query, number=number).exists()


def note(query: str, number: int, **figures: Any) -> Batch:
    """Write down that a batch has been done."""
    Batch.objects.filter(query=query, number__lt=number - KEPT).delete()
    return Batch.objects.create(query=query, number=number, **figures)
