"""Limits that a person changes at run time: what is kept, what workers and REST apply, and the card of a topic."""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse

from django_rmq.conf import get_config
from django_rmq.core.commands import limits
from django_rmq.core.model.changed_limits import ChangedLimits, decode_limits, limited
from django_rmq.core.model.keys import changed_limits_key, schedules_key, topics_key
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.rate_limits import RateLimits
from django_rmq.exceptions import InvalidRequest
from django_rmq.operations import Actor, Operations
from django_rmq.worker import listener_registry
from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess
from django_rmq.worker.worker_reports import ReportDuty
from tests.support.brokers import project_on
from tests.support.reports import printed
from tests.support.workers import LONG, Listener, eventually, live, send

TOPICS = {
    "free": {
        "TYPE": "range_merge",
        "SLOTS": 4,
        "TIME_RANGE": "1ms",
        "IDENTITY": "key",
        "HARD_TIMEOUT": "1h",
        "BACKOFF": 5,
    },
    "busy": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"},
    "tight": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms", "MAX_RATE": 5, "MAX_IN_FLIGHT": 2},
    "slotwise": {"SLOTS": 2, "MAX_RATE": {"rate": 3, "per": "slot"}},
}
CHANGED = ChangedLimits({"max_rate": 2.5}, "ada", 1_700_000_000_000)
LIMITED = Topic("free", TopicType.RANGE_MERGE, slots=4)


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    """A broker with the topics of this module."""
    schedules = {"nightly": {"TOPIC": "free", "CRON": "0 3 * * *", "BODY": 1}}
    with project_on(broker, TOPICS=TOPICS, TOPIC_DEFAULTS={"TIMEOUT": "90s"}, SCHEDULES=schedules):
        yield broker


def operations() -> Operations:
    return Operations(Actor("tester", "test"))


def test_limits_are_read_as_they_were_written() -> None:
    assert decode_limits(CHANGED.encode().encode()) == CHANGED
    assert limited(LIMITED, CHANGED).max_rate == 2.5
    assert limited(LIMITED, None) is LIMITED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"values": {"max_rate": "fast"}, "by": "", "at_ms": 1}',
        '{"values": {"max_rate": 0}, "by": "", "at_ms": 1}',
        '{"values": {"max_rate": NaN}, "by": "", "at_ms": 1}',
        '{"values": {"max_in_flight": 1.5}, "by": "", "at_ms": 1}',
        '{"values": {"max_in_flight": true}, "by": "", "at_ms": 1}',
        '{"values": {}, "by": 3, "at_ms": 1}',
        '{"values": {}, "by": "", "at_ms": "now"}',
        "[" * 100_000,
    ],
)
def test_a_text_that_is_no_limits_is_not_read(text: str) -> None:
    assert decode_limits(text.encode()) is None


def test_limits_take_precedence_until_they_are_reset(shop: Any) -> None:
    shop.run(limits.write_changed_limits("slotwise", CHANGED))
    found = operations().change_limits("tight", {"max_rate": 100})
    assert (found.topic.max_rate, found.topic.max_in_flight, found.different) == (100.0, 2, ["max_rate"])
    assert found.changed is not None and found.changed.by == "tester"
    # What is not named is that of the settings.
    found = operations().change_limits("tight", {"max_in_flight": None})
    assert (found.topic.max_rate, found.topic.max_in_flight) == (5.0, None)
    assert operations().topic_limits("tight") == found
    assert operations().reset_limits("tight").different == []
    assert operations().topic_limits("tight").changed is None
    assert list(shop.run(limits.read_changed_limits())) == ["slotwise"]


