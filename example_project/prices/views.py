from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render

from example_project.prices.models import Product

SHOWN = 24


def _newest() -> dict[str, Any]:
    return {
        "products": Product.objects.rendered().select_related("shop")[:SHOWN],
        "outdated": Product.objects.outdated().count(),
    }


def shop_front(request: HttpRequest) -> HttpResponse:
    """The images that were rendered last."""
    return render(request, "prices/shop_front.html", _newest())


def newest(request: HttpRequest) -> HttpResponse:
    """The live part of the shop front."""
    return render(request, "prices/_newest.html", _newest())


def product(request: HttpRequest, sku: int) -> HttpResponse:
    """One product, which can be ordered."""
    found = get_object_or_404(Product.objects.select_related("shop"), sku=sku)
    return render(request, "prices/product.html", {"product": found})


def product_image(request: HttpRequest, sku: int) -> HttpResponse:
    """The live part of a product's page."""
    return render(request, "prices/_product.html", {"product": get_object_or_404(Product, sku=sku)})
