"""A process that sends the transfers of a list through the outbox, and goes on where a killed one has stopped.

    python -m tests.e2e.bank.sender LIST

It sends no more than the number in ``WORKER_DATA/allowed``, and ends when it has sent all.
"""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path

import django

TOGETHER = 20
"""Transfers in one transaction."""


def main(path: Path) -> None:
    django.setup()
    from django.db import Error, close_old_connections, transaction
    from django.db.models import Max

    from django_rmq import send_messages
    from tests.e2e.bank.models import Order

    with path.open() as file:
        transfers = [[int(field) for field in row] for row in csv.reader(file)]
    allowed = Path(os.environ["WORKER_DATA"]) / "allowed"
    sent = -1
    while sent != len(transfers):
        try:
            if sent < 0:
                # Whether a transaction was committed whose end this process or another one has not seen.
                last = Order.objects.aggregate(last=Max("number"))["last"]
                sent = 0 if last is None else last + 1
            some = transfers[sent : min(sent + TOGETHER, int(allowed.read_text() or 0))]
            if not some:
                time.sleep(0.05)
                continue
            with transaction.atomic():
                Order.objects.bulk_create(Order(number=sent + at) for at in range(len(some)))
                send_messages("transfers", some)
            sent += len(some)
        except Error as error:
            print(f"from {sent}: {error}", flush=True)
            sent = -1
            close_old_connections()
            time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
