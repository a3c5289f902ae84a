"""The listener that does nothing, or sleeps for SLEEP seconds beside others."""

from __future__ import annotations

import asyncio
import os

from django_rmq import Message, listener

SLEEP = float(os.environ.get("SLEEP", "0"))

if SLEEP:

    @listener("noop")
    async def sleeping(message: Message) -> None:
        message.body  # noqa: B018 - decoding belongs to the work
        await asyncio.sleep(SLEEP)

else:

    @listener("noop")
    def nothing(message: Message) -> None:
        message.body  # noqa: B018
