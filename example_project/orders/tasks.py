"""The shop's mails. Any worker of the shop sends them: `TASKS` in the settings is all that this needs."""

from __future__ import annotations

from django.core.mail import EmailMessage
from django.utils import timezone

from example_project.orders.models import Order

try:
    from django.tasks import task
except ImportError:  # Django 5.2
    from django_tasks import task  # type: ignore[no-redef]


@task(priority=10)
def confirm(pk: int) -> bool:
    """Send the confirmation of an order, unless it was sent before; return whether it was."""
    order = Order.objects.select_related("product").get(pk=pk)
    if order.confirmed_at is not None:
        return False
    EmailMessage(
        f"Your order {pk}",
        f"{order.quantity} × {order.product.name}: {order.total}. Please pay until {order.due_at:%H:%M}.",
        "shop@example.com",
        [f"customer-{pk}@example.com"],
    ).send()
    Order.objects.filter(pk=pk).update(confirmed_at=timezone.now())
    return True
