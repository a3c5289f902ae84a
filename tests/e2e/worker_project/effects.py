"""A listener whose effects happen once in the database, beside one that needs no database."""

from __future__ import annotations

from django_rmq import Message, listener
from tests.e2e.worker_project.happened import write_down


@listener("effects", once=True)
def effect(message: Message) -> None:
    write_down("effect", message.body)


@listener("work")
def work(message: Message) -> None:
    write_down("done", message.body)
