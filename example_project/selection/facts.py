"""What the sources say becomes what we know: the newest event of a source counts, whenever it comes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction

from example_project.selection.models import Batch, Item, Work
from example_project.selection.sources import SOURCES

LARGEST_SKU = 2**31 - 1
KEPT = 1_000
"""Batches of a query that are kept to look at; to know the last one would do."""


class Event(NamedTuple):
    """The newest that one source said of one item in a batch; `value` as text."""

    source: str
    sku: int
    version: int
    value: str


def take_in(
    query: str, number: int, events: Iterable[Event], *, rows: int, unusable: int = 0
) -> Batch | None:
    """Write a batch of `rows` events down to the newest; None if this batch has been written before.

    An event older than what is known changes nothing; a value that an item cannot have counts as unusable.
    """
    events = list(events)
    fields = {source.name: source.field for source in SOURCES}
    with transaction.atomic():
        if Batch.objects.filter(query=query, number=number).exists():
            return None
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
        return note(query, number, work=Work.INTAKE, rows=rows, unusable=unusable, items=len(changed))


def note(query: str, number: int, **figures: Any) -> Batch:
    """Write down that a batch has been written; call it in the transaction that writes it."""
    Batch.objects.filter(query=query, number__lt=number - KEPT).delete()
    return Batch.objects.create(query=query, number=number, **figures)
