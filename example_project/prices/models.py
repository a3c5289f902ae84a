from __future__ import annotations

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.urls import reverse


class Grade(models.TextChoices):
    """What a merchant is to us; the better the grade, the sooner its images are rendered."""

    KEY_ACCOUNT = "KA", "Key account"
    STANDARD = "A", "Standard"
    SMALL = "B", "Small"


PRIORITIES = {Grade.KEY_ACCOUNT: 500, Grade.STANDARD: 300, Grade.SMALL: 100}
"""Of messages about the products of a merchant."""


class Photo(models.TextChoices):
    """What the photo server does when it is asked for a product's photo."""

    GOOD = "good", "There"
    SLOW_DISK = "slow", "There at the third attempt"
    MISSING = "missing", "Missing"


class Shop(models.Model):
    name = models.CharField(max_length=80, unique=True)
    grade = models.CharField(max_length=2, choices=Grade.choices, default=Grade.SMALL)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return self.name


class ProductQuerySet(models.QuerySet["Product"]):
    def outdated(self) -> ProductQuerySet:
        """Products whose image does not show the current price yet."""
        return self.filter(price_version__gt=F("rendered_version"))


class Product(models.Model):
    """One article of the catalogue.

    `price_version` counts the price changes; `rendered_version` is the one that the image shows. A renderer
    writes only over an older version, so that one that was slow, or that ran twice, does no harm.
    """

    sku = models.PositiveIntegerField(primary_key=True)
    name = models.CharField(max_length=80)
    shop = models.ForeignKey(Shop, on_delete=models.CASCADE, related_name="products")
    photo = models.CharField(max_length=8, choices=Photo.choices, default=Photo.GOOD)
    stock = models.PositiveIntegerField(default=100)

    price = models.DecimalField(max_digits=9, decimal_places=2, validators=[MinValueValidator(0)])
    price_version = models.PositiveIntegerField(default=0, editable=False)

    image = models.FileField(upload_to="renders", blank=True, editable=False)
    rendered_price = models.DecimalField(max_digits=9, decimal_places=2, null=True, editable=False)
    rendered_version = models.PositiveIntegerField(default=0, editable=False)
    rendered_at = models.DateTimeField(null=True, editable=False)

    objects = ProductQuerySet.as_manager()

    class Meta:
        ordering = ["sku"]
        indexes = [
            models.Index(fields=["-rendered_at"], name="newest_renders"),
            models.Index(
                fields=["sku"], name="outdated_images", condition=Q(price_version__gt=F("rendered_version"))
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        return reverse("product", args=[self.sku])

    @property
    def outdated(self) -> bool:
        return self.price_version > self.rendered_version
