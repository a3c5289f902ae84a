"""The shop's pages. `static/shop/shop.js` fetches their live parts again and again."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render

from example_project.prices.models import Product

SHOWN = 24


def shop_front(request: HttpRequest) -> HttpResponse:
    """The images that were rendered last."""
    rendered = Product.objects.exclude(rendered_at=None).order_by("-rendered_at")
    products = rendered.select_related("shop")[:SHOWN]
    outdated = Product.objects.outdated().count()
    return render(request, "prices/shop_front.html", {"products": products, "outdated": outdated})


def product(request: HttpRequest, sku: int) -> HttpResponse:
    """One product, which can be ordered."""
    shown = get_object_or_404(Product.objects.select_related("shop"), sku=sku)
    return render(request, "prices/product.html", {"product": shown})
