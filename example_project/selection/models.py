from __future__ import annotations

from datetime import datetime

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from example_project.selection import rules
from example_project.selection.rules import Facts, RuleError

TIME = "%d %b %H:%M:%S UTC"


class Item(models.Model):
    """What the sources have last said of one item; what nobody has told yet is null, or an empty title.

    Each source has a version, which rises with its events: an event that comes late, or twice, changes nothing.
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

    @property
    def facts(self) -> Facts:
        """What rules look at."""
        return {
            "price": self.price,
            "stock": self.stock,
            "rating": self.rating,
            "title": rules.folded(self.title),
        }


def validate_rule(text: str) -> None:
    """Raise ValidationError for a rule that cannot be read."""
    try:
        rules.parse(text)
    except RuleError as error:
        raise ValidationError(str(error)) from error


class ProductSet(models.Model):
    """Items that a rule holds for. Changed by `sets.save_set`, so that the members follow.

    A set is `running` from `starts_at` until `ends_at` if it is active; a set that is not has no members. `revision`
    rises when the rule changes, or the set begins or ends: an evaluation of before is not written any more. `joined`
    and `left` count members since the set was made.
    """

    name = models.CharField(max_length=80, unique=True)
    rule = models.TextField(max_length=rules.LONGEST, validators=[validate_rule])
    active = models.BooleanField(default=True, help_text="A set that is not active has no members.")
    starts_at = models.DateTimeField(null=True, blank=True, help_text="Empty: at once.")
    ends_at = models.DateTimeField(null=True, blank=True, help_text="Empty: never.")
    running = models.BooleanField(default=True, editable=False)
    revision = models.PositiveIntegerField(default=1, editable=False)
    joined = models.PositiveBigIntegerField(default=0, editable=False)
    left = models.PositiveBigIntegerField(default=0, editable=False)
    items: models.ManyToManyField[Item, Member] = models.ManyToManyField(
        Item, through="Member", related_name="sets"
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if self.starts_at and self.ends_at and self.starts_at >= self.ends_at:
            raise ValidationError({"ends_at": "A set must begin before it ends."})

    def is_due(self, now: datetime) -> bool:
        """Whether the set should be running."""
        begun = self.starts_at is None or self.starts_at <= now
        return self.active and begun and (self.ends_at is None or now < self.ends_at)

    def next_time(self, now: datetime) -> datetime | None:
        """When it begins or ends next."""
        times = [at for at in (self.starts_at, self.ends_at) if at is not None and at > now]
        return min(times) if times and self.active else None

    @property
    def when(self) -> str:
        """Why it is not running, or until when it is, in words; empty if it simply runs."""
        if not self.active:
            return "not active"
        if self.running:
            return f"until {self.ends_at:{TIME}}" if self.ends_at else ""
        if self.ends_at and self.ends_at <= timezone.now():
            return f"ended {self.ends_at:{TIME}}"
        return f"begins {self.starts_at:{TIME}}"

    @property
    def parsed(self) -> rules.Rule:
        """The rule as a tree. Raises RuleError for one that was never validated."""
        return rules.parse(self.rule)


class Member(models.Model):
    """One item in one set."""

    product_set = models.ForeignKey(ProductSet, on_delete=models.CASCADE, related_name="members")
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="memberships")
    since = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-since", "item"]
        constraints = [models.UniqueConstraint(fields=["product_set", "item"], name="item_once_per_set")]
        indexes = [models.Index(fields=["-since"], name="newest_members")]

    def __str__(self) -> str:
        return f"{self.item} in {self.product_set}"


class Change(models.Model):
    """One item that joined or left one set: when, and the facts that decided it.

    `labelled_at`: when the listener of the message about it had made the labels follow.
    """

    product_set = models.ForeignKey(ProductSet, on_delete=models.CASCADE, related_name="changes")
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="changes")
    joined = models.BooleanField()
    why = models.CharField(max_length=200)
    at = models.DateTimeField(default=timezone.now)
    labelled_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.item} {'joined' if self.joined else 'left'} {self.product_set}"

    @property
    def seconds(self) -> float | None:
        """How long the label took to follow."""
        return None if self.labelled_at is None else (self.labelled_at - self.at).total_seconds()


class Label(models.Model):
    """One item that is labelled with one set. Stands for what a search index or another shop would know.

    It follows the members through messages alone.
    """

    product_set = models.ForeignKey(ProductSet, on_delete=models.CASCADE, related_name="labels")
    item = models.ForeignKey(Item, on_delete=models.CASCADE, related_name="labels")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["product_set", "item"], name="label_once_per_set")]

    def __str__(self) -> str:
        return f"{self.item} labelled {self.product_set}"


class Work(models.TextChoices):
    INTAKE = "intake", "Intake"
    SELECTION = "selection", "Selection"


class Batch(models.Model):
    """A batch of Spark that has been done, so that it is not counted or written again after a crash.

    `query` is the identity of its checkpoint, `number` Spark's own. `rows` counts events (intake) or messages
    (selection), `items` how many items they were about, `unusable` the rows that made no sense.
    """

    query = models.CharField(max_length=64)
    number = models.BigIntegerField(validators=[MinValueValidator(0)])
    work = models.CharField(max_length=9, choices=Work.choices)
    at = models.DateTimeField(default=timezone.now)
    rows = models.PositiveIntegerField()
    unusable = models.PositiveIntegerField(default=0)
    items = models.PositiveIntegerField()
    joined = models.PositiveIntegerField(default=0)
    left = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["-at", "-id"]
        verbose_name_plural = "batches"
        constraints = [models.UniqueConstraint(fields=["query", "number"], name="batch_once_per_query")]

    def __str__(self) -> str:
        return f"{self.get_work_display()} {self.number}"
