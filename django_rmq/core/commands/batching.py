"""Many calls, one for each slot, spread over several round trips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import HeldReply
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

T = TypeVar("T")

AT_ONCE = 1_000
"""The default number of calls in one round trip."""


def attempt(broker: Broker, calls: Iterable[Call[T]], at_once: int = AT_ONCE) -> Iterator[T | RmqError]:
    """Run calls, ``at_once`` per round trip, and yield the answer of each, or its error, in order."""
    left = iter(calls)
    while some := list(islice(left, at_once)):
        yield from run_all(broker, some)


def walk(broker: Broker, calls: Iterable[Call[T]], at_once: int = AT_ONCE) -> Iterator[T]:
    """Run calls, ``at_once`` per round trip, and yield their answers in order. Raises the first error among them."""
    for answer in attempt(broker, calls, at_once):
        if isinstance(answer, RmqError):
            raise answer
        yield answer


def all_held(broker: Broker, topic: Topic, slot: int, owner: str, first: list[HeldReply]) -> list[HeldReply]:
    """Return everything that ``owner`` holds in a slot; ``first`` is the first page. Raises ``RmqError``."""
    held = first
    page: list[HeldReply] | None = first
    while page and len(page) == BATCH:
        page = broker.run(fetch.held(topic, slot, owner, len(held), BATCH))
        held = [*held, *(page or ())]
    return held
