"""Several transitions in one call, like a pipeline of Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from django_rmq.core.commands.script_call import Answer, Call
from django_rmq.core.model.send_results import Confirmed, Durability
from django_rmq.exceptions import RmqError

T = TypeVar("T")


class Pipeline:
    """Collects calls; ``execute`` passes them to ``run``, in order."""

    def __init__(self, run: Callable[[Call[Any]], Any]) -> None:
        self._run = run
        self._calls: list[tuple[Call[Any], Answer[Any]]] = []
        self._wanted: Durability | None = None
        self.confirmed: Confirmed | None = None

    def add(self, call: Call[T]) -> Answer[T]:
        """Collect a call; return an object that holds its answer after the pipeline has run."""
        answer: Answer[T] = Answer()
        self._calls.append((call, answer))
        return answer

    def confirm(self, wanted: Durability) -> None:
        """Report afterwards that everything requested was reached: memory is no less durable than that."""
        self._wanted = wanted

    def keep_order(self) -> None:
        """Do nothing: the order is always kept."""

    def __len__(self) -> int:
        return len(self._calls)

    def send(self) -> Self:
        """Do nothing: what was collected runs when its answers are asked for."""
        return self

    def receive(self) -> list[Any]:
        """Run what was collected; return the answer of each call, or an ``RmqError``, in order."""
        collected, self._calls = self._calls, []
        for call, answer in collected:
            try:
                answer.become(self._run(call))
            except RmqError as error:
                answer.become(error)
        if self._wanted is not None:
            self.confirmed = Confirmed(self._wanted.replicas or None, self._wanted.fsync or None)
        return [answer.result() for _, answer in collected]

    def execute(self) -> list[Any]:
        """Run what was collected; return the answer of each call, or an ``RmqError``, in order."""
        return self.send().receive()
