"""Where features meet: schedules and changed topics, collected bodies and repairs, lists and permits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any
from unittest import mock

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_rmq import Message, cancel_message, connections, listener, message_status, schedules, send_message
from django_rmq.conf import get_config
from django_rmq.core.commands import ack, claims, fetch, inspect, operate
from django_rmq.core.commands import send as send_commands
from django_rmq.core.commands.schedules import read_schedules
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.schedules import declarations
from django_rmq.core.schedules.stepper import Stepper
from django_rmq.exceptions import Cancelled, OperationRefused, ServerUnavailable
from django_rmq.operations import Actor, Operations, topic_audit
from django_rmq.operations import undeclared_topics as retirement
from django_rmq.testing import Clock, InMemoryBroker, clock_from_now, drain, memory_broker
from django_rmq.worker.listener_registry import isolated
from tests.support.sends import entries
from tests.support.workers import Worker, eventually, live, send

pytestmark = pytest.mark.django_db

TIMED = {"TYPE": "fixed_time", "IDENTITY": "key", "SLOTS": 2}
MERGED = {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5, "IDENTITY": "key"}
COLLECTING = {**MERGED, "ACCUMULATE": 50}


def configured(scheduled: dict[str, Any] | None = None, **topics: Any) -> override_settings:
    rmq = {"REDIS": "redis://nowhere", "TOPICS": topics, "AUTODISCOVER": None, "ON_COMMIT": False}
    return override_settings(RMQ={**rmq, "SCHEDULES": scheduled or {}})


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    with isolated(), memory_broker(found := clock_from_now()):
        yield found


def broker() -> Any:
    return connections.get_broker("worker")


@pytest.mark.parametrize("kind", ["fifo", "priority"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_schedule_can_go_after_its_topic_has_another_type(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, moved: bool
) -> None:
    def topics() -> list[str]:
        return [record.schedule.topic for record in broker().run(read_schedules())]

    with configured({"s": {"TOPIC": "reports", "EVERY": 600}}, reports=TIMED):
        schedules.declare()
        for slot in range(2):
            broker().run(operate.purge(get_config().topic("reports"), slot, "store"))
    left = {"s": {"TOPIC": "others", "EVERY": 600}} if moved else {}
    with configured(left, reports={**TIMED, "TYPE": kind}, others=TIMED):
        call_command("rmqtopics", "--apply")
        clock.advance(700)
        schedules.declare()
        (begin,) = schedules.duties()
        assert next(begin()) >= 0
        if moved:
            assert topics() == ["others"]
            return
        # Its next tick is due, and the topic has no place for it any more.
        assert topics() == ["reports"]
        assert f"Schedule s does not run: topic reports has the TYPE {kind}" in caplog.text
        monkeypatch.setattr(declarations, "GONE_SECONDS", 0.0)
        list(islice(begin(), 20))
        assert topics() == []


def test_a_topic_out_of_reach_stops_no_other_schedule(clock: Clock) -> None:
    both = {"a": {"TOPIC": "lost", "EVERY": 10}, "b": {"TOPIC": "found", "EVERY": 10}}
    with configured(both, lost=TIMED, found=TIMED):
        schedules.declare()
        real = InMemoryBroker.run

        def run(self: InMemoryBroker, call: Any) -> Any:
            if call.script == "put_tick" and call.place.topic.name == "lost":
                raise ServerUnavailable("its node is down")
            return real(self, call)

        with mock.patch.object(InMemoryBroker, "run", run):
            stepper = Stepper(broker(), get_config().topics)
            for _ in range(5):
                clock.advance(10)
                with pytest.raises(ServerUnavailable):
                    stepper.settle()
        held = {name: len(entries(name)) for name in ("lost", "found")}
        assert held == {"lost": 1, "found": 6}


def stray(options: dict[str, Any]) -> tuple[Any, bytes | None]:
    """Repair a topic that holds the key ``k`` in a wrong slot and in its own; return the outcome and the body there."""
    with configured(views=options):
        send_message("views", "new", key="k")
        topic, own = get_config().topic("views"), slot_of(b"k", 4)
        bodies = (b'"stray"',) if topic.collects else None
        envelope = encode_envelope(Envelope(b'"stray"', bodies=bodies))
        broker().run(send_commands.send_merge(topic, (own + 1) % 4, 5_000, [b"k"], [envelope]))
        *_, found = topic_audit.find_strays(broker(), topic, repair=True)
        (looked,) = broker().run(inspect.describe_messages(topic, own, [b"k"]))
        return found, looked.envelope


def test_a_repair_joins_collected_bodies() -> None:
    found, envelope = stray(COLLECTING)
    assert found.mended == 1
    assert envelope is not None
    assert b'5:"new"7:"stray"' in envelope


def test_a_repair_mends_debounced_topics() -> None:
    found, _ = stray({**MERGED, "DEBOUNCE": True, "MAX_WAIT": 60})
    assert found.mended == 1


def test_collecting_changes_only_while_a_topic_is_empty() -> None:
    with configured(views=COLLECTING):
        send_message("views", 1, key="k")
    with configured(views=MERGED), pytest.raises(CommandError):
        call_command("rmqtopics", "--apply")


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (COLLECTING, MERGED, "differ in ACCUMULATE"),
        ({"TYPE": "fifo", "SLOTS": 4}, {"TYPE": "fifo", "SLOTS": 4}, "keeps their order"),
    ],
)
def test_a_move_that_would_lose_bodies_or_order_is_refused(
    source: dict[str, Any], target: dict[str, Any], reason: str
) -> None:
    with configured(former=source, views=target):
        send_message("former", 1, key="k")
    with configured(views=target):
        send_message("views", 1, key="k")
        found = Operations(Actor("me", "test")).find_stranded("former")
        views, producer = get_config().topic("views"), connections.get_producer
        with pytest.raises(OperationRefused, match=reason):
            list(retirement.retire(broker(), producer, found, views, delete=False, dead=""))


@pytest.mark.parametrize("is_async", [True, False])
def test_permits_come_in_lists(is_async: bool) -> None:
    topic = Topic("work", TopicType.RANGE_MERGE, slots=1, time_range_ms=1, max_in_flight=100)
    sizes: list[int] = []

    async def listen_beside(messages: list[Any]) -> None:
        sizes.append(len(messages))
        await asyncio.sleep(0.001)

    def listen(messages: list[Any]) -> None:
        sizes.append(len(messages))

    memory = InMemoryBroker("m:")
    send(memory, topic, range(200))
    with Worker(memory, topic, listen_beside if is_async else listen, batch_size=50, threads=2):
        eventually(lambda: live(memory, topic) == 0)
    assert max(sizes) > 5


KEPT = {**MERGED, "SLOTS": 1, "TIME_RANGE": "1ms", "MAX_RETRIES": 0, "OUTCOME_RETENTION": "1h"}


@pytest.mark.parametrize("by", ["an acknowledgement of Spark", "a person"])
def test_what_has_left_dead_is_no_longer_called_dead(clock: Clock, by: str) -> None:
    """Neither leaves an outcome, so the note that it died is all that is left."""
    with configured(kept=KEPT):
        topic, run = get_config().topic("kept"), broker().run
        send_message("kept", 1, key="k")
        clock.advance(1)
        taken = run(fetch.prepare(topic, 0, "me", None, 1))
        run(ack.rollback(topic, 0, taken.receipt, [Failure(b"k", "failed", None, "ValueError: x")]))
        assert message_status("kept", key="k").state == "dead"
        if by == "a person":
            assert run(operate.remove(topic, 0, [b"k"], "dead")) == ["dead"]
        else:
            assert run(operate.replay(topic, 0, [b"k"])) == ["replayed"]
            run(claims.claim(topic, 0, "spark", 1, 60_000, 10, 100_000))
            run(claims.renew_claim(topic, 0, "spark", 1, 60_000, seal=True))
            run(claims.ack_claim(topic, 0, "spark", 1))
        assert (message_status("kept", key="k").state, live(broker(), topic)) == ("unknown", 0)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_drain_raises_cancelled_only_of_a_listener_that_nobody_cancelled(
    clock: Clock, is_cancelled: bool
) -> None:
    with configured(kept={**KEPT, "IDENTITY": "body"}):

        @listener("kept")
        def stop(message: Message) -> None:
            if is_cancelled:
                cancel_message("kept", message.body)
                message.extend()
            raise Cancelled

        send_message("kept", 1)
        clock.advance(1)
        with nullcontext() if is_cancelled else pytest.raises(Cancelled):
            drain()
        assert message_status("kept", 1).state == ("cancelled" if is_cancelled else "dead")
