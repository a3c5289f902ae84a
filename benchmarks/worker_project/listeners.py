"""The listener that does nothing, or the job of ``benchmarks.overlap`` beside others."""

from __future__ import annotations

import os

from benchmarks.peers import jobs
from django_rmq import Message, listener

if os.environ.get("ORDERED"):
    from order_jobs import run  # type: ignore[import-not-found]  # the folder of the drivers is in PYTHONPATH

    @listener("ordered")
    def in_order(message: Message) -> None:
        run(message.body["entity"], message.body["n"])

elif jobs.SLEEP:

    @listener("noop")
    async def overlapping(message: Message) -> None:
        message.body  # noqa: B018 - decoding belongs to the work
        await jobs.job()

else:

    @listener("noop")
    def nothing(message: Message) -> None:
        message.body  # noqa: B018
        jobs.ran()
