"""Brokers for tests: each transition is a method, which runs its call at once; a pipeline's collects it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django_rmq.core import commands
from django_rmq.core.cluster import cluster_broker as cluster
from django_rmq.core.commands.script_call import Call
from django_rmq.core.redis import broker as redis
from django_rmq.core.redis import in_memory
from tests.oracle import broker as oracle


def _functions() -> Iterator[Callable[..., Call[Any]]]:
    for module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
        for function in vars(importlib.import_module(module.name)).values():
            returned = inspect.isfunction(function) and function.__annotations__.get("return", "")
            if str(returned).startswith("Call[") and function.__module__ == module.name:
                yield function


FUNCTIONS: dict[str, Callable[..., Call[Any]]] = {
    function.__name__: function for function in _functions() if not function.__name__.startswith("_")
}
"""Every function that makes a call, by its name."""


class Methods:
    """A method for each transition: it runs the call at once."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise AttributeError(f"a broker has no attribute {name!r}")
        broker: Any = self
        return lambda *args, **kwargs: broker.run(FUNCTIONS[name](*args, **kwargs))


class _Collecting:
    """A pipeline with a method for each transition: it collects the call and returns its index."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in FUNCTIONS:
            raise AttributeError(f"a pipeline has no attribute {name!r}")

        def collect(*args: Any, **kwargs: Any) -> int:
            pipeline: Any = self
            pipeline.add(FUNCTIONS[name](*args, **kwargs))
            return len(pipeline) - 1

        return collect


class Pipeline(_Collecting, redis.RedisPipeline):
    """Collects calls for a Redis server."""


class _ClusterPipeline(_Collecting, cluster.ClusterPipeline):
    """Collects calls for a Redis Cluster."""


class _OraclePipeline(_Collecting, oracle.Pipeline):
    """Collects calls for memory."""


class Broker(Methods, redis.RedisBroker):
    """Runs calls on a Redis server."""

    def pipeline(self) -> Pipeline:
        return Pipeline(self.exchange)


class ClusterBroker(Methods, cluster.ClusterBroker):
    """Runs calls on a Redis Cluster."""

    def pipeline(self) -> _ClusterPipeline:
        return _ClusterPipeline(self.client, self.exchange)


class _InMemoryPipeline(_Collecting, in_memory._Pipeline):
    """Collects calls for fakeredis."""


class InMemoryBroker(Methods, in_memory.InMemoryBroker):
    """Runs calls on fakeredis."""

    def pipeline(self) -> _InMemoryPipeline:
        return _InMemoryPipeline(self.exchange)


class OracleBroker(Methods, oracle.OracleBroker):
    """Runs calls on dictionaries."""

    def pipeline(self) -> _OraclePipeline:
        return _OraclePipeline(self.run)


@contextmanager
def oracle_broker(clock: Callable[[], int] | None = None) -> Iterator[OracleBroker]:
    """Use a new oracle in this block instead of the configured broker."""
    from django_rmq import connections

    broker = OracleBroker("", clock)
    with connections.replaced_broker(broker):
        yield broker


@contextmanager
def project_on(broker: Any, **rmq: Any) -> Iterator[None]:
    """Give the project these settings, and this broker in place of the one that they name."""
    from django.test import override_settings

    from django_rmq import connections

    server = {} if "BROKER" in rmq else {"REDIS": "redis://127.0.0.1:1/0"}
    with override_settings(RMQ={**server, **rmq}), connections.replaced_broker(broker):
        yield


class _Direct(Methods):
    """A broker that the package built, with the methods of those here."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in FUNCTIONS else getattr(self._broker, name)


def direct(broker: Any) -> Any:
    """Return a broker that the package built, with a method for each transition."""
    return _Direct(broker)


def get_broker() -> Any:
    """Return the broker of the settings, with a method for each transition."""
    from django_rmq import connections

    return direct(connections.get_broker())


def intercept(broker: Any, script: str, instead: Callable[[Call[Any]], Any]) -> Callable[[Call[Any]], Any]:
    """Let ``instead`` answer the calls of one script that ``broker`` runs at once; return what answered them."""
    run: Callable[[Call[Any]], Any] = broker.run
    broker.run = lambda call: instead(call) if call.script == script else run(call)
    return run


def set_clock(broker: Any, clock: Callable[[], int]) -> None:
    """Give a broker a clock (microseconds since the epoch)."""
    if isinstance(broker, oracle.OracleBroker):
        broker._clock = clock
    else:
        broker.exchange.clock = clock