@pytest.mark.parametrize(
    "values",
    [{}, {"max_body": 1}, {"max_rate": 0}, {"max_rate": 1e7}, {"max_rate": True}, {"max_in_flight": 0}],
)
def test_limits_that_cannot_be_are_refused(shop: Any, values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        operations().change_limits("tight", values)
    assert shop.run(limits.read_changed_limits()) == {}


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_value_of_another_type_leaves_the_settings_in_effect(shop: Any) -> None:
    shop.client.set(changed_limits_key(shop.prefix), "text")
    assert operations().topic_limits("tight").topic.max_rate == 5.0
    applied: list[Any] = []
    duty = ReportDuty(shop, "w", 1, "", list, lambda: 1.0, limit=applied.append)
    with closing(duty()) as steps:
        next(steps)
    assert applied == []


def test_a_topic_becomes_limited_and_free_again() -> None:
    from tests.oracle.broker import OracleBroker

    shared = RateLimits(OracleBroker("m:"), "A", [LIMITED], lambda topic: 4)

    def ask(now: float, waiting: int) -> None:
        shared.ask(now, lambda name: waiting, lambda name, error: None, lambda name: 0)

    shared.change(LIMITED, 3, 1.0)
    assert not shared, "without limits nothing is asked"
    # Three messages are in flight when the limit comes; they count, and none of them is taken away.
    shared.change(replace(LIMITED, max_in_flight=4), 3, 1.0)
    assert shared.room("free") <= 0 and shared.due() == 1.0 and shared.has_permits("free")
    ask(1.0, 1)
    assert shared.room("free") == 1
    shared.ended("free", 3, 1.5)
    shared.change(replace(LIMITED, max_in_flight=2), 0, 2.0)
    assert shared.room("free") <= 2
    ask(2.0, 1)
    assert shared.room("free") == 2
    shared.change(LIMITED, 0, 3.0)
    assert shared.room("free") > 1_000_000 and shared.due() == float("inf")
    shared.change(replace(LIMITED, max_rate=1.0), 0, 4.0)
    assert shared.room("free") == 0 and not shared.has_permits("free")
    ask(4.0, 1)
    assert shared.room("free") == 1


def test_a_worker_reads_changed_limits_with_its_report(shop: Any) -> None:
    applied: list[Any] = []
    duty = ReportDuty(shop, "w", 1, "", list, lambda: 1.0, limit=applied.append)
    with closing(duty()) as steps:
        next(steps)
        operations().change_limits("tight", {"max_rate": 7})
        next(steps)
        operations().reset_limits("tight")
        next(steps)
    values = [{name: one.values for name, one in each.items()} for each in applied]
    assert values == [{}, {"tight": {"max_rate": 7.0}}, {}]


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_running_worker_follows_limits_that_change(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, running, lock = threading.Event(), [0], threading.Lock()
    most: list[int] = []

    def listen(message: Any) -> None:
        with lock:
            running[0] += 1
            most.append(running[0])
        assert go.wait(5 * LONG)
        with lock:
            running[0] -= 1

    monkeypatch.setattr(listener_registry, "listeners", lambda: {"busy": Listener("busy", listen)})
    topic = get_config().topic("busy")
    # The limit holds from the beginning, although no report was written yet.
    operations().change_limits("busy", {"max_in_flight": 1})
    process = WorkerProcess([topic], ProcessOptions(threads=4))
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    try:
        send(shop, topic, [f"m{number}" for number in range(40)])
        eventually(lambda: running[0] == 1)
        figures = operations().topic("busy")
        assert (running[0], figures.prepare) == (1, 1)
        process.limit({"busy": ChangedLimits({"max_in_flight": 3})})
        eventually(lambda: running[0] == 3)
        assert max(most) == 3
        process.limit({})
        eventually(lambda: running[0] == 4)
        go.set()
        eventually(lambda: live(shop, topic) == 0)
    finally:
        go.set()
        process.stop()
        thread.join(LONG)
    assert not thread.is_alive()


def test_consumers_over_rest_and_the_reasons_of_a_wait_have_the_limits(shop: Any) -> None:
    send(shop, get_config().topic("busy"), [f"m{number}" for number in range(8)])
    operations().change_limits("busy", {"max_in_flight": 2})
    first, second = uuid4(), uuid4()
    taken = operations().deliveries("busy").take(first, 5, 20)
    assert len(taken) == 2
    assert operations().deliveries("busy").take(second, 5) == []
    waiting = operations().listing("busy", "waiting").copies[0]
    assert "in_flight_limit" in [one.reason for one in operations().holds("busy", waiting.id)]
    operations().reset_limits("busy")
    assert "in_flight_limit" not in [one.reason for one in operations().holds("busy", waiting.id)]
    assert len(operations().deliveries("busy").take(second, 5)) >= 1


def test_the_card_says_where_each_value_comes_from(shop: Any) -> None:
    card = operations().topic_card("free")
    found = {one.key: (one.value, one.origin) for one in card.settings}
    assert found["SLOTS"] == ("4", "topic") and found["HARD_TIMEOUT"] == ("1h", "topic")
    assert found["BACKOFF"] == ("5s", "topic") and found["TIMEOUT"] == ("90s", "defaults")
    assert found["MAX_RETRIES"] == ("16", "") and found["MAX_RUNTIME"] == ("2h", "")
    assert found["MAX_BACKLOG"] == ("None", "") and found["SERIAL"] == ("True", "")
    assert found["TIME_RANGE"] == ("1ms", "topic") and "DEFAULT_PRIORITY" not in found
    assert [one.name for one in card.schedules] == ["nightly"]
    slotwise = {one.key: one.value for one in operations().topic_card("slotwise").settings}
    assert slotwise["MAX_RATE"] == "3 per slot" and slotwise["BACKOFF"] == "1s to 10m"


def test_the_card_names_what_redis_has_instead(shop: Any) -> None:
    topic = get_config().topic("free")
    shop.define(replace(topic, timeout=45))
    rows = {one.key: one.registered for one in operations().topic_card("free").settings}
    assert rows["TIMEOUT"] == "45" and rows["SLOTS"] == ""


@pytest.mark.django_db
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("key_of", [schedules_key, topics_key])
def test_a_key_that_another_program_has_written_hides_no_other_rule(
    shop: Any, staff: Callable[..., Client], key_of: Callable[[str], bytes]
) -> None:
    shop.client.delete(key_of(shop.prefix))
    shop.client.lpush(key_of(shop.prefix), "foreign")
    answer = staff("view_topic").get(
        reverse("admin:django_rmq_topic_change", args=["free"]) + "?tab=settings"
    )
    text = html.unescape(answer.content.decode())
    assert answer.status_code == 200 and "MAX_RETRIES" in text
    assert "holds data that RMQ did not write" in text


@pytest.mark.django_db
def test_the_limits_are_changed_and_reset_from_the_page(shop: Any, staff: Callable[..., Client]) -> None:
    client = staff("view_topic", "pause_topic")
    card = reverse("admin:django_rmq_topic_change", args=["tight"]) + "?tab=settings"
    form = reverse("admin:django_rmq_topic_limits", args=["tight"])

    def get(page: str) -> str:
        return html.unescape(client.get(page).content.decode())

    assert "Back to the settings" not in get(card) and "differ from the settings" not in get(card)
    assert "Leave empty for the settings (5)" in get(form)
    answer = client.post(form, {"max_rate": "fast", "max_in_flight": "-1"})
    assert answer.status_code == 200 and shop.run(limits.read_changed_limits()) == {}
    assert "slowest" in html.unescape(client.post(form, {"max_rate": "1e-9"}).content.decode())
    answer = client.post(form, {"max_rate": "0.5", "max_in_flight": "0"}, follow=True)
    shown = html.unescape(answer.content.decode())
    assert "The limits were changed" in shown and "limits differ from the settings" in shown
    assert "at most 0.5/s" in shown and "settings: 5" in shown and "settings: 2" in shown
    (one,) = shop.run(limits.read_changed_limits()).values()
    assert one.values == {"max_rate": 0.5, "max_in_flight": None}
    assert 'value="0.5"' in get(form)
    shown = html.unescape(client.post(form, {"act": "reset"}, follow=True).content.decode())
    assert "those of the settings" in shown and shop.run(limits.read_changed_limits()) == {}
    # An empty form is a reset, and there is nothing to reset.
    client.post(form, {"max_rate": "", "max_in_flight": ""})
    written = list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))
    assert written == [
        "Change limits (max_rate 5 -> 0.5, max_in_flight 2 -> none): 1 changed (admin)",
        "Reset limits (max_rate 0.5 -> 5, max_in_flight none -> 2): 1 changed (admin)",
    ]
    viewer = staff("view_topic")
    assert "Change the limits" not in viewer.get(card).content.decode()
    assert viewer.get(form).status_code == 403


