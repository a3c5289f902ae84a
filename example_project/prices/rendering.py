"""From a product to an image that shows its price: a drawn card stands for the photo, Pillow does the rest."""

from __future__ import annotations

import colorsys
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
SCALE = 2
"""Shapes are drawn this much larger and scaled down: Pillow draws jagged edges."""

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
    kind = product.name.split()[-1]
    image = _card(kind if kind in KINDS else KINDS[product.sku % len(KINDS)], product.sku * 7 % 24).copy()
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
    """The picture without words: a thing of this kind in this of 24 hues."""

    def tone(lightness: float, saturation: float) -> tuple[int, int, int]:
        red, green, blue = colorsys.hls_to_rgb(hue / 24, lightness, saturation)
        return round(red * 255), round(green * 255), round(blue * 255)

    side = SIZE * SCALE
    image = Image.new("RGB", (side, side), tone(0.88, 0.5))
    draw = ImageDraw.Draw(image)
    body, dark, light = tone(0.52, 0.55), tone(0.36, 0.55), tone(0.94, 0.6)

    def at(*points: float) -> list[float]:
        """Coordinates are given on a card of 100 × 100."""
        return [point * side / 100 for point in points]

    draw.ellipse(at(-20, 62, 120, 150), fill=tone(0.8, 0.45))
    draw.ellipse(at(26, 73, 70, 80), fill=tone(0.7, 0.4))
    match kind:
        case "Mug":
            draw.ellipse(at(58, 42, 80, 66), outline=dark, width=int(side * 0.04))
            draw.rounded_rectangle(at(28, 34, 66, 77), radius=side * 0.05, fill=body)
            draw.ellipse(at(28, 30, 66, 40), fill=dark)
        case "Lamp":
            draw.rectangle(at(46, 50, 50, 74), fill=dark)
            draw.ellipse(at(34, 72, 62, 78), fill=dark)
            draw.polygon(at(38, 26, 58, 26, 70, 54, 26, 54), fill=body)
            draw.ellipse(at(42, 52, 54, 60), fill=light)
        case "Vase":
            draw.ellipse(at(30, 42, 66, 78), fill=body)
            draw.polygon(at(43, 26, 53, 26, 56, 48, 40, 48), fill=body)
            draw.ellipse(at(41, 23, 55, 29), fill=dark)
        case "Clock":
            draw.ellipse(at(24, 28, 72, 76), fill=dark)
            draw.ellipse(at(28, 32, 68, 72), fill=light)
            draw.line(at(48, 52, 48, 38), fill=dark, width=int(side * 0.02))
            draw.line(at(48, 52, 59, 57), fill=body, width=int(side * 0.02))
        case "Bowl":
            draw.pieslice(at(22, 30, 74, 78), 0, 180, fill=body)
            draw.ellipse(at(22, 48, 74, 60), fill=dark)
        case "Stool":
            draw.polygon(at(32, 46, 37, 46, 31, 77, 26, 77), fill=dark)
            draw.polygon(at(59, 46, 64, 46, 70, 77, 65, 77), fill=dark)
            draw.rounded_rectangle(at(24, 38, 72, 48), radius=side * 0.03, fill=body)
        case "Kite":
            draw.line(at(48, 70, 56, 78, 66, 74), fill=dark, width=int(side * 0.012))
            draw.polygon(at(48, 24, 68, 42, 48, 70, 28, 42), fill=body)
            draw.polygon(at(48, 24, 68, 42, 48, 42), fill=light)
        case _:
            for x, y in ((28, 34), (56, 32), (42, 22)):
                draw.ellipse(at(x, y, x + 16, y + 26), fill=dark)
            draw.polygon(at(32, 54, 66, 54, 61, 77, 37, 77), fill=body)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)
