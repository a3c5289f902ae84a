"""Several transitions at once, as a pipeline of Redis takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from django_rmq.core.memory.keyspace import Memory
from django_rmq.core.words.results import Confirmed, Durability
from django_rmq.exceptions import RmqError


class Pipeline:
    """Collects calls of any transition; each returns its index. ``execute`` runs them in order."""

    def __init__(self, broker: Memory) -> None:
        self.prefix = broker.prefix
        self._broker = broker
        self._calls: list[Callable[[], Any]] = []
        self._wanted: Durability | None = None
        self.confirmed: Confirmed | None = None

    def confirm(self, wanted: Durability) -> None:
        """Say afterwards that all that was wanted is reached: nothing here is less safe than that."""
        self._wanted = wanted

    def keep_order(self) -> None:
        """Do nothing: the order is kept in any case."""

    def __len__(self) -> int:
        return len(self._calls)

    def __getattr__(self, name: str) -> Callable[..., int]:
        method = getattr(self._broker, name)

        def collect(*args: Any, **kwargs: Any) -> int:
            self._calls.append(lambda: method(*args, **kwargs))
            return len(self._calls) - 1

        return collect

    def send(self) -> Self:
        """Do nothing: what was collected runs when its results are asked for."""
        return self

    def receive(self) -> list[Any]:
        """Run what was collected; return a result or an ``RmqError`` for each call, in order."""
        calls, self._calls = self._calls, []
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call())
            except RmqError as error:
                results.append(error)
        if self._wanted is not None:
            self.confirmed = Confirmed(self._wanted.replicas or None, self._wanted.fsync or None)
        return results

    def execute(self) -> list[Any]:
        """Run what was collected and return a result or an ``RmqError`` for each call."""
        return self.send().receive()
