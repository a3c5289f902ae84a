"""What happens in a shop all day: prices change, mostly those of a few products; orders come, some are paid."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from itertools import accumulate

from django.conf import settings
from django.db import connection
from django.utils import timezone

from django_rmq import send_message, send_messages
from example_project.orders.checkout import OutOfStock, create_order, pay_order
from example_project.orders.models import Order, State
from example_project.orders.tasks import confirm
from example_project.prices.changes import change_prices
from example_project.prices.models import Product

TICK_SECONDS = 0.1
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


class Traffic(threading.Thread):
    """Changes `rate` prices per second until `stop()`; what went wrong is in `error` then."""

    def __init__(self, rate: float) -> None:
        super().__init__(name="traffic")
        self.rate = rate
        self.done = Done()
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._draw = random.Random()
        self._prices: dict[int, Decimal] = {}
        self._ranks: list[float] = []
        self._unpaid: list[tuple[float, Order]] = []

    def stop(self) -> None:
        """Let the tick under way end, and return when it has."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        try:
            self._prices = dict(Product.objects.values_list("sku", "price"))
            # Zipf: the second product changes half as often as the first, the third a third as often, …
            self._ranks = list(accumulate(1 / rank for rank in range(1, len(self._prices) + 1)))
            began = time.monotonic()
            while not self._stopping.wait(TICK_SECONDS):
                wanted = (time.monotonic() - began) * self.rate
                self._change_prices(round(wanted) - self.done.price_changes)
                if self.done.price_changes // CHANGES_PER_ORDER > self.done.orders:
                    self._order()
                self._pay()
        except Exception as error:  # noqa: BLE001 - a thread cannot raise to its starter, which reads `error`
            self.error = error
        finally:
            connection.close()

    def _change_prices(self, count: int) -> None:
        """One source reports `count` new prices: a supplier, a promotion, a competitor's price."""
        if count < 1:
            return
        changes = []
        for sku in self._draw.choices(list(self._prices), cum_weights=self._ranks, k=count):
            factor = Decimal(self._draw.randint(930, 1075)) / 1000
            price = min(
                max((self._prices[sku] * factor).quantize(Decimal("0.01")), Decimal(1)), Decimal(9999)
            )
            self._prices[sku] = price
            changes.append((sku, price))
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
