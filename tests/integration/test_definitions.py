"""Topic definitions in Redis, and the commands that compare, apply and audit: rmqtopics, rmqaudit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings

from django_rmq import (
    InvalidMessage,
    TopicMismatch,
    connections,
    message_status,
    remove_message,
    send_message,
    send_messages,
)
from django_rmq.conf import get_config
from django_rmq.connections import brokers
from django_rmq.core import topic_registration
from django_rmq.core.coordination import Worker, topic_slots
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer import producer
from django_rmq.core.reslotting import begin, finish
from django_rmq.exceptions import ServerRefused
from tests.support.brokers import direct, set_clock

ROOT = Path(__file__).parents[2]
PRIORITY = Topic("renders", TopicType.PRIORITY, slots=4)


def configured(url: str, prefix: str, **topics: Any) -> override_settings:
    return override_settings(RMQ={"REDIS": url, "KEY_PREFIX": prefix, "TOPICS": topics})


@pytest.fixture
def shop(redis_url: str, prefix: str) -> Any:
    """Settings with these topics, on the Redis of the tests."""
    return lambda **topics: configured(redis_url, prefix, **topics)


RENDERS = {"TYPE": "priority", "SLOTS": 4}


def run(command: str, *args: str, returncode: int = 0) -> Any:
    """What the command prints; as data with --json. ``returncode``: how it must end."""
    out = io.StringIO()
    if returncode:
        with pytest.raises(CommandError) as caught:
            call_command(command, *args, stdout=out, no_color=True)
        assert caught.value.returncode == returncode
        assert "\n" not in str(caught.value)
    else:
        call_command(command, *args, stdout=out, no_color=True)
    return json.loads(out.getvalue()) if "--json" in args else out.getvalue()


def test_what_is_not_known_is_registered_and_then_agreed_upon(broker: Any) -> None:
    topic_registration.register_topics(broker, [PRIORITY])
    topic_registration.register_topics(broker, [PRIORITY])
    assert broker.definitions() == {"renders": PRIORITY.definition()}


def test_every_difference_of_every_topic_is_told_with_both_values(broker: Any) -> None:
    fixed = Topic("orders", TopicType.FIXED_TIME)
    topic_registration.register_topics(broker, [PRIORITY, fixed])
    others = [
        replace(PRIORITY, slots=8, timeout=60),
        replace(fixed, serial=False),
        replace(fixed, name="new"),
    ]
    with pytest.raises(TopicMismatch) as caught:
        topic_registration.register_topics(broker, others)
    for part in (
        'topic "renders": SLOTS is 8 here and 4 in Redis, TIMEOUT is 60 here and 30 in Redis',
        'topic "orders": SERIAL is False here and True in Redis',
    ):
        assert part in str(caught.value)
    assert broker.definitions()["renders"]["slots"] == 4


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"slots": 8}, "SLOTS"),
        ({"type": TopicType.FIXED_TIME}, "TYPE"),
        ({"body": "text"}, "BODY"),
        ({"identity": "key"}, "IDENTITY"),
        ({"slot_basis": "shop"}, "SLOT_BASIS"),
        ({"serial": False}, "SERIAL"),
        ({"timeout": 31}, "TIMEOUT"),
        ({"max_retries": 17}, "MAX_RETRIES"),
        ({"backoff": BackOff(0, 0)}, "BACKOFF"),
        ({"retry_priority": "lowest"}, "RETRY_PRIORITY"),
        ({"max_prepared": 5}, "MAX_PREPARED"),
    ],
)
def test_whatever_decides_how_a_message_is_treated_is_compared(change: dict[str, Any], setting: str) -> None:
    (difference,) = topic_registration.differences(replace(PRIORITY, **change), PRIORITY.definition())
    assert difference.setting == setting
    assert difference.declared != difference.registered


@pytest.mark.parametrize(
    "change", [{"max_body": 5}, {"prefetch": 5}, {"time_range_ms": 5}, {"max_rate": 1.0}, {"listener": False}]
)
def test_what_is_each_process_own_business_is_not(change: dict[str, Any]) -> None:
    assert topic_registration.differences(replace(PRIORITY, **change), PRIORITY.definition()) == []


def test_a_definition_of_another_version_differs_by_what_only_it_has() -> None:
    registered = {**PRIORITY.definition(), "colour": "red"}
    assert topic_registration.differences(PRIORITY, registered) == [("COLOUR", None, "red")]


@pytest.mark.parametrize(
    "change",
    [
        *({"TIMEOUT": 60}, {"TIMEOUT": 5}, {"MAX_RETRIES": 3}, {"BACKOFF": 5}),
        *({"RETRY_PRIORITY": "lowest"}, {"SERIAL": False}, {"MAX_PREPARED": 5}),
    ],
    ids=lambda change: next(iter(change)).lower(),
)
@pytest.mark.django_db(transaction=True)
def test_a_sender_follows_redis_in_what_only_consumers_need(
    shop: Any, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (setting,) = change
    with shop(renders=RENDERS):
        send_message("renders", 1, priority=50)
        before = connections.with_present_slots(get_config().topic("renders"))
    with shop(renders={**RENDERS, **change}):
        assert send_message("renders", 2, priority=50).status == "stored"
        assert send_messages("renders", [3, 4], priority=50).counts() == {"stored": 2}
        assert remove_message("renders", 4).status == "waiting"
        assert message_status("renders", 3).state == "waiting"
        with transaction.atomic():
            result = send_message("renders", 5, priority=50)
        assert result.status == "stored"
        assert connections.with_present_slots(get_config().topic("renders")) == before
        (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert f'This process follows Redis: topic "renders": {setting} is ' in warning.getMessage()
        broker = direct(connections.get_broker())
        topic = get_config().topic("renders")
        with pytest.raises(TopicMismatch, match=f"{setting} is .* here and .* in Redis"):
            topic_registration.register_topics(broker, [topic])
        # Somebody applies the settings. Processes that run learn of it.
        assert topic_registration.apply(broker, topic) == []
        brokers.current().next_look = 0.0
        send_message("renders", 6, priority=50)
        assert connections.with_present_slots(topic) == topic


def test_the_first_priority_of_a_slot_settles_the_registered_retries(shop: Any, redis_url: str) -> None:
    with shop(renders={**RENDERS, "MAX_RETRIES": 40}):
        run("rmqtopics", "--apply")
    with shop(renders=RENDERS):
        for sku in range(20):
            send_message("renders", sku, priority=50)
        with pytest.raises(InvalidMessage, match="priority must be from 41 "):
            send_message("renders", 1, priority=30)
        prefix, client = get_config().key_prefix, redis.Redis.from_url(redis_url)
        controls = [slot_keys(prefix, "renders", slot).control for slot in range(4)]
        assert {client.hget(control, "max_retries") for control in controls} == {b"40"}
        client.close()


def obstacles(broker: Any, topic: Topic, **change: Any) -> list[str]:
    changed = replace(topic, **change)
    different = topic_registration.differences(changed, topic.definition())
    found = topic_registration.obstacles(broker, changed, different)
    assert len(found) <= 1
    return found


def fill(broker: Any, topic: Topic) -> None:
    broker.send_replace(topic, 0, [500], [b'{"sku":1}'])


def test_slots_are_never_changed_here(broker: Any) -> None:
    assert obstacles(broker, PRIORITY, slots=8, timeout=60) == [
        "SLOTS: `manage.py rmqreslot renders 8` changes the slots of a topic"
    ]


def test_settings_from_before_a_re_slotting_are_agreed_upon_and_warned_of(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.define(PRIORITY)
    reslotting = begin(broker, PRIORITY, 16)
    assert reslotting is not None
    for slots in (4, 16):
        topic_registration.register_topics(broker, [replace(PRIORITY, slots=slots)])
    assert not caplog.messages
    assert "being re-slotted to 16 slots" in obstacles(broker, PRIORITY, timeout=60)[0]
    finish(broker, reslotting)
    topic_registration.register_topics(broker, [replace(PRIORITY, slots=16)])
    assert not caplog.messages
    registered = topic_registration.register_topics(broker, [PRIORITY])["renders"]
    assert caplog.messages == ["Topic renders was re-slotted to 16 slots: SLOTS is still 4 in the settings"]
    assert topic_registration.as_registered(PRIORITY, registered).slots == 16
    different = topic_registration.differences(PRIORITY, registered)
    assert topic_registration.obstacles(broker, PRIORITY, different) == [
        "SLOTS: the topic was re-slotted; write SLOTS 16 into the settings"
    ]
    with pytest.raises(TopicMismatch, match="SLOTS is 8 here and 16 in Redis"):
        topic_registration.register_topics(broker, [replace(PRIORITY, slots=8)])


@pytest.mark.parametrize(
    "change", [{"type": TopicType.FIXED_TIME}, {"body": "text"}, {"identity": "key"}, {"slot_basis": "shop"}]
)
def test_what_waiting_messages_could_not_follow_needs_an_empty_topic(
    broker: Any, change: dict[str, Any]
) -> None:
    assert obstacles(broker, PRIORITY, **change) == []
    fill(broker, PRIORITY)
    (reason,) = obstacles(broker, PRIORITY, **change)
    assert "must be empty, but it holds 1 messages" in reason
    assert f"delete them with `manage.py rmqpurge {PRIORITY.name}`" in reason


def test_dead_messages_count_for_they_could_be_replayed(broker: Any) -> None:
    fill(broker, PRIORITY)
    broker.bury(PRIORITY, 0, [b'{"sku":1}'])
    assert obstacles(broker, PRIORITY, body="text")


def test_more_retries_on_a_priority_topic_need_empty_slots_for_priorities_could_read_as_retries(
    broker: Any,
) -> None:
    assert obstacles(broker, PRIORITY, max_retries=600) == []
    fill(broker, PRIORITY)
    assert "MAX_RETRIES: in 1 slots" in obstacles(broker, PRIORITY, max_retries=600)[0]
    assert obstacles(broker, PRIORITY, max_retries=3) == []
    assert obstacles(broker, replace(PRIORITY, type=TopicType.FIXED_TIME), max_retries=600) == []


def test_a_definition_stays_if_a_message_comes_before_its_slot_has_the_retries(broker: Any) -> None:
    topic_registration.register_topics(broker, [PRIORITY])
    changed = replace(PRIORITY, max_retries=600)
    assert obstacles(broker, PRIORITY, max_retries=600) == []
    fill(broker, PRIORITY)
    (reason,) = topic_registration.apply(broker, changed)
    assert reason.startswith("MAX_RETRIES: in 1 slots")
    assert broker.definitions()["renders"] == PRIORITY.definition()
    broker.remove(PRIORITY, 0, [b'{"sku":1}'])
    assert topic_registration.apply(broker, changed) == []
    assert broker.definitions()["renders"] == changed.definition()


@pytest.mark.parametrize(
    "change",
    [
        *({"timeout": 90}, {"backoff": BackOff(5, 5)}, {"serial": False}),
        *({"retry_priority": "lowest"}, {"max_prepared": 5}),
    ],
)
def test_the_harmless_ones_are_applied_while_messages_wait(broker: Any, change: dict[str, Any]) -> None:
    topic_registration.register_topics(broker, [PRIORITY])
    fill(broker, PRIORITY)
    changed = replace(PRIORITY, **change)
    assert obstacles(broker, PRIORITY, **change) == []
    topic_registration.apply(broker, changed)
    topic_registration.register_topics(broker, [changed])


def test_applying_gives_every_slot_its_new_time_out(broker: Any) -> None:
    fill(broker, PRIORITY)
    assert broker.prepare(PRIORITY, 0, "owner", None, 1).status == "ok"
    topic_registration.apply(broker, replace(PRIORITY, timeout=10**6))
    # Had the slot kept its 30 seconds, a delivery of long ago would have timed out by now.
    later = replace(PRIORITY, timeout=1)
    clock_ms = broker.now_ms() + 100_000
    set_clock(broker, lambda: clock_ms * 1000)
    assert broker.time_out(later, 0) == 0


def test_rmqtopics_tells_what_is_new_and_registers_it(shop: Any) -> None:
    with shop(renders=RENDERS):
        (row,) = run("rmqtopics", "--json", returncode=1)
        assert (row["topic"], row["state"], row["registered"]) == ("renders", "new", None)
        assert direct(connections.get_broker()).definitions() == {}
        (row,) = run("rmqtopics", "--json", "--apply")
        assert row["state"] == "registered"
        (row,) = run("rmqtopics", "--json")
        assert (row["state"], row["registered"]) == ("same", row["declared"])
        assert "renders  same        priority, 4 slots" in run("rmqtopics")


def test_rmqtopics_tells_differences_and_applies_the_harmless_ones(shop: Any) -> None:
    with shop(renders=RENDERS):
        send_message("renders", 1, priority=50)
    with shop(renders={**RENDERS, "TIMEOUT": 60}):
        text = run("rmqtopics", returncode=1)
        assert "TIMEOUT: 60 in the settings, 30 in Redis" in text
        (row,) = run("rmqtopics", "--json", returncode=1)
        assert row["differences"] == [{"setting": "TIMEOUT", "declared": 60, "registered": 30}]
        assert run("rmqtopics", "--json", "--apply")[0]["state"] == "applied"
        assert send_message("renders", 1, priority=50).status == "replaced"


def test_rmqtopics_applies_nothing_of_a_topic_that_has_an_obstacle(shop: Any) -> None:
    with shop(renders=RENDERS):
        send_message("renders", 1, priority=50)
    with shop(renders={**RENDERS, "SLOTS": 8, "TIMEOUT": 60}):
        text = run("rmqtopics", "--apply", returncode=1)
        assert "not applied: SLOTS: `manage.py rmqreslot renders 8` changes the slots of a topic" in text
        (row,) = run("rmqtopics", "--json", "--apply", returncode=1)
        assert (row["state"], row["registered"]["timeout"]) == ("differs", 30)
        assert direct(connections.get_broker()).definitions()["renders"]["timeout"] == 30


def join_renders() -> None:
    """Let a worker live that serves a topic."""
    worker = Worker("w", "here", 7, 0.0, 1, topic_slots([get_config().topic("renders")]))
    direct(connections.get_broker()).beat("w", "t", 60_000, record=write_record("t", worker))


@pytest.mark.parametrize(
    ("change", "setting"),
    [({"TIMEOUT": 3}, "TIMEOUT (lowered)"), ({"SERIAL": False}, "SERIAL"), ({"IDENTITY": "key"}, "IDENTITY")],
    ids=["timeout", "gate", "identity"],
)
def test_rmqtopics_does_not_apply_what_running_workers_would_not_follow(
    shop: Any, change: dict[str, Any], setting: str
) -> None:
    with shop(renders=RENDERS, others=RENDERS):
        run("rmqtopics", "--apply")
        join_renders()
    with shop(renders={**RENDERS, **change}, others={**RENDERS, **change}):
        text = run("rmqtopics", "--apply", returncode=1)
        why = "running workers would keep the old value (process 7 on here): stop them first, or use --force"
        assert f"not applied: {setting}: {why}" in text
        states = {row["topic"]: row["state"] for row in run("rmqtopics", "--json", "--apply", returncode=1)}
        assert states == {"renders": "differs", "others": "same"}, "nobody serves the other one"
        forced = run("rmqtopics", "--json", "--apply", "--force")
        assert {row["state"] for row in forced} == {"applied", "same"}


def test_rmqtopics_applies_what_running_workers_are_not_harmed_by(shop: Any) -> None:
    with shop(renders=RENDERS):
        run("rmqtopics", "--apply")
        join_renders()
    with shop(renders={**RENDERS, "TIMEOUT": 60, "BACKOFF": 5}):
        assert run("rmqtopics", "--json", "--apply")[0]["state"] == "applied"


def test_rmqtopics_lists_what_redis_has_and_the_settings_do_not(shop: Any) -> None:
    with shop(renders=RENDERS, others=RENDERS):
        run("rmqtopics", "--apply")
    with shop(renders=RENDERS):
        assert [row["state"] for row in run("rmqtopics", "--json")] == ["same", "undeclared"]
        assert [row["topic"] for row in run("rmqtopics", "renders", "--json")] == ["renders"]


def test_usage_and_configuration_are_exit_2_and_redis_away_is_3(shop: Any) -> None:
    with shop(renders=RENDERS):
        for command in ("rmqtopics", "rmqaudit"):
            run(command, "render", returncode=2)
    with override_settings(RMQ={"REDIS": "nowhere", "TOPICS": {"a": {}}}):
        run("rmqtopics", returncode=2)
    with configured("redis://127.0.0.1:1/0", "", renders=RENDERS):
        run("rmqtopics", returncode=3)
        run("rmqaudit", returncode=3)


def test_from_a_shell_an_error_is_one_line_and_its_exit_code(redis_url: str) -> None:
    environment = {**os.environ, "REDIS_URL": "redis://127.0.0.1:1/0"}
    command = [sys.executable, "manage.py", "rmqaudit"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout) == (3, "")
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("CommandError: Redis does not answer")


def test_rmqaudit_finds_a_system_that_does_its_work_balanced(shop: Any) -> None:
    with shop(renders=RENDERS):
        send_messages("renders", range(20), priority=50)
        topic, broker = get_config().topic("renders"), direct(connections.get_broker())
        for slot in range(4):
            prepared = broker.prepare(topic, slot, "owner", None, 2)
            broker.commit(topic, slot, prepared.receipt, [prepared.deliveries[0].member])
        (row,) = run("rmqaudit", "--json")
        assert (row["topic"], row["drifting"], row["counters"]["committed"]) == ("renders", [], 4)
        assert (row["depths"]["store"], row["depths"]["prepare"]) == (12, 4)
        assert run("rmqaudit", "renders") == "renders: balanced over 4 slots (store 12, prepare 4)\n"


def test_rmqaudit_tells_what_came_from_outside_and_adopts_it(
    shop: Any, redis_client: redis.Redis, prefix: str
) -> None:
    keys = slot_keys(prefix, "renders", 2)
    with shop(renders=RENDERS):
        redis_client.zadd(keys.store, {b"foreign": 50, b"also": 60})
        (row,) = run("rmqaudit", "--json", returncode=1)
        assert row["drifting"] == [{"slot": 2, "live": 2, "dead": 0, "delivery": 0, "claim": 0}]
        assert "slot 2: live +2" in run("rmqaudit", returncode=1)
        (row,) = run("rmqaudit", "--json", "--adopt")
        assert (row["adopted"], row["drifting"], row["counters"]) == (2, [], {"foreign": 2, "sent": 0})
        assert run("rmqaudit", "--json")[0]["adopted"] == 0


def test_rmqaudit_never_adopts_a_loss(shop: Any, redis_client: redis.Redis, prefix: str) -> None:
    with shop(renders={**RENDERS, "SLOTS": 1}):
        send_messages("renders", range(3), priority=50)
        redis_client.zrem(slot_keys(prefix, "renders", 0).store, b"1")
        (row,) = run("rmqaudit", "--json", "--adopt", returncode=1)
        assert (row["adopted"], row["drifting"][0]["live"]) == (0, -1)


def test_two_persons_do_not_adopt_the_same_messages(broker: Any) -> None:
    assert broker.adopt(PRIORITY, 0, 2, 0) == "ok"
    assert broker.adopt(PRIORITY, 0, 2, 0) == "changed"
    assert broker.adopt(PRIORITY, 0, 1, 2) == "ok"
    assert broker.audit_ledger(PRIORITY, 0)["foreign"] == 3
    assert broker.audit_ledger(PRIORITY, 0).live_drift == -3


def test_definitions_that_redis_has_lost_are_registered_again_as_they_were(
    shop: Any, redis_client: redis.Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the slot count of a topic that was re-slotted, by which running processes place messages."""
    with shop(renders=RENDERS, others=RENDERS):
        topic = get_config().topic("renders")
        send_message("renders", 1, priority=100)
        run("rmqreslot", "renders", "16")
        assert connections.with_present_slots(topic, at_once=True).slots == 16
        before = connections.get_broker().definitions()
        keys = list(redis_client.scan_iter(f"{prefix}*"))
        redis_client.delete(*keys)
        assert connections.with_present_slots(topic, at_once=True).slots == 16
        assert connections.get_broker().definitions() == before
        assert "Redis has lost the definitions of all topics; 1 of them are registered again" in caplog.text
        connections.close()
        # A process that starts now agrees with those that have been running.
        sent = send_messages("renders", range(200), priority=100)
        assert {result.slot for result in sent} == set(range(16))


