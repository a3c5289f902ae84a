"""What the audit trail says of each action: the filter, the messages by sealed ids, the values before and after, no content."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import InterfaceError, OperationalError
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.commands import operate, send
from django_rmq.core.commands.schedules import change_schedule
from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.schedule import Schedule
from django_rmq.exceptions import InvalidRequest
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Filter, Operations, Permission
from django_rmq.operations.audit_trail import MOST_NAMED, record
from django_rmq.testing import memory_broker
from tests.support.programs import Program, user_with

pytestmark = pytest.mark.django_db

TOPICS = {
    "ranked": {"TYPE": "priority", "SLOTS": 1},
    "timed": {"TYPE": "fixed_time", "SLOTS": 1},
    "reports": {"TYPE": "fixed_time", "SLOTS": 1, "IDENTITY": "key"},
}


@pytest.fixture(autouse=True)
def broker() -> Iterator[Any]:
    rmq = {"BROKER": "memory", "AUTODISCOVER": None, "TOPICS": TOPICS, "API": {"SEND_RATE": None}}
    with override_settings(RMQ=rmq), memory_broker():
        yield connections.get_broker()


@pytest.fixture
def operations() -> Operations:
    return Operations(Actor.of_user(user_with(*Permission), "admin"))


def put(broker: Any, *members: str, topic: str = "ranked", error: str = "") -> list[str]:
    """Let these messages wait; with an error, let them be dead. Return their ids."""
    raw = [member.encode() for member in members]
    declared = get_config().topics[topic]
    broker.run(send.send_replace(declared, 0, [2_000_000] * len(raw), raw))
    if error:
        broker.run(operate.bury(declared, 0, raw, error))
    return [message_id(0, member) for member in raw]


def notes() -> list[str]:
    """Return what the history has."""
    return list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))


def sealed(member: str, topic: str = "ranked") -> str:
    return sealed_id(topic, 0, member.encode())


class TokenUser:
    """A user that an identity provider knows, and the database does not."""

    pk = "auth0|7"

    def get_username(self) -> str:
        return "grace"

    def has_perm(self, permission: str) -> bool:
        return True


def test_a_user_without_a_row_is_in_the_log_alone(broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    put(broker, "1")
    with caplog.at_level(logging.INFO, "django_rmq.audit"):
        assert Operations(Actor.of_user(TokenUser(), "rest")).purge("ranked", "store").result().done == 1
    assert "1 purged by grace (rest)" in caplog.text
    assert notes() == []


@pytest.mark.parametrize("error", [OperationalError(2006, "gone away"), InterfaceError(0, "")])
def test_an_action_that_is_done_raises_no_error_of_the_history(
    broker: Any,
    operations: Operations,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Drivers of MySQL have the second error for every use of a connection after one that has found it broken."""

    def refuse(**fields: object) -> Any:
        raise error

    monkeypatch.setattr(LogEntry.objects, "create", refuse)
    assert operations.delete("ranked", put(broker, "a"), "live").outcomes == {"deleted": 1}
    assert "The LogEntry could not be written" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Filter(), "dead"),
        (Filter(error="KeyError"), "dead, error KeyError"),
        (Filter(error="shop.errors.Boom", slot=0), "dead, error shop.errors.Boom, slot 0"),
        (Filter(older_than=0.5, newer_than=3600), "dead, older than 0.5 s, newer than 3600 s"),
        (Filter(text="4111111111111111"), "dead, a text (left out)"),
        (Filter(error="card 4111111111111111"), "dead, an error (left out)"),
        (Filter(error="4111111111111111"), "dead, an error (left out)"),
    ],
)
def test_the_filter_of_an_act_on_many_messages_is_in_the_trail(
    broker: Any, operations: Operations, caplog: pytest.LogCaptureFixture, wanted: Filter, told: str
) -> None:
    put(broker, "1", error="KeyError: 'a'")
    with caplog.at_level(logging.INFO, "django_rmq.audit"):
        operations.replay_all("ranked", wanted).result()
    (note,) = notes()
    assert note.startswith(f"Replay all ({told}): ")
    assert told in caplog.text
    assert "4111111111111111" not in note + caplog.text
    assert caplog.records[-1].rmq_note == told  # type: ignore[attr-defined]


def test_a_purge_says_its_age_and_its_slot(broker: Any, operations: Operations) -> None:
    put(broker, "1", topic="timed")
    operations.purge("timed", "store", older_than=60, slot=0).result()
    operations.delete_all("ranked", "store", Filter(priority=5)).result()
    assert notes() == [
        "Purge (waiting, older than 60 s, slot 0): 1 purged (admin)",
        "Delete all (waiting, priority 5): nothing (admin)",
    ]


def test_what_was_done_to_all_matches_is_in_the_trail(broker: Any, operations: Operations) -> None:
    put(broker, "1")
    operations.reschedule_all("ranked", "store", Filter(slot=0), priority=500).result()
    operations.bury_all("ranked", "store", why="secret reasons").result()
    assert notes() == [
        "Reschedule all (waiting, slot 0; to priority 500): 1 rescheduled (admin)",
        "Bury all (waiting; with a reason): 1 buried (admin)",
    ]


