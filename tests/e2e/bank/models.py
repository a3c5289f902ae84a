"""Accounts, and what the sender has ordered."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Account(models.Model):
    balance = models.BigIntegerField(default=0)

    objects: ClassVar[models.Manager[Account]] = models.Manager()

    def __str__(self) -> str:
        return f"account {self.pk}"


class Order(models.Model):
    """A transfer that the sender has committed, by its number in the list."""

    number = models.IntegerField(primary_key=True)

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    def __str__(self) -> str:
        return f"transfer {self.number}"
