"""A process that has agreed on a topic reaches its messages after another process has re-slotted it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import override_settings
from rest_framework.test import APIRequestFactory, force_authenticate

from django_rmq import (
    InvalidMessage,
    cancel_message,
    connections,
    message_status,
    remove_message,
    replay_message,
    send_message,
)
from django_rmq.api.topics import SlotsView
from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core import reslotting
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import MessageGone, OperationRefused, ServerUnavailable, SlotMoved
from django_rmq.message_ids import identify_for_program, sealed_id
from django_rmq.operations import Actor, Operations, Permission
from django_rmq.operations.consumption import SettledDelivery
from django_rmq.worker.listener_registry import isolated
from tests.support.brokers import OracleBroker
from tests.support.reports import printed

TOPICS = {
    "prices": {"TYPE": "range_merge", "TIME_RANGE": "1h", "SLOTS": 2, "OUTCOME_RETENTION": "1h"},
    "orders": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key", "SLOT_BASIS": "shop"},
}
LATE = datetime(2096, 10, 2, tzinfo=UTC)
BODIES = [{"n": n} for n in range(12)]


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    rmq = {"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, "AUTODISCOVER": None}
    with override_settings(RMQ=rmq), isolated():
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
    assert message_status("prices", BODIES[0]).state == "waiting"
    assert remove_message("prices", {"n": -1}, on_commit=False) == "not_found"
    for slots in request.param:
        reslot("prices", slots)
    return sent


@pytest.mark.usefixtures("ids")
def test_the_status_of_a_moved_message_is_known_by_its_body() -> None:
    assert {message_status("prices", body).state for body in BODIES} == {"waiting"}
    assert message_status("prices", {"n": -1}).state == "unknown"


def test_the_status_of_a_moved_message_is_known_by_its_id(ids: list[str]) -> None:
    found = [message_status("prices", id=one) for one in ids]
    assert {one.state for one in found} == {"waiting"}
    assert [one.id for one in found] == [message_status("prices", body).id for body in BODIES]


def test_the_id_of_a_log_line_is_good_after_a_re_slotting(ids: list[str]) -> None:
    sealed = []
    for one in ids:
        identity = identify_for_program(get_config().topics["prices"], one, get_broker())
        assert identity.member is not None
        sealed.append(sealed_id("prices", identity.slot, identity.member))
    assert {message_status("prices", id=one).state for one in sealed} == {"waiting"}
    half = len(ids) // 2
    assert {cancel_message("prices", id=one).status for one in sealed[:half]} == {"waiting"}
    assert {remove_message("prices", id=one).status for one in ids[half:]} == {"waiting"}
    assert {message_status("prices", body).state for body in BODIES} <= {"removed", "cancelled", "unknown"}


@pytest.mark.usefixtures("ids")
@pytest.mark.parametrize("act", [remove_message, cancel_message])
def test_a_moved_message_is_taken_back(act: Any) -> None:
    assert {act("prices", body, on_commit=False).status for body in BODIES} == {"waiting"}
    assert {act("prices", body, on_commit=False).status for body in BODIES} == {"not_found"}
    assert {message_status("prices", body).state for body in BODIES} <= {"removed", "unknown"}


@pytest.mark.usefixtures("ids")
@pytest.mark.django_db(transaction=True)
def test_a_moved_message_is_taken_back_at_the_commit() -> None:
    with transaction.atomic():
        results = [remove_message("prices", body) for body in BODIES]
    assert {one.status for one in results} == {"waiting"}


def test_a_message_with_a_basis_of_its_own_is_found_by_an_id_from_before_a_re_slotting() -> None:
    sent = send_orders()
    reslot("orders", 16)
    assert {message_status("orders", id=one).state for one in sent} == {"waiting"}
    assert message_status("orders", id="0.a2s").state == "unknown"


def test_an_id_is_one_of_a_slot_that_the_topic_has_or_had() -> None:
    send_message("prices", BODIES[0], on_commit=False)
    with pytest.raises(InvalidMessage):
        message_status("prices", id="5.YQ")
    reslot("prices", 8)
    assert message_status("prices", id="5.YQ").state == "unknown"
    with pytest.raises(InvalidMessage):
        message_status("prices", id="8.YQ")


@pytest.mark.parametrize("act", [remove_message, cancel_message])
def test_a_message_with_a_basis_of_its_own_is_taken_back_by_an_id_from_before_a_re_slotting(act: Any) -> None:
    sent = send_orders()
    reslot("orders", 16)
    assert {act("orders", id=one, on_commit=False).status for one in sent} == {"waiting"}
    assert {act("orders", id=one, on_commit=False).status for one in sent} == {"not_found"}


def test_how_a_message_ended_is_known_by_its_id_before_and_after_a_re_slotting(ids: list[str]) -> None:
    assert {remove_message("prices", id=one, on_commit=False).status for one in ids} == {"waiting"}
    assert {message_status("prices", id=one).state for one in ids} == {"removed"}
    before = send_message("prices", {"n": "ended before"}, on_commit=False).id
    remove_message("prices", id=before, on_commit=False)
    slots = get_broker().definitions()["prices"]["slots"]
    reslot("prices", slots * 4)
    assert message_status("prices", id=before).state == "removed"
    assert shell().follow("prices", before).status.state == "removed"


def shell() -> Operations:
    return Operations(Actor("somebody", "command"))


def person(*permissions: Permission) -> Operations:
    return Operations(Actor("somebody", "rest", None, frozenset(permissions or Permission).__contains__))


def send_orders(count: int = 12) -> list[str]:
    """Send messages with bases of their own, which their ids do not tell; return the ids."""
    return [
        send_message("orders", {"shop": n}, key=f"k{n}", fixed_time=LATE, on_commit=False).id
        for n in range(count)
    ]


def send_prices(count: int = 12) -> list[str]:
    return [send_message("prices", {"n": n}, on_commit=False).id for n in range(count)]


def seal_ids(name: str, ids: list[str]) -> list[str]:
    """Return the ids as the log shows them."""
    found = [identify_for_program(get_config().topics[name], one, get_broker()) for one in ids]
    return [sealed_id(name, one.slot, one.member or b"") for one in found]


@pytest.fixture(params=["prices", "orders"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(16,), (1,), (1, 8)], ids=str)
def changes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """The slot counts that a topic of two slots is given, one after the other."""
    return tuple(request.param)


def sent_before(name: str, changes: tuple[int, ...], form: str) -> list[str]:
    """Send messages, look at them and re-slot their topic; return their ids."""
    sent = send_prices() if name == "prices" else send_orders()
    shell().permitted(name)
    for slots in changes:
        reslot(name, slots)
    return seal_ids(name, sent) if form == "sealed" else sent


@pytest.fixture(params=["plain", "sealed"])
def old(request: pytest.FixtureRequest, name: str, changes: tuple[int, ...]) -> list[str]:
    """The ids of waiting messages whose topic was re-slotted since; a process has looked before."""
    return sent_before(name, changes, request.param)


@pytest.mark.parametrize("operations", [shell, person])
def test_operations_find_messages_by_ids_from_before_a_re_slotting(
    name: str, old: list[str], operations: Any
) -> None:
    found = [operations().follow(name, one) for one in old]
    assert {one.status.state for one in found} == {"waiting"}
    assert [[copy.id for copy in one.copies] for one in found] == [[one] for one in old]
    assert all(operations().body(name, one, "store") for one in old)
    assert all(operations().holds(name, one) for one in old)
    assert len({operations().get(name, one)[0].member for one in old}) == len(old)


@pytest.mark.parametrize("operations", [shell, person])
def test_operations_act_on_messages_by_ids_from_before_a_re_slotting(
    name: str, old: list[str], operations: Any
) -> None:
    some, others = old[:6], old[6:]
    assert operations().reschedule(name, old, due=LATE + timedelta(milliseconds=1)).found == dict.fromkeys(
        old, "rescheduled"
    )
    assert {copy.score for one in old for copy in operations().get(name, one)} == {
        LATE.timestamp() * 1000 + 1
    }
    assert operations().bury(name, old, "why not").found == dict.fromkeys(old, "buried")
    assert operations().replay(name, some).found == dict.fromkeys(some, "replayed")
    assert operations().replay(name, some).found == dict.fromkeys(some, "waiting")
    for one in others:
        body = {**operations().get(name, one)[0].body(), "edited": True}
        assert operations().replay_edited(name, one, body).outcomes == {"replayed": 1}
    assert operations().cancel(name, some[:3]).outcomes == {"deleted": 3}
    assert operations().delete(name, some[3:5], "live").outcomes == {"deleted": 2}
    assert operations().delete_only(name, some[5]).outcomes == {"deleted": 1}
    assert operations().cancel(name, some).outcomes == {"gone": 6}
    with pytest.raises(MessageGone):
        operations().get(name, some[0])


def test_two_ids_of_one_message_are_one_action() -> None:
    (old,) = send_prices(1)
    reslot("prices", 16)
    done = shell().cancel("prices", [old, *seal_ids("prices", [old])])
    assert done.outcomes == {"deleted": 2}


def test_the_audit_trail_names_a_moved_message_as_the_log_does_now(caplog: pytest.LogCaptureFixture) -> None:
    (old,) = send_orders(1)
    reslot("orders", 16)
    (now,) = seal_ids("orders", [message_status("orders", id=old).id])
    caplog.set_level("INFO", "django_rmq.audit")
    shell().cancel("orders", [old])
    assert now in caplog.text


def test_a_message_with_the_same_key_elsewhere_is_left_alone_while_the_slot_of_the_id_has_one() -> None:
    """Two messages whose bases differ; the dead one is where its id says, the other one waits in its family."""
    first, other = (next(n for n in range(1_000) if slot_of(str(n).encode(), 16) == slot) for slot in (1, 9))
    dead = send_message("orders", {"shop": first}, key="k", fixed_time=LATE, on_commit=False).id
    shell().bury("orders", [dead])
    reslot("orders", 16)
    dead = shell().listing("orders", "dead").copies[0].id
    send_message("orders", {"shop": other}, key="k", fixed_time=LATE, on_commit=False)
    assert [copy.slot for copy in shell().listing("orders", "dead").copies] == [1]
    assert [copy.slot for copy in shell().listing("orders", "store").copies] == [9]
    assert shell().delete("orders", [dead], "live").outcomes == {"gone": 1}
    assert len(shell().listing("orders", "store").copies) == 1


def test_during_a_re_slotting_a_message_that_is_not_there_is_not_called_gone() -> None:
    sent = send_prices()
    broker = get_broker()
    begun = reslotting.begin(broker, get_config().topics["prices"], 16)
    assert begun is not None
    reslotting.move(broker, begun, [0])
    present, _ = sent.pop(), remove_message("prices", id=sent[0], on_commit=False)
    assert shell().cancel("prices", [sent[0], present]).found == {sent[0]: "not_found", present: "deleted"}
    with pytest.raises(OperationRefused):
        shell().get("prices", sent[0])
    reslotting.move(broker, begun)
    reslotting.finish(broker, begun)
    assert shell().cancel("prices", sent[:2]).found == {sent[0]: "gone", sent[1]: "deleted"}


@pytest.mark.parametrize(("before", "after"), [(2, 16), (16, 2)])
def test_dead_messages_are_replayed_while_their_topic_is_re_slotted(before: int, after: int) -> None:
    if before != 2:
        reslot("prices", before)
        connections.refresh_definitions(at_once=True)
    sent = send_prices()
    shell().bury("prices", sent)
    broker = get_broker()
    begun = reslotting.begin(broker, get_config().topics["prices"], after)
    assert begun is not None
    reslotting.move(broker, begun, [0])
    words: list[str] = [replay_message("prices", body) for body in BODIES[:4]]
    words += [replay_message("prices", id=one) for one in sent[4:8]]
    words += [shell().replay("prices", [one]).found[one] for one in sent[8:10]]
    words += [shell().replay_edited("prices", one, {"edited": one}).found[one] for one in sent[10:]]
    assert words == ["replayed"] * 12
    assert replay_message("prices", {"n": -1}) == "not_found"
    reslotting.move(broker, begun)
    reslotting.finish(broker, begun)
    assert {message_status("prices", body).state for body in BODIES[:10]} == {"waiting"}
    assert {message_status("prices", {"edited": one}).state for one in sent[10:]} == {"waiting"}


@pytest.mark.parametrize(("before", "after"), [(2, 16), (16, 2)])
def test_all_dead_messages_are_replayed_while_their_topic_is_re_slotted(before: int, after: int) -> None:
    if before != 2:
        reslot("prices", before)
        connections.refresh_definitions(at_once=True)
    shell().bury("prices", send_prices())
    broker = get_broker()
    begun = reslotting.begin(broker, get_config().topics["prices"], after)
    assert begun is not None
    reslotting.move(broker, begun, [0])
    connections.refresh_definitions(at_once=True)
    assert shell().replay_all("prices").result().outcomes == {"replayed": len(BODIES)}


def test_a_replay_says_that_a_slot_was_re_slotted_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (sent,) = send_prices(1)
    shell().bury("prices", [sent])
    reslot("prices", 16)
    monkeypatch.setattr(connections, "refresh_definitions", lambda **_: None)
    monkeypatch.setattr(connections, "with_present_slots", lambda topic, **_: topic)
    with pytest.raises(SlotMoved):
        replay_message("prices", BODIES[0])


def test_who_may_not_see_bodies_learns_nothing_from_a_guess_after_a_re_slotting() -> None:
    (right,) = send_prices(1)
    reslot("prices", 16)
    wrong = message_id(0, b'{"n":99}')
    blind = person(*(set(Permission) - {Permission.VIEW_BODIES}))
    assert blind.cancel("prices", [right, wrong]).outcomes == {"gone": 2}
    for one in (right, wrong):
        with pytest.raises(MessageGone):
            blind.follow("prices", one)


@pytest.mark.parametrize("slots", [1, 16])
def test_the_lists_of_slots_end_with_those_that_the_topic_has_now(slots: int) -> None:
    reslot("prices", slots)
    connections.refresh_definitions(at_once=True)
    (listed,) = json.loads(printed("rmqslots", "prices", "--json"))
    assert [row["slot"] for row in listed["slots"]] == list(range(slots))
    for first, following in ((0, None), (slots, None), (slots - 1, None), (0, 1 if slots > 1 else None)):
        limit = 1 if following else slots
        query: dict[str, Any] = {"topic": "prices", "first": first, "limit": limit}
        request = APIRequestFactory().get("/slots/", query)
        force_authenticate(request, user=User(username="ann", is_superuser=True))
        assert SlotsView.as_view()(request).data["next_slot"] == following


def test_a_late_delivery_of_a_slot_that_is_no_more_is_stale() -> None:
    now = datetime.now(UTC) - timedelta(seconds=5)
    sent = send_message("orders", {"shop": 1}, key="late", fixed_time=now, on_commit=False)
    deliveries = person().deliveries("orders")
    (taken,) = deliveries.take(uuid4(), 1)
    assert sent.id == taken.id
    settled = SettledDelivery(deliveries.id(taken), deliveries.receipt(taken))
    assert deliveries.commit([settled]) == ["ok"]
    reslot("orders", 1)
    connections.with_present_slots(get_config().topics["orders"], at_once=True)
    assert person().deliveries("orders").commit([settled]) == ["stale"]


PRICES = Topic("moving", TopicType.RANGE_MERGE, slots=1, time_range_ms=3_600_000)


@pytest.fixture
def broker() -> Broker:
    return OracleBroker("m:")


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
