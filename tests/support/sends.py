"""What became of sends: members that wait in Redis, what a listing shows, and the round trips that brought them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_rmq import RemoveResult, SendResult, connections
from django_rmq.conf import get_config
from django_rmq.core.model.topic import Topic
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.reslotting import begin, finish, move
from django_rmq.operations import MessageCopy, Operations
from tests.support.brokers import direct


class Undo(Exception):
    """Rolls a transaction back."""


def entries(name: str, state: str = "store") -> list[Any]:
    """What the slots of a topic list of a state, one slot after another."""
    topic, broker = get_config().topic(name), direct(connections.get_broker("worker"))
    pages = [broker.list_messages(topic, slot, state) for slot in range(topic.slots)]
    return [entry for page in pages for entry in page.entries]


def waiting(name: str, state: str = "store") -> list[bytes]:
    """The members in the Stores of a topic, sorted."""
    return sorted(entry.member for entry in entries(name, state))


def scores(name: str) -> dict[bytes, float]:
    """The members in the Stores of a topic with their scores."""
    return {entry.member: entry.score for entry in entries(name)}


def statuses(*results: SendResult | RemoveResult) -> list[str]:
    return [result.status for result in results]


def reslot_until(name: str, stage: str, slots: int = 16) -> Topic:
    """Begin to re-slot a topic, and go on until some slots are shut, or to the end; return the new topic."""
    broker: Any = direct(connections.get_broker())
    before = get_config().topic(name)
    reslotting = begin(broker, before, slots)
    assert reslotting is not None
    if stage == "shut":
        for slot in (*range(before.slots, slots), 0, 1):
            broker.shut(reslotting.topic, slot, 1)
    elif stage == "finished":
        move(broker, reslotting)
        finish(broker, reslotting)
    return reslotting.topic


@contextmanager
def receiving(receiver: Callable[..., None], *which: Any) -> Iterator[None]:
    """Let a function receive these signals in this block."""
    for signal in which:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal in which:
            signal.disconnect(receiver)


@contextmanager
def listening(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """What a signal tells in this block."""
    told: list[dict[str, Any]] = []
    with receiving(lambda **kwargs: told.append(kwargs), signal):
        yield told


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
