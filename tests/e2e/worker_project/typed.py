"""Listeners of topics with typed bodies, in a thread and in the event loop."""

from __future__ import annotations

from django_rmq import Message, listener
from tests.e2e.worker_project.happened import write_down
from tests.support.typed_bodies import PriceChanged


@listener("typed")
def typed(message: Message[PriceChanged]) -> None:
    write_down("done", {"name": f"{message.body.at:%H}-{message.body.lines[0].price}"})


@listener("typed-async")
async def typed_async(message: Message[PriceChanged]) -> None:
    write_down("done", {"name": f"{message.body.at:%H}-{message.body.lines[0].price}"})


@listener("typed-list", batch_size=10)
def typed_list(messages: list[Message[PriceChanged]]) -> None:
    for message in messages:
        write_down("done", {"name": f"{message.body.at:%H}-{message.body.lines[0].price}"})
