"""Items, sets and their members: how events are written, a rule is changed, and an evaluation is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F

from django_rmq import Send, SendResults, send_messages
from example_project.prices.models import PRIORITIES, Grade, Product
from example_project.product_sets.models import BOUNDS, FIELDS, Batch, Item, Label, Member, ProductSet

CHANGES, MEMBERSHIPS = "item-changes", "memberships"
INTAKE, EVALUATION = "intake", "evaluation"
MOST_ITEMS = 10_000
"""In one evaluation: SQLite takes 32,766 values in a statement."""

FIRST_SETS: list[dict[str, Any]] = [
    {"name": "Under twenty", "max_price": 20, "min_stock": 1},
    {"name": "Mugs in stock", "title_contains": "mug", "min_stock": 1},
    {"name": "Best rated", "min_rating": "4.5"},
    {"name": "Good lamps", "title_contains": "lamp", "min_rating": 3},
]

Pair = tuple[int, int]
"""An item, and a set."""


class Event(NamedTuple):
    """The newest report about one field of one item; `value` is text."""

    field: str
    sku: int
    version: int
    value: str


def write_events(events: Collection[Event]) -> int:
    """Write reported values, and return how many an item cannot have; those are left out.

    An event that is no newer than the known value changes nothing, so a batch may be written again.
    """
    unusable = 0
    columns = {column.name: column for column in Item._meta.concrete_fields}
    with transaction.atomic():
        items = Item.objects.in_bulk({event.sku for event in events})
        changed = {}
        for field, sku, version, value in events:
            try:
                cleaned = columns[field].clean(value, None)
            except ValidationError:
                unusable += 1
                continue
            item = items.setdefault(sku, Item(sku=sku))
            if version > getattr(item, f"{field}_version"):
                setattr(item, field, cleaned)
                setattr(item, f"{field}_version", version)
                changed[sku] = item
        Item.objects.bulk_create(
            changed.values(),
            update_conflicts=True,
            unique_fields=["sku"],
            update_fields=[name for field in FIELDS for name in (field, f"{field}_version")],
        )
    return unusable


def create_first_sets() -> None:
    """Create a few sets, unless some exist."""
    if not ProductSet.objects.exists():
        for fields in FIRST_SETS:
            save_set(ProductSet(**fields))


def save_set(product_set: ProductSet) -> None:
    """Save a set. If its bounds are new, all items are evaluated again once the transaction commits."""
    product_set.full_clean()
    with transaction.atomic():
        before = ProductSet.objects.select_for_update().filter(pk=product_set.pk).first()
        has_new_bounds = before is None or before.bounds != product_set.bounds
        if before is None:
            product_set.save(force_insert=True)
        else:
            product_set.revision = before.revision + has_new_bounds
            # Spark writes the other columns meanwhile.
            product_set.save(update_fields=["name", "revision", "title_contains", *BOUNDS])
        if has_new_bounds:
            evaluate_all()


def delete_set(product_set: ProductSet) -> None:
    """Delete a set; its members leave it."""
    with transaction.atomic():
        send_memberships(
            [(sku, product_set.pk) for sku in product_set.members.values_list("item_id", flat=True)]
        )
        product_set.delete()


def evaluate_all() -> SendResults:
    """Send a message for each item. It merges with the messages about other changes of the item."""
    return send_messages(CHANGES, [{"item": sku} for sku in Item.objects.values_list("sku", flat=True)])


def is_written(query: str, number: int) -> bool:
    """Whether this batch has been written."""
    return Batch.objects.filter(query=query, number=number).exists()


class Evaluation(NamedTuple):
    """What one batch found: the items it evaluated, and which of them belong to which set."""

    items: Collection[int]
    revisions: Mapping[int, int]
    """Set → the revision of the bounds it was evaluated by."""
    belonging: Mapping[int, set[int]]
    """Set → those of the items for which its bounds hold."""


def write_evaluation(
    query: str, number: int, evaluation: Evaluation, *, rows: int, unusable: int = 0
) -> bool:
    """Make the members of the sets follow an evaluation; False if this batch has been written before.

    The messages about members are sent by the same transaction. A set whose bounds have changed since is left alone:
    the messages that came with the change have all its items evaluated.
    """
    with transaction.atomic():
        if is_written(query, number):
            return False
        known = set(Item.objects.filter(sku__in=evaluation.items).values_list("sku", flat=True))
        for product_set in ProductSet.objects.filter(pk__in=evaluation.revisions):
            if product_set.revision == evaluation.revisions[product_set.pk]:
                _replace_members(product_set, known, evaluation.belonging[product_set.pk] & known)
        Batch.objects.create(query=query, number=number, work=EVALUATION, rows=rows, unusable=unusable)
    return True


def _replace_members(product_set: ProductSet, evaluated: set[int], belonging: set[int]) -> None:
    members = Member.objects.filter(product_set=product_set, item__in=evaluated)
    present = set(members.values_list("item_id", flat=True))
    joined, left = sorted(belonging - present), sorted(present - belonging)
    Member.objects.bulk_create(Member(product_set=product_set, item_id=sku) for sku in joined)
    members.filter(item__in=left).delete()
    ProductSet.objects.filter(pk=product_set.pk).update(
        joined=F("joined") + len(joined), left=F("left") + len(left)
    )
    send_memberships([(sku, product_set.pk) for sku in (*joined, *left)])


def send_memberships(pairs: Collection[Pair]) -> None:
    """Send a message for each item and set, those of key accounts with the highest priority.

    Items that the shop does not sell come last. A message names a membership, and does not say what became of it. So it
    may merge, come twice, and come late.
    """
    sold = Product.objects.filter(sku__in={item for item, _ in pairs})
    grades = dict(sold.values_list("sku", "shop__grade"))
    send_messages(
        MEMBERSHIPS,
        [
            Send({"item": item, "set": pk}, priority=PRIORITIES[Grade(grades.get(item, Grade.SMALL))])
            for item, pk in pairs
        ],
    )


def update_labels(pairs: Collection[Pair]) -> None:
    """Make the labels of these items follow the sets that they are in now."""
    within = {"item__in": {item for item, _ in pairs}, "product_set__in": {pk for _, pk in pairs}}
    with transaction.atomic():
        members = _pairs(Member.objects.filter(**within)) & set(pairs)
        labels = _pairs(Label.objects.filter(**within)) & set(pairs)
        Label.objects.bulk_create(
            Label(item_id=item, product_set_id=pk) for item, pk in sorted(members - labels)
        )
        for item, pk in labels - members:
            Label.objects.filter(item=item, product_set=pk).delete()


def differing_labels() -> set[Pair]:
    """Return the memberships whose label is missing, and the labels without a membership."""
    return _pairs(Member.objects.all()) ^ _pairs(Label.objects.all())


def differing_members() -> dict[str, set[int]]:
    """Return set → the items that are missing or too many by now, by plain Python."""
    items = list(Item.objects.all())
    differing = {}
    for product_set in ProductSet.objects.all():
        belonging = {item.sku for item in items if product_set.holds(item)}
        if items_differing := belonging ^ set(product_set.members.values_list("item_id", flat=True)):
            differing[product_set.name] = items_differing
    return differing


def _pairs(rows: Any) -> set[Pair]:
    return set(rows.values_list("item_id", "product_set_id"))
