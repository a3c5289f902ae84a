"""Whether a batch may have been written before, which decides if its sink looks for what is there. No Spark."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from django_rmq.spark import foreach_batch
from django_rmq.spark.foreach_batch import Batches


class Told:
    """A sink that fails where it is to, and remembers what it was told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, bool]] = []
        self.fails = False

    def write(self, frame: Any, query: str, number: int, *, may_repeat: bool) -> None:
        self.batches.append((number, may_repeat))
        if self.fails:
            raise ConnectionError


def test_a_batch_that_comes_again_to_the_same_object_may_have_been_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreach_batch, "query_of", lambda *_: "q")
    sink = Told()
    batches = Batches("checkpoint", sink)
    batches(Mock(), 0)
    batches(Mock(), 1)
    batches(Mock(), 1)  # the query failed before Spark recorded it, and was started again
    batches(Mock(), 2)
    sink.fails = True
    with pytest.raises(ConnectionError):
        batches(Mock(), 3)
    sink.fails = False
    batches(Mock(), 3)
    batches(Mock(), 4)
    assert sink.batches == [(0, True), (1, False), (1, True), (2, False), (3, False), (3, True), (4, False)]
