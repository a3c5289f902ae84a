"""The first screen of the admin says what is wrong: the findings of ``rmqhealth``, with links, counted in the title."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import translation

from django_rmq import connections
from django_rmq.admin import findings_panel
from django_rmq.conf import get_config
from django_rmq.connections import coordinators
from django_rmq.core import lua
from django_rmq.core.commands.membership import assign, roster
from django_rmq.core.commands.reports import write_report
from django_rmq.core.coordination import Worker, topic_slots
from django_rmq.core.coordination.stored_plan import AssignmentPlan, Span
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.server_checks import ServerInfo, SlowCommand
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.model.worker_report import RunningCall
from django_rmq.core.monitoring.history import TimesCount
from django_rmq.core.redis.clients import parse_slow_commands
from django_rmq.exceptions import ServerRefused, ServerUnavailable
from django_rmq.operations import Actor, Operations, ScheduleStats, shared_reads, stats, undeclared_topics
from django_rmq.operations.health import USUAL_UNOWNED, HealthThresholds
from django_rmq.outbox.row_lists import Waiting
from django_rmq.testing import Clock
from tests.integration.test_health import NOW, die, in_memory, late, run
from tests.support.reports import REPORT, join
from tests.support.servers import RedisServer
from tests.support.workers import flush

pytestmark = pytest.mark.django_db

TOPICS: dict[str, Any] = {
    "orders": {"TYPE": "fixed_time", "SLOTS": 1, "LISTENER": False, "TIMEOUT": 7_200},
    "mails": {"TYPE": "fixed_time", "SLOTS": 2, "LISTENER": False},
}
HOURLY = Schedule("nightly", "mails", every=3_600)
WELL = ScheduleStats("nightly", "mails", HOURLY, HOURLY, {}, False, False, None, None, 0)
FULL = ServerInfo("Redis", {"role": "master", "used_memory": "200", "maxmemory": "100"}, {})


@pytest.fixture
def boss(staff: Callable[..., Client]) -> Client:
    return staff("*")


def address(name: str, *args: str) -> str:
    return reverse(f"admin:django_rmq_topic_{name}", args=args)


def page(boss: Client, name: str = "changelist", *args: str, **headers: str) -> str:
    answer = boss.get(address(name, *args), headers=headers)
    assert answer.status_code == 200
    return answer.content.decode()


def lines_of(text: str) -> list[tuple[bool, str]]:
    """Whether each sentence of the findings is an alarm, and its text."""
    section = re.search(r'<section class="rmq-findings".*?</section>', text, re.DOTALL)
    assert section
    found = re.findall(r'<li class="(.*?)">(.*?)</li>', section[0], re.DOTALL)
    return [
        (kind == "rmq-is-alarm", html.unescape(re.sub(r"<[^>]*>", "", sentence))) for kind, sentence in found
    ]


def links_of(text: str) -> list[str]:
    return [html.unescape(link) for link in re.findall(r'<li class="rmq-is-[a-z]+"><a href="(.*?)"', text)]


def test_each_incident_is_an_alarm_on_the_first_screen_and_on_the_page_of_its_topic(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(NOW)
    topics = {**TOPICS, "served": {"TYPE": "fixed_time", "SLOTS": 1}}
    schedules = [replace(WELL, outcome="dead", outcome_ms=NOW), replace(WELL, name="slow", late_ms=700_000)]
    monkeypatch.setattr(shared_reads, "outbox", lambda context: [Waiting("mails", 0, 19, None)])
    monkeypatch.setattr(shared_reads, "schedules", lambda context: schedules)
    monkeypatch.setattr(shared_reads, "read_servers", lambda context: [FULL])
    with in_memory(topics, clock, OUTBOX=True) as broker:
        late(broker, "orders", 0)
        assert broker.prepare(get_config().topic("orders"), 0, "worker", None, 10).deliveries
        clock.advance(1_000)
        late(broker, "mails", 4_000)
        die(broker, "mails", 3)
        text = page(boss)
        wanted = [
            ("Redis refuses writes: its memory is full", address("servers")),
            ("mails: the oldest message has been due for 83 min", f"{address('change', 'mails')}?tab=store"),
            ("mails: schedule slow is late by 12 min", address("schedules")),
            ("served: no live worker serves it", f"{address('change', 'served')}?tab=slots"),
            ("orders: the longest delivery has run for 17 min", address("running")),
            ("mails: 19 messages in the outbox were refused", address("outbox")),
            (
                "mails: schedule nightly: the latest of its runs that ended is dead",
                address("schedules"),
            ),
            ("mails: 3 messages are dead", f"{address('change', 'mails')}?tab=dead"),
        ]
        found = lines_of(text)
        assert len(found) == len(wanted)
        for (is_alarm, sentence), link, (start, where) in zip(found, links_of(text), wanted, strict=True):
            assert is_alarm and sentence.startswith(start) and link == where
        assert "<title>(8) Topics" in text and "django_rmq/findings-8.svg" in text
        fragment = page(boss, "dashboard_live")
        assert lines_of(fragment) == found and 'data-rmq-findings="8"' in fragment
        own = page(boss, "change", "orders")
        subjects = [sentence.partition(":")[0] for _, sentence in lines_of(own)]
        assert subjects == ["Redis refuses writes", "orders"]
        assert "<title>(2) orders" in own
        assert lines_of(page(boss, "live", "orders")) == lines_of(own)


def test_a_topic_without_a_worker_is_the_worst_one_where_messages_are_due(boss: Client) -> None:
    with in_memory({**TOPICS, "served": {"TYPE": "fixed_time", "SLOTS": 1}}) as broker:
        late(broker, "mails", 4_000)
        mails = "mails: the oldest message has been due for 67 min"
        assert [text for _, text in lines_of(page(boss))] == [mails, "served: no live worker serves it"]
        late(broker, "served", 1)
        served = "served: no live worker serves it, and 1 message is due"
        assert [text for _, text in lines_of(page(boss))] == [served, mails]


def test_the_page_says_what_the_command_says(boss: Client) -> None:
    with in_memory(TOPICS) as broker:
        late(broker, "mails", 1_000)
        die(broker, "orders", 2)
        lines = [line for line in run()[0].splitlines() if line.startswith(("BAD", "note"))]
        said = {" ".join(line.split()[2:]) for line in lines}
        assert {sentence for _, sentence in lines_of(page(boss))} == said != set()


def test_where_nothing_is_wrong_nothing_is_counted(boss: Client) -> None:
    with in_memory(TOPICS):
        text = page(boss)
        assert lines_of(text) == [] and "Nothing needs attention." in text
        assert "<title>Topics" in text and "findings-" not in text


def test_what_was_paused_on_purpose_is_said_last_and_not_counted(boss: Client) -> None:
    with in_memory(TOPICS) as broker:
        late(broker, "orders", 5_000)
        broker.pause(get_config().topic("orders"), 0)
        late(broker, "mails", 400)
        text = page(boss)
        assert lines_of(text) == [
            (True, "mails: the oldest message has been due for 6.7 min"),
            (False, "orders: the oldest message has been due for 83 min, and it is paused"),
            (False, "orders: is paused"),
        ]
        assert "<title>(1) Topics" in text


def test_many_findings_of_a_kind_are_three_lines_and_a_count_that_opens(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"topic-{number:02}": TOPICS["mails"] for number in range(20)}
    with in_memory(many) as broker:
        for number, name in enumerate(many):
            late(broker, name, 1_000 + number)
        text = page(boss)
        topics = [sentence.partition(":")[0] for _, sentence in lines_of(text)[:3]]
        assert topics == ["topic-19", "topic-18", "topic-17"]
        assert len(lines_of(text)) == 4 and lines_of(text)[3][1].startswith("and 17 more like these")
        assert "<title>(20) Topics" in text and "django_rmq/findings-10.svg" in text
        opened = text.partition("<details>")[2].partition("</details>")[0]
        assert [name for name in reversed(many) if f"<strong>{name}</strong>" in opened] == list(many)[16::-1]
        monkeypatch.setattr(findings_panel, "MOST_OPENED", 5)
        opened = page(boss).partition("<details>")[2].partition("</details>")[0]
        assert opened.count("<strong>") == 5 and "and 12 more, which manage.py rmqhealth -v 2 lists" in opened


def test_the_findings_are_in_the_language_of_its_reader_and_that_of_the_command_is_english(
    boss: Client,
) -> None:
    with in_memory(TOPICS) as broker:
        die(broker, "mails", 3)
        assert lines_of(page(boss, **{"accept-language": "zh-Hans"})) == [(True, "mails: 3 条死信")]
        with translation.override("zh-hans"):
            found = Operations(Actor("tester", "test")).health(HealthThresholds(), ["mails"]).findings
            assert "3 messages are dead" in [one.text for one in found]
            assert translation.get_language() == "zh-hans"


def test_workers_that_vanished_in_the_last_hour_are_a_finding(boss: Client) -> None:
    with in_memory(TOPICS) as broker:
        for worker, seconds in (("gone", 40), ("gone-before", 300), ("forgotten", 3_700)):
            broker.run(write_report(worker, replace(REPORT, at_ms=NOW - seconds * 1_000)))
        text = page(boss)
        said = "2 workers vanished in the last hour: the last of them reported 40 s ago"
        assert lines_of(text) == [(True, said)] and links_of(text) == [address("workers")]
        assert "<title>(1) Topics" in text
        assert lines_of(page(boss, "dashboard_live")) == [(True, said)]
        # It concerns no topic, and not those who look for one.
        assert lines_of(page(boss, "change", "orders")) == []
        assert lines_of(boss.get(address("changelist"), {"q": "orders"}).content.decode()) == []
        lines, error = run("--no-workers")
        assert f"note vanished     {said}" in lines.splitlines() and error == ""
        assert "vanished" not in run("--no-workers", "orders")[0]


def calls_of(*seconds: float, topic: str = "mails") -> tuple[RunningCall, ...]:
    """Calls that have run for so long, each in a thread of its own."""
    return tuple(
        RunningCall(topic, f"0~{at}", NOW - round(passed * 1000), 1, f"rmq-executor-{at}")
        for at, passed in enumerate(seconds)
    )


@pytest.mark.parametrize(
    ("usual", "running", "is_stuck"),
    [
        (None, (90, 61), True),
        (None, (90, 59), False),
        (0.01, (90, 12), True),
        (0.01, (90, 4), False),
        (8.0, (90, 30), True),
        (8.0, (90, 14), False),
        (0.01, (90,), False),
    ],
)
def test_workers_whose_threads_all_hang_are_a_finding(
    boss: Client, usual: float | None, running: tuple[float, ...], is_stuck: bool
) -> None:
    with in_memory(TOPICS) as broker:
        join(broker, "w", "mails")
        ran: dict[str, Any] = {"taken": len(running), "running": 2, "calls": calls_of(*running)}
        broker.run(write_report("w", replace(REPORT, at_ms=NOW, threads=2, **ran)))
        if usual is not None:
            count = TimesCount(broker)
            count.note_calls(get_config().topic("mails"), [usual] * 100)
            flush(count)
        text = page(boss)
        age = f"{running[-1]} s"
        said = f"1 worker is stuck: all its threads are in calls that take unusually long, the shortest {age}"
        expected = [(True, said)] if is_stuck else []
        assert lines_of(text) == lines_of(page(boss, "change", "mails")) == expected
        assert links_of(text) == [address("running")] * is_stuck
        assert lines_of(page(boss, "change", "orders")) == [], "the worker does not serve it"
        for names in ((), ("mails",)):
            assert (f"note running      {said}" in run("--no-workers", *names)[0]) is is_stuck
        assert "stuck" not in run("--no-workers", "orders")[0]


def test_a_report_of_a_clock_that_is_ahead_is_not_of_the_future(boss: Client) -> None:
    with in_memory(TOPICS) as broker:
        broker.run(write_report("gone", replace(REPORT, at_ms=NOW + 9_000)))
        die(broker, "mails", 3)
        assert [sentence for _, sentence in lines_of(page(boss))] == [
            "1 worker vanished in the last hour: it reported last 0 s ago",
            "mails: 3 messages are dead",
        ]


def test_messages_in_slots_that_no_worker_has_are_a_finding(
    boss: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_memory({"served": {"TYPE": "fixed_time", "SLOTS": 2}}) as broker:
        served = get_config().topic("served")
        worker = Worker("w", "shop-1", 7, 1.0, 2, topic_slots([served]))
        beat = broker.beat("w", "token", 60_000, record=write_record("token", worker))
        late(broker, "served", USUAL_UNOWNED + 1, 2)
        said = "served: 2 messages are due in slots that no worker has, for up to 31 s"
        assert lines_of(page(boss)) == [(True, said)]
        assert links_of(page(boss)) == [f"{address('change', 'served')}?tab=slots"]
        assert lines_of(page(boss, "change", "served")) == [(True, said)]
        assert "note unowned      served: 2 messages are due" in run()[0]
        capsys.readouterr()
        call_command("rmqstats")
        assert "2 due in slots that no worker has\n" in capsys.readouterr().out

        def give(owner: str) -> None:
            plan = AssignmentPlan({"served": (Span(0, 2, owner, 1),)}).encode()
            assert broker.run(assign(beat.members_version, broker.run(roster()).plan_version, plan))

        give("gone")
        assert lines_of(page(boss)) == [(True, said)]
        give("w")
        assert lines_of(page(boss)) == []


def test_no_page_counts_workers_that_are_unknown(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_away() -> None:
        raise ServerUnavailable("ZooKeeper does not answer")

    monkeypatch.setattr(coordinators, "survey_zookeeper", is_away)
    with in_memory({"served": {"TYPE": "fixed_time", "SLOTS": 2}}) as broker:
        late(broker, "served", 1)
        slots = boss.get(address("change", "served"), {"tab": "slots"}).content.decode()
        for text in (page(boss), page(boss, "change", "served"), slots):
            assert "ZooKeeper does not answer" in text
            assert not re.search(r"no workers|No worker|rmq-is-dead|>none<", text)


def test_slots_that_have_no_worker_for_some_seconds_are_well(boss: Client) -> None:
    with in_memory({"served": {"TYPE": "fixed_time", "SLOTS": 2}}) as broker:
        worker = Worker("w", "shop-1", 7, 1.0, 2, topic_slots([get_config().topic("served")]))
        broker.beat("w", "token", 60_000, record=write_record("token", worker))
        late(broker, "served", USUAL_UNOWNED)
        assert lines_of(page(boss)) == []
        broker.pause(get_config().topic("served"), 0)
        late(broker, "served", 100)
        assert [is_alarm for is_alarm, _ in lines_of(page(boss))] == [False]


def test_messages_of_a_topic_that_the_settings_do_not_have_are_a_finding(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_memory(TOPICS) as broker:
        before = Topic("renamed", TopicType.FIXED_TIME, slots=4)
        broker.define(before)
        assert lines_of(page(boss)) == []
        broker.send_replace(before, 2, [1_000], [b'"a"'])
        said = "renamed: holds messages (1 waiting) and is not in the settings"
        assert lines_of(page(boss)) == [(True, said)]
        assert lines_of(page(boss, "change", "orders")) == []
        # A page reads a part of the slots where there are very many.
        monkeypatch.setattr(undeclared_topics, "STRANDED_SLOTS", 2)
        assert lines_of(page(boss)) == [
            (True, "renamed: holds messages (at least 1 waiting) and is not in the settings")
        ]
        monkeypatch.setattr(undeclared_topics, "STRANDED_SLOTS", 1)
        assert lines_of(page(boss)) == []
        assert "(1 waiting)" in run("--no-workers")[0]
        monkeypatch.setattr(undeclared_topics, "MOST_STRANDED", 0)
        assert lines_of(page(boss)) == []


def test_an_outbox_that_does_not_answer_is_a_finding(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: object) -> None:
        raise ServerUnavailable("the database does not answer")

    monkeypatch.setattr(shared_reads, "outbox", fail)
    monkeypatch.setattr(shared_reads, "schedules", fail)
    with in_memory(TOPICS, OUTBOX=True):
        assert lines_of(page(boss)) == [(True, "the database does not answer")] * 2


def test_the_findings_ask_redis_for_no_second_survey(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    survey = stats.survey_topics

    def count(*arguments: Any) -> stats.Overview:
        asked.append(1)
        return survey(*arguments)

    monkeypatch.setattr(stats, "survey_topics", count)
    with in_memory(TOPICS):
        page(boss)
    assert asked == [1]


def test_the_page_of_the_servers_shows_a_real_one(boss: Client, settings: Any) -> None:
    with RedisServer() as server:
        settings.RMQ = {"REDIS": server.url, "TOPICS": TOPICS}
        broker: Any = connections.get_broker("web")
        broker.client.config_set("slowlog-log-slower-than", 0)
        broker.client.set("a-secret-key", "a-secret-value")
        text = html.unescape(page(boss, "servers"))
        assert f"127.0.0.1:{server.port}" in text
        assert "primary" in text and "there is no limit" in text and "Slow log" in text
        assert "<code>SET</code>" in text and "a-secret" not in text


def test_the_page_of_the_servers_says_what_the_user_of_redis_may_not_read(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object) -> None:
        raise ServerRefused("NOPERM")

    with in_memory(TOPICS) as broker:
        monkeypatch.setattr(type(broker), "servers", refuse)
        monkeypatch.setattr(type(broker), "slow_commands", refuse)
        text = page(boss, "servers")
        assert "may not read INFO" in text and "may not read the slow log" in text


def test_each_node_of_a_cluster_has_a_panel_and_says_why_it_refuses(
    boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {
        "valkey_version": "9.1.2",
        "role": "master",
        "connected_slaves": "1",
        "slave0": "ip=10.0.0.7,port=6379,state=online,offset=14,lag=3",
        "connected_clients": "12",
        "maxclients": "10000",
        "aof_enabled": "1",
        "aof_last_write_status": "err",
    }
    replica = ServerInfo("the node b:2", {"role": "slave"}, {}, "b:2")
    nodes = [ServerInfo("the node a:1", info, {}, "a:1"), replica]
    with in_memory(TOPICS) as broker:
        monkeypatch.setattr(type(broker), "servers", lambda self: nodes)
        text = html.unescape(page(boss, "servers"))
        assert "<h2>a:1</h2>" in text and "<h2>b:2</h2>" in text
        assert "Valkey 9.1.2" in text and "10.0.0.7:6379 online (3 s)" in text
        assert "12 of at most 10,000" in text
        assert "Refuses writes: it cannot write its append-only file" in text
        assert "Refuses writes: it is a read-only replica" in text


def test_a_slow_log_shows_no_arguments() -> None:
    log = [
        [2, 1_800_000_000, 1_000, [b"evalsha", lua.load("prepare").sha, b"1", b"orders:secret"], b"", b""],
        [1, 1_800_000_000, 2_500, [b"EVALSHA", b"abc", b"1", b"orders:secret"], b"127.0.0.1:1", b""],
        [2, 1_800_000_001, 9_000, [b"SET", b"orders:secret", b"card"]],
    ]
    assert parse_slow_commands({"": [log]}) == [
        SlowCommand("", 1_800_000_001_000, 9_000, "SET"),
        SlowCommand("", 1_800_000_000_000, 2_500, "EVALSHA abc"),
        SlowCommand("", 1_800_000_000_000, 1_000, "evalsha prepare"),
    ]
