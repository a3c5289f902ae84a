"""Many calls, one for each slot: some of them in each round trip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from django_rmq.core.calls.call import Call
from django_rmq.core.redis.broker import Broker

T = TypeVar("T")

AT_ONCE = 1_000
"""Calls in one round trip, unless another number is given."""


def walk(broker: Broker, calls: Iterable[Call[T]], at_once: int = AT_ONCE) -> Iterator[T]:
    """Run calls, ``at_once`` in a round trip, and yield their answers in order. Raises the first error among them."""
    left = iter(calls)
    while some := list(islice(left, at_once)):
        pipeline = broker.pipeline()
        answers = [pipeline.add(call) for call in some]
        pipeline.execute()
        for answer in answers:
            yield answer.get()
