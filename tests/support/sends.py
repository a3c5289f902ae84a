"""What became of sends: members that wait in Redis, what a listing shows, and the round trips that brought them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.operations import MessageCopy, Operations
from tests.support.brokers import direct


class Undo(Exception):
    """Rolls a transaction back."""


def waiting(name: str) -> list[bytes]:
    """The members in the Stores of a topic, sorted."""
    topic, broker = get_config().topic(name), direct(connections.get_broker("worker"))
    slots = range(topic.slots)
    return sorted(
        entry.member for slot in slots for entry in broker.list_messages(topic, slot, "store").entries
    )


@contextmanager
def counted_trips(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Which scripts went in each round trip."""
    trips: list[list[str]] = []
    build, run = RedisBroker.pipeline, RedisBroker.run

    def alone(self: RedisBroker, call: Any) -> Any:
        trips.append([call.script])
        return run(self, call)

    def pipeline(self: RedisBroker) -> Any:
        made = build(self)
        send = made.send

        def counted() -> Any:
            trips.append([call.script for call in made._calls])
            return send()

        made.send = counted  # type: ignore[method-assign]
        return made

    with monkeypatch.context() as patch:
        patch.setattr(RedisBroker, "pipeline", pipeline)
        patch.setattr(RedisBroker, "run", alone)
        yield trips


def everything(operations: Operations, name: str, state: str, **options: Any) -> list[MessageCopy]:
    """The messages of all pages of a listing."""
    copies: list[MessageCopy] = []
    cursor = ""
    for _ in range(10_000):
        page = operations.listing(name, state, cursor=cursor, **options)
        assert len(page.cursor) < 512
        copies += page.copies
        cursor = page.cursor
        if not cursor:
            return copies
    raise AssertionError("the pages do not end")
