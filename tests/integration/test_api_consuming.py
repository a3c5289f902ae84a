"""Two-phase consumption over HTTP, on a real Redis: the gate, retries and limits of a worker."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.test import override_settings

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.commands import inspect
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import ServerUnavailable
from django_rmq.operations import Actor, consumption
from django_rmq.operations.consumption import Deliveries, SettledDelivery
from django_rmq.testing import Clock, clock_from_now
from tests.support.brokers import ClusterBroker, direct, project_on, set_clock
from tests.support.programs import Consumer, broker_of_project
from tests.support.servers import RedisCluster
from tests.support.workers import LONG, Heard, Worker, audit, cluster_of, eventually, total

pytestmark = pytest.mark.django_db

TOPICS = {
    "work": {"TYPE": "priority", "SLOTS": 1, "BACKOFF": 0, "MAX_RETRIES": 2, "TIMEOUT": 60},
    "many": {"TYPE": "priority", "SLOTS": 4096},
    "timed": {"TYPE": "fixed_time", "SLOTS": 2},
    "keyed": {"TYPE": "priority", "SLOTS": 2, "IDENTITY": "key"},
    "shared": {"TYPE": "priority", "SLOTS": 1, "SERIAL": False},
    "slow": {"TYPE": "priority", "SLOTS": 8, "MAX_RATE": 2},
    "narrow": {"TYPE": "priority", "SLOTS": 8, "MAX_IN_FLIGHT": 3},
    "both": {"TYPE": "priority", "SLOTS": 8, "MAX_IN_FLIGHT": 3, "MAX_RATE": 20},
    "own": {"TYPE": "priority", "SLOTS": 1, "MAX_RETRIES": 2, "BACKOFF": f"{__name__}.rest"},
}


def rest(failures: int) -> float:
    return 1000.0 * failures


@pytest.fixture
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Topics of every kind, on each broker."""
    monkeypatch.setattr("django_rmq.operations.consumption.ROUND_SECONDS", 60.0)
    monkeypatch.setattr("django_rmq.operations.consumption.ROUND_SECONDS", 60.0)
    yield from broker_of_project(request, TOPICS=TOPICS, API={"SEND_RATE": None})


def topic_of(name: str) -> Topic:
    return get_config().topic(name)


def test_what_is_taken_is_committed_by_its_receipt_and_once(broker: Any) -> None:
    consumer = Consumer("work")
    consumer.send({"n": 1}, {"n": 2})
    taken = consumer.take(5)
    assert sorted(one["body"]["n"] for one in taken) == [1, 2]
    assert len({one["delivery"] for one in taken}) == 1
    assert {(one["retries_left"], one["encoding"]) for one in taken} == {(2, "json")}
    assert consumer.settle("commit", taken[0], taken[0]) == {"ok": 1, "stale": 1}
    assert consumer.settle("commit", *taken) == {"stale": 1, "ok": 1}
    (ledger,) = audit(broker, topic_of("work"))
    assert (ledger["committed"], ledger.store, ledger.prepare) == (2, 0, 0)


def test_a_failure_is_retried_as_often_as_for_a_worker_and_then_dead_with_its_error(broker: Any) -> None:
    consumer = Consumer("work")
    consumer.send(1)
    left = []
    while taken := consumer.take():
        left.append(taken[0]["retries_left"])
        assert consumer.settle("rollback", *taken, error="shop.Boom: bad") == {"ok": 1}
    assert left == [2, 1, 0]
    (copy,) = consumer.ok("GET", "topics/work/messages/?state=dead&error=Boom")["results"]
    assert (copy["failures"], copy["error"], copy["failed"]) == (3, "shop.Boom: bad", "failed")


def test_a_rollback_may_choose_its_rest_or_reject(broker: Any) -> None:
    consumer = Consumer("work")
    consumer.send(1, 2)
    one, other = consumer.take(2)
    consumer.settle("rollback", one, delay=60)
    consumer.settle("rollback", other, reject=True)
    (resting,) = consumer.ok("GET", "topics/work/messages/?state=retry")["results"]
    assert 30_000 < resting["at_ms"] - time.time() * 1000 < 65_000
    (dead,) = consumer.ok("GET", "topics/work/messages/?state=dead")["results"]
    assert dead["failed"] == "rejected"


