"""What happened, on the charts: actions of people, and versions of the project's code that workers report."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import DatabaseError, InterfaceError, connection
from django.test import Client, modify_settings
from django.urls import reverse
from django.utils import translation

from django_rmq.admin.audit_log import AUDITED, translate_record
from django_rmq.admin.charts import MOST_LISTED
from django_rmq.conf import get_config
from django_rmq.core.commands.reports import read_code_versions, read_reports, write_code_version
from django_rmq.core.model.keys import code_versions_key
from django_rmq.core.model.worker_report import CodeVersion
from django_rmq.operations import Actor, Operations, Permission, TopicRule, actions, shared_reads
from django_rmq.worker.worker_reports import ABSENT_MS, MOST_VERSIONS, ReportDuty
from tests.support.brokers import project_on

NAMES = ("timed", "other")
SECRET = "other"


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    """A broker with two topics that have been sampled for an hour. No answer is shared."""
    topics = {name: {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms"} for name in NAMES}
    with project_on(broker, TOPICS=topics):
        now = broker.now_ms() // 60_000
        for name in NAMES:
            for minute in range(now - 60, now + 1):
                record = " ".join(
                    map(str, (minute * 60_000, 2, 2, 9, 3, 0, 0, 0, 0, 0, *[minute] * 6, *[0] * 9))
                )
                broker.store_minute(get_config().topic(name), minute, record, 60)
        yield broker


def duty(broker: Any, code: str) -> ReportDuty:
    return ReportDuty(broker, f"worker of {code}", 1, code, list, lambda: 1.0)


def report_once(broker: Any, code: str) -> None:
    """Let a worker of this version report, as after its start."""
    with contextlib.closing(duty(broker, code)()) as reporting:
        next(reporting)


def version(broker: Any, name: str) -> CodeVersion:
    (found,) = [one for one in broker.run(read_code_versions()) if one.name == name]
    return found


def page(client: Client, tab: str = "") -> str:
    address = reverse("admin:django_rmq_topic_changelist")
    if tab:
        address = f"{reverse('admin:django_rmq_topic_change', args=['timed'])}?tab=history"
    return html.unescape(client.get(address).content.decode())


def test_a_version_begins_with_its_first_worker_and_goes_on_with_the_others(shop: Any) -> None:
    began = shop.now_ms()
    report_once(shop, "2026.11.3")
    first = version(shop, "2026.11.3")
    assert began <= first.since_ms == first.seen_ms
    shop.run(write_code_version(first._replace(since_ms=first.since_ms - 50_000)))
    report_once(shop, "2026.11.3")
    again = version(shop, "2026.11.3")
    assert again.since_ms == first.since_ms - 50_000 and again.seen_ms >= first.seen_ms


@pytest.mark.parametrize(
    ("absent_ms", "begins_anew"), [(ABSENT_MS + 60_000, True), (ABSENT_MS - 60_000, False)]
)
def test_a_version_begins_anew_after_a_time_without_a_worker(
    shop: Any, absent_ms: int, begins_anew: bool
) -> None:
    now = shop.now_ms()
    shop.run(write_code_version(CodeVersion("2026.11.2", now - 9_000_000, now - absent_ms)))
    report_once(shop, "2026.11.2")
    assert (version(shop, "2026.11.2").since_ms >= now) is begins_anew


def test_a_worker_whose_clock_is_a_moment_behind_does_not_move_the_beginning(shop: Any) -> None:
    now = shop.now_ms()
    shop.run(write_code_version(CodeVersion("2026.11.2", now - 9_000_000, now + 500)))
    report_once(shop, "2026.11.2")
    assert version(shop, "2026.11.2").since_ms == now - 9_000_000


def test_a_worker_without_a_version_notes_none(shop: Any) -> None:
    report_once(shop, "")
    assert shop.run(read_code_versions()) == []


def test_the_versions_that_were_reported_long_ago_are_forgotten(shop: Any) -> None:
    now = shop.now_ms()
    for at in range(MOST_VERSIONS + 3):
        shop.run(write_code_version(CodeVersion(f"v{at}", now - 9_000, now - 9_000 + at)))
    report_once(shop, "new")
    left = {one.name for one in shop.run(read_code_versions())}
    assert left == {"new", *(f"v{at}" for at in range(4, MOST_VERSIONS + 3))}


@pytest.mark.django_db
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_what_another_program_has_written_is_no_version_and_stops_no_report(shop: Any) -> None:
    key = code_versions_key(shop.prefix)
    shop.client.hset(key, mapping={"a": "x", "b": "1", "c": "-1 5", "d": "1 2 3", "e": "7 8"})
    assert shop.run(read_code_versions()) == [CodeVersion("e", 7, 8)]
    shop.client.delete(key)
    shop.client.set(key, "foreign")
    reporting = duty(shop, "2026.11.3")()
    next(reporting)
    assert [one.code for one in shop.run(read_reports()).values()] == ["2026.11.3"]
    assert Operations(Actor("tester", "test")).annotations_of(NAMES, 0) == []


@pytest.mark.django_db
def test_actions_and_versions_are_on_the_charts_of_their_time(
    shop: Any, staff: Callable[..., Client]
) -> None:
    boss = staff("view_topic", "pause_topic")
    now = shop.now_ms()
    for name, minutes in (("2026.11.3", 10), ("2026.11.2", 300)):
        shop.run(write_code_version(CodeVersion(name, now - minutes * 60_000, now)))
    list(Operations(Actor.of_user(boss_of(boss), "admin")).pause("timed"))
    for tab in ("history", ""):
        shown = page(boss, tab)
        assert "Version 2026.11.3" in shown and "2026.11.2" not in shown
        assert re.search(r"<strong>timed</strong> Pause.*: 2 paused \(admin\)", shown), shown[
            shown.find("rmq-annotations") :
        ][:900]
        charts = shown.count('aria-labelledby="rmq-chart-')
        assert charts and shown.count("rmq-marker rmq-is-version") == charts + 1
    list(Operations(Actor.of_user(boss_of(boss), "admin")).pause("other"))
    assert "<strong>other</strong>" in page(boss) and "<strong>other</strong>" not in page(boss, "history")


def boss_of(client: Client) -> Any:
    from django.contrib.auth.models import User

    return User.objects.get(pk=client.session["_auth_user_id"])


@pytest.mark.django_db
def test_who_may_not_know_of_a_topic_does_not_see_what_happened_to_it(
    shop: Any, staff: Callable[..., Client]
) -> None:
    user = boss_of(staff("view_topic", "pause_topic"))
    for name in NAMES:
        list(Operations(Actor.of_user(user, "admin")).pause(name))
    hides = TopicRule(lambda topic, permission: topic.name != SECRET)
    found = Operations(Actor.of_user(user, "admin", hides)).annotations_of(NAMES, 0)
    assert [one.topic for one in found] == ["timed"]
    everything = Operations(Actor.of_user(user, "admin")).annotations_of(NAMES, 0)
    assert [one.topic for one in everything] == ["timed", SECRET]


@pytest.mark.parametrize(
    ("record", "english", "chinese"),
    [
        ("Pause (slots): 1 paused (admin)",) * 2 + ("暂停 (slots): 1 已暂停 (admin)",),
        (
            "Delete all in the background (dead, error a (b): c): 40 deleted, 2 not found (rest)",
            "Delete all matches in the background (dead, error a (b): c): 40 deleted, 2 not found (rest)",
            "删除全部匹配项（后台） (dead, error a (b): c): 40 已删除，2 未找到 (rest)",
        ),
        ("Replay (1 chosen: 2~a): 1,replayed",) * 3,
        ("Knit (all): 3 replayed (admin)",) * 3,
    ],
)
def test_a_recorded_action_is_shown_in_the_language_of_the_reader(
    record: str, english: str, chinese: str
) -> None:
    assert translate_record(record) == english
    with translation.override("zh-hans"):
        assert translate_record(record) == chinese


def test_actions_on_messages_are_recorded_under_names_that_readers_are_shown() -> None:
    named = {one.name for one in (actions.REPLAY, actions.CANCEL)} | {"delete", "bury", "reschedule"}
    of_all = {
        *(f"{name} all" for name in ("replay", "delete", "bury", "reschedule")),
        *(f"undo {kind}" for kind in ("delete", "purge")),
    }
    assert {name.capitalize() for name in named | of_all} <= {*AUDITED}


@pytest.mark.django_db
def test_the_list_below_the_charts_is_bounded_and_says_so(shop: Any, staff: Callable[..., Client]) -> None:
    boss = staff("view_topic", "pause_topic")
    operations = Operations(Actor.of_user(boss_of(boss), "admin"))
    for _ in range(MOST_LISTED + 2):
        list(operations.pause("timed"))
    shown = page(boss, "history")
    assert len(re.findall(r"<li><svg[^>]*><circle class=\"rmq-marker", shown)) == MOST_LISTED
    assert "2 earlier ones are only in the charts." in shown


@pytest.mark.django_db
@pytest.mark.parametrize("error", [DatabaseError("no such table"), InterfaceError(0, "")])
def test_charts_are_drawn_without_a_database_for_actions(
    shop: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(**asked: object) -> Any:
        raise error

    shop.run(write_code_version(CodeVersion("2026.11.3", shop.now_ms(), shop.now_ms())))
    monkeypatch.setattr(LogEntry.objects, "filter", refuse)
    found = Operations(Actor("tester", "test")).annotations_of(NAMES, 0)
    assert [one.text for one in found] == ["2026.11.3"]
    assert "could not be read for a chart" in caplog.text


def test_without_the_admin_there_are_versions_alone(shop: Any) -> None:
    now = shop.now_ms()
    shop.run(write_code_version(CodeVersion("2026.11.3", now, now)))
    with modify_settings(INSTALLED_APPS={"remove": ["django.contrib.admin"]}):
        found = Operations(Actor("tester", "test")).annotations_of(NAMES, 0)
    assert [one.text for one in found] == ["2026.11.3"]


@pytest.mark.django_db
def test_charts_are_drawn_where_django_has_no_time_zones(shop: Any, staff: Any, settings: Any) -> None:
    settings.USE_TZ = False
    client = staff("*")
    assert 'id="rmq-chart-site-depth"' in page(client)
    assert 'id="rmq-chart-depth"' in page(client, "history")


@pytest.mark.django_db
def test_open_dashboards_share_what_happened(
    shop: Any, monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 2_000)
    operations = Operations(Actor("tester", "test"))
    operations.annotations_of(NAMES, 0)
    with django_assert_num_queries(0, connection=connection):
        operations.annotations_of(NAMES, 0)


def test_only_those_who_may_view_see_it(shop: Any) -> None:
    nobody = Actor("nobody", "test", permits=lambda permission: permission is not Permission.VIEW)
    with pytest.raises(Exception, match="lacks the permission"):
        Operations(nobody).annotations_of(NAMES, 0)