def test_what_has_died_since_an_act_began_is_no_filter_of_it() -> None:
    begun = Filter(error="Boom").as_of("dead", 12.5)
    assert begun.description == "error Boom"
    assert begun.scores("dead", 100_000) == (1000.0, 87_500)
    assert Filter(older_than=20).as_of("dead", 12.5).scores("dead", 100_000)[1] == 80_000
    assert Filter().as_of("dead", 12.5).is_empty
    assert Filter(error="Boom").as_of("store", 12.5) == Filter(error="Boom")
    with pytest.raises(InvalidRequest, match="an age must be"):
        Filter().as_of("dead", 1e300).check(get_config().topics["ranked"], "dead")


def test_chosen_messages_are_named_by_sealed_ids(broker: Any, operations: Operations) -> None:
    one, other = put(broker, '"secret-1"', '"secret-2"')
    (late,) = put(broker, '"secret-3"', topic="timed")
    operations.reschedule("ranked", [one, other], priority=500)
    operations.reschedule("timed", [late], due=datetime(2030, 3, 17, 17, 46, 40, tzinfo=UTC))
    operations.bury("ranked", [one], "secret reasons")
    operations.bury("ranked", [other])
    operations.replay_edited("ranked", one, "secret-4")
    operations.delete("ranked", [other], "dead")
    operations.cancel("ranked", [sealed('"secret-9"')])
    first, second, third = sealed('"secret-1"'), sealed('"secret-2"'), sealed('"secret-3"', "timed")
    unknown = sealed('"secret-9"')
    assert notes() == [
        f"Reschedule (2 chosen: {first}, {second}; to priority 500): 2 rescheduled (admin)",
        f"Reschedule (1 chosen: {third}; to 2030-03-17T17:46:40.000+00:00): 1 rescheduled (admin)",
        f"Bury (1 chosen: {first}; with a reason): 1 buried (admin)",
        f"Bury (1 chosen: {second}): 1 buried (admin)",
        f"Replay edited (1 chosen: {first}; with another body): 1 replayed (admin)",
        f"Delete (1 chosen: {second}; dead copy): 1 deleted (admin)",
        f"Cancel (1 chosen: {unknown}): 1 gone (admin)",
    ]
    assert "secret" not in "".join(notes())


def test_the_trail_names_some_of_many_chosen_messages(broker: Any, operations: Operations) -> None:
    members = [str(n) for n in range(MOST_NAMED + 5)]
    operations.replay("ranked", put(broker, *members, error="Boom: bad"))
    (note,) = notes()
    named = ", ".join(sealed(member) for member in members[:MOST_NAMED])
    assert note == f"Replay (15 chosen: {named} and 5 more): 15 replayed (admin)"


def test_the_trail_names_what_was_sent(operations: Operations) -> None:
    operations.send("ranked", "secret", priority=50)
    name = sealed('"secret"')
    assert notes() == [f"Send ({name}): 1 stored (admin)"]


def test_the_history_page_shows_acts_of_the_admin_and_of_rest(broker: Any, admin_client: Client) -> None:
    (one,) = put(broker, "1")
    program = Program(user_with(*Permission))
    program.ok("POST", f"topics/ranked/messages/{one}/bury/", {"why": "requested"})
    program.ok("POST", "topics/ranked/replay/", {"filter": {"text": "x", "slot": 0}})
    shown = admin_client.get(reverse("admin:django_rmq_topic_history", args=["ranked"])).content.decode()
    assert f"Put into Dead (1 chosen: {sealed('1')}; with a reason): 1 put into Dead (rest)" in shown
    assert "Replay all (dead, a text (left out), slot 0): nothing (rest)" in shown


def test_what_a_database_cannot_store_is_not_written(operations: Operations) -> None:
    record(operations.actor, "act", "ranked", {"done": 1}, "a\0b")
    assert notes() == ["Act (a\N{REPLACEMENT CHARACTER}b): 1 done (admin)"]


def test_an_edit_of_a_schedule_says_the_values_before_and_after(broker: Any, operations: Operations) -> None:
    declared = Schedule("nightly", "reports", 1, cron="0 3 * * *", timezone="Europe/Berlin")
    broker.run(change_schedule("nightly", "spec", declared.text))
    operations.edit_schedule("nightly", {"cron": "*/5 * * * *", "timezone": "Asia/Tokyo", "catch_up": "all"})
    operations.edit_schedule("nightly", {"catch_up": "all"})
    operations.edit_schedule("nightly", {"every": 60})
    operations.reset_schedule("nightly")
    operations.pause_schedule("nightly")
    before, after = "0 3 * * * Europe/Berlin, catch-up last", "*/5 * * * * Asia/Tokyo, catch-up all"
    assert notes() == [
        f"Edit (schedule nightly: from {before} to {after}): 1 changed (admin)",
        f"Edit (schedule nightly: {after}): 1 unchanged (admin)",
        f"Edit (schedule nightly: from {after} to every 60 s, catch-up all): 1 changed (admin)",
        f"Edit (schedule nightly: from every 60 s, catch-up all to {before}): 1 changed (admin)",
        "Pause (schedule nightly): 1 paused (admin)",
    ]


def test_a_run_of_a_schedule_names_its_message(broker: Any, operations: Operations) -> None:
    declared = Schedule("often", "reports", 1, every=60)
    broker.run(change_schedule("often", "spec", declared.text))
    sent = operations.run_schedule("often")
    (copy,) = operations.get("reports", sent)
    assert copy.member is not None
    assert notes() == [f"Run (schedule often: {sealed_id('reports', 0, copy.member)}): 1 stored (admin)"]
