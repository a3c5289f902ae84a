"""What happens in a shop all day: prices change, mostly those of a few products; orders come, some are paid."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from itertools import accumulate

from django.conf import settings
from django.utils import timezone

from django_rmq import send_message, send_messages
from example_project.orders.checkout import OutOfStock, create_order, pay_order
from example_project.orders.models import Order, State
from example_project.orders.tasks import confirm
from example_project.prices.changes import change_prices
from example_project.prices.models import Product

CHANGES_PER_ORDER = 100
PAID = 0.4
"""The part of the orders that is paid in time."""


def resume() -> None:
    """Send messages for all work that the database has open: they were lost with the Redis of an earlier run."""
    outdated = list(Product.objects.outdated().values_list("sku", flat=True))
    send_messages("price-changes", [{"sku": sku} for sku in outdated])
    for pk, due_at in Order.objects.filter(state=State.OPEN).values_list("pk", "due_at"):
        soon = timezone.now() + timedelta(seconds=1)
        send_message("order-timeouts", {"order": pk}, fixed_time=max(due_at, soon))
    for pk in Order.objects.filter(confirmed_at=None).values_list("pk", flat=True):
        confirm.enqueue(pk)


@dataclass
class Done:
    """What the traffic did so far; each is counted after the call returned."""

    price_changes: int = 0
    orders: int = 0
    paid: int = 0


class Traffic:
    """A day in the shop."""

    def __init__(self) -> None:
        self.done = Done()
        self._draw = random.Random()
        self._prices: dict[int, Decimal] = dict(Product.objects.values_list("sku", "price"))
        # Zipf: the second product changes half as often as the first, the third a third as often, …
        self._ranks = list(accumulate(1 / rank for rank in range(1, len(self._prices) + 1)))
        self._unpaid: list[tuple[float, Order]] = []

    def go_on(self, changes: int) -> None:
        """Have so many prices change, and now and then an order come or be paid."""
        if changes > 0:
            self._change_prices(changes)
        if self.done.price_changes // CHANGES_PER_ORDER > self.done.orders:
            self._order()
        self._pay()

    def _change_prices(self, count: int) -> None:
        """One source reports `count` new prices: a supplier, a promotion, a competitor's price."""
        changes = []
        for sku in self._draw.choices(list(self._prices), cum_weights=self._ranks, k=count):
            factor = Decimal(self._draw.randint(930, 1075)) / 1000
            price = (self._prices[sku] * factor).quantize(Decimal("0.01"))
            self._prices[sku] = min(max(price, Decimal(1)), Decimal(9999))
            changes.append((sku, self._prices[sku]))
        lost = [result for result in change_prices(changes) if not result.ok]
        if lost:
            raise RuntimeError(f"{len(lost)} of {count} price changes were not sent, such as {lost[0]}")
        self.done.price_changes += count

    def _order(self) -> None:
        try:
            order = create_order(self._draw.choice(list(self._prices)))
        except OutOfStock:
            return
        self.done.orders += 1
        if self._draw.random() < PAID:
            patience = settings.SHOP_ORDER_TIMEOUT.total_seconds() * self._draw.uniform(0.1, 0.9)
            self._unpaid.append((time.monotonic() + patience, order))

    def _pay(self) -> None:
        now = time.monotonic()
        for _, order in (ready := [entry for entry in self._unpaid if entry[0] <= now]):
            self.done.paid += pay_order(order)
        self._unpaid = [entry for entry in self._unpaid if entry not in ready]
