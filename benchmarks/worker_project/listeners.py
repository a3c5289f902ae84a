"""The listener that does nothing, or the job of ``benchmarks.overlap`` beside others."""

from __future__ import annotations

from benchmarks.peers import jobs
from django_rmq import Message, listener

if jobs.SLEEP:

    @listener("noop")
    async def overlapping(message: Message) -> None:
        message.body  # noqa: B018 - decoding belongs to the work
        await jobs.job()

else:

    @listener("noop")
    def nothing(message: Message) -> None:
        message.body  # noqa: B018
