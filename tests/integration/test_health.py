"""What the health check concludes, in which order, how long it takes, and that its output fits on a page.

The check for django-health-check comes to the same, and tells its page no word of a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import yaml
from django.core.management import CommandError, call_command
from django.test import AsyncRequestFactory, modify_settings, override_settings
from health_check.views import HealthCheckView

from django_rmq import connections, health_check
from django_rmq.api import topics as topic_responses
from django_rmq.api.probes import _Ready
from django_rmq.conf import get_config
from django_rmq.connections import coordinators
from django_rmq.core.model.keys import slot_keys, topics_key
from django_rmq.core.model.schedule import Schedule
from django_rmq.exceptions import ServerUnavailable
from django_rmq.health_check import RmqHealthCheck
from django_rmq.metrics import collector
from django_rmq.operations import Actor, Operations, ScheduleStats, health, outbox, stats
from django_rmq.operations.health import (
    CHECKS,
    USUAL_LIMITS,
    USUAL_UNDRAINED,
    Finding,
    HealthThresholds,
    Severity,
)
from django_rmq.operations.outbox import Known
from django_rmq.outbox import row_lists
from django_rmq.outbox.row_lists import Waiting
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker, project_on
from tests.support.reports import printed, samples
from tests.support.servers import RedisServer
from tests.support.workers import eventually

ROOT = Path(__file__).parents[2]
NOW = 1_800_000_000_000
MANY = {f"topic-{number:04}": {"TYPE": "fixed_time", "SLOTS": 1} for number in range(1_000)}


@contextlib.contextmanager
def in_memory(topics: dict[str, Any], clock: Clock | None = None, **rmq: Any) -> Iterator[Any]:
    broker = OracleBroker("m:", clock or Clock(NOW))
    with project_on(broker, BROKER="memory", TOPICS=topics, **rmq):
        yield broker


def check(limits: HealthThresholds | None = None, names: list[str] | None = None) -> health.Health:
    return Operations(Actor("tester", "test")).health(limits or HealthThresholds(needs_workers=False), names)


def run(*arguments: str) -> tuple[str, str]:
    """The output of rmqhealth, and the error with which it ended."""
    out = io.StringIO()
    try:
        call_command("rmqhealth", *arguments, stdout=out)
    except CommandError as error:
        return out.getvalue(), str(error)
    return out.getvalue(), ""


def late(broker: Any, name: str, seconds: float, count: int = 1) -> None:
    bodies = [b"%d" % number for number in range(count)]
    broker.send_replace(get_config().topic(name), 0, [NOW - round(seconds * 1000)] * count, bodies)


def die(broker: Any, name: str, count: int) -> None:
    topic, bodies = get_config().topic(name), [b'"dead %d"' % number for number in range(count)]
    broker.send_replace(topic, 0, [NOW - 1] * count, bodies)
    broker.bury(topic, 0, bodies, "test")


def test_a_thousand_topics_that_are_well_are_one_line() -> None:
    with in_memory(MANY):
        lines, error = run("--no-workers")
        assert error == "" and len(lines.splitlines()) < 10
        assert "ok   topics       1000 topics are well" in lines


def test_what_is_wrong_comes_first_and_the_worst_before_the_bad() -> None:
    with in_memory(MANY) as broker:
        late(broker, "topic-0500", 1_000)
        late(broker, "topic-0700", 5_000)
        die(broker, "topic-0001", 3)
        die(broker, "topic-0900", 4)
        lines, error = run("--no-workers")
        shown = [" ".join(line.split()) for line in lines.splitlines()]
        assert shown[:6] == [
            "BAD age topic-0700: the oldest message has been due for 83 min",
            "BAD age topic-0500: the oldest message has been due for 17 min",
            "see docs/deploy/runbooks.md#rmqlate",
            "note dead topic-0900: 4 messages are dead",
            "note dead topic-0001: 3 messages are dead",
            "see docs/deploy/runbooks.md#rmqdead",
        ]
        assert shown[-1] == "ok topics 996 topics are well"
        assert re.match(r"2 of \d{4} checks failed; topic-0700: ", error)


def test_a_thousand_topics_that_are_all_unwell_are_a_page() -> None:
    with in_memory(MANY) as broker:
        for name in MANY:
            late(broker, name, 1_000)
            die(broker, name, 1)
        run_all, error = run()
        lines = run_all.splitlines()
        assert len(lines) < 45
        assert sum(line.startswith("BAD") for line in lines) == 2 * 11
        assert "and 990 more (all: --json or -v 2)" in run_all and "topics are well" not in run_all
        found = json.loads(run("--json")[0])["findings"]
        assert {one["topic"] for one in found} == {None, *MANY}, "JSON is complete"
        assert error.startswith(f"2000 of {len(found)} checks failed")
        everything = [line.split()[0] for line in run("-v", "2")[0].splitlines()]
        assert len(everything) - everything.count("see") == len(found)


def test_one_topic_is_well() -> None:
    with in_memory(MANY):
        assert "ok   topics       1 topic is well" in run("--no-workers", "topic-0001")[0]


def test_what_a_dead_query_holds_is_due_in_every_face() -> None:
    clock = Clock(NOW)
    with in_memory({"work": {"TYPE": "fixed_time", "SLOTS": 2, "LISTENER": False}}, clock) as broker:
        work, shell = get_config().topic("work"), Operations(Actor("tester", "test"))

        def faces() -> dict[str, tuple[int, float]]:
            [row] = json.loads(printed("rmqstats", "work", "--json"))
            scraped = {name: value for (name, *labels), value in samples().items() if labels == ["work"]}
            sample = broker.sample(work, [0, 1])
            told: dict[str, Any] = topic_responses.TopicAnswer.of(shell.topic("work"))
            return {
                "rmqstats": (row["due"], row["oldest_due_seconds"] or 0),
                "metrics": (int(scraped["rmq_messages_due"]), scraped["rmq_oldest_due_age_seconds"]),
                "history": (sample.due, (clock() // 1000 - (sample.oldest_due_ms or clock() // 1000)) / 1000),
                "REST": (told["due"], (told["age_ms"] or 0) / 1000),
            }

        def unleased() -> float:
            [found] = [value for (name, *_), value in samples().items() if name == "rmq_messages_unleased"]
            return found

        late(broker, "work", 0, 3)
        assert broker.claim(work, 0, "dead", 1, 60_000, 9).taken == 3
        broker.renew_claim(work, 0, "dead", 1, 60_000, seal=True)
        clock.advance("59999ms")
        assert set(faces().values()) == {(0, 0)} and unleased() == 0
        assert "nothing is overdue" in run("--no-workers", "-v", "2")[0]
        clock.advance("600001ms")
        assert set(faces().values()) == {(3, 600)}, faces()
        assert "the oldest message has been due for 10 min" in run("--no-workers")[0]
        assert unleased() == 3
        while broker.time_out(work, 0):
            pass
        assert unleased() == 0


@pytest.mark.parametrize(
    ("seconds", "limits", "severity"),
    [
        (299, HealthThresholds(), Severity.OK),
        (301, HealthThresholds(), Severity.NOTE),
        (301, HealthThresholds(lateness=Severity.BAD), Severity.BAD),
        (299, HealthThresholds(lateness=Severity.BAD), Severity.OK),
        (301, HealthThresholds(max_age=400), Severity.OK),
        (301, HealthThresholds(max_age=300), Severity.BAD),
        (11, HealthThresholds(max_age=10), Severity.BAD),
    ],
)
def test_lateness_is_a_note_without_a_limit_and_trouble_above_one(
    seconds: float, limits: HealthThresholds, severity: Severity
) -> None:
    with in_memory({"work": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False}}) as broker:
        late(broker, "work", seconds)
        (age,) = (one for one in check(limits).findings if one.name == "age")
        assert age.severity == severity


def test_what_is_paused_is_late_as_a_note_and_what_is_paused_in_part_is_trouble() -> None:
    with in_memory({"work": {"TYPE": "fixed_time", "SLOTS": 2, "LISTENER": False}}) as broker:
        topic = get_config().topic("work")
        late(broker, "work", 1_000)
        broker.pause(topic, 1)
        found = {one.name: one for one in check(HealthThresholds(max_age=10)).findings}
        assert found["age"].severity == Severity.BAD and found["paused"].severity == Severity.NOTE
        assert found["paused"].text == "is paused in 1 of 2 slots"
        broker.pause(topic, 0)
        found = {one.name: one for one in check(HealthThresholds(max_age=10)).findings}
        assert found["age"].severity == found["paused"].severity == Severity.NOTE
        assert found["paused"].text == "is paused"


def test_a_slot_of_a_priority_topic_may_be_filled_for_an_hour() -> None:
    clock = Clock(NOW)
    with in_memory({"work": {"TYPE": "priority", "SLOTS": 1, "LISTENER": False}}, clock) as broker:
        broker.send_replace(get_config().topic("work"), 0, [100], [b"1"])
        for seconds, severity in ((USUAL_UNDRAINED - 1, Severity.OK), (2, Severity.NOTE)):
            clock.advance(seconds)
            (age,) = (one for one in check().findings if one.name == "age")
            assert age.severity == severity


@pytest.mark.parametrize(
    ("waiting", "limits", "severity"),
    [
        (Waiting("work", 1, 0, 299_000), HealthThresholds(), Severity.OK),
        (Waiting("work", 1, 0, 301_000), HealthThresholds(), Severity.NOTE),
        (Waiting("work", 1, 0, 301_000), HealthThresholds(lateness=Severity.BAD), Severity.BAD),
        (Waiting("work", 1, 0, 301_000), HealthThresholds(max_outbox_age=400), Severity.OK),
        (Waiting("work", 0, 2, None), HealthThresholds(lateness=Severity.BAD), Severity.NOTE),
    ],
)
def test_rows_of_the_outbox_that_are_old_or_refused(
    monkeypatch: pytest.MonkeyPatch, waiting: Waiting, limits: HealthThresholds, severity: Severity
) -> None:
    monkeypatch.setattr(health, "outbox_as_known", lambda *_, **__: Known([waiting], []))
    with in_memory({"work": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False}}, OUTBOX=True):
        (found,) = (one for one in check(limits).findings if one.name == "outbox")
        assert (found.topic, found.severity) == ("work", severity)
        names = {one.name for one in check(limits, []).findings}
        assert names <= {"redis", "coordinator"}, "without topics only the servers are checked"


def test_a_topic_that_left_the_settings_is_reported_by_the_command() -> None:
    with in_memory({"old": {"TYPE": "fixed_time", "SLOTS": 1}}) as broker:
        broker.define(get_config().topic("old"))
        late(broker, "old", 1)
        with override_settings(RMQ={"BROKER": "memory", "TOPICS": {"new": {"TYPE": "fixed_time"}}}):
            lines, _ = run("--no-workers")
            assert "BAD  undeclared   old: holds messages (1 waiting) and is not in the settings" in lines


def test_a_topic_that_left_the_settings_and_cannot_be_read_hides_no_other(
    redis_url: str, redis_client: redis.Redis, prefix: str
) -> None:
    def shop(*names: str) -> Any:
        topics = {name: {"TYPE": "fixed_time", "SLOTS": 2} for name in names}
        return override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": topics})

    with shop("old", "older"):
        call_command("rmqtopics", "--apply", stdout=io.StringIO())
        redis_client.zadd(slot_keys(prefix, "older", 1).store, {b"1": 1})
        redis_client.lpush(slot_keys(prefix, "old", 1).dead, "foreign")
    problem = f"slot 1: WRONGTYPE dead_{{{prefix}old_1}} is a list, not a zset"
    with shop("new"):
        lines, _ = run()
        assert "BAD  undeclared   older: holds messages (1 waiting) and is not in the settings" in lines
        assert f"BAD  undeclared   old: {problem}" in lines
        output = io.StringIO()
        with pytest.raises(CommandError, match=re.escape("older (1 waiting). Declare")) as caught:
            call_command("rmqtopics", "--apply", stdout=output)
        assert f"topic old: {problem}" in str(caught.value) and "older" in output.getvalue()
        with pytest.raises(CommandError, match=re.escape(f"topic old: {problem}")):
            call_command("rmqtopics", "old", "--retire", "--delete", "--no-input")
        redis_client.delete(topics_key(prefix))
        redis_client.lpush(topics_key(prefix), "foreign")
        lines, _ = run()
        assert "BAD  undeclared   the key" in lines and "BAD  workers      new" in lines


def test_the_usual_limits_are_those_of_the_alerts() -> None:
    groups = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    assert f"rmq_oldest_due_age_seconds) > {USUAL_LIMITS.max_age:.0f} " in rules["RmqLate"]
    assert f"rmq_undrained_seconds) > {USUAL_UNDRAINED:.0f} " in rules["RmqNotDrained"]
    assert rules["RmqOutboxOld"].endswith(f"> {USUAL_LIMITS.max_outbox_age:.0f}")
    assert f"seconds) > {USUAL_LIMITS.max_schedule_lateness:.0f} " in rules["RmqScheduleOverdue"]


def test_every_check_leads_to_a_section_of_the_docs() -> None:
    for name, one in CHECKS.items():
        page, _, anchor = one.docs.partition("#")
        lines = (ROOT / "docs" / page).read_text().splitlines()
        headings = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings], name


def test_rows_and_schedules_lead_to_the_runbook_of_their_alert() -> None:
    hourly = Schedule("nightly", "mails", every=3_600)
    well = ScheduleStats("nightly", "mails", hourly, hourly, {}, False, False, None, None, 0)
    limits = health.DEFAULT_THRESHOLDS
    found = {
        "rmqoutboxold": health.judge_waiting(Waiting("work", 1, 2, 301_000), limits),
        "rmqoutboxrefused": health.judge_waiting(Waiting("work", 0, 2, None), limits),
        "rmqscheduleoverdue": health.judge_schedule(replace(well, late_ms=700_000, outcome="dead"), limits),
        "rmqscheduledies": health.judge_schedule(replace(well, outcome="dead"), limits),
        "rmqschedulemissing": health.judge_schedule(replace(well, is_missing=True), limits),
    }
    assert all(one.docs == f"deploy/runbooks.md#{name}" for name, one in found.items())
    page = (ROOT / "docs/deploy/runbooks.md").read_text().lower()
    assert all(f"\n## {name}\n" in page for name in found)


def test_the_reference_of_the_command_lists_every_check() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    section = page.partition("## `rmqhealth`")[2].partition("\n## ")[0]
    assert set(CHECKS) == set(re.findall(r"^\| `([a-z]+)` \|", section, re.MULTILINE))


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and never says anything, as one does that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


TOPIC = {"work": {"TYPE": "priority", "SLOTS": 1}}
LONGEST = health.TOTAL_SECONDS + 2.0


def timed(**rmq: Any) -> dict[str, health.Finding]:
    began = time.monotonic()
    with override_settings(RMQ={"TOPICS": TOPIC, **rmq}):
        found = dict[str, health.Finding]()
        for one in check(HealthThresholds()).findings:
            found.setdefault(one.name, one)  # the worst of each check
        connections.close()
    assert time.monotonic() - began < LONGEST
    return found


@pytest.mark.usefixtures("real_waits")
def test_a_zookeeper_that_hangs_delays_nothing_else(silent: int, redis_url: str, prefix: str) -> None:
    zookeeper = {"HOSTS": f"127.0.0.1:{silent}"}
    found = timed(REDIS=redis_url, KEY_PREFIX=prefix, COORDINATOR="zookeeper", ZOOKEEPER=zookeeper)
    assert "does not answer" in found["coordinator"].text and not found["coordinator"].is_well
    assert found["redis"].is_well and found["age"].is_well


def test_a_zookeeper_that_does_not_answer_is_asked_once_for_the_topics(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fail() -> None:
        asked.append(threading.current_thread().name)
        raise ServerUnavailable("ZooKeeper does not answer")

    monkeypatch.setattr(coordinators, "survey_zookeeper", fail)
    hosts = {"HOSTS": "127.0.0.1:1"}
    found = timed(REDIS=redis_url, KEY_PREFIX=prefix, COORDINATOR="zookeeper", ZOOKEEPER=hosts)
    assert not found["coordinator"].is_well and "vanished" not in found
    # Once beside the topics, and once by the check of the coordinator.
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.usefixtures("real_waits")
def test_a_redis_and_a_zookeeper_that_hang_are_both_found(silent: int) -> None:
    hosts = f"127.0.0.1:{silent}"
    found = timed(REDIS=f"redis://{hosts}/0", COORDINATOR="zookeeper", ZOOKEEPER={"HOSTS": hosts})
    assert list(found) == ["redis", "coordinator"] and not any(one.is_well for one in found.values())


@pytest.mark.usefixtures("real_waits")
def test_a_redis_that_stops_between_two_answers_is_found() -> None:
    with RedisServer() as server, override_settings(RMQ={"REDIS": server.url, "TOPICS": TOPIC}):
        assert check(HealthThresholds(needs_workers=False)).is_well
        server.pause()
        try:
            assert not check(HealthThresholds(needs_workers=False)).is_well
        finally:
            server.resume()
        connections.close()


def test_what_does_not_end_in_time_is_trouble_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def hang(*args: object) -> list[Waiting]:
        goes_on.wait(60)
        ended.set()
        return []

    monkeypatch.setattr(health, "TOTAL_SECONDS", 0.2)
    monkeypatch.setattr(coordinators, "survey_zookeeper", hang)
    monkeypatch.setattr(row_lists, "waiting", hang)
    monkeypatch.setattr(outbox, "needs_this_thread", lambda alias: False)
    monkeypatch.setattr(outbox, "_inquiries", {})
    topics = {"work": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False}}
    with in_memory(topics, OUTBOX=True, COORDINATOR="zookeeper", ZOOKEEPER={"HOSTS": "nowhere:1"}):
        found = {one.name: one for one in check().findings}
        assert {name for name, one in found.items() if not one.is_well} == {"coordinator", "outbox"}
        assert "did not end within" in found["coordinator"].text and found["redis"].is_well
        assert found["outbox"].text == "the database default does not answer within 1 s"
        goes_on.set()
        assert ended.wait(60)


def test_a_database_that_hangs_leaves_out_the_metrics_of_the_outbox_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, asked = threading.Event(), threading.Semaphore(0)

    def hang(*args: object) -> list[Waiting]:
        asked.release()
        goes_on.wait(60)
        return [Waiting("work", 3)]

    monkeypatch.setattr(collector, "OUTBOX_SECONDS", 0.05)
    monkeypatch.setattr(collector, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(outbox, "needs_this_thread", lambda alias: False)
    monkeypatch.setattr(outbox, "_inquiries", {})
    monkeypatch.setattr(row_lists, "waiting", hang)
    with in_memory(TOPIC, OUTBOX=True):
        collecting = collector.RmqCollector()

        def names() -> set[str]:
            return {family.name for family in collecting.collect()}

        for _ in range(3):
            assert "rmq_up" in (found := names()) and "rmq_outbox_messages" not in found
        assert asked.acquire(timeout=60)
        assert not asked.acquire(blocking=False), "one thread waits for the database"
        goes_on.set()
        eventually(lambda: "rmq_outbox_messages" in names())


def test_an_error_of_a_check_is_raised_to_who_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "survey_topics", Mock(side_effect=ZeroDivisionError))
    with in_memory(TOPIC), pytest.raises(ZeroDivisionError):
        check()


def test_while_one_probe_waits_for_a_server_others_get_what_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def wait(*args: object) -> health.Health:
        began.set()
        assert goes_on.wait(60)
        return health.Health([])

    ready = _Ready()
    with in_memory(TOPIC):
        known = ready.recent_health()
        assert ready.recent_health() is known
        ready._until = 0.0
        monkeypatch.setattr(Operations, "health", wait)
        waiting = threading.Thread(target=ready.recent_health)
        waiting.start()
        assert began.wait(60)
        assert ready.recent_health() is known
        goes_on.set()
        waiting.join(60)
        assert ready.recent_health().findings == []


PROBED = {
    "work": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False},
    "heard": {"TYPE": "fixed_time", "SLOTS": 1},
}
CHECK = "django_rmq.health_check.RmqHealthCheck"


@pytest.fixture
def probed() -> Iterator[OracleBroker]:
    with in_memory(PROBED) as broker:
        yield broker


def asked(**options: Any) -> tuple[int, str]:
    """What the page of django-health-check answers: the status, and what it says of our check."""
    view = HealthCheckView.as_view(checks=[(CHECK, options)])
    response = asyncio.run(view(AsyncRequestFactory().get("/health/?format=json")))
    (told,) = json.loads(response.content).values()
    return response.status_code, told


def test_all_is_well(probed: OracleBroker) -> None:
    assert asked(topics=("work",), max_age=60.0, max_dead=0) == (200, "OK")


@modify_settings(INSTALLED_APPS={"append": "health_check"})
def test_a_probe_that_asks_for_no_json_gets_the_page(probed: OracleBroker) -> None:
    view = HealthCheckView.as_view(checks=[(CHECK, {"needs_workers": False})])
    response = asyncio.run(view(AsyncRequestFactory().get("/health/", headers={"accept": "*/*"})))
    assert (response.status_code, response.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "RmqHealthCheck" in response.rendered_content


def test_no_worker_is_unavailable_and_may_be_allowed(probed: OracleBroker) -> None:
    status, told = asked()
    assert status == 500 and "Unavailable: heard: no live worker serves it" in told
    assert asked(needs_workers=False) == (200, "OK")


def test_what_is_late_or_dead_is_a_warning(probed: OracleBroker) -> None:
    work = get_config().topic("work")
    probed.send_replace(work, 0, [1_799_999_000_000] * 2, [b"1", b"2"])
    probed.bury(work, 0, [b"2"], "test")
    status, told = asked(needs_workers=False, max_age=60.0, max_dead=0)
    assert status == 500 and told.startswith("Warning")
    assert "due for 17 min" in told and "1 message is dead" in told
    assert asked(needs_workers=False, max_age=6_000.0, max_dead=1) == (200, "OK")


def test_redis_away_says_nothing_of_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(RMQ={"REDIS": "redis://:secret@127.0.0.1:1/0", "TOPICS": PROBED}):
        status, told = asked()
    assert status == 500 and "redis is unhealthy" in told
    assert "127.0.0.1" not in told and "secret" not in told + caplog.text
    assert "127.0.0.1" in caplog.text


def test_what_a_server_says_of_a_topic_that_is_not_declared_stays_in_the_log() -> None:
    finding = Finding(
        "undeclared", "former", Severity.BAD, "slot 3: WRONGTYPE secret", runbook="rmqunreadable"
    )
    assert health_check._public_text(finding) == "former: cannot be read"


def test_a_topic_that_is_not_declared_is_unavailable(probed: OracleBroker) -> None:
    assert "Unavailable" in asked(topics=("other",))[1]


def test_its_repr_holds_what_was_given_and_no_secret() -> None:
    assert repr(RmqHealthCheck(max_age=5)) == (
        "RmqHealthCheck(max_age=5, max_dead=None, needs_workers=True, max_outbox_age=None, "
        "max_schedule_lateness=None, max_running=None, topics=None)"
    )
