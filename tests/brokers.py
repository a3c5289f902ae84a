"""Brokers for tests: each transition is a method, which runs its call at once; a pipeline's collects it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_rmq.core.calls import (
    answers,
    claims,
    ending,
    history,
    limits,
    looking,
    moving,
    people,
    sending,
    taking,
    workers,
)
from django_rmq.core.calls.call import Call
from django_rmq.core.cluster import broker as cluster
from django_rmq.core.memory import broker as memory
from django_rmq.core.memory import pipeline as memory_pipeline
from django_rmq.core.redis import broker as redis
from django_rmq.core.redis import pipeline as redis_pipeline

P = ParamSpec("P")
T = TypeVar("T")

FUNCTIONS: dict[str, Callable[..., Call[Any]]] = {
    name: function
    for module in (
        answers,
        claims,
        ending,
        history,
        limits,
        looking,
        moving,
        people,
        sending,
        taking,
        workers,
    )
    for name, function in vars(module).items()
    if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_")
}
"""Every function that makes a call, by its name."""


def at_once(function: Callable[P, Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that runs the call which ``function`` makes."""

    @wraps(function)
    def method(broker: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = broker.run(function(*args, **kwargs))
        return found

    return method


class Methods:
    """A method for each transition: it runs the call at once."""

    send_merge = at_once(sending.send_merge)
    send_replace = at_once(sending.send_replace)
    ensure = at_once(sending.ensure)

    acquire = at_once(taking.acquire)
    acquire_all = at_once(taking.acquire_all)
    held = at_once(taking.held)
    prepare = at_once(taking.prepare)

    commit = at_once(ending.commit)
    rollback = at_once(ending.rollback)
    release = at_once(ending.release)
    extend = at_once(ending.extend)
    expire = at_once(ending.expire)
    promote = at_once(ending.promote)

    claim = at_once(claims.claim)
    renew = at_once(claims.renew)
    ack = at_once(claims.ack)
    return_claim = at_once(claims.return_claim)
    read_claim = at_once(claims.read_claim)

    replay = at_once(people.replay)
    bury = at_once(people.bury)
    remove = at_once(people.remove)
    discard = at_once(people.discard)
    reschedule = at_once(people.reschedule)
    purge = at_once(people.purge)
    pause = at_once(people.pause)
    configure = at_once(people.configure)
    adopt = at_once(people.adopt)
    retire = at_once(people.retire)
    loose = at_once(people.loose)

    shut = at_once(moving.shut)
    reopen = at_once(moving.reopen)
    survey = at_once(moving.survey)
    move_out = at_once(moving.move_out)
    move_in = at_once(moving.move_in)

    peek = at_once(looking.peek)
    find = at_once(looking.find)
    count = at_once(looking.count)
    between = at_once(looking.between)
    look = at_once(looking.look)
    ranks = at_once(looking.ranks)
    seek = at_once(looking.seek)
    heads = at_once(looking.heads)
    audit = at_once(looking.audit)

    sample = at_once(history.sample)
    times = at_once(history.times)
    claim_minute = at_once(history.claim_minute)
    note_late = at_once(history.note_late)
    note_times = at_once(history.note_times)
    keep_minute = at_once(history.keep_minute)
    minutes = at_once(history.minutes)

    beat = at_once(workers.beat)
    leave = at_once(workers.leave)
    assign = at_once(workers.assign)
    roster = at_once(workers.roster)

    allow = at_once(limits.allow)
    end_permits = at_once(limits.end_permits)
    spend = at_once(limits.spend)

    begin_answer = at_once(answers.begin_answer)
    keep_answer = at_once(answers.keep_answer)


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


class Pipeline(_Collecting, redis_pipeline.Pipeline):
    """Collects calls for a Redis server."""


class _ClusterPipeline(_Collecting, cluster.ClusterPipeline):
    """Collects calls for a Redis Cluster."""


class _MemoryPipeline(_Collecting, memory_pipeline.Pipeline):
    """Collects calls for memory."""


class Broker(Methods, redis.RedisBroker):
    """Runs calls on a Redis server."""

    def pipeline(self) -> Pipeline:
        return Pipeline(self.exchange)


class ClusterBroker(Methods, cluster.ClusterBroker):
    """Runs calls on a Redis Cluster."""

    def pipeline(self) -> _ClusterPipeline:
        return _ClusterPipeline(self.client, self.exchange)


class InMemoryBroker(memory.InMemoryBroker):
    """Runs calls on dictionaries."""

    def pipeline(self) -> _MemoryPipeline:
        return _MemoryPipeline(self.run)


class _Direct(Methods):
    """A broker that the package built, with the methods of those here."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def direct(broker: Any) -> Any:
    """Return a broker that the package built, with a method for each transition."""
    return _Direct(broker)


def get_broker() -> Any:
    """Return the broker of the settings, with a method for each transition."""
    from django_rmq.project import connections

    return direct(connections.get_broker())


def intercept(broker: Any, name: str, instead: Callable[[Call[Any]], Any]) -> Callable[[Call[Any]], Any]:
    """Let ``instead`` answer the calls of one transition that ``broker`` runs at once; return what answered them."""
    run: Callable[[Call[Any]], Any] = broker.run
    broker.run = lambda call: instead(call) if call.name == name else run(call)
    return run


def set_clock(broker: Any, clock: Callable[[], int]) -> None:
    """Give a broker a clock (microseconds since the epoch)."""
    if isinstance(broker, memory.InMemoryBroker):
        broker._clock = clock
    else:
        broker.exchange.clock = clock
