"""What the demo does after a start with an empty Redis: messages and tasks for all work that is open in its database."""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from django_rmq import send_message, send_messages
from example_project.orders.models import Order, State
from example_project.orders.tasks import confirm
from example_project.prices.models import Product


def resume() -> None:
    """Send messages for outdated images and open orders; those that already wait merge."""
    outdated = list(Product.objects.outdated().values_list("sku", flat=True))
    send_messages("price-changes", [{"sku": sku} for sku in outdated])
    for pk, due_at in Order.objects.filter(state=State.OPEN).values_list("pk", "due_at"):
        soon = timezone.now() + timedelta(seconds=1)
        send_message("order-timeouts", {"order": pk}, fixed_time=max(due_at, soon))
    for pk in Order.objects.filter(confirmed_at=None).values_list("pk", flat=True):
        confirm.enqueue(pk)
