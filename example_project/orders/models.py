from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.urls import reverse
from django.utils import timezone

from example_project.prices.models import Product


class State(models.TextChoices):
    OPEN = "open", "Waiting for payment"
    PAID = "paid", "Paid"
    CLOSED = "closed", "Closed unpaid"


class Order(models.Model):
    """So many of one product, reserved until `due_at`."""

    product = models.ForeignKey(Product, on_delete=models.CASCADE, related_name="orders")
    quantity = models.PositiveSmallIntegerField(default=1)
    total = models.DecimalField(max_digits=11, decimal_places=2)
    state = models.CharField(max_length=6, choices=State.choices, default=State.OPEN)
    created_at = models.DateTimeField(default=timezone.now)
    due_at = models.DateTimeField()
    confirmed_at = models.DateTimeField(null=True, blank=True)
    """When the customer was sent a mail about it."""
    paid_at = models.DateTimeField(null=True, blank=True)
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["state", "due_at"], name="orders_by_state")]

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("order", args=[self.pk])

    @property
    def time_left(self) -> str:
        """Minutes and seconds until the due time."""
        minutes, seconds = divmod(max(0, round((self.due_at - timezone.now()).total_seconds())), 60)
        return f"{minutes}:{seconds:02}"

    @property
    def lateness(self) -> timedelta | None:
        """From the due time until the order was closed; negative would be too early."""
        return None if self.closed_at is None else self.closed_at - self.due_at


class DailyReport(models.Model):
    """What became of the orders of one day."""

    day = models.DateField(unique=True)
    orders = models.PositiveIntegerField()
    paid = models.PositiveIntegerField()
    closed = models.PositiveIntegerField()
    revenue = models.DecimalField(max_digits=14, decimal_places=2)

    class Meta:
        ordering = ["-day"]

    def __str__(self) -> str:
        return f"{self.day}: {self.paid} of {self.orders} orders paid"
