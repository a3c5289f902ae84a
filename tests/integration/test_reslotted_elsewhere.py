"""A process that has agreed on a topic reaches its messages after another process has re-slotted it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django.test import override_settings

from django_rmq import InvalidMessage, cancel_message, remove_message, send_message, status
from django_rmq.core.calls.broker import Broker
from django_rmq.core.memory.broker import InMemoryBroker
from django_rmq.core.producer.sending import Producer
from django_rmq.core.topics import reslotting
from django_rmq.core.words.topics import Topic, TopicType
from django_rmq.exceptions import ServerUnavailable
from django_rmq.project.connections import get_broker
from django_rmq.project.ids import identify_for_program
from django_rmq.project.listening.registry import isolated
from django_rmq.project.sealing import sealed_id
from django_rmq.project.settings import get_config
from django_rmq.testing import memory_broker

TOPICS = {
    "prices": {"TYPE": "range_merge", "TIME_RANGE": 3_600_000, "SLOTS": 2, "KEEP_DONE": "1h"},
    "orders": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key", "SLOT_BASIS": "shop"},
}
LATE = 4_000_000_000_000
BODIES = [{"n": n} for n in range(12)]


@pytest.fixture(autouse=True, params=["redis", "memory"])
def _broker(request: pytest.FixtureRequest) -> Iterator[None]:
    url, prefix = "redis://nowhere", "m:"
    if request.param == "redis":
        url, prefix = request.getfixturevalue("redis_url"), request.getfixturevalue("prefix")
    rmq = {"REDIS": url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated():
        if request.param == "redis":
            yield
        else:
            with memory_broker():
                yield


def reslot(name: str, slots: int) -> None:
    """Re-slot a topic, which this process is not told."""
    broker = get_broker()
    chosen = reslotting.begin(broker, get_config().topics[name], slots)
    assert chosen is not None
    reslotting.move(broker, chosen)
    reslotting.finish(broker, chosen)


@pytest.fixture(params=[(16,), (1,), (1, 8)], ids=str)
def ids(request: pytest.FixtureRequest) -> list[str]:
    """The ids of messages that were sent and looked at before re-slottings."""
    sent = [send_message("prices", body, on_commit=False).id for body in BODIES]
    assert status("prices", BODIES[0]).state == "waiting"
    assert remove_message("prices", {"n": -1}, on_commit=False) == "not_found"
    for slots in request.param:
        reslot("prices", slots)
    return sent


@pytest.mark.usefixtures("ids")
def test_the_status_of_a_moved_message_is_known_by_its_body() -> None:
    assert {status("prices", body).state for body in BODIES} == {"waiting"}
    assert status("prices", {"n": -1}).state == "unknown"


def test_the_status_of_a_moved_message_is_known_by_its_id(ids: list[str]) -> None:
    found = [status("prices", id=one) for one in ids]
    assert {one.state for one in found} == {"waiting"}
    assert [one.id for one in found] == [status("prices", body).id for body in BODIES]


def test_the_id_of_a_log_line_is_good_after_a_re_slotting(ids: list[str]) -> None:
    sealed = []
    for one in ids:
        identity = identify_for_program(get_config().topics["prices"], one)
        assert identity.member is not None
        sealed.append(sealed_id("prices", identity.slot, identity.member))
    assert {status("prices", id=one).state for one in sealed} == {"waiting"}
    half = len(ids) // 2
    assert {cancel_message("prices", id=one).status for one in sealed[:half]} == {"waiting"}
    assert {remove_message("prices", id=one).status for one in ids[half:]} == {"waiting"}
    assert {status("prices", body).state for body in BODIES} <= {"removed", "cancelled", "unknown"}


@pytest.mark.usefixtures("ids")
@pytest.mark.parametrize("act", [remove_message, cancel_message])
def test_a_moved_message_is_taken_back(act: Any) -> None:
    assert {act("prices", body, on_commit=False).status for body in BODIES} == {"waiting"}
    assert {act("prices", body, on_commit=False).status for body in BODIES} == {"not_found"}
    assert {status("prices", body).state for body in BODIES} <= {"removed", "unknown"}


@pytest.mark.usefixtures("ids")
@pytest.mark.django_db(transaction=True)
def test_a_moved_message_is_taken_back_at_the_commit() -> None:
    with transaction.atomic():
        results = [remove_message("prices", body) for body in BODIES]
    assert {one.status for one in results} == {"waiting"}


def test_a_message_with_a_basis_of_its_own_is_found_by_an_id_from_before_a_re_slotting() -> None:
    sent = [
        send_message("orders", {"shop": n}, key=f"k{n}", fixed_time=LATE, on_commit=False) for n in range(12)
    ]
    reslot("orders", 16)
    assert {status("orders", id=one.id).state for one in sent} == {"waiting"}
    assert status("orders", id="0.a2s").state == "unknown"


def test_an_id_is_one_of_a_slot_that_the_topic_has_or_had() -> None:
    send_message("prices", BODIES[0], on_commit=False)
    with pytest.raises(InvalidMessage):
        status("prices", id="5.YQ")
    reslot("prices", 8)
    assert status("prices", id="5.YQ").state == "unknown"
    with pytest.raises(InvalidMessage):
        status("prices", id="8.YQ")


# --- in one step with sends

PRICES = Topic("moving", TopicType.RANGE_MERGE, slots=1, time_range_ms=3_600_000)


@pytest.fixture
def broker() -> Broker:
    return InMemoryBroker("m:")


def stale(broker: Broker, slots: int = 4) -> Producer:
    """Return a producer that does not know that its topic was re-slotted."""
    broker.define(PRICES)
    producer = Producer(broker)
    producer.send([producer.build(PRICES, n) for n in range(8)])
    chosen = reslotting.begin(broker, PRICES, slots)
    assert chosen is not None
    reslotting.move(broker, chosen)
    reslotting.finish(broker, chosen)
    return producer


def taking_back(producer: Producer, body: int) -> Any:
    return producer.outgoing(PRICES, body, 0)._replace(act="remove")


def test_what_is_sent_after_a_removal_stays(broker: Broker) -> None:
    producer = stale(broker)
    steps = [step for n in range(8) for step in (taking_back(producer, n), producer.build(PRICES, n))]
    results, errors = producer.attempt(steps, removes=True)
    assert [one.status for one in results] == ["waiting", "stored"] * 8
    assert not errors


def test_what_is_removed_after_a_send_goes(broker: Broker) -> None:
    producer = stale(broker)
    steps = [step for n in range(8) for step in (producer.build(PRICES, n), taking_back(producer, n))]
    results, errors = producer.attempt(steps, removes=True)
    assert {one.status for one in results[1::2]} == {"waiting"}
    assert not errors
    left, _ = producer.attempt([taking_back(producer, n) for n in range(8)], removes=True)
    assert {one.status for one in left} == {"not_found"}


def test_a_re_slotting_behind_the_sends_takes_nothing_from_them(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.define(PRICES)
    producer = Producer(broker)
    steps = [step for n in range(8) for step in (taking_back(producer, n), producer.build(PRICES, n))]

    def begun() -> Any:
        return {"moving": {"slots": 4, "reslot": {"number": 1, "former": [1]}}}

    with monkeypatch.context() as patch:
        patch.setattr(broker, "definitions", begun)
        results, _ = producer.attempt(steps, removes=True)
    assert [one.status for one in results] == ["not_found", "stored"] * 8
    assert {producer.attempt([taking_back(producer, n)], removes=True)[0][0].status for n in range(8)} == {
        "waiting"
    }


def test_what_may_be_elsewhere_is_not_called_not_found(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = stale(broker)

    def away() -> Any:
        raise ServerUnavailable("gone")

    monkeypatch.setattr(broker, "definitions", away)
    results, errors = producer.attempt([taking_back(producer, n) for n in range(8)], removes=True)
    assert [index for index, one in enumerate(results) if one.status == "failed"] == sorted(errors)
    assert errors
    assert {one.status for one in results} == {"failed", "waiting"}
