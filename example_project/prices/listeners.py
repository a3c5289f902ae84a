"""What happens after a price has changed. `manage.py runrmqconsumers` imports this module."""

from __future__ import annotations

from django_rmq import Message, Reject, Send, listener, send_messages
from example_project.prices.models import PRIORITIES, Grade, Product
from example_project.prices.rendering import PhotoMissing, render_price


@listener("price-changes", batch_size=200)
def order_renders(messages: list[Message]) -> None:
    """Ask for new images, key accounts first.

    Also where the image shows this very price already: a renderer at work right now may have read
    the price before.
    """
    products = Product.objects.select_related("shop").in_bulk({message.body["sku"] for message in messages})
    renders = []
    for message in messages:
        product = products.get(message.body["sku"])
        if product is None:
            message.reject(f"there is no product {message.body['sku']}")
            continue
        priority = PRIORITIES[Grade(product.shop.grade)]
        renders.append(Send({"sku": product.sku, "shop": product.shop_id}, priority=priority))
    send_messages("image-renders", renders)


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
