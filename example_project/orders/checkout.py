"""An order's life: created, then paid or closed. Each step may be repeated and changes nothing the second time."""

from __future__ import annotations

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.shortcuts import get_object_or_404
from django.utils import timezone

from django_rmq import remove_message, send_message
from example_project.orders.models import Order, State
from example_project.orders.tasks import confirm
from example_project.prices.models import Product


class OutOfStock(Exception):
    """Fewer are left than were ordered."""


def create_order(sku: int, quantity: int = 1) -> Order:
    """Reserve the goods and have the order closed at its time; OutOfStock or Http404 instead.

    The message goes out when the transaction commits, and so does the mail: none for an order that never was.
    """
    with transaction.atomic():
        product = get_object_or_404(Product, sku=sku)
        if not Product.objects.filter(sku=sku, stock__gte=quantity).update(stock=F("stock") - quantity):
            raise OutOfStock(f"Fewer than {quantity} of {product.name} are left.")
        now = timezone.now()
        order = Order.objects.create(
            product=product,
            quantity=quantity,
            total=product.price * quantity,
            created_at=now,
            due_at=now + settings.SHOP_ORDER_TIMEOUT,
        )
        send_message("order-timeouts", {"order": order.pk}, fixed_time=order.due_at)
        confirm.enqueue(order.pk)
    return order


def pay_order(order: Order) -> bool:
    """Mark the order as paid and take its message back; False if it is closed. Paying twice is paying once."""
    with transaction.atomic():
        if Order.objects.filter(pk=order.pk, state=State.OPEN).update(
            state=State.PAID, paid_at=timezone.now()
        ):
            # It would find the order paid and do nothing; removing it only saves the work.
            remove_message("order-timeouts", {"order": order.pk})
    order.refresh_from_db()
    return order.state == State.PAID


def close_order(pk: int) -> bool:
    """Close an order that nobody paid and put the goods back on the shelf; says whether it was open."""
    with transaction.atomic():
        open_order = Order.objects.filter(pk=pk, state=State.OPEN)
        if not open_order.update(state=State.CLOSED, closed_at=timezone.now()):
            return False
        order = Order.objects.only("product_id", "quantity").get(pk=pk)
        Product.objects.filter(sku=order.product_id).update(stock=F("stock") + order.quantity)
    return True
