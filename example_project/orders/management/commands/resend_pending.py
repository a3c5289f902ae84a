from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from django_rmq import send_message, send_messages
from example_project.orders.models import Order, State
from example_project.prices.models import Product


class Command(BaseCommand):
    help = (
        "Send messages for all work that is open in the database: outdated images and open orders. Use it "
        "after Redis has lost its data. Otherwise it is harmless, because messages merge with waiting ones."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        outdated = list(Product.objects.outdated().values_list("sku", flat=True))
        send_messages("price-changes", [{"sku": sku} for sku in outdated])
        orders = list(Order.objects.filter(state=State.OPEN).values_list("pk", "due_at"))
        for pk, due_at in orders:
            soon = timezone.now() + timedelta(seconds=1)
            send_message("order-timeouts", {"order": pk}, fixed_time=max(due_at, soon))
        self.stdout.write(f"{len(outdated)} outdated images, {len(orders)} open orders")