def test_the_topics_own_back_off_function_is_asked(broker: Any) -> None:
    consumer = Consumer("own")
    consumer.send(1)
    consumer.settle("rollback", *consumer.take())
    (resting,) = consumer.ok("GET", "topics/own/messages/?state=retry")["results"]
    assert 900_000 < resting["at_ms"] - time.time() * 1000 < 1_010_000


def test_release_gives_back_with_nothing_spent(broker: Any) -> None:
    consumer = Consumer("work")
    consumer.send(1)
    (first,) = consumer.take()
    assert consumer.settle("release", first) == {"ok": 1}
    (again,) = consumer.take()
    assert again["retries_left"] == first["retries_left"]
    assert again["delivery"] > first["delivery"]
    assert consumer.settle("commit", first) == {"stale": 1}


def test_nobody_takes_from_a_slot_that_another_holds(broker: Any) -> None:
    one, other = Consumer("work"), Consumer("work")
    one.send(1, 2, 3)
    taken = one.take(1)
    assert other.take(3) == []
    assert len(one.take(1)) == 1
    same_uuid = Consumer("work")
    same_uuid.uuid = one.uuid
    assert same_uuid.take(3) == [], "the consumer of another user is another consumer"
    # What the worker would be called is no way in.
    assert other.settle("commit", {**taken[0], "receipt": "1.0123456789abcdef0123"}) == {"stale": 1}
    forged = {"deliveries": [{"id": taken[0]["id"], "receipt": "1"}]}
    other.refused(400, "invalid_request", "POST", "topics/work/commit/", forged)


def test_what_is_not_settled_comes_back_and_what_is_extended_does_not(broker: Any) -> None:
    clock = Clock()
    set_clock(broker, clock)
    consumer, other = Consumer("work"), Consumer("work")
    consumer.send(1)
    (taken,) = consumer.take()
    for _ in range(4):
        clock.advance(50)
        assert consumer.settle("extend", taken) == {"ok": 1}
        assert other.take() == []
    clock.advance(62)
    (again,) = other.take()
    assert again["retries_left"] == 1
    assert consumer.settle("commit", taken) == {"stale": 1}
    assert consumer.settle("extend", taken) == {"stale": 1}
    assert other.settle("commit", again) == {"ok": 1}


def test_a_consumer_that_waits_gets_the_first_message_there_is(broker: Any) -> None:
    consumer = Consumer("timed")
    began = time.monotonic()
    assert consumer.take(wait=0.3) == []
    assert time.monotonic() - began >= 0.3
    due = int(time.time() * 1000) + 700
    consumer.ok("POST", "topics/timed/messages/", {"body": 1, "fixed_time": due}, 202)
    (taken,) = consumer.take(wait=15)
    assert time.time() * 1000 >= due
    assert taken["body"] == 1
    consumer.refused(400, "invalid", "POST", "topics/timed/prepare/", {"consumer": consumer.uuid, "wait": 21})
    consumer.refused(
        400, "invalid", "POST", "topics/timed/prepare/", {"consumer": consumer.uuid, "max": 1001}
    )
    consumer.refused(400, "invalid", "POST", "topics/timed/prepare/", {"consumer": "evil"})
    consumer.refused(400, "invalid", "POST", "topics/timed/prepare/", {"consumer": 7})


