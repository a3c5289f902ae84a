"""The listener that does nothing."""

from __future__ import annotations

from benchmarks.peers import jobs
from django_rmq import Message, listener


@listener("noop")
def nothing(message: Message) -> None:
    message.body  # noqa: B018 - decoding belongs to the work
    jobs.ran()
