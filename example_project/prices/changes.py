"""The one way to change a price: whoever does, the image follows."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from django.db import transaction
from django.db.models import F

from django_rmq import SendResults, send_messages
from example_project.prices.models import Product


def change_prices(changes: Iterable[tuple[int, Decimal]]) -> SendResults:
    """Set prices by (sku, price), the last of a sku counts, and have the images rendered again.

    A message carries no price: whoever renders reads the current one, so that five changes in five
    seconds may be one message. The messages are sent when the transaction commits, or not at all.
    """
    changes = list(changes)
    with transaction.atomic():
        for sku, price in dict(changes).items():
            Product.objects.filter(sku=sku).update(price=price, price_version=F("price_version") + 1)
        return send_messages("price-changes", [{"sku": sku} for sku, _ in changes])
