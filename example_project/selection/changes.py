"""Joining and leaving a set: the member, the note of the change, and the message about it, in one transaction.

A message says whose membership to look at, not what became of it. So it may merge, come twice, and come late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from django_rmq import Send, send_messages
from example_project.prices.models import Grade, Product
from example_project.selection.models import Change, Label, Member, ProductSet

TOPIC = "memberships"
PRIORITIES = {Grade.KEY_ACCOUNT: 500, Grade.STANDARD: 300, Grade.SMALL: 100}
"""Of messages about the items of a merchant; items that the shop does not sell come last."""
KEY_ACCOUNT_WAIT = timedelta(milliseconds=500)
"""How long changes of an item of a key account are collected; those of others wait as the topic says."""
MOST_ITEMS = 10_000
"""In one statement or evaluation: SQLite takes 32,766 values in a statement."""
KEPT = 1_000
"""Changes of a set that are kept to look at."""

Pair = tuple[int, int]
"""An item, and a set."""


def move(product_set: ProductSet, joined: Mapping[int, str], left: Mapping[int, str]) -> None:
    """Let items join and leave a set, each for a reason that people can read. Call it in a transaction.

    The messages are sent when that transaction commits; the outbox keeps them until Redis has them.
    """
    if not joined and not left:
        return
    Member.objects.bulk_create([Member(product_set=product_set, item_id=sku) for sku in sorted(joined)])
    for skus in _parts(left):
        Member.objects.filter(product_set=product_set, item__in=skus).delete()
    ProductSet.objects.filter(pk=product_set.pk).update(
        joined=F("joined") + len(joined), left=F("left") + len(left)
    )
    Change.objects.bulk_create(
        Change(product_set=product_set, item_id=sku, joined=has_joined, why=why)
        for has_joined, skus in ((True, joined), (False, left))
        for sku, why in sorted(skus.items())
    )
    newest = Change.objects.filter(product_set=product_set).order_by("-pk").values_list("pk", flat=True)
    for oldest in newest[KEPT : KEPT + 1]:
        Change.objects.filter(product_set=product_set, pk__lte=oldest).delete()
    send_on([(sku, product_set.pk) for sku in (*joined, *left)])


def send_on(pairs: Collection[Pair]) -> None:
    """Send a message for each item and set, those of key accounts with the highest priority."""
    for part in _parts(pairs):
        sold = Product.objects.filter(sku__in={item for item, _ in part})
        grades = dict(sold.values_list("sku", "shop__grade"))
        send_messages(
            TOPIC,
            [
                Send({"item": item, "set": pk}, priority=PRIORITIES[Grade(grades.get(item, Grade.SMALL))])
                for item, pk in part
            ],
        )


def key_accounts(skus: Iterable[int]) -> set[int]:
    """Return which of these items a key account sells."""
    found: set[int] = set()
    for part in _parts(skus):
        sold = Product.objects.filter(sku__in=part, shop__grade=Grade.KEY_ACCOUNT)
        found.update(sold.values_list("sku", flat=True))
    return found


def relabel(pairs: Collection[Pair]) -> None:
    """Make the labels of these items those of the sets that they are in now, and note when."""
    here = {"item__in": {item for item, _ in pairs}, "product_set__in": {pk for _, pk in pairs}}
    columns = ("item_id", "product_set_id")
    with transaction.atomic():
        members = set(Member.objects.filter(**here).values_list(*columns))
        labels = {(item, of): pk for pk, item, of in Label.objects.filter(**here).values_list("pk", *columns)}
        Label.objects.bulk_create(
            Label(item_id=item, product_set_id=of)
            for item, of in sorted(pairs)
            if (item, of) in members and (item, of) not in labels
        )
        gone = [labels[pair] for pair in pairs if pair in labels and pair not in members]
        Label.objects.filter(pk__in=gone).delete()
        waiting = Change.objects.filter(labelled_at=None, **here).values_list("pk", *columns)
        done = [pk for pk, item, of in waiting if (item, of) in pairs]
        for part in _parts(done):
            Change.objects.filter(pk__in=part).update(labelled_at=timezone.now())


def differing_labels() -> set[Pair]:
    """Return where the labels are not those of the members by now."""
    columns = ("item_id", "product_set_id")
    return set(Member.objects.values_list(*columns)) ^ set(Label.objects.values_list(*columns))


def _parts(values: Iterable[Any]) -> Iterator[list[Any]]:
    whole = list(values)
    for first in range(0, len(whole), MOST_ITEMS):
        yield whole[first : first + MOST_ITEMS]
