from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

FIELDS = ("title", "price", "stock", "rating")
"""What the sources report about an item."""

BOUNDS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "max_price": ("price", operator.le),
    "min_stock": ("stock", operator.ge),
    "min_rating": ("rating", operator.ge),
}
"""Field of a set → field of an item, and the comparison; a column of Spark understands the same operators."""


class Item(models.Model):
    """What the sources have reported about one item; a value that nobody has reported is null, or an empty title.

    Each value has the version of the event that set it: an event that comes late, or twice, changes nothing.
    """

    sku = models.PositiveIntegerField(primary_key=True)
    title = models.CharField(max_length=80, blank=True)
    price = models.DecimalField(max_digits=9, decimal_places=2, null=True, validators=[MinValueValidator(0)])
    stock = models.PositiveIntegerField(null=True, validators=[MinValueValidator(0)])
    rating = models.DecimalField(max_digits=2, decimal_places=1, null=True, validators=[MinValueValidator(0)])

    title_version = models.BigIntegerField(default=0, editable=False)
    price_version = models.BigIntegerField(default=0, editable=False)
    stock_version = models.BigIntegerField(default=0, editable=False)
    rating_version = models.BigIntegerField(default=0, editable=False)

    class Meta:
        ordering = ["sku"]

    def __str__(self) -> str:
        return f"{self.sku} {self.title}".strip()


class ProductSet(models.Model):
    """The items for which all bounds hold. `sets.save_set` changes a set, so that its members follow.

    `revision` rises when the bounds change: an evaluation by the older bounds is not written any more.
    `joined` and `left` count members since the set was made.
    """

    name = models.CharField(max_length=80, unique=True)
    title_contains = models.CharField(max_length=40, blank=True)
    max_price = models.DecimalField(max_digits=9, decimal_places=2, null=True, blank=True)
    min_stock = models.PositiveIntegerField(null=True, blank=True)
    min_rating = models.DecimalField(max_digits=2, decimal_places=1, null=True, blank=True)
    revision = models.PositiveIntegerField(default=1, editable=False)
    joined = models.PositiveBigIntegerField(default=0, editable=False)
    left = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def bounds(self) -> dict[str, Any]:
        """The bounds that are set."""
        values = {name: getattr(self, name) for name in ("title_contains", *BOUNDS)}
        return {name: value for name, value in values.items() if value not in (None, "")}

    @property
    def rule(self) -> str:
        """The bounds in words."""
        words = (f"{name.replace('_', ' ')} {value}" for name, value in self.bounds.items())
        return ", ".join(words) or "all items"

    def holds(self, item: Item) -> bool:
        """Whether the item belongs to the set. A bound of a value that nobody has reported does not hold."""
        if self.title_contains.lower() not in item.title.lower():
            return False
        for name, (field, compare) in BOUNDS.items():
            bound, value = getattr(self, name), getattr(item, field)
            if bound is not None and (value is None or not compare(value, bound)):
                return False
        return True


class Member(models.Model):
    """One item in one set."""

    product_set = models.ForeignKey(ProductSet, on_delete=models.CASCADE, related_name="members")
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="members")
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-since", "-id"]
        constraints = [models.UniqueConstraint(fields=["product_set", "item"], name="one_member_per_item")]

    def __str__(self) -> str:
        return f"{self.item} in {self.product_set}"


class Label(models.Model):
    """One item that is labelled with one set. It stands for what a search index or another service keeps.

    Labels follow the members through messages alone.
    """

    product_set = models.ForeignKey(ProductSet, on_delete=models.CASCADE, related_name="labels")
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="labels")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["product_set", "item"], name="one_label_per_item")]

    def __str__(self) -> str:
        return f"{self.item} labelled {self.product_set}"


class Batch(models.Model):
    """A batch that Spark has written, so that it is not written again after a crash.

    `query` is the identity of its checkpoint, `number` Spark's own. `rows` counts events (intake) or messages
    (evaluation), `unusable` those of them that made no sense.
    """

    query = models.CharField(max_length=64)
    number = models.BigIntegerField()
    work = models.CharField(max_length=10)
    at = models.DateTimeField(default=timezone.now)
    rows = models.PositiveIntegerField()
    unusable = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["-at", "-id"]
        verbose_name_plural = "batches"
        constraints = [models.UniqueConstraint(fields=["query", "number"], name="one_batch_per_number")]

    def __str__(self) -> str:
        return f"{self.work} {self.number}"