@pytest.mark.django_db
def test_rest_and_the_command_change_limits(shop: Any, staff: Callable[..., Client]) -> None:
    client = staff("view_topic", "pause_topic")
    route = "/api/rmq/topics/tight/limits/"

    def post(data: object, who: Client = client) -> Any:
        return who.post(route, json.dumps(data), content_type="application/json")

    assert client.get(route).json() == {
        "topic": "tight",
        "max_rate": 5.0,
        "max_in_flight": 2,
        "declared_max_rate": 5.0,
        "declared_max_in_flight": 2,
        "changed": [],
        "changed_by": None,
        "changed_ms": None,
    }
    answer = post({"max_rate": None})
    assert answer.status_code == 200
    assert (answer.json()["max_rate"], answer.json()["changed"]) == (None, ["max_rate"])
    assert client.get("/api/rmq/topics/tight/").json()["max_rate"] is None
    for wrong in ({}, {"max_rate": 0}, {"max_rate": "5"}, {"max_in_flight": 1.5}, {"slots": 4}):
        assert post(wrong).status_code == 400, wrong
    assert post({"max_rate": 1}, staff("view_topic")).status_code == 403
    assert client.delete(route).json()["changed"] == []

    def command(*arguments: str) -> str:
        return printed("rmqtopics", *arguments)

    printed("rmqtopics", "--apply")
    assert "tight: max_rate 2.5, max_in_flight none" in command(
        "tight", "--max-rate", "2.5", "--max-in-flight", "none"
    )
    assert "changed at run time: max_rate 2.5, max_in_flight none" in command("tight")
    changed = command("tight", "--max-rate", "2.5", "--max-in-flight", "none", "--json")
    assert json.loads(changed) == [{"topic": "tight", "max_rate": 2.5, "max_in_flight": None}]
    limits = json.loads(command("tight", "--json"))[0]["changed_limits"]
    assert limits == {"max_rate": 2.5, "max_in_flight": None}
    assert "max_rate 5, max_in_flight 2" in command("tight", "--reset-limits")
    assert "changed at run time" not in command("tight")
    for wrong_arguments in (
        ("--max-rate", "3"),
        ("tight", "--max-rate", "0"),
        ("tight", "--max-rate", "fast"),
        ("tight", "--max-rate", "3", "--reset-limits"),
    ):
        with pytest.raises(CommandError):
            command(*wrong_arguments)
