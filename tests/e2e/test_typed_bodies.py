"""Typed bodies in worker processes: what fits arrives, what does not is dead at once, and is replayed by a newer version."""

from __future__ import annotations

from django_rmq.core.model.replies import Death
from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage
from tests.support.brokers import Broker
from tests.support.workers import audit, eventually, send, total

OLD = {"shop": 7, "at": "2026-11-23T12:00:00Z", "sku": 1, "price": "9.90"}
NEW = {"shop": 7, "at": "2026-11-23T13:00:00Z", "lines": [{"sku": 1, "price": "8.90"}]}


TOPICS = [
    Topic(name, TopicType.RANGE_MERGE, slots=1, time_range_ms=1)
    for name in ("typed", "typed-async", "typed-list")
]
NAMES = [topic.name for topic in TOPICS]


def test_an_old_body_is_dead_at_once_and_succeeds_when_it_is_upcast(
    start: Start, broker: Broker, happened: Happened, redis_url: str, prefix: str
) -> None:
    for topic in TOPICS:
        send(broker, topic, [OLD, NEW])
    worker = start(*NAMES, WORKER_LISTENERS="typed")
    happened.wait("done", 3)
    eventually(
        lambda: all(broker.audit_ledger(topic, 0).dead == 1 for topic in TOPICS), "the old bodies in Dead"
    )
    for topic in TOPICS:
        (entry,) = broker.list_messages(topic, 0, "dead").entries
        death = Death.parse(entry.record or b"")
        assert (death.reason, death.times) == ("rejected", 1)
        assert death.error == (
            b"django_rmq.exceptions.InvalidBody: body does not fit tests.support.typed_bodies.PriceChanged: "
            b"lines: Field required"
        )
    eventually(lambda: worker.output.count("lines: Field required); to Dead") == 3, "the log")
    assert "Traceback" not in worker.output
    worker.signal()
    assert worker.wait() == 0

    environment = environment_of(happened.data, redis_url, prefix, WORKER_LISTENERS="typed")
    for name in NAMES:
        replayed = manage(environment, "rmqreplay", name, "--error", "InvalidBody", "--no-input")
        assert replayed.returncode == 0, replayed.stderr
    start(*NAMES, WORKER_LISTENERS="typed", WORKER_UPCAST="tests.support.typed_bodies.upcast")
    happened.wait("done", 6)
    assert happened.lines("done") == ["13-8.90"] * 3 + ["12-9.90"] * 3
    for topic in TOPICS:
        eventually(lambda: total(broker, topic, "committed") == 2, "the commit")  # noqa: B023
        audit(broker, topic)


def test_a_worker_does_not_start_with_an_upcast_that_is_not_there(start: Start) -> None:
    worker = start("typed", WORKER_LISTENERS="typed", WORKER_UPCAST="tests.support.typed_bodies.nowhere")
    assert worker.wait() != 0
    assert "'tests.support.typed_bodies.nowhere' cannot be imported" in worker.output