@pytest.fixture
def looks(broker: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the slots of a topic were looked at."""
    seen: list[float] = []
    heads = inspect.heads

    def counted(*args: Any, **how: Any) -> Any:
        seen.append(time.monotonic())
        return heads(*args, **how)

    monkeypatch.setattr(inspect, "heads", counted)
    return seen


def test_a_consumer_that_waits_for_many_slots_looks_less_often(
    looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.operations.consumption.SLOTS_PER_SECOND", topic_of("timed").slots / 0.7)
    assert Consumer("timed").take(wait=1) == []
    assert 2 <= len(looks) <= 3


def test_a_consumer_that_waits_looks_again_when_the_next_message_is_due(
    broker: Any, looks: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.operations.consumption.FIRST_PAUSE", 15)
    consumer, clock, rests = Consumer("timed"), clock_from_now(), list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        clock.advance(seconds)

    set_clock(broker, clock)
    for n, seconds in enumerate((10, 3600)):
        due = clock() // 1000 + seconds * 1000
        consumer.ok("POST", "topics/timed/messages/", {"body": n, "fixed_time": due}, 202)
    monkeypatch.setattr(time, "sleep", rest)
    assert [one["body"] for one in consumer.take(wait=20)] == [0]
    assert sum(rests) < 11
    # Not by looking all the time.
    assert 2 <= len(looks) <= 10


def test_no_connection_to_redis_is_kept_while_a_consumer_waits(redis_url: str, prefix: str) -> None:
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}
    with override_settings(RMQ=rmq):
        pool = direct(connections.get_broker()).client.connection_pool
        consumer, busy = Consumer("timed"), list[int]()
        sleep = time.sleep

        def rest(seconds: float) -> None:
            # To redis-py those that rest are in use.
            busy.append(len(pool._in_use_connections) - len(pool._resting))
            sleep(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", rest)
            assert consumer.take(wait=0.5) == []
        assert busy and set(busy) == {0}
        connections.close()


def test_held_answers_what_a_lost_answer_handed_out(broker: Any) -> None:
    consumer, other = Consumer("work"), Consumer("work")
    consumer.send(1, "x" * 2000)
    taken = consumer.take(5)
    held = consumer.take(held=True)
    assert sorted(held, key=str) == sorted(taken, key=str)
    assert other.take(held=True) == []
    assert consumer.settle("commit", *held) == {"ok": 2}
    assert consumer.take(held=True) == []
    Consumer("shared").refused(
        409, "refused", "POST", "topics/shared/prepare/", {"consumer": other.uuid, "held": True}
    )


def test_keyed_messages_come_with_key_and_headers(broker: Any) -> None:
    consumer = Consumer("keyed")
    consumer.send({"n": 1}, key="k", headers={"x": "y"})
    (taken,) = consumer.take()
    assert (taken["body"], taken["key"], taken["headers"]) == ({"n": 1}, "k", {"x": "y"})
    assert consumer.settle("commit", taken) == {"ok": 1}


def test_slots_are_tried_in_turn_and_those_that_are_held_are_skipped(broker: Any) -> None:
    one, other = Consumer("many"), Consumer("many")
    one.send(*range(60))
    first = one.take(20)
    second = other.take(100)
    assert Counter(json_key(each) for each in first + second) == Counter({str(n): 1 for n in range(60)})
    assert {each["slot"] for each in first}.isdisjoint(each["slot"] for each in second)


def json_key(message: dict[str, Any]) -> str:
    return str(message["body"])


@pytest.mark.slow
def test_deliveries_of_a_topic_with_a_rate_come_at_that_rate(broker: Any) -> None:
    consumer = Consumer("slow")
    consumer.send(*range(10))
    began = time.monotonic()
    taken = consumer.take(10, wait=5)
    while len(taken) < 5:
        taken += consumer.take(10, wait=5)
    passed = time.monotonic() - began
    assert len(taken) <= 2 * passed + 1
    assert passed < 60


def test_messages_in_flight_are_bounded_over_all_consumers_and_workers(broker: Any) -> None:
    one, other = Consumer("narrow"), Consumer("narrow")
    one.send(*range(20))
    taken = one.take(2)
    more = other.take(5)
    assert (len(taken), len(more)) == (2, 1)
    assert one.take(5) == other.take(5) == []
    assert one.settle("commit", taken[0]) == {"ok": 1}
    (third,) = other.take(5)
    assert one.take(5) == []
    assert other.settle("rollback", third, delay=60) == {"ok": 1}
    assert one.settle("extend", taken[1]) == {"ok": 1}
    assert one.settle("release", taken[1]) == {"ok": 1}
    heard = Heard()
    with Worker(broker, topic_of("narrow"), heard) as worker:
        worker.asleep()
        assert other.settle("commit", *more) == {"ok": 1}
        heard.wait(17)
    assert total(broker, topic_of("narrow"), "committed") == 19


def test_requests_of_one_consumer_side_by_side_are_bounded_as_well(broker: Any) -> None:
    consumer = Consumer("narrow")
    consumer.send(*range(20))
    ours = Deliveries(Actor("a", "rest"), topic_of("narrow"), broker)
    permits = ours._taking._permits
    asking, told = permits.request, threading.Barrier(2, timeout=LONG)

    def ask(request: str, most: int) -> Any:
        found = asking(request, most)
        told.wait()
        return found

    permits.request = ask  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(ours.take, uuid.UUID(int=1), 3) for _ in range(2)]
        assert sum(len(one.result(LONG)) for one in both) == 3


def test_a_request_that_waits_in_vain_leaves_no_wish_behind(broker: Any) -> None:
    one, other = Consumer("narrow"), Consumer("narrow")
    one.send(*range(20))
    assert len(one.take(3)) == 3
    assert other.take(2, wait=0.4) == []
    found = broker.allow(topic_of("narrow"), "x", tokens=0, in_use=0, wanted=1, lease_ms=1)
    assert not found.others_wait


def test_permits_that_were_not_needed_are_given_back(broker: Any) -> None:
    one, other = Consumer("both"), Consumer("both")
    one.send(1)
    assert len(one.take(3)) == 1
    other.send(2, 3, 4)
    taken: list[Any] = []

    def has_both() -> bool:
        taken.extend(other.take(3))
        return len(taken) == 2

    eventually(has_both)
    assert other.take(3) == []


def test_a_consumer_gets_its_share_though_a_worker_wants_everything(broker: Any) -> None:
    consumer = Consumer("narrow")
    consumer.send(*range(1_000))
    pause = threading.Event()
    with Worker(broker, topic_of("narrow"), lambda message: pause.wait(0.02), threads=4):
        taken = consumer.take(1, wait=15)
        assert len(taken) == 1
        consumer.settle("commit", *taken)


def test_a_prepare_whose_answer_is_lost_hands_out_what_was_taken_before(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer("many")
    consumer.send(*range(30))
    made = []
    real = type(broker).pipeline

    def pipeline(self: Any) -> Any:
        found = real(self)
        made.append(found)
        if len(made) == 3:
            execute = found.execute
            found.execute = lambda: (execute(), (_ for _ in ()).throw(ServerUnavailable("gone")))
        return found

    monkeypatch.setattr(type(broker), "pipeline", pipeline)
    taken = consumer.take(30)
    assert 0 < len(taken) < 30
    monkeypatch.undo()
    held = consumer.take(held=True)
    assert len(held) > len(taken)
    assert {one["id"] for one in taken} <= {one["id"] for one in held}


def test_another_definition_in_redis_is_misconfigured_not_a_500(redis_url: str, prefix: str) -> None:
    rmq: dict[str, Any] = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}
    with override_settings(RMQ=rmq):
        Consumer("work").send(1)
        connections.close()
    rmq["TOPICS"] = {"work": {**TOPICS["work"], "TYPE": "fixed_time"}}
    with override_settings(RMQ=rmq):
        consumer = Consumer("work")
        consumer.refused(503, "misconfigured", "POST", "topics/work/prepare/", {"consumer": consumer.uuid})
        connections.close()


def test_a_receipt_is_for_its_topic_and_slot_only(broker: Any) -> None:
    one = Deliveries(Actor("a", "rest"), topic_of("timed"), broker)
    known = consumption.sealed("timed", 0, 1)
    for topic, slot in (("work", 0), ("timed", 1)):
        assert consumption.unsealed(topic, slot, known) is None
    assert consumption.unsealed("timed", 0, known) == 1
    assert one.commit([SettledDelivery("1.MQ", known)]) == ["stale"]


def test_on_a_cluster_all_is_the_same(redis_cluster: RedisCluster, prefix: str) -> None:
    client = cluster_of(redis_cluster)
    with project_on(ClusterBroker(client, prefix), REDIS={"CLUSTER": redis_cluster.url}, TOPICS=TOPICS):
        consumer = Consumer("narrow")
        body = {"messages": [{"body": n, "priority": 100} for n in range(12)]}
        first = consumer.ok("POST", "topics/narrow/messages/", body, 202, Idempotency_Key="k")
        assert consumer.ok("POST", "topics/narrow/messages/", body, 202, Idempotency_Key="k") == first
        seen = []
        while taken := consumer.take(10, wait=1):
            assert len(taken) <= 3
            assert sorted(consumer.take(held=True), key=str) == sorted(taken, key=str)
            seen += [one["body"] for one in taken]
            assert consumer.settle("commit", *taken) == {"ok": len(taken)}
        assert sorted(seen) == list(range(12))
    client.close()
