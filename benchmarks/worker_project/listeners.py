"""The listener that does nothing, or sleeps for SLEEP seconds beside others."""

from __future__ import annotations

import asyncio
import os

from django_rmq import Message, listener

SLEEP = float(os.environ.get("SLEEP", "0"))

if os.environ.get("ORDERED"):
    from order_jobs import run  # the folder of the drivers is in PYTHONPATH

    @listener("ordered")
    def in_order(message: Message) -> None:
        run(message.body["entity"], message.body["n"])

elif SLEEP:

    @listener("noop")
    async def sleeping(message: Message) -> None:
        message.body  # noqa: B018 - decoding belongs to the work
        await asyncio.sleep(SLEEP)

else:

    @listener("noop")
    def nothing(message: Message) -> None:
        message.body  # noqa: B018
