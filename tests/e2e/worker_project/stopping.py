"""Listeners that hang, or run until they are cancelled, and write down until when they ran."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator

from django_rmq import Cancelled, Message, listener
from tests.e2e import ledger
from tests.e2e.worker_project.settings import WORKER_DATA

LEDGER = WORKER_DATA / "ledger"


def entered(message: Message) -> tuple[int, int, int, str]:
    entry = (threading.get_ident(), message.slot, message.receipt, message.body["name"])
    ledger.write(LEDGER, "start", 0, *entry)
    return entry


def rounds(message: Message) -> Iterator[None]:
    """Yield as long as the listener of this message runs, and write down each time that it still does."""
    entry, body, end = entered(message), message.body, time.monotonic() + message.body["ms"] / 1000
    is_first = message.retries_left == message.topic.max_retries
    if body.get("do") == "hold" and is_first:
        ctypes.PyDLL(None).sleep(1_000)  # unlike time.sleep it keeps the interpreter's lock
    if body.get("do") == "print" and is_first:
        sys.stdout = os.fdopen(os.pipe()[1], "w")
        print("x" * 1_000_000, flush=True)  # nobody reads it
    while (body.get("do") == "hang" and is_first) or body.get("do") == "wait" or time.monotonic() < end:
        ledger.write(LEDGER, "alive", 0, *entry)
        yield
        if message.cancelled:
            ledger.write(LEDGER, "cancelled", 0, *entry)
            raise Cancelled
    ledger.write(LEDGER, "end", 0, *entry)


def hanging(message: Message) -> None:
    for _ in rounds(message):
        time.sleep(0.02)


async def hanging_beside(message: Message) -> None:
    for _ in rounds(message):
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            if message.cancelled:
                continue  # and write it down
            raise


listener("hanging")(hanging_beside if os.environ.get("WORKER_ASYNC") == "1" else hanging)
