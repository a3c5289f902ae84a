from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction

from example_project.prices.models import Grade, Photo, Product, Shop
from example_project.prices.rendering import KINDS

SHOPS = (
    ("Harbour & Sons", Grade.KEY_ACCOUNT),
    ("Northlight", Grade.KEY_ACCOUNT),
    ("Old Mill Goods", Grade.STANDARD),
    ("Kestrel House", Grade.STANDARD),
    ("Blue Door", Grade.STANDARD),
    ("Tin & Timber", Grade.SMALL),
    ("Pocket Garden", Grade.SMALL),
    ("Second Shelf", Grade.SMALL),
    ("Marrow Lane", Grade.SMALL),
    ("The Odd Cup", Grade.SMALL),
)
ADJECTIVES = ("Amber", "Birch", "Coral", "Dusk", "Ember", "Fern", "Granite", "Hazel", "Indigo", "Juniper")
SURFACES = ("Glazed", "Plain", "Ribbed", "Speckled", "Striped", "Tall", "Wide")

# Where failures show: both are among the products whose price changes all the time.
SLOW_DISK_SKU = 3
MISSING_SKU = 5


class Command(BaseCommand):
    help = "Fill the catalogue with the same shops and products every time. Existing ones stay unchanged."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--products", type=int, default=2000, help="number of products (default 2000)")

    def handle(self, *args: Any, **options: Any) -> None:
        draw = Random(20)
        with transaction.atomic():
            Shop.objects.bulk_create(
                [
                    Shop(id=number, name=name, grade=grade)
                    for number, (name, grade) in enumerate(SHOPS, start=1)
                ],
                ignore_conflicts=True,
            )
            before = Product.objects.count()
            Product.objects.bulk_create(
                [self._product(sku, draw) for sku in range(1, options["products"] + 1)],
                ignore_conflicts=True,
                batch_size=500,
            )
            created = Product.objects.count() - before
        self.stdout.write(f"{len(SHOPS)} shops, {before + created} products ({created} new)")

    def _product(self, sku: int, draw: Random) -> Product:
        photo = {SLOW_DISK_SKU: Photo.SLOW_DISK, MISSING_SKU: Photo.MISSING}.get(sku, Photo.GOOD)
        return Product(
            sku=sku,
            name=f"{draw.choice(ADJECTIVES)} {draw.choice(SURFACES)} {draw.choice(KINDS)}",
            shop_id=sku % len(SHOPS) + 1,
            photo=photo,
            price=Decimal(draw.randint(300, 19_999)) / 100,
        )