def test_pages_are_read_while_redis_refuses_the_definitions_that_it_has_lost(
    shop: Any, redis_client: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def redefine(self: object, name: str, change: object) -> None:
        attempts.append(name)
        raise ServerRefused("You can't write against a read only replica.")

    with shop(renders=RENDERS):
        topic = get_config().topic("renders")
        run("rmqreslot", "renders", "16")
        before = connections.with_present_slots(topic, at_once=True)
        redis_client.delete(*redis_client.scan_iter(f"{prefix}*"))
        with monkeypatch.context() as patched:
            patched.setattr(type(connections.get_broker()), "redefine", redefine)
            assert connections.with_present_slots(topic, at_once=True) == before
            assert connections.with_present_slots(topic) == before
        assert attempts == ["renders"], "it is tried again after some seconds"
        assert connections.with_present_slots(topic, at_once=True) == before
        assert connections.get_broker().definitions()["renders"]["slots"] == 16


def test_explicit_slot_bases_are_noted_again_now_and_then(
    shop: Any, redis_client: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop(renders=RENDERS):
        topic, broker = get_config().topic("renders"), connections.get_broker()
        send_message("renders", 1, priority=100, slot_basis="a")
        redis_client.delete(*redis_client.scan_iter(f"{prefix}*"))
        send_message("renders", 2, priority=100, slot_basis="a")
        assert not broker.has_slot_bases(topic), "one note a minute is enough"
        monkeypatch.setattr(producer, "NOTE_SECONDS", 0.0)
        connections.close()
        send_message("renders", 3, priority=100, slot_basis="a")
        redis_client.delete(*redis_client.scan_iter(f"{prefix}*"))
        send_message("renders", 3, priority=100, slot_basis="a")
        assert broker.has_slot_bases(topic)
