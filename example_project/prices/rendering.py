"""From a product to an image that shows its price: a drawn card stands for the photo, Pillow does the rest."""

from __future__ import annotations

import os
import threading
from decimal import Decimal
from functools import cache
from pathlib import Path

from django.conf import settings
from django.utils import timezone
from PIL import Image, ImageDraw, ImageFont

from example_project.prices.models import Photo, Product

SIZE = 360
KINDS = ("Mug", "Lamp", "Vase", "Clock", "Bowl", "Stool", "Kite", "Plant")


class PhotoMissing(Exception):
    """The product has no photo; trying again is of no use."""


class PhotoServerBusy(Exception):
    """The photo server did not answer in time; later it may."""


def render_price(product: Product, attempt: int = 1) -> bool:
    """Draw the product's current price onto its photo and show that image from now on.

    Says whether there was anything to do. Safe to run twice, and late: the file belongs to one version of the
    price, appears whole or not at all, and the row takes it only instead of an older one. `attempt` counts from 1.
    """
    if not product.outdated:
        return False
    image = photo_of(product, attempt)
    draw_price(image, product.price)

    name = f"renders/{product.sku}-{product.price_version}.png"
    path = Path(settings.MEDIA_ROOT) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    image.save(unfinished, "PNG", compress_level=1)
    unfinished.replace(path)

    older = Product.objects.filter(sku=product.sku, rendered_version__lt=product.price_version)
    taken = older.update(
        image=name,
        rendered_price=product.price,
        rendered_version=product.price_version,
        rendered_at=timezone.now(),
    )
    if not taken and not Product.objects.filter(sku=product.sku, image=name).exists():
        path.unlink(missing_ok=True)
    elif taken and product.image:
        Path(product.image.path).unlink(missing_ok=True)
    return bool(taken)


def photo_of(product: Product, attempt: int = 1) -> Image.Image:
    """The product's photo as an image of its own; PhotoMissing or PhotoServerBusy instead of some."""
    if product.photo == Photo.MISSING:
        raise PhotoMissing(f"product {product.sku} has no photo")
    if product.photo == Photo.SLOW_DISK and attempt < 3:
        raise PhotoServerBusy(f"no photo of product {product.sku} within a second (attempt {attempt})")
    image = _card(product.name.split()[-1], product.sku * 7 % 24).copy()
    draw = ImageDraw.Draw(image)
    draw.text((24, 22), product.name, font=_font(24), fill="#1d2330")
    draw.text((24, 54), f"No. {product.sku}", font=_font(15), fill="#5d6577")
    return image


def draw_price(image: Image.Image, price: Decimal) -> None:
    """Draw the price into the lower right corner, as on a price tag."""
    draw = ImageDraw.Draw(image)
    text = f"${price:,.2f}"
    width = int(draw.textlength(text, font=_font(34)))
    right, bottom = SIZE - 20, SIZE - 20
    draw.rounded_rectangle((right - width - 36, bottom - 60, right, bottom), radius=14, fill="#d92d4a")
    draw.text((right - width / 2 - 18, bottom - 30), text, font=_font(34), fill="white", anchor="mm")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


@cache
def _card(kind: str, hue: int) -> Image.Image:
    """The picture without words: the initial of this kind in this of 24 hues."""
    image = Image.new("RGB", (SIZE, SIZE), f"hsl({hue * 15}, 50%, 88%)")
    draw = ImageDraw.Draw(image)
    draw.ellipse((90, 90, 270, 270), fill=f"hsl({hue * 15}, 55%, 52%)")
    draw.text((SIZE / 2, SIZE / 2), kind[0], font=_font(120), fill="white", anchor="mm")
    return image
