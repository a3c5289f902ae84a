from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST

from example_project.orders.checkout import OutOfStock, create_order, pay_order
from example_project.orders.models import Order, State

SHOWN = 50


def orders(request: HttpRequest) -> HttpResponse:
    """The newest orders."""
    counts = {state.label: Order.objects.filter(state=state).count() for state in State}
    newest = Order.objects.select_related("product")[:SHOWN]
    return render(request, "orders/orders.html", {"orders": newest, "counts": counts})


def order(request: HttpRequest, pk: int) -> HttpResponse:
    """One order, which can be paid while it is open."""
    shown = get_object_or_404(Order.objects.select_related("product__shop"), pk=pk)
    return render(request, "orders/order.html", {"order": shown})


@require_POST
def create(request: HttpRequest, sku: int) -> HttpResponse:
    """Order one of a product."""
    try:
        return redirect(create_order(sku))
    except OutOfStock as error:
        messages.error(request, str(error))
        return redirect("product", sku)


@require_POST
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    """Pay an order, if it is still open."""
    order = get_object_or_404(Order, pk=pk)
    if not pay_order(order):
        messages.error(request, "This order was already closed; the goods are back in stock.")
    return redirect(order)
