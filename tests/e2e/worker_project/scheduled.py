"""The listener of the ticks of `WORKER_SCHEDULES`."""

from __future__ import annotations

from django_rmq import Message, listener
from tests.e2e.worker_project.happened import write_down


@listener("ticks")
def tick(message: Message) -> None:
    write_down("done", {"name": message.key})
