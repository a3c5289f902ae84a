"""The listener that transfers money. It looks at nothing but its message, so a second call transfers a second time."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F

from django_rmq import Message, Retry, listener
from django_rmq.worker import once
from tests.e2e.bank.models import Account
from tests.e2e.worker_project import points

WORKER_DATA = Path(os.environ["WORKER_DATA"])
FAILING = 0.03
"""How often the listener fails after each of its changes."""
ONCE = os.environ.get("BANK_ONCE", "1") == "1"


@listener("transfers", once=ONCE)
def transfer(message: Message) -> None:
    """Move an amount from one account to another."""
    with nullcontext() if ONCE else transaction.atomic():
        source, target, amount = message.body
        # In one order, so that transfers in both directions do not wait for each other.
        for account, change in sorted([(source, -amount), (target, amount)]):
            points.doom.passing("in-transaction")
            Account.objects.filter(pk=account).update(balance=F("balance") + change)
            if random.random() < FAILING:
                raise Retry("at random", delay=0.1)


_log_done_before = once._log_done_before


def _write_down(messages: list[Message]) -> None:
    """Count the deliveries for which the listener was not called, a byte for each."""
    with (WORKER_DATA / "again").open("ab") as file:
        file.write(b"." * len(messages))
    _log_done_before(messages)


if os.environ.get("WORKER_POINTS"):
    points.install()
    wrapper: Any = BaseDatabaseWrapper
    wrapper._commit = points.wrapped(
        wrapper._commit, before="before-database-commit", after="after-database-commit"
    )
    vars(once)["_log_done_before"] = _write_down
