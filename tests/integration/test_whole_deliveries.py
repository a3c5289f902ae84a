"""The end of a whole delivery: told without naming its messages, and by their names where that may be wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis

from django_rmq.core.commands import ack
from django_rmq.core.consumer import Dispatcher, WorkerCallbacks, WorkerOptions
from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.fetch_round_trips import RoundTrip
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import ServerUnavailable
from tests.support.workers import (
    Broker,
    Heard,
    Listener,
    Worker,
    audit,
    eventually,
    send,
    total,
    turn_until_idle,
)

LINE = Topic("line", TopicType.FIFO, slots=1, identity="key", timeout=60, backoff=BackOff(0, 0))
COUNT = 5


class Watcher:
    def __init__(self) -> None:
        self.committed: list[Any] = []

    def wants(self, topic: str) -> bool:
        return True

    def ended(self, committed: list[Message], failed: list[tuple[Message, Failure]], began_ns: int) -> None:
        self.committed += [message.body for message in committed]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the dispatcher tells Redis about the ends of deliveries, in this order."""
    found: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        call = getattr(ack, name)

        def told(*args: Any) -> Any:
            found.append(name)
            return call(*args)

        return told

    for name in ("commit_delivery", "commit", "rollback", "release"):
        monkeypatch.setattr(ack, name, noted(name))
    return found


def taken(
    broker: Broker, topic: Topic, watcher: Watcher | None = None, count: int = COUNT
) -> tuple[Dispatcher, Batch]:
    """A dispatcher whose threads do not run, and the batch that they would have."""
    listeners = {topic.name: Listener(topic.name, lambda message: None)}
    dispatcher = Dispatcher(
        broker, [topic], listeners, WorkerOptions(threads=1), callbacks=WorkerCallbacks(watcher=watcher)
    )
    dispatcher.own([(topic.name, 0)])
    dispatcher._mailbox.process_items()
    turn_until_idle(dispatcher)
    (batch,) = dispatcher._in_flight.batches.values()
    assert len(batch.messages) == count
    return dispatcher, batch


def sent(dispatcher: Dispatcher) -> RoundTrip:
    dispatcher._acks.due = 0.0
    trip = dispatcher._round_trips.send()
    assert trip is not None
    return trip


def levels_of_stale(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records if vars(record).get("rmq_event") == "stale"]


def members(batch: Batch) -> list[bytes]:
    return [message.delivery.member for message in batch.messages]


def end(dispatcher: Dispatcher, batch: Batch, *slices: slice) -> None:
    """Report slices of a batch as the thread would, when all of them have succeeded."""
    dispatcher._pool.threads[0].withdraw(batch)
    for some in slices or (slice(None),):
        ended = members(batch)[some]
        dispatcher._router.finished(BatchReport(batch, ended, [], [], 0.001, ended[-1] == members(batch)[-1]))


def all_committed(broker: Broker, dispatcher: Dispatcher, topic: Topic = LINE) -> bool:
    return dispatcher.processed == total(broker, topic, "committed") == COUNT


def assert_named(broker: Broker, told: list[str], topic: Topic = LINE, *slices: slice) -> None:
    """Everything that waits is taken, and its commits name it at once."""
    dispatcher, batch = taken(broker, topic)
    end(dispatcher, batch, *slices)
    turn_until_idle(dispatcher)
    assert told == ["commit"]
    assert all_committed(broker, dispatcher, topic)


def test_a_whole_delivery_is_committed_without_its_names(broker: Broker, told: list[str]) -> None:
    send(broker, LINE, range(COUNT))
    watcher = Watcher()
    dispatcher, batch = taken(broker, LINE, watcher)
    end(dispatcher, batch)
    turn_until_idle(dispatcher)
    assert told == ["commit_delivery"]
    assert all_committed(broker, dispatcher)
    assert watcher.committed == list(range(COUNT))


@pytest.mark.parametrize(
    ("kind", "kept_ms"),
    [(TopicType.RANGE_MERGE, None), (TopicType.RANGE_MERGE, 60_000), (TopicType.PRIORITY, None)],
)
def test_topics_of_other_types_do_so_too(
    broker: Broker, told: list[str], kind: TopicType, kept_ms: int | None
) -> None:
    topic = Topic("others", kind, slots=1, time_range_ms=1, timeout=60, outcome_retention_ms=kept_ms)
    send(broker, topic, range(COUNT), **({"priority": 500} if topic.is_priority else {}))
    eventually(lambda: broker.count(topic, 0).due == COUNT, "the due time")
    dispatcher, batch = taken(broker, topic)
    end(dispatcher, batch)
    turn_until_idle(dispatcher)
    assert told == ["commit_delivery"]
    assert all_committed(broker, dispatcher, topic)


def test_what_is_delivered_beside_another_delivery_is_named(broker: Broker, told: list[str]) -> None:
    topic = replace(LINE, order="loose")
    send(broker, topic, range(COUNT))
    dispatcher, first = taken(broker, topic)
    send(broker, topic, [COUNT])
    dispatcher._schedule.make_ready(first.slot)
    turn_until_idle(dispatcher)
    (second,) = (batch for batch in dispatcher._in_flight.batches.values() if batch is not first)
    for batch in (second, first):
        end(dispatcher, batch)
    turn_until_idle(dispatcher)
    assert told == ["commit", "commit"]
    assert dispatcher.processed == total(broker, topic, "committed") == COUNT + 1


def test_what_a_thread_reports_in_parts_is_named(broker: Broker, told: list[str]) -> None:
    send(broker, LINE, range(COUNT))
    assert_named(broker, told, LINE, slice(2), slice(2, None))


def test_topics_that_are_not_serial_name_what_they_commit(broker: Broker, told: list[str]) -> None:
    topic = replace(LINE, serial=False, order="loose")
    send(broker, topic, range(COUNT))
    assert_named(broker, told, topic)


