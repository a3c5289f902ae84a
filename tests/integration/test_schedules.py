"""Schedules in Django: declared, kept a tick ahead, changed by deployments and by people, and shown."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock
from uuid import RFC_4122, UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.core import checks
from django.core.management import CommandError, call_command
from django.test import Client, override_settings
from django.urls import reverse
from rich.console import Console

from django_rmq import Message, UnknownSchedule, listener, schedule, schedules
from django_rmq import schedules as schedule_duty
from django_rmq.conf import get_config
from django_rmq.connections import get_broker
from django_rmq.core.commands import ack, fetch
from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.schedules import change_schedule, read_schedules
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.keys import schedules_key
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.schedule import ScheduleRecord
from django_rmq.core.schedules import stepper, tick_times
from django_rmq.core.schedules.declarations import ENDED_SECONDS, GONE_SECONDS, Declarations
from django_rmq.exceptions import (
    ConfigurationError,
    InvalidRequest,
    OperationRefused,
    ServerUnavailable,
    TopicFull,
    Unreadable,
    WrongType,
)
from django_rmq.management.commands import rmqstats
from django_rmq.operations import Actor, Operations
from django_rmq.operations import schedules as operating
from django_rmq.testing import Clock, ScheduleState, drain, inline_worker, schedule_state, start_schedules
from django_rmq.worker.listener_registry import isolated
from django_rmq.worker.startup import check_start, chosen_topics
from tests.oracle.keyspace import SortedSet
from tests.support.brokers import OracleBroker, oracle_broker
from tests.support.reports import printed, samples

REPORTS = {"TYPE": "fixed_time", "IDENTITY": "key", "SLOTS": 4}
TOPICS = {"reports": REPORTS, "merged": {**REPORTS, "TYPE": "range_merge", "TIME_RANGE": 5}}
NIGHTLY = {"TOPIC": "reports", "CRON": "0 3 * * *", "TIMEZONE": "Europe/Berlin", "BODY": {"kind": "orders"}}
NOON = "2026-03-28T12:00:00Z"


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def project(topics: dict[str, Any], scheduled: dict[str, Any]) -> override_settings:
    return override_settings(
        RMQ={"BROKER": "memory", "AUTODISCOVER": None, "TOPICS": topics, "SCHEDULES": scheduled}
    )


def settings(**scheduled: Any) -> override_settings:
    return project(TOPICS, scheduled)


def findings() -> list[checks.CheckMessage]:
    """What the checks say about schedules."""
    return [found for found in checks.run_checks(tags=["rmq"]) if "07" in str(found.id)]


@pytest.fixture(autouse=True)
def settings_of_this_test() -> Iterator[None]:
    with settings(nightly=NIGHTLY), isolated():
        yield


class Planned:
    """A broker whose time stands still, and what is planned there."""

    def __init__(self, broker: OracleBroker, clock: Clock) -> None:
        self.broker, self.clock = broker, clock
        self.run, self.keyspace, self.advance = broker.run, broker.keyspace, clock.advance

    def turn(self, to: str | int) -> None:
        """Set the clock."""
        to_ms = ms(to) if isinstance(to, str) else to
        self.advance((to_ms - self.clock() // 1000) / 1000)

    def records(self) -> dict[str, ScheduleRecord]:
        return {one.name: one for one in self.run(read_schedules())}

    def waiting(self, topic: str = "reports") -> dict[str, str]:
        """Return what waits: the key, and when it is due."""
        return {
            member.decode(): datetime.fromtimestamp(score / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            for slot in range(4)
            for member, score in self.keyspace.get(f"{topic}_{slot}".encode(), {}).items()
            if isinstance(score, float)
        }

    def take(self) -> list[Any]:
        """Take and commit what is due; return its messages."""
        found: list[Any] = []
        topic = get_config().topic("reports")
        for slot in range(4):
            while (prepared := self.run(fetch.prepare(topic, slot, "w", None, 100))).deliveries:
                found += prepared.deliveries
                members = [one.member for one in prepared.deliveries]
                self.run(ack.commit(topic, slot, prepared.receipt, members))
        return found

    def taken(self) -> list[str]:
        """Take and commit what is due; return its keys."""
        return [one.member.decode() for one in self.take()]


@pytest.fixture
def planned() -> Iterator[Planned]:
    clock = Clock(ms(NOON))
    with oracle_broker(clock) as broker:
        yield Planned(broker, clock)


def operations() -> Operations:
    return Operations(Actor("ann", "rest", permits=lambda one: True))


def test_a_worker_declares_what_the_settings_say_and_writes_the_first_tick(planned: Planned) -> None:
    schedule_duty.declare()
    assert planned.waiting() == {"nightly@2026-03-29T01:00:00Z": "2026-03-29T01:00:00Z"}
    record = planned.records()["nightly"]
    assert (record.state, record.late_ms, record.schedule.timezone) == ("written", 0, "Europe/Berlin")
    before = {key: dict(value) for key, value in planned.keyspace.items()}
    schedule_duty.declare()
    assert {key: dict(value) for key, value in planned.keyspace.items()} == before


def test_a_tick_says_of_which_schedule_and_instant_it_is(planned: Planned) -> None:
    schedule_duty.declare()
    planned.advance(13 * 3600)
    (delivery,) = planned.take()
    assert delivery.envelope.endswith(b'\n{"kind":"orders"}')
    assert b'"headers":{"schedule":"nightly","tick":"2026-03-29T01:00:00Z"}' in delivery.envelope


def test_a_decorator_declares_a_schedule_beside_its_listener(planned: Planned) -> None:
    @schedule("hourly", topic="merged", every=timedelta(hours=1), body={"a": 1})
    @listener("merged")
    def count(message: Any) -> None: ...

    assert count.__name__ == "count"
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        assert schedules.declared_schedules()["hourly"].timezone == "Asia/Tokyo"
        schedule_duty.declare()
    assert planned.waiting("merged") == {"hourly@2026-03-28T13:00:00Z": "2026-03-28T13:00:00Z"}
    with isolated():
        assert set(schedules.declared_schedules()) == {"nightly"}
    assert set(schedules.declared_schedules()) == {"nightly", "hourly"}


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("a b", {"every": 1}, "needs a name"),
        (5, {"every": 1}, "needs a name"),
        ("a", {"every": 0.5}, "every must be whole seconds"),
        ("a", {"every": 60, "catch_up": "some"}, "catch_up must be 'none', 'last' or 'all'"),
        ("a", {"cron": 5}, "cron must be non-empty text"),
        ("a", {"every": 60, "topic": ""}, "topic must be non-empty text"),
    ],
)
def test_a_decorator_refuses_options_that_cannot_be_used(name: Any, options: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        schedule(name, **{"topic": "reports", **options})


def test_two_different_schedules_of_one_name_are_refused(planned: Planned) -> None:
    def one() -> None: ...

    schedule("a", topic="reports", every=60)(one)
    schedule("a", topic="reports", every=60)(one)
    with pytest.raises(ConfigurationError, match='two schedules of the name "a"'):
        schedule("a", topic="reports", every=61)(one)
    schedule("nightly", topic="reports", every=60)(one)
    with pytest.raises(ConfigurationError, match='schedule "nightly" is declared in'):
        schedule_duty.declare()
    assert [found.id for found in findings()] == ["django_rmq.E074"]


@pytest.mark.parametrize(
    ("options", "problem", "told"),
    [
        ({"TOPIC": "report"}, "E070", 'sends to "report", which is not in RMQ'),
        ({"CRON": "0 3 * *"}, "E071", "has 4 fields"),
        ({"CRON": "61 3 * * *"}, "E071", "is not a cron expression: Bad minute"),
        ({"CRON": "0 0 30 2 *"}, "E071", "is not a cron expression"),
        ({"TIMEZONE": "Europe/Atlantis"}, "E071", "'Europe/Atlantis' is not a time zone"),
        ({"TIMEZONE": "../x"}, "E071", "is not a time zone"),
        ({"EVERY": 60}, "E072", "has both CRON and EVERY"),
        ({"CRON": None}, "E072", "has neither CRON nor EVERY"),
        ({"TOPIC": "priority"}, "E072", 'which has TYPE "priority"'),
        ({"TOPIC": "bodies"}, "E072", 'which has IDENTITY "body"'),
        ({"TOPIC": "texts"}, "E072", 'has a BODY that topic "texts" cannot have'),
        ({"TOPIC": "fields"}, "E072", "the body must be an object with that field"),
    ],
)  # fmt: skip
def test_a_check_and_a_worker_report_a_schedule_that_cannot_run(
    planned: Planned, caplog: pytest.LogCaptureFixture, options: Any, problem: str, told: str
) -> None:
    topics = {
        **TOPICS,
        "priority": {"TYPE": "priority", "IDENTITY": "key"},
        "bodies": {"TYPE": "fixed_time"},
        "texts": {**REPORTS, "BODY": "text"},
        "fields": {**REPORTS, "SLOT_BASIS": "shop"},
    }
    declared = {"nightly": {**NIGHTLY, **options}}
    with project(topics, declared):
        (found,) = findings()
        assert found.id == f"django_rmq.{problem}"
        assert told in found.msg
        if problem == "E070":
            schedule_duty.declare()
            assert "Schedule nightly does not run: its topic is not in the settings" in caplog.text
            return
        with pytest.raises(ConfigurationError) as caught:
            schedule_duty.declare()
        assert told in str(caught.value)


def test_a_cron_expression_without_cronsim_is_reported() -> None:
    with mock.patch("django_rmq.schedules.find_spec", return_value=None):
        (found,) = findings()
        assert (found.id, found.hint) == ("django_rmq.E073", 'pip install "django-redis-rmq[schedules]".')
        with settings(hourly={"TOPIC": "reports", "EVERY": 3600}):
            assert findings() == []


@pytest.mark.parametrize(
    ("scheduled", "told"),
    [
        ([], 'RMQ["SCHEDULES"] is []: it must be a dict.'),
        ({"a b": {}}, "RMQ[\"SCHEDULES\"] has the name 'a b'"),
        ({"a": {"TOPIC": "reports", "EVERY": 60, "BODY": {1, 2}}}, "it must be what JSON can hold"),
        ({"a": {"TOPIC": "reports", "EVERY": 60, "BODY": (1, 2)}}, "it must be what JSON can hold"),
        ({"a": {"TOPIC": "reports", "CORN": ""}}, "unknown key 'CORN'"),
        ({"a": {"TOPIC": "reports", "EVERY": 1.5}}, "whole seconds, a timedelta or text"),
        ({"a": {"TOPIC": "reports", "EVERY": 60, "CATCH_UP": "yes"}}, "'none', 'last' or 'all'"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_reported(scheduled: Any, told: str) -> None:
    found = {"BROKER": "memory", "TOPICS": TOPICS, "SCHEDULES": scheduled}
    with override_settings(RMQ=found), pytest.raises(ConfigurationError) as caught:
        get_config()
    assert told in str(caught.value)


def test_a_project_without_schedules_has_no_duty_and_writes_nothing(planned: Planned) -> None:
    with settings():
        schedule_duty.declare()
        (begin,) = schedule_duty.duties()
        assert (list(begin()), planned.keyspace) == ([], {})
    (begin,) = schedule_duty.duties()
    assert next(begin()) == 0.0


def test_the_start_of_a_worker_declares(planned: Planned) -> None:
    listener("reports")(print)
    check_start(chosen_topics())
    assert "nightly@2026-03-29T01:00:00Z" in planned.waiting()


def test_each_tick_becomes_one_message_whoever_steps_and_over_both_changes_of_the_clock(
    planned: Planned,
) -> None:
    schedule_duty.declare()
    seen: list[str] = []
    steppers = [schedule_duty.stepper() for _ in range(5)]
    for start in ("2026-03-28T12:00:00Z", "2026-10-24T12:00:00Z"):
        planned.turn(start)
        for minute in range(0, 60 * 48, 30):
            planned.turn(ms(start) + minute * 60_000)
            for each in steppers:
                while each.step() == 0.0:
                    pass
            seen += planned.taken()
    assert seen == [
        "nightly@2026-03-29T01:00:00Z",
        "nightly@2026-03-30T01:00:00Z",
        # Nothing ran meanwhile: of the ticks that were missed the last one is sent.
        "nightly@2026-03-31T01:00:00Z",
        "nightly@2026-10-24T01:00:00Z",
        "nightly@2026-10-25T02:00:00Z",
        "nightly@2026-10-26T02:00:00Z",
    ]


@pytest.mark.parametrize(
    ("catch_up", "sent"), [("none", ["10"]), ("last", ["10", "13"]), ("all", ["10", "11", "12", "13"])]
)
def test_what_was_missed_is_sent_as_the_schedule_says(
    planned: Planned, catch_up: str, sent: list[str]
) -> None:
    with settings(hourly={"TOPIC": "reports", "EVERY": 3600, "CATCH_UP": catch_up}):
        planned.turn("2026-05-05T09:30:00Z")
        schedule_duty.declare()
        planned.turn("2026-05-05T13:30:00Z")
        schedule_duty.stepper().settle()
        found = sorted(planned.taken())
        assert found == [f"hourly@2026-05-05T{hour}:00:00Z" for hour in sent]
        assert list(planned.waiting()) == ["hourly@2026-05-05T14:00:00Z"]
        assert planned.records()["hourly"].last_run(planned.broker.now_ms()) == ms(
            f"2026-05-05T{sent[-1]}:00:00Z"
        )


@pytest.mark.parametrize("catch_up", ["none", "last"])
def test_a_tick_that_is_a_little_late_is_not_missed(planned: Planned, catch_up: str) -> None:
    with settings(quick={"TOPIC": "reports", "EVERY": 10, "CATCH_UP": catch_up}):
        schedule_duty.declare()
        planned.advance(45)
        schedule_duty.stepper().settle()
        assert len(planned.take()) == 4


def test_a_tick_waits_while_its_slot_is_full(planned: Planned, caplog: pytest.LogCaptureFixture) -> None:
    full = {"reports": {**REPORTS, "SLOTS": 1, "MAX_BACKLOG": 1}}
    declared = {"a": {"TOPIC": "reports", "EVERY": 60}, "b": {"TOPIC": "reports", "EVERY": 60}}
    with project(full, declared):
        schedule_duty.declare()
        assert list(planned.waiting()) == ["a@2026-03-28T12:01:00Z"]
        assert "Schedule b waits: slot 0 of topic reports is full" in caplog.text
        planned.advance(60)
        due = planned.run(fetch.prepare(get_config().topic("reports"), 0, "w", None, 9)).deliveries
        assert [one.member for one in due] == [b"a@2026-03-28T12:01:00Z"]
        schedule_duty.stepper().settle()
        states = {name: one.state for name, one in planned.records().items()}
        assert states == {"a": "written", "b": "writing"}
        planned.advance(30)
        assert operations().schedule("b").late_ms == 30_000


def test_a_deployment_changes_the_time_of_the_tick_that_waits(planned: Planned) -> None:
    schedule_duty.declare()
    planned.advance(60)
    with settings(nightly={**NIGHTLY, "CRON": "30 4 * * *", "BODY": "new"}):
        schedule_duty.declare()
        assert list(planned.waiting()) == ["nightly@2026-03-29T02:30:00Z"]
    with settings(nightly={**NIGHTLY, "TOPIC": "merged"}):
        schedule_duty.declare()
        assert (planned.waiting(), list(planned.waiting("merged"))) == ({}, ["nightly@2026-03-29T01:00:00Z"])


class Version:
    """A worker of one version of the project, whose duty looks every few seconds."""

    def __init__(self, planned: Planned, *, starts: bool = True, **scheduled: Any) -> None:
        self.planned, clock = planned, planned.clock
        with settings(**scheduled):
            declared, topics = schedules.declared_schedules(), get_config().topics
            self.steps = schedule_duty.stepper()
        made = Declarations(planned.broker, declared, topics, clock=lambda: clock() / 1e6)
        self.declarations = made
        if starts:
            made.start()
            self.steps.settle()

    def look(self) -> None:
        now_ms = self.planned.broker.now_ms
        while self.declarations.reconcile(self.planned.run(read_schedules()), now_ms()):
            pass
        self.steps.settle()


@pytest.mark.parametrize("ends", [False, True])
def test_a_renewal_that_redis_refuses_is_an_error_of_the_duty(
    planned: Planned, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Version(planned, nightly=NIGHTLY)
    known = planned.run(read_schedules())
    planned.advance(60)
    monkeypatch.setattr(worker.declarations, "_read", lambda: known)
    planned.keyspace[schedules_key(planned.broker.prefix)] = SortedSet({b"of another program": 1.0})
    with pytest.raises(WrongType):
        worker.declarations.end() if ends else worker.declarations.reconcile(known, planned.broker.now_ms())


def live(versions: list[Version], seconds: float) -> None:
    """Let workers look every five seconds."""
    for _ in range(round(seconds / 5)):
        versions[0].planned.advance(5)
        for version in versions:
            version.look()


HOURLY = {"TOPIC": "reports", "EVERY": 3600}


def test_a_schedule_that_no_worker_declares_any_more_goes_with_its_waiting_tick(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_rmq.schedules")
    Version(planned, nightly=NIGHTLY)
    later = Version(planned)
    assert "Schedule nightly of topic reports is not declared here; it is removed when no" in caplog.text
    live([later], GONE_SECONDS)
    assert list(planned.waiting()) == ["nightly@2026-03-29T01:00:00Z"]
    live([later], 5)
    assert (planned.records(), planned.waiting()) == ({}, {})
    assert "is removed, because it is no longer declared by a worker" in caplog.text
    later.look()
    assert later.declarations.is_idle
    schedule_duty.declare()
    assert list(planned.waiting()) == ["nightly@2026-03-29T01:00:00Z"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec", b"x"),
        ("spec", b"[]"),
        ("spec", b"\xff"),
        ("spec", b"[" * 100_000),
        ("spec", b'{"name":"nightly","topic":"reports","every":60,"field_of_a_later_version":1}'),
        ("spec", b'{"name":"nightly","topic":"reports","every":"60"}'),
        ("spec", b'{"name":"nightly","topic":["reports"],"every":60}'),
        ("spec", b'{"name":"nightly","topic":"reports","every":0}'),
        ("spec", b'{"name":"nightly","topic":"reports"}'),
        ("override", b"[]"),
        ("override", b'{"every":true}'),
        ("at", b"soon"),
        ("at", b"-1"),
        ("at", b"9" * 30),
        ("generation", b""),
        ("walls", b"[1]"),
        ("walls", b'[[1e999,0,"UTC"]]'),
    ],
)
def test_a_schedule_that_cannot_be_read_stops_no_other(
    planned: Planned, caplog: pytest.LogCaptureFixture, field: str, value: bytes
) -> None:
    worker = Version(planned, nightly=NIGHTLY, added=HOURLY)
    stored: Any = planned.keyspace[schedules_key(planned.broker.prefix)]
    stored[f"nightly:{field}".encode()] = value
    before = {name: text for name, text in stored.items() if name.startswith(b"nightly:")}
    for one in (worker, Version(planned, nightly=NIGHTLY, added=HOURLY)):
        for _ in range(3):
            planned.advance(3600)
            one.look()
            # No worker declares it, because a later version may have written it.
            assert before == {name: stored[name] for name in stored if name.startswith(b"nightly:")}
    assert len([name for name in planned.waiting() if name.startswith("added@")]) == 7
    assert "Schedule nightly does not run: fields 'nightly:…' of the hash" in caplog.text
    with settings(nightly=NIGHTLY, added=HOURLY):
        shown = {one.name: one for one in operations().schedules()}
        assert shown["nightly"].problem.startswith("does not run: fields 'nightly:…'")
        assert (shown["nightly"].is_missing, shown["added"].problem) == (False, "")
        with pytest.raises(CommandError, match="schedule nightly does not run"):
            printed("rmqhealth", "--no-workers", "--max-age", "1d")
        with pytest.raises(Unreadable):
            operations().pause_schedule("nightly")
        assert "does not run" in command()
        for name in before:
            del stored[name]
        live([worker], 5)
        assert {one.name: one.problem for one in operations().schedules()} == {"nightly": "", "added": ""}


def test_an_old_worker_that_starts_again_does_not_take_away_what_a_newer_one_declares(
    planned: Planned,
) -> None:
    new = Version(planned, nightly=NIGHTLY, added=HOURLY)
    operations().pause_schedule("added")
    for _ in range(3):
        old = Version(planned, nightly=NIGHTLY)
        live([old, new], 3 * GONE_SECONDS)
    before = planned.records()
    assert set(before) == {"nightly", "added"} and before["added"].is_paused
    live([new], 3 * GONE_SECONDS)
    assert planned.records()["added"].generation == before["added"].generation
    # The deployment was rolled back.
    live([Version(planned, nightly=NIGHTLY)], GONE_SECONDS + 5)
    assert set(planned.records()) == {"nightly"}


def test_versions_side_by_side_do_not_change_a_schedule_back_and_forth(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_rmq.schedules")
    changed = {**NIGHTLY, "CRON": "30 4 * * *"}
    old = Version(planned, nightly=NIGHTLY)
    new = Version(planned, nightly=changed)
    assert list(planned.waiting()) == ["nightly@2026-03-29T02:30:00Z"]
    generation = planned.records()["nightly"].generation
    for _ in range(3):
        old = Version(planned, nightly=NIGHTLY)
        live([old, new], 3 * GONE_SECONDS)
    assert planned.records()["nightly"].generation == generation
    assert "nightly of topic reports stays 30 4 * * * Europe/Berlin, which workers of a newer" in caplog.text
    operations().edit_schedule("nightly", {"catch_up": "all"})
    # Rolled back: nobody declares the newer version any more.
    live([old], GONE_SECONDS + 5)
    record = planned.records()["nightly"]
    assert (record.declared.cron, dict(record.override)) == ("0 3 * * *", {"catch_up": "all"})
    assert list(planned.waiting()) == ["nightly@2026-03-29T01:00:00Z"]


def test_a_worker_that_ends_says_so_and_others_that_are_alive_say_that_they_are(planned: Planned) -> None:
    one, two = (Version(planned, nightly=NIGHTLY) for _ in range(2))
    other = Version(planned)
    one.declarations.end()
    live([other, two], 3 * ENDED_SECONDS)
    assert set(planned.records()) == {"nightly"}
    two.declarations.end()
    live([other], ENDED_SECONDS + 5)
    assert planned.records() == {}
    # And who starts after it need not wait for anything.
    Version(planned, nightly={**NIGHTLY, "CRON": "30 4 * * *"}).declarations.end()
    Version(planned, nightly=NIGHTLY).declarations.end()
    Version(planned, nightly={**NIGHTLY, "CRON": "30 4 * * *"})
    assert planned.records()["nightly"].declared.cron == "30 4 * * *"


def test_while_redis_is_unavailable_nobody_counts_as_gone(planned: Planned) -> None:
    one, other = Version(planned, nightly=NIGHTLY), Version(planned)
    live([one, other], 60)
    before = planned.records()["nightly"].generation
    planned.advance(10 * GONE_SECONDS)
    live([other], GONE_SECONDS - 10)
    live([other, one], 2 * GONE_SECONDS)
    assert planned.records()["nightly"].generation == before


def test_a_step_that_fails_does_not_put_off_a_removal(planned: Planned) -> None:
    """The duty begins again after each failure, and has still seen what it saw before."""
    schedule_duty.declare()
    seconds = [0.0]
    with settings():
        begin: Any
        (begin,) = schedule_duty.duties()
        begin.args[1]._clock = lambda: seconds[0]
        while seconds[0] <= GONE_SECONDS:
            assert set(planned.records()) == {"nightly"}
            step = begin()
            next(step)
            with pytest.raises(ServerUnavailable):
                step.throw(ServerUnavailable("away"))
            seconds[0] += 20
        assert planned.records()["nightly"].is_removed


def test_who_declares_what_somebody_is_about_to_remove_keeps_it(planned: Planned) -> None:
    one, other = Version(planned, nightly=NIGHTLY), Version(planned)
    live([other], GONE_SECONDS)
    stale = planned.run(read_schedules())
    planned.advance(5)
    one.look()
    assert not other.declarations.reconcile(stale, planned.broker.now_ms())
    assert not planned.records()["nightly"].is_removed
    # What somebody has removed nevertheless is declared again.
    planned.run(change_schedule("nightly", "removed", "1"))
    one.look()
    assert not planned.records()["nightly"].is_removed


def test_schedules_that_redis_has_lost_go_on_and_the_log_says_so(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    schedule_duty.declare()
    (begin,) = schedule_duty.duties()
    duty = begin()
    assert next(duty) > 0
    planned.keyspace.clear()
    while next(duty) == 0:
        pass
    assert planned.waiting() == {"nightly@2026-03-29T01:00:00Z": "2026-03-29T01:00:00Z"}
    (line,) = [one for one in caplog.records if one.__dict__.get("rmq_event") == "schedule_lost"]
    assert line.levelname == "WARNING"
    assert "Schedule nightly of topic reports was not known to Redis; it is declared again" in line.message
    assert planned.broker.definitions()["reports"]["slots"] == 4
    duty.close()
    assert planned.records()["nightly"].renewed_ms == 0


def test_a_tick_of_a_schedule_whose_last_changes_were_lost_is_written_all_the_same(planned: Planned) -> None:
    """Its key and its slots are on different nodes of a cluster, so one can fail over and lose what the other has."""
    one_slot = {"reports": {**REPORTS, "SLOTS": 1}}
    with project(one_slot, {"nightly": NIGHTLY}):
        schedule_duty.declare()
        key = schedules_key("")
        restored = copy.copy(planned.keyspace[key])
        planned.advance(1)
        operations().edit_schedule("nightly", {"catch_up": "all"})
        planned.keyspace[key] = restored
        planned.turn("2026-03-29T01:00:00Z")
        assert list(planned.waiting()) == ["nightly@2026-03-29T01:00:00Z"]
        schedule_duty.stepper().settle()
        assert set(planned.waiting()) == {"nightly@2026-03-29T01:00:00Z", "nightly@2026-03-30T01:00:00Z"}
        assert planned.records()["nightly"].generation == planned.broker.now_ms()


def test_a_tick_that_is_written_again_has_the_same_origin(planned: Planned) -> None:
    """Redis was restored from an older state, which does not have what was planned and done since."""

    def origins(at: str) -> dict[str, str]:
        planned.turn(at)
        schedule_duty.stepper().settle()
        return {one.member.decode(): str(decode_envelope(one.envelope).origin) for one in planned.take()}

    topics = {"reports": {**REPORTS, "ORIGIN": True}}
    both = {"nightly": NIGHTLY, "other": {**NIGHTLY, "CATCH_UP": "all"}}
    with project(topics, both):
        schedule_duty.declare()
        before = copy.deepcopy(planned.keyspace)
        first = origins("2026-03-29T01:00:00Z") | origins("2026-03-30T01:00:00Z")
        planned.keyspace.clear()
        planned.keyspace.update(before)
        again = origins("2026-03-30T01:00:00Z")
    assert again == first
    assert len(first) == len(set(first.values())) == 4
    found = UUID(first["nightly@2026-03-30T01:00:00Z"])
    assert (found.version, found.variant, found.hex) == (7, RFC_4122, first["nightly@2026-03-30T01:00:00Z"])
    assert found.int >> 80 == ms("2026-03-30T01:00:00Z")


@contextmanager
def rules(hours: float) -> Iterator[None]:
    """Let the clock of every time zone be ahead of UTC by this."""
    with mock.patch.object(tick_times, "zone", return_value=timezone(timedelta(hours=hours))):
        yield


YEARLY = {**NIGHTLY, "CRON": "0 12 1 1 *"}


@pytest.mark.parametrize(("hours", "due"), [(3, "2027-01-01T09:00:00Z"), (1, "2027-01-01T11:00:00Z")])
def test_new_rules_of_a_time_zone_move_the_tick_that_waits_and_it_runs_once(
    planned: Planned, caplog: pytest.LogCaptureFixture, hours: float, due: str
) -> None:
    caplog.set_level("INFO", "django_rmq.schedules")
    with rules(2):
        Version(planned, yearly=YEARLY)
    assert list(planned.waiting()) == ["yearly@2027-01-01T10:00:00Z"]
    with rules(hours):
        version = Version(planned, yearly=YEARLY)
        assert list(planned.waiting()) == [f"yearly@{due}"]
        assert "is planned again, because the rules of time zone Europe/Berlin have changed" in caplog.text
        planned.turn(due)
        version.look()
        planned.turn("2027-01-02T00:00:00Z")
        version.look()
        assert planned.taken() == [f"yearly@{due}"]


@pytest.mark.parametrize("starts", [True, False], ids=["at its start", "while it runs"])
def test_a_worker_compares_what_waits_with_the_rules(planned: Planned, starts: bool) -> None:
    with rules(2):
        Version(planned, yearly=YEARLY)
    with rules(1):
        version = Version(planned, starts=starts, yearly=YEARLY)
        if not starts:
            version.look()
        assert list(planned.waiting()) == ["yearly@2027-01-01T11:00:00Z"]


@pytest.mark.parametrize("before", [2, 1], ids=["set forward", "set back"])
def test_new_rules_within_the_day_of_a_run_neither_repeat_it_nor_leave_it_out(
    planned: Planned, before: int
) -> None:
    with rules(before):
        old = Version(planned, yearly=YEARLY, hourly={**NIGHTLY, "CRON": "30 * * * *"})
        planned.turn("2027-01-01T10:40:00Z")
        old.look()
        ran = [one.member.decode() for one in planned.take() if b"yearly" in one.member]
    assert ran == (["yearly@2027-01-01T10:00:00Z"] if before == 2 else [])
    with rules(3 - before):
        new = Version(planned, yearly=YEARLY, hourly={**NIGHTLY, "CRON": "30 * * * *"})
        for hour in range(11, 24):
            planned.turn(f"2027-01-01T{hour}:59:00Z")
            new.look()
        later = planned.taken()
    # By the new rules the other one should have been at 10:00, which is over: it comes as it was planned.
    due = [] if before == 2 else ["yearly@2027-01-01T11:00:00Z"]
    assert [one for one in later if "yearly" in one] == due
    # What has a star for the hour counts the hours that pass.
    assert len([one for one in later if "hourly" in one]) == 13


def test_a_schedule_whose_time_zone_was_changed_runs_again_on_that_day(planned: Planned) -> None:
    """It is another time of day, which the people who changed it want."""
    Version(planned, nightly=NIGHTLY)
    planned.turn("2026-03-29T01:00:00Z")
    version = Version(planned, nightly=NIGHTLY)
    assert len(planned.take()) == 1
    operations().edit_schedule("nightly", {"timezone": "America/New_York"})
    version.look()
    assert list(planned.waiting()) == ["nightly@2026-03-29T07:00:00Z"]


def test_a_schedule_of_another_project_stays(planned: Planned) -> None:
    schedule_duty.declare()
    with project({"other": REPORTS}, {}):
        schedule_duty.declare()
        assert not planned.records()["nightly"].is_removed
        planned.advance(14 * 3600)
        schedule_duty.stepper().settle()
        assert list(planned.waiting()) == ["nightly@2026-03-29T01:00:00Z"]
        # Nobody has its topic any more.
        assert operations().delete_schedule("nightly") == "deleted"
        assert (planned.records(), planned.waiting()) == ({}, {})


def test_a_tick_that_is_due_survives_a_deployment_and_is_not_sent_twice(planned: Planned) -> None:
    schedule_duty.declare()
    planned.turn("2026-03-29T01:00:00Z")
    with settings(nightly={**NIGHTLY, "BODY": "new"}):
        schedule_duty.declare()
        assert set(planned.waiting()) == {"nightly@2026-03-29T01:00:00Z", "nightly@2026-03-30T01:00:00Z"}
        assert [one.member for one in planned.take()] == [b"nightly@2026-03-29T01:00:00Z"]
        planned.turn("2026-03-29T01:30:00Z")
        with settings(nightly=NIGHTLY):
            schedule_duty.declare()
        assert planned.take() == []


def test_what_people_edited_survives_a_deployment_until_it_is_reset(planned: Planned) -> None:
    schedule_duty.declare()
    assert operations().edit_schedule("nightly", {"cron": "0 5 * * *"}) == "changed"
    assert list(planned.waiting()) == ["nightly@2026-03-29T03:00:00Z"]
    with settings(nightly={**NIGHTLY, "CRON": "0 6 * * *"}):
        schedule_duty.declare()
        assert list(planned.waiting()) == ["nightly@2026-03-29T03:00:00Z"]
        shown = operations().schedule("nightly")
        assert (shown.timing, shown.declared.timing) == ("0 5 * * * Europe/Berlin", "0 6 * * * Europe/Berlin")
        assert shown.override == {"cron": "0 5 * * *"}
        assert operations().reset_schedule("nightly") == "changed"
        assert list(planned.waiting()) == ["nightly@2026-03-29T04:00:00Z"]
        assert operations().reset_schedule("nightly") == "unchanged"


def test_a_topic_with_another_slot_count_gets_its_ticks_and_gives_them_back(planned: Planned) -> None:
    schedule_duty.declare()
    call_command("rmqreslot", "reports", "16", stdout=io.StringIO(), stderr=io.StringIO())
    # Its first slot remembers the tick, which has left for another one, and is taken back there and written again.
    before = operations().schedule("nightly").next_ms
    operations().edit_schedule("nightly", {"catch_up": "all"})
    assert operations().schedule("nightly").next_ms == before
    keys = [f"reports_{slot}".encode() for slot in range(16)]
    tick = b"nightly@2026-03-29T01:00:00Z"
    assert [member for key in keys for member in planned.keyspace.get(key, {})] == [tick]
    planned.turn("2026-03-29T01:00:00Z")
    schedule_duty.stepper().settle()
    operations().pause_schedule("nightly")
    assert [member for key in keys for member in planned.keyspace.get(key, {})] == [tick]


def test_people_pause_resume_and_run(planned: Planned) -> None:
    schedule_duty.declare()
    who = operations()
    assert [who.pause_schedule("nightly"), who.pause_schedule("nightly")] == ["paused", "unchanged"]
    assert (planned.waiting(), who.schedule("nightly").next_ms) == ({}, None)
    planned.advance(86_400)
    assert schedule_duty.stepper().step() > 0
    assert planned.take() == []
    assert [who.resume_schedule("nightly"), who.resume_schedule("nightly")] == ["resumed", "unchanged"]
    assert list(planned.waiting()) == ["nightly@2026-03-30T01:00:00Z"]
    assert who.schedule("nightly").next_ms == ms("2026-03-30T01:00:00Z")
    assert who.run_schedule("nightly").partition(".")[0] in "0123"
    (delivery,) = planned.take()
    assert delivery.member == b"nightly!2026-03-29T12:00:00.000+00:00"
    assert b'"run":"2026-03-29T12:00:00.000+00:00"' in delivery.envelope
    assert list(planned.waiting()) == ["nightly@2026-03-30T01:00:00Z"]


def test_people_edit_with_the_rules_of_the_settings(planned: Planned) -> None:
    schedule_duty.declare()
    who = operations()
    assert who.edit_schedule("nightly", {"every": 3600, "catch_up": "all"}) == "changed"
    shown = who.schedule("nightly")
    assert (shown.timing, shown.override) == ("every 3600 s", {"every": 3600, "catch_up": "all"})
    assert who.edit_schedule("nightly", {"cron": "0 3 * * *", "catch_up": "last"}) == "changed"
    assert who.schedule("nightly").override == {}
    assert who.edit_schedule("nightly", {"timezone": "Europe/Berlin"}) == "unchanged"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"cron": "x"}, "has 1 fields"),
        ({"timezone": "x"}, "not a time zone"),
        ({"every": 0}, "whole seconds"),
        ({"cron": "0 3 * * *", "every": 5}, "either cron or every"),
        ({"cron": None}, "neither CRON nor EVERY"),
        ({"topic": "merged"}, "topic of a schedule cannot be changed"),
    ]
    for changes, told in refused:
        with pytest.raises(InvalidRequest, match=told):
            who.edit_schedule("nightly", changes)


def test_what_cannot_be_done_says_why(planned: Planned) -> None:
    who = operations()
    for act in (who.schedule, who.pause_schedule, who.resume_schedule, who.run_schedule, who.reset_schedule):
        with pytest.raises(UnknownSchedule, match="no schedule 'nightly' is known"):
            act("nightly")
    schedule_duty.declare()
    with pytest.raises(UnknownSchedule):
        who.pause_schedule("nightly", ["merged"])
    planned.run(change_schedule("nightly", "removed", "1"))
    with pytest.raises(OperationRefused, match="being removed"):
        who.pause_schedule("nightly")


def test_run_now_says_that_a_slot_is_full(planned: Planned) -> None:
    full = {"reports": {**REPORTS, "SLOTS": 1, "MAX_BACKLOG": 1}}
    with project(full, {"nightly": NIGHTLY}):
        schedule_duty.declare()
        with pytest.raises(TopicFull, match="MAX_BACKLOG = 1"):
            operations().run_schedule("nightly")


def command(*arguments: str) -> str:
    return printed("rmqschedules", *arguments)


def test_rmqstats_that_watches_shows_the_schedules_of_its_topics(planned: Planned) -> None:
    def monitor(*topics: str) -> str:
        return printed("rmqstats", *topics, "--interval", "0.1", "--count", "1")

    assert "not in Redis: no worker declares it" in monitor()
    schedule_duty.declare()
    command("pause", "nightly")
    last = monitor().splitlines()[-2]
    assert " ".join(last.split()) == "nightly reports 0 3 * * * Europe/Berlin - - paused"
    assert "nightly" in monitor("reports")
    assert "nightly" not in monitor("merged")


def test_the_table_of_rmqstats_has_every_schedule(planned: Planned) -> None:
    schedule_duty.declare()
    console = Console(file=io.StringIO(), width=200)
    console.print(rmqstats._schedules(operations().schedules()))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "nightly" in text and "2026-03-29 01:00:00" in text and "on time" in text


def test_a_test_runs_schedules_by_its_clock(planned: Planned) -> None:
    heard: list[str] = []
    listener("reports")(lambda message: heard.append(message.headers["tick"]))
    drain()
    with pytest.raises(UnknownSchedule, match="start_schedules"):
        schedule_state("nightly")
    start_schedules()
    first, second = (datetime(2026, 3, day, 1, tzinfo=UTC) for day in (29, 30))
    assert schedule_state("nightly") == ScheduleState(first, None, is_paused=False)
    assert drain() == 0
    planned.advance(86_400)
    assert drain() == 1
    assert heard == ["2026-03-29T01:00:00Z"]
    assert schedule_state("nightly") == ScheduleState(second, first, is_paused=False)
    operations().pause_schedule("nightly")
    planned.advance(86_400)
    assert drain() == 0
    assert schedule_state("nightly") == ScheduleState(None, first, is_paused=True)


def test_a_schedule_that_is_unknown_does_not_hide_what_was_done_to_one_before_it(planned: Planned) -> None:
    schedule_duty.declare()
    output = io.StringIO()
    with pytest.raises(CommandError, match="typo"):
        call_command("rmqschedules", "pause", "nightly", "typo", stdout=output)
    assert output.getvalue() == "nightly: paused\n"


def test_a_test_gets_all_ticks_that_are_due_or_an_error_that_names_what_is_left(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener("merged")(lambda message: None)
    with settings(often={"TOPIC": "reports", "EVERY": 60, "CATCH_UP": "all"}):
        start_schedules()
        planned.advance(300 * 60)
        assert drain("merged") == 0
        assert len(planned.taken()) == 300
        monkeypatch.setattr(inline_worker, "TICKS", 50)
        planned.advance(300 * 60)
        with pytest.raises(RuntimeError, match=r"after 50 ticks\. Still due: often since 2026-03-28 17:5"):
            drain("merged")


def test_the_command_lists_and_acts(planned: Planned) -> None:
    with settings():
        assert command() == "no worker has declared a schedule\n"
    assert command().splitlines()[1].endswith("not in Redis: no worker declares it")
    (row,) = json.loads(command("--json"))
    assert (row["missing"], row["next_ms"], row["outcome"]) == (True, None, "")
    schedule_duty.declare()
    lines = command().splitlines()
    assert lines[0].split("  ")[0] == "schedule"
    assert "0 3 * * * Europe/Berlin" in lines[1] and "2026-03-29 01:00:00" in lines[1]
    assert lines[1].endswith("on time")
    (row,) = json.loads(command("--json"))
    assert (row["next_ms"], row["last_ms"], row["paused"]) == (ms("2026-03-29T01:00:00Z"), None, False)
    assert command("pause", "nightly") == "nightly: paused\n"
    assert command("list", "nightly").endswith("paused\n")
    assert json.loads(command("resume", "nightly", "--json")) == {"nightly": "resumed"}
    assert command("run", "nightly").startswith("nightly: sent as ")
    assert command("set", "nightly", "--cron", "0 5 * * *", "--catch-up", "all") == "nightly: changed\n"
    assert "(edited)" in command()
    assert command("reset", "nightly") == "nightly: changed\n"
    planned.advance(2 * 86_400)
    assert "late by 11 h" in command()
    with pytest.raises(CommandError, match="remove schedule nightly from the settings"):
        command("delete", "nightly")
    for arguments in (["set", "nightly"], ["pause", "nightly", "--every", "5"], ["pause"]):
        with pytest.raises(CommandError):
            command(*arguments)


def test_the_admin_shows_and_acts(planned: Planned, staff: Callable[..., Client]) -> None:
    schedule_duty.declare()
    url = reverse("admin:django_rmq_topic_schedules")
    edit = reverse("admin:django_rmq_topic_schedule", args=["nightly"])
    viewer = staff("view_topic")
    shown = viewer.get(url).content.decode()
    assert "nightly" in shown and "0 3 * * * Europe/Berlin" in shown
    assert 'value="pause"' not in shown and 'value="run"' not in shown and edit not in shown
    for act in ("run", "pause", "resume", "reset"):
        assert viewer.post(url, {"act": act, "name": "nightly"}).status_code == 403
    assert viewer.get(edit).status_code == 403
    person = staff("view_topic", "pause_topic", "send_messages", "edit_messages")
    assert url in person.get(reverse("admin:django_rmq_topic_changelist")).content.decode()
    assert person.post(url, {"act": "pause", "name": "nightly"}).status_code == 302
    assert 'value="resume"' in person.get(url).content.decode()
    person.post(url, {"act": "resume", "name": "nightly"})
    person.post(url, {"act": "run", "name": "nightly"})
    assert len(planned.waiting()) == 2
    assert 'value="0 3 * * *"' in person.get(edit).content.decode()
    wrong = person.post(edit, {"cron": "x", "every": "", "timezone": "UTC", "catch_up": "last"})
    assert "has 1 fields" in wrong.content.decode()
    right = {"cron": "", "every": "3600", "timezone": "Europe/Berlin", "catch_up": "last"}
    assert person.post(edit, right).status_code == 302
    shown = person.get(url).content.decode()
    assert "every 3600 s" in shown and "settings: 0 3 * * * Europe/Berlin" in shown
    person.post(url, {"act": "reset", "name": "nightly"})
    assert operations().schedule("nightly").override == {}
    assert person.post(url, {"act": "pause", "name": "x"}).status_code == 404
    assert person.post(url, {"act": "x", "name": "nightly"}).status_code == 302
    assert person.get(reverse("admin:django_rmq_topic_schedule", args=["x"])).status_code == 404
    notes = set(LogEntry.objects.values_list("object_id", "change_message"))
    assert ("reports", "Pause (schedule nightly): 1 paused (admin)") in notes


def test_rest_lists_and_acts(planned: Planned, staff: Callable[..., Client]) -> None:
    schedule_duty.declare()
    person = staff("view_topic", "pause_topic", "send_messages")
    root = reverse("rmq_api:schedules")
    (found,) = person.get(root).json()["results"]
    assert (found["name"], found["topic"], found["missing"]) == ("nightly", "reports", False)
    assert (found["cron"], found["every"], found["timezone"]) == ("0 3 * * *", None, "Europe/Berlin")
    assert (found["catch_up"], found["edited"], found["paused"]) == ("last", [], False)
    assert (found["next_ms"], found["last_ms"], found["late_ms"]) == (ms("2026-03-29T01:00:00Z"), None, 0)
    assert (found["outcome"], found["outcome_ms"]) == (None, None)
    assert person.post(f"{root}nightly/pause/").json() == {"name": "nightly", "outcome": "paused"}
    assert person.post(f"{root}nightly/resume/").json() == {"name": "nightly", "outcome": "resumed"}
    answer = person.post(f"{root}nightly/run/")
    assert (answer.status_code, answer.json()["name"]) == (202, "nightly")
    missing = person.post(f"{root}x/pause/")
    assert (missing.status_code, missing.json()["code"]) == (404, "schedule_not_found")
    assert staff("view_topic").post(f"{root}nightly/run/").status_code == 403


def test_health_knows_the_schedules_of_decorators(planned: Planned) -> None:
    def discover() -> list[Any]:
        schedule("hourly", topic="reports", every=timedelta(hours=1))(lambda message: None)
        return []

    with settings(), mock.patch("django_rmq.worker.listener_registry.discover", discover):
        told = printed("rmqhealth", "--no-workers")
    assert "reports: schedule hourly is declared, and Redis does not know it" in told


def test_metrics_and_health_tell_how_late_a_schedule_is(planned: Planned) -> None:
    of = ("nightly", "reports")
    found = samples()
    assert found["rmq_schedule_missing", *of] == 1
    assert [name for name, *_ in found if name.startswith("rmq_schedule")] == ["rmq_schedule_missing"]
    told = printed("rmqhealth", "--no-workers")
    assert "note schedule     reports: schedule nightly is declared, and Redis does not know it" in told
    for arguments in (["--no-workers", "--max-schedule-lateness", "1h"], ["--patience", "0"]):
        out = io.StringIO()
        with pytest.raises(CommandError, match="checks failed"):
            call_command("rmqhealth", *arguments, stdout=out)
        assert "BAD  schedule     reports: schedule nightly is declared, and Redis does not" in out.getvalue()
    schedule_duty.declare()
    found = samples()
    assert found["rmq_schedule_missing", *of] == found["rmq_schedule_last_run_dead", *of] == 0
    assert found["rmq_schedule_next_timestamp_seconds", *of] == ms("2026-03-29T01:00:00Z") / 1000
    assert found["rmq_schedule_lateness_seconds", *of] == found["rmq_schedule_paused", *of] == 0
    assert ("rmq_schedule_last_timestamp_seconds", *of) not in found
    told = printed("rmqhealth", "--no-workers", "--max-schedule-lateness", "1h", "-v", "2")
    assert "schedule nightly is on time" in told
    planned.turn("2026-03-30T02:00:00Z")
    found = samples()
    assert found["rmq_schedule_lateness_seconds", *of] == 3600
    assert found["rmq_schedule_last_timestamp_seconds", *of] == ms("2026-03-29T01:00:00Z") / 1000
    with pytest.raises(CommandError, match="schedule nightly is late by 60 min"):
        printed("rmqhealth", "--no-workers", "--max-age", "2d", "--max-schedule-lateness", "59m")
    operations().pause_schedule("nightly")
    assert samples()["rmq_schedule_paused", *of] == 1


def test_a_schedule_whose_next_run_is_unknown_is_shown_with_the_reason(planned: Planned) -> None:
    schedule_duty.declare()
    record = planned.records()["nightly"]
    broken = record.declared.text.replace("0 3 * * *", "x y")
    planned.run(change_schedule("nightly", "spec", broken))
    with mock.patch.object(stepper.Stepper, "settle"):
        shown = operations().schedule("nightly")
    assert (shown.next_ms, shown.problem) == (None, "'x y' has 2 fields: a cron expression has five")
    assert "has 2 fields" in command()


def test_a_schedule_that_waits_for_a_clock_that_was_set_back_is_trouble(planned: Planned) -> None:
    schedule_duty.declare()
    planned.turn("2026-03-29T01:00:00Z")
    schedule_duty.stepper().settle()
    assert operations().schedule("nightly").problem == ""
    planned.advance(-30)
    assert operations().schedule("nightly").problem == "", "it runs again within a minute"
    planned.advance(-3600)
    told = "ran last at 2026-03-29T01:00:00Z, and does not run again before that time: the clock of Redis was set back"
    shown = operations().schedule("nightly")
    assert (shown.next_ms, shown.problem) == (ms("2026-03-30T01:00:00Z"), told)
    assert told in command()
    with pytest.raises(CommandError, match=f"schedule nightly {told}"):
        printed("rmqhealth", "--no-workers")
    planned.advance("2h")
    assert operations().schedule("nightly").problem == ""


def end_runs(planned: Planned, reason: str | None, slots: range = range(4)) -> None:
    """Take what is due; let it succeed, or end with this failure."""
    topic = get_config().topic("reports")
    for slot in slots:
        prepared = planned.run(fetch.prepare(topic, slot, "w", None, 100))
        members = [one.member for one in prepared.deliveries]
        if members and reason is None:
            planned.run(ack.commit(topic, slot, prepared.receipt, members))
        elif members:
            failures = [Failure(member, reason or "") for member in members]
            planned.run(ack.rollback(topic, slot, prepared.receipt, failures))


def test_a_schedule_whose_runs_die_is_seen(planned: Planned, staff: Callable[..., Client]) -> None:
    def outcome() -> tuple[str, int | None]:
        shown = operations().schedule("hourly")
        return shown.outcome, shown.outcome_ms

    def page_of(address: str) -> str:
        return staff("view_topic").get(reverse(address)).content.decode()

    def dead_by_metrics() -> float:
        (value,) = [value for (name, *_), value in samples().items() if name == "rmq_schedule_last_run_dead"]
        return value

    with settings(hourly=HOURLY):
        schedule_duty.declare()
        assert outcome() == ("", None)
        one, two, three = (ms(f"2026-03-28T1{hour}:00:00Z") for hour in (3, 4, 5))
        planned.turn(one)
        schedule_duty.stepper().settle()
        assert outcome() == ("", None), "it has not ended"
        end_runs(planned, "failed")
        assert outcome() == ("resting", one)
        assert "failed, is tried again" in page_of("admin:django_rmq_topic_schedules")
        assert command().rstrip().endswith("last run failed, on time")
        planned.advance(3000)
        end_runs(planned, "rejected")
        assert outcome() == ("dead", one)
        planned.turn(two)
        schedule_duty.stepper().settle()
        assert outcome() == ("dead", one), "the next one has not ended"
        end_runs(planned, "rejected")
        assert (outcome(), dead_by_metrics()) == (("dead", two), 1)
        assert command().rstrip().endswith("last run died, on time")
        told = printed("rmqhealth", "--no-workers")
        assert "schedule hourly: the latest of its runs that ended is dead" in told
        assert "died" in page_of("admin:django_rmq_topic_schedules")
        dashboard = page_of("admin:django_rmq_topic_changelist")
        assert re.search(r"rmq-is-alarm[^>]*>Schedules [^>]*>1 needs attention<", dashboard)
        (row,) = staff("view_topic").get(reverse("rmq_api:schedules")).json()["results"]
        assert (row["outcome"], row["outcome_ms"]) == ("dead", two)
        planned.turn(three)
        schedule_duty.stepper().settle()
        end_runs(planned, None)
        assert (outcome(), dead_by_metrics()) == (("", None), 0)
        dashboard = page_of("admin:django_rmq_topic_changelist")
        assert "needs attention<" not in dashboard


def test_what_becomes_of_all_schedules_is_asked_in_one_round_trip(planned: Planned) -> None:
    """While their latest runs have ended; another one for each run further back."""
    with settings(**{f"s{n}": HOURLY for n in range(20)}):
        schedule_duty.declare()
        planned.turn("2026-03-28T13:00:00Z")
        schedule_duty.stepper().settle()
        end_runs(planned, "rejected")
        with mock.patch(f"{operating.__name__}.run_all", wraps=run_all) as trips:
            assert {one.outcome for one in operations().schedules()} == {"dead"}
        assert trips.call_count == 1


def test_a_schedule_above_a_listener_sends_to_its_topic() -> None:
    @schedule("weekly", cron="0 3 * * 1")
    @listener("reports")
    def report(message: Message[Any]) -> None:
        raise AssertionError("nothing is delivered in this test")

    assert schedules.declared_schedules()["weekly"].topic == "reports"
    assert "weekly" not in get_config().topics


def test_a_scheduled_function_needs_no_topic_and_no_listener(planned: Planned) -> None:
    seen: list[tuple[str | None, Any]] = []

    @schedule("tidy", every=60, body={"days": 7})
    def tidy(message: Message[Any]) -> None:
        seen.append((message.key, message.body))

    topic = get_config().topic("tidy")
    assert (topic.type, topic.identity, topic.slots) == ("fixed_time", "key", 1)
    assert "tidy" in [one.name for one in chosen_topics()]
    assert [one.id for one in checks.run_checks() if one.id and one.id.startswith("django_rmq.E")] == []
    start_schedules()
    planned.advance(60)
    drain("tidy")
    assert [body for _, body in seen] == [{"days": 7}]
    assert (seen[0][0] or "").startswith("tidy@")


def test_a_topic_of_the_settings_with_the_name_of_a_schedule_is_that_topic() -> None:
    with settings(merged={"EVERY": 60}):
        assert get_config().schedules["merged"].topic == "merged"
        assert get_config().topic("merged").type == "range_merge"
    with settings(stock={"EVERY": 60}):
        assert get_config().topic("stock").type == "fixed_time"


def test_the_runs_of_a_topic_that_a_schedule_brings_come_one_after_the_other_whatever_the_defaults() -> None:
    loose = {"SLOTS": 8, "SERIAL": False}
    with override_settings(
        RMQ={"BROKER": "memory", "TOPIC_DEFAULTS": loose, "SCHEDULES": {"stock": {"EVERY": 60}}}
    ):
        topic = get_config().topic("stock")
        assert (topic.slots, topic.serial) == (1, True)


def test_what_was_sent_is_there_after_a_schedule_has_brought_its_topic() -> None:
    before, broker = get_config(), get_broker()

    @schedule("tidy", every=60)
    def tidy(message: Message[Any]) -> None:
        raise AssertionError("nothing is delivered in this test")

    assert get_config() is before and get_broker() is broker and "tidy" in before.topics


def test_a_function_that_listens_twice_says_to_which_topic_its_schedule_sends() -> None:
    def report(message: Message[Any]) -> None:
        raise AssertionError("nothing is delivered in this test")

    listener("reports")(report)
    listener("merged")(report)
    with pytest.raises(ConfigurationError, match="pass topic="):
        schedule("weekly", every=60)(report)
    schedule("weekly", every=60, topic="merged")(report)
    assert schedules.declared_schedules()["weekly"].topic == "merged"


def test_the_topic_of_a_schedule_goes_with_it() -> None:
    with isolated():

        @schedule("tidy", every=60)
        def tidy(message: Message[Any]) -> None:
            raise AssertionError("nothing is delivered in this test")

        assert "tidy" in get_config().topics
    assert "tidy" not in get_config().topics
