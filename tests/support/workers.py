"""A dispatcher in a thread of the test, and a listener that remembers what it heard."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import iscoroutinefunction
from typing import Any, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_rmq.core.cluster.cluster_broker import Cluster
from django_rmq.core.commands import inspect, membership
from django_rmq.core.consumer import AssignmentCallbacks, Dispatcher, WorkerCallbacks, WorkerOptions
from django_rmq.core.coordination import Holding, Member
from django_rmq.core.coordination.stored_plan import plan_of_roster
from django_rmq.core.coordination.worker_records import members_of_roster
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring.history import TimesCount
from django_rmq.core.producer.producer import Producer
from tests.support.brokers import Broker, ClusterBroker
from tests.support.servers import RedisCluster

LONG = float(os.environ.get("TEST_PATIENCE", "60"))
"""Seconds after which a test gives up waiting. A machine that others use, too, may stand still for some of them. A test
that has to fail, because a rule is missing, waits less."""


@dataclass
class Listener:
    """What a registry would hand to the dispatcher."""

    topic: str
    function: Callable[[Any], Any]
    batch_size: int | None = None

    @property
    def coroutine(self) -> Callable[[Any], Any] | None:
        return self.function if iscoroutinefunction(self.function) else None


def client_of(url: str, socket_timeout: float = LONG) -> redis.Redis:
    """A client as workers have it: it repeats nothing by itself."""
    return redis.Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        socket_timeout=socket_timeout,
        socket_connect_timeout=socket_timeout,
    )


def cluster_of(server: RedisCluster, socket_timeout: float = LONG, patience: float = 1.0) -> Cluster:
    """A client of a cluster as workers have it."""
    options = {
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": socket_timeout,
    }
    return Cluster([("127.0.0.1", node.port) for node in server.nodes], options, patience=patience)


def eventually(condition: Callable[[], object], what: str = "the condition", seconds: float = LONG) -> None:
    """Return as soon as `condition()` holds; an assertion fails after so many seconds.

    A condition that is dear to ask, because it reads a whole ledger or all of /proc, takes a quarter of a core at most: what
    is waited for needs the rest.
    """
    pause = threading.Event()
    began = asked = time.monotonic()
    while not condition():
        answered = time.monotonic()
        assert answered < began + seconds, f"{what} did not hold within {seconds} s"
        # What takes long may be noticed a little later.
        pause.wait(max(0.005, min(3 * (answered - asked), 0.1), min((answered - began) / 20, 0.05)))
        asked = time.monotonic()


class Heard:
    """What listeners have been called with, in order; `wait` returns when there is enough."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.times: list[float] = []
        self._changed = threading.Condition()

    def __call__(self, message: Message) -> None:
        self.note(message.body)

    def note(self, body: Any) -> None:
        with self._changed:
            self.bodies.append(body)
            self.times.append(time.time() * 1000)
            self._changed.notify_all()

    def wait(self, count: int = 1, seconds: float = LONG) -> list[Any]:
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.bodies) >= count, seconds)
            assert enough, f"heard {len(self.bodies)} of {count} messages within {seconds} s"
            return list(self.bodies)


