"""What happens after a price has changed. `manage.py runrmqconsumers` imports this module."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django_rmq import Message, Reject, listener, send_messages
from example_project.prices.models import Grade, Product
from example_project.prices.rendering import PhotoMissing, render_price

RENDER_PRIORITY = {Grade.KEY_ACCOUNT: 500, Grade.STANDARD: 300, Grade.SMALL: 100}


@listener("price-changes", batch_size=200)
def order_renders(messages: list[Message]) -> None:
    """Ask for new images, key accounts first.

    Also where the image shows this very price already: a renderer at work right now may have read
    the price before.
    """
    merchants = {
        sku: (shop, grade)
        for sku, shop, grade in Product.objects.filter(
            sku__in=[message.body["sku"] for message in messages]
        ).values_list("sku", "shop_id", "shop__grade")
    }
    bodies_of: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for message in messages:
        sku = message.body["sku"]
        if sku not in merchants:
            message.reject(f"there is no product {sku}")
            continue
        shop, grade = merchants[sku]
        bodies_of[RENDER_PRIORITY[Grade(grade)]].append({"sku": sku, "shop": shop})
    for priority, bodies in bodies_of.items():
        send_messages("image-renders", bodies, priority=priority)


@listener("image-renders")
def render(message: Message) -> None:
    """Draw the price of this moment onto the product's image."""
    product = Product.objects.filter(sku=message.body["sku"]).first()
    if product is None:
        raise Reject(f"there is no product {message.body['sku']}")
    try:
        render_price(product, attempt=message.topic.max_retries - message.retries_left + 1)
    except PhotoMissing as missing:
        # Waiting will not bring a photo: into Dead at once, where a person finds it, and can replay it.
        raise Reject(str(missing)) from missing