def test_messages_with_keys_are_named(broker: Broker, told: list[str]) -> None:
    for n in range(COUNT):
        send(broker, LINE, [n], key=str(n))
    assert_named(broker, told)


def test_messages_that_have_failed_are_named(broker: Broker, told: list[str]) -> None:
    send(broker, LINE, range(COUNT))
    given = broker.prepare(LINE, 0, "another", None, 1)
    broker.rollback(LINE, 0, given.receipt, [Failure(given.deliveries[0].member)])
    assert_named(broker, told)


def test_what_a_person_marks_meanwhile_ends_as_marked(broker: Broker, told: list[str]) -> None:
    send(broker, LINE, range(COUNT))
    watcher = Watcher()
    dispatcher, batch = taken(broker, LINE, watcher)
    assert broker.bury(LINE, 0, [members(batch)[2]]) == ["running"]
    end(dispatcher, batch)
    turn_until_idle(dispatcher)
    assert told == ["commit_delivery", "commit"]
    assert broker.count(LINE, 0).dead == 1
    assert total(broker, LINE, "committed") == COUNT - 1
    assert sorted(watcher.committed) == list(range(COUNT))


def test_a_worker_that_ends_names_what_could_not_be_committed_as_a_whole(
    broker: Broker, told: list[str]
) -> None:
    send(broker, LINE, range(COUNT))
    dispatcher, batch = taken(broker, LINE)
    assert broker.bury(LINE, 0, [members(batch)[2]]) == ["running"]
    end(dispatcher, batch)
    dispatcher._shut_down()
    assert told == ["commit_delivery", "commit"]
    assert (total(broker, LINE, "committed"), dispatcher.forced) == (COUNT - 1, False)


def test_what_timed_out_meanwhile_is_not_committed(
    broker: Broker, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    topic = replace(LINE, timeout=1)
    send(broker, topic, range(COUNT))
    dispatcher, batch = taken(broker, topic)
    eventually(lambda: broker.time_out(topic, 0) or broker.count(topic, 0).retry, "the time-out")
    end(dispatcher, batch)
    with caplog.at_level(logging.INFO, "django_rmq.consumer"):
        dispatcher._round_trips.receive(sent(dispatcher))
        dispatcher._round_trips.receive(sent(dispatcher))
    assert told == ["commit_delivery", "commit"]
    assert total(broker, topic, "committed") == 0
    assert levels_of_stale(caplog) == [logging.WARNING]


def test_a_whole_delivery_whose_answer_is_lost_is_told_again_by_name(
    broker: Broker, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    send(broker, LINE, range(COUNT))
    dispatcher, batch = taken(broker, LINE)
    end(dispatcher, batch)
    trip = sent(dispatcher)
    trip.pipeline.receive()
    lost: Any = trip.pipeline
    lost.receive = lambda: (_ for _ in ()).throw(ServerUnavailable("the answer is lost"))
    with pytest.raises(ServerUnavailable):
        dispatcher._round_trips.receive(trip)
    with caplog.at_level(logging.INFO, "django_rmq.consumer"):
        turn_until_idle(dispatcher)
    assert told == ["commit_delivery", "commit"]
    assert all_committed(broker, dispatcher)
    assert levels_of_stale(caplog) == [logging.INFO]


def test_a_refusal_of_redis_is_followed_by_the_names(
    broker: Broker, told: list[str], redis_client: redis.Redis, prefix: str
) -> None:
    keys = slot_keys(prefix, LINE.name, 0)
    send(broker, LINE, range(COUNT))
    dispatcher, batch = taken(broker, LINE)
    end(dispatcher, batch)
    redis_client.rename(keys.control, b"aside" + keys.control)
    redis_client.set(keys.control, "of another type")
    dispatcher._round_trips.receive(sent(dispatcher))
    assert (told, redis_client.hlen(keys.inflight)) == (["commit_delivery"], COUNT)
    redis_client.rename(b"aside" + keys.control, keys.control)
    batch.slot.left_alone_until = 0.0
    turn_until_idle(dispatcher)
    assert told == ["commit_delivery", "commit"]
    assert all_committed(broker, dispatcher)


def test_a_worker_commits_whole_deliveries_in_order(broker: Broker, told: list[str]) -> None:
    heard = Heard()
    with Worker(broker, LINE, heard):
        for first in range(0, 2_000, 100):
            send(broker, LINE, range(first, first + 100))
        assert heard.wait(2_000) == list(range(2_000))
        eventually(lambda: total(broker, LINE, "committed") == 2_000, "the commits")
    assert "commit_delivery" in told
    assert all(ledger.balanced for ledger in audit(broker, LINE))


def is_due(broker: Broker, topic: Topic, count: int) -> bool:
    return broker.count(topic, 0).due == count


def test_the_outcome_of_many_messages_is_noted_once_and_that_of_few_for_each(
    broker: Broker, redis_client: redis.Redis
) -> None:
    topic = Topic("kept", TopicType.RANGE_MERGE, slots=1, time_range_ms=1, outcome_retention_ms=60_000)
    keys = slot_keys(broker.prefix, topic.name, 0)
    for count, texts, records in ((ack.ENOUGH - 1, 0, ack.ENOUGH - 1), (ack.ENOUGH, 1, ack.ENOUGH - 1)):
        send(broker, topic, range(count))
        eventually(partial(is_due, broker, topic, count), "the due time")
        dispatcher, batch = taken(broker, topic, count=count)
        end(dispatcher, batch)
        turn_until_idle(dispatcher)
        sizes = (redis_client.zcard(keys.delivery_outcomes), redis_client.hlen(keys.outcomes))
        assert sizes == (texts, records)