class HeldListener(Heard):
    """A listener that has ``begun``, and returns when it may ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, message: Message) -> None:
        super().__call__(message)
        self.begun.set()
        assert self.go.wait(5 * LONG)


class Worker:
    """A dispatcher that owns all slots of its topics and runs while the block does."""

    def __init__(
        self,
        broker: Any,
        topics: Topic | Iterable[Topic],
        listener: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]],
        *,
        batch_size: int | None = None,
        slots: Iterable[tuple[str, int]] | None = None,
        **options: Any,
    ) -> None:
        chosen = [topics] if isinstance(topics, Topic) else list(topics)
        functions = listener if isinstance(listener, Mapping) else {topic.name: listener for topic in chosen}
        options = {"threads": 2, "shutdown_timeout": LONG, **options}

        def taken(names: Iterable[str]) -> dict[str, Any]:
            return {name: options.pop(name) for name in names if name in options}

        self.dispatcher = Dispatcher(
            broker,
            chosen,
            {name: Listener(name, function, batch_size) for name, function in functions.items()},
            WorkerOptions(**taken([field.name for field in fields(WorkerOptions)])),
            ownership=AssignmentCallbacks(**taken(AssignmentCallbacks._fields)),
            callbacks=WorkerCallbacks(**taken(WorkerCallbacks._fields)),
            **options,
        )
        self.dispatcher.own(
            [(topic.name, slot) for topic in chosen for slot in range(topic.slots)]
            if slots is None
            else slots
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="test-worker", daemon=True)

    def _run(self) -> None:
        try:
            self.dispatcher.run()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self.error = error

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def join(self, seconds: float = LONG + 5) -> None:
        """Wait for the end, and raise what the dispatcher raised."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the dispatcher did not end"
        if self.error is not None:
            raise self.error

    def asleep(self) -> None:
        """Return when the dispatcher has acquired its slots, asked all of them, and nothing is to do."""
        dispatcher = self.dispatcher
        eventually(
            lambda: (
                dispatcher._table
                and not dispatcher._table.has_unacquired
                and not dispatcher._acquirer.unacquired
                and not dispatcher._in_flight.messages
                and not dispatcher._acks.pending
                and not dispatcher._schedule.waiting
                and all(place.due > 0 for place in list(dispatcher._table.awake.values()))
            ),
            "falling asleep",
        )

    def __exit__(self, *exc_info: object) -> None:
        self.dispatcher.stop()
        if exc_info[0] is None:
            self.join()
        else:
            self.thread.join(LONG + 5)


def finish(worker: Worker) -> Worker:
    """Let a worker run until it ends by itself."""
    with worker:
        worker.join()
    return worker


def work_off(broker: Any, topic: Topic, listener: Callable[[Any], Any], **options: Any) -> Worker:
    """Let a worker run until no message of the topic is left."""
    with Worker(broker, topic, listener, **options) as worker:
        eventually(lambda: live(broker, topic) == 0, "the end of all")
    return worker


def turn_until_idle(dispatcher: Dispatcher) -> None:
    """Make the turns of a dispatcher whose threads do not run, until nothing is left to send."""
    for _ in range(50):
        if not dispatcher._turn():
            if not dispatcher._acks.pending:
                return
            time.sleep(max(0.0, dispatcher._acks.due - time.monotonic()))
    raise AssertionError("the dispatcher does not come to rest")


def flush(count: TimesCount) -> None:
    """Store what a worker has counted of times, as its background thread does every few seconds."""
    steps = count.flushing()
    next(steps)
    steps.close()


def send(broker: Any, topic: Topic, bodies: Iterable[Any], **options: Any) -> None:
    """Send bodies as an application would."""
    producer = Producer(broker)
    results = producer.send([producer.build(topic, body, **options) for body in bodies])
    assert all(result.ok for result in results)


def audit(broker: Any, topic: Topic) -> list[Ledger]:
    """The ledger of each slot; an assertion fails where one does not balance."""
    ledgers = [broker.run(inspect.audit_ledger(topic, slot)) for slot in range(topic.slots)]
    for ledger in ledgers:
        assert ledger.balanced, ledger
    return ledgers


def total(broker: Any, topic: Topic, counter: str) -> int:
    """The sum of a counter over all slots, whose ledgers balance."""
    return sum(ledger[counter] for ledger in audit(broker, topic))


def live(broker: Any, topic: Topic) -> int:
    """How many messages wait, run or rest."""
    return sum(ledger.store + ledger.prepare + ledger.retry for ledger in audit(broker, topic))


__all__ = [
    "Broker", "Heard", "Listener", "Worker", "audit", "client_of", "eventually", "finish", "live", "send", "total",
    "turn_until_idle", "work_off",
]  # fmt: skip


@contextmanager
def broker_on(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The broker that a fixture's parameter names: redis or cluster."""
    if request.param == "redis":
        client = client_of(request.getfixturevalue("redis_url"))
        yield Broker(client, request.getfixturevalue("prefix"))
        client.close()
    else:
        cluster = cluster_of(request.getfixturevalue("redis_cluster"))
        yield ClusterBroker(cluster, f"t{uuid.uuid4().hex[:12]}:")
        cluster.close()


def members(broker: Any) -> list[Member]:
    """Return all workers whose sessions are active, by id."""
    return members_of_roster(broker.run(membership.roster()))


def describe(broker: Any) -> list[Holding]:
    """Return the owners of the slots of serial topics, and since when they own them."""
    return plan_of_roster(broker.run(membership.roster())).holdings
