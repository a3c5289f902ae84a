"""The listener of the one topic there is when `WORKER_SLOTS` says how many slots it has."""

from __future__ import annotations

import threading

from django_rmq import Message, listener
from tests.e2e import ledger
from tests.e2e.worker_project.settings import WORKER_DATA


@listener("many")
def note(message: Message) -> None:
    entry = (threading.get_ident(), message.slot, message.receipt, message.body["name"])
    ledger.write(WORKER_DATA / "ledger", "end", 0, *entry)
