"""The admin's pages on a real Redis: who may see and do what, and what comes of it."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth.models import User
from django.test import Client, override_settings
from django.urls import URLPattern, path, resolve, reverse

from django_rmq import send_message
from django_rmq.admin import TopicAdmin, cause_views, export_views
from django_rmq.admin import action_views as pages
from django_rmq.admin.action_views import so_far
from django_rmq.admin.page import AMBIGUOUS
from django_rmq.conf import get_config
from django_rmq.core.model.body_codec import ExactNumber
from django_rmq.core.model.delivered_message import message_id as id_of
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.topic import Topic
from django_rmq.core.producer.placement import slot_of
from django_rmq.models import Topic as TopicModel
from django_rmq.operations import Actor, Limits, Operations, Permission
from tests.support import programs
from tests.support.brokers import Broker, project_on
from tests.support.programs import put
from tests.support.reports import join
from tests.support.sends import waiting
from tests.support.servers import RedisServer
from tests.support.workers import eventually

pytestmark = pytest.mark.django_db

TOPICS = {
    "timed": {"TYPE": "fixed_time", "SLOTS": 4, "BACKOFF": 60},
    "ranked": {"TYPE": "priority", "SLOTS": 4},
    "under_scored.topic": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": 60, "BODY": "text"},
    "keyed": {"TYPE": "fixed_time", "SLOTS": 2, "IDENTITY": "key"},
    "secret": {"TYPE": "fixed_time", "SLOTS": 2},
    "wide": {"TYPE": "fixed_time", "SLOTS": 8_192},
}


def redact(topic: str, body: Any) -> Any:
    return {"card": f"**** {body['card'][-4:]}"}


own_site = admin.AdminSite(name="operators")
own_site.register(TopicModel, TopicAdmin)
urlpatterns = [path("operators/", own_site.urls), path("admin/", admin.site.urls)]


@pytest.fixture
def broker(
    redis_url: str, redis_client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Broker]:
    monkeypatch.setattr(pages, "SLICE_SECONDS", 60.0)
    monkeypatch.setattr(pages, "COUNT_SECONDS", 60.0)
    found = Broker(redis_client, prefix)
    admin = {"PAGE_SIZE": 10, "FORMATTER": {"secret": f"{__name__}.redact"}}
    with project_on(found, REDIS=redis_url, TOPICS=TOPICS, ADMIN=admin):
        yield found


@pytest.fixture
def boss(broker: Broker, staff: Callable[..., Client]) -> Client:
    return staff("*")


def topic_of(name: str) -> Topic:
    return get_config().topic(name)


def url(page: str, *args: str) -> str:
    return reverse(f"admin:django_rmq_topic_{page}", args=args)


kill = partial(programs.kill, error="shop.errors.Boom: bad card 4111")


def depth(broker: Broker, name: str, state: str) -> int:
    topic = topic_of(name)
    return sum(getattr(broker.count(topic, slot), state) for slot in range(topic.slots))


def ids(page: str) -> list[str]:
    return [html.unescape(found) for found in re.findall(r'name="id" value="([^"]*)"', page)]


def text(response: Any) -> str:
    return html.unescape(response.content.decode())


def read(client: Client, page: str, *args: str, **query: str) -> str:
    """Return a page as a person sees it."""
    return text(client.get(url(page, *args), query))


def carried(response: Any) -> dict[str, Any]:
    """The hidden fields of the form on a page."""
    form = response.content.decode().partition('<form class="rmq-confirm"')[2].partition("</form>")[0]
    fields: dict[str, Any] = {}
    for tag in re.findall(r"<input[^>]*type=\"hidden\"[^>]*>", form):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        assert name
        fields.setdefault(name[1], []).append(html.unescape(value[1]) if value else "")
    fields.pop("csrfmiddlewaretoken", None)
    return fields


def confirm(client: Client, topic: str, question: Any, *, follow: bool = False, **answers: str) -> Any:
    """Say yes to the question of a page, or to its going on."""
    given = carried(question) | {"confirmed": "yes", **answers}
    return client.post(url("act", topic), given, follow=follow)


def members(prefix: str, count: int) -> list[bytes]:
    return [b'{"n":"%s%d"}' % (prefix.encode(), number) for number in range(count)]


def our_urls() -> list[URLPattern]:
    return admin.site.get_model_admin(TopicModel).get_urls()


def test_every_address_is_behind_the_admin_and_declares_a_permission() -> None:
    names = set()
    for pattern in our_urls():
        view: Any = pattern.callback
        permissions = getattr(view, "rmq_permissions", ())
        assert Permission.VIEW in permissions, pattern
        assert view.__wrapped__, pattern
        names.add(pattern.name)
    assert len(names) == len(our_urls()) > 10


def addresses(message_id: str) -> dict[str, str]:
    arguments = {"object_id": "timed", "message_id": message_id}
    found = {}
    for pattern in our_urls():
        assert pattern.name
        wanted = {name: arguments[name] for name in pattern.pattern.converters}
        found[pattern.name.removeprefix("django_rmq_topic_")] = reverse(
            f"admin:{pattern.name}", kwargs=wanted
        )
    return found


FIXED = sorted({str(one.pattern).partition("/")[0] for one in our_urls()} - {"", "<rmq_topic:object_id>"})
"""The first parts of the addresses that belong to no topic."""


@pytest.mark.parametrize("name", [*FIXED, "change", "message", "timed", "under_scored.topic"])
def test_each_address_leads_to_its_page_whatever_the_name_of_the_topic(name: str) -> None:
    for pattern in our_urls():
        values = {each: quote(name) for each in pattern.pattern.converters}
        found = resolve(reverse(f"admin:{pattern.name}", kwargs=values))
        assert found.url_name == pattern.name
        assert [unquote(each) for each in found.kwargs.values()] == [name] * len(values)


def test_only_topics_with_the_name_of_a_page_have_another_address() -> None:
    assert url("change", "timed") == "/admin/django_rmq/topic/timed/change/"
    assert url("live", "search") == "/admin/django_rmq/topic/search/live/"
    assert url("change", "schedules") == "/admin/django_rmq/topic/~schedules/change/"


@pytest.mark.parametrize("name", FIXED)
def test_the_pages_of_a_topic_with_the_name_of_a_page_exist(
    redis_url: str, broker: Broker, staff: Callable[..., Client], name: str
) -> None:
    topics = {name: {"TYPE": "fixed_time", "SLOTS": 2}}
    with project_on(broker, REDIS=redis_url, TOPICS=topics, ADMIN={}):
        boss = staff("*")
        kill(broker, name, b'{"a":1}')
        assert Operations(Actor.of_user(User.objects.get(), "admin")).replay_all(name).result().done == 1
        (entry,) = LogEntry.objects.all()
        page = boss.get(entry.get_admin_url() or "")
        assert (page.status_code, page.context["name"]) == (200, name)
        row, change = boss.get(url("changelist")).context["rows"][0], url("change", quote(name))
        assert row.url == change == page.context["row"].url
        live = boss.get(page.context["urls"]["live"])
        assert (live.status_code, live.context["name"]) == (200, name)
        history = boss.get(page.context["urls"]["log"])
        assert list(history.context["action_list"]) == [entry]
        assert f'href="{change}"' in text(history)


def test_without_a_permission_no_address_answers(broker: Broker, staff: Callable[..., Client]) -> None:
    kill(broker, "timed", b'{"a":1}')
    message_id = ids_of_dead(broker)
    client = staff()
    for name, address in addresses(message_id).items():
        for method in (client.get, client.post):
            assert method(address).status_code == 403, (name, method)
    client.logout()
    for name, address in addresses(message_id).items():
        assert client.get(address).status_code == 302, name
    assert "django_rmq" not in text(staff().get("/admin/"))


def test_a_viewer_sees_pages_and_can_change_nothing(broker: Broker, staff: Callable[..., Client]) -> None:
    kill(broker, "timed", b'{"a":1}')
    client = staff("view_topic")
    page = read(client, "change", "timed", tab="dead")
    assert "<button" in page  # the filter's
    assert 'name="act"' not in page
    message_id = ids_of_dead(broker)
    for act in ("replay", "delete", "replay_all", "purge", "pause", "resume", "bury", "cancel"):
        state = "store" if act in ("bury", "cancel") else "dead"
        given = {"act": act, "state": state, "id": message_id, "confirmed": "yes", "name": "timed"}
        assert client.post(url("act", "timed"), given).status_code == 403, act
    for name in ("send", "edit", "raw"):
        arguments = ["timed"] if name == "send" else ["timed", message_id]
        assert client.post(url(name, *arguments), {"body": "1"}).status_code == 403, name
    assert depth(broker, "timed", "dead") == 1
    assert not LogEntry.objects.exists()


def ids_of_dead(broker: Broker) -> str:
    topic = topic_of("timed")
    for slot in range(topic.slots):
        for entry in broker.list_messages(topic, slot, "dead").entries:
            return id_of(slot, entry.member)
    raise AssertionError("nothing is dead")


def test_what_spark_has_claimed_is_listed_and_shown_and_offers_nothing_to_do(
    boss: Client, broker: Broker
) -> None:
    put(broker, "timed", b'{"a":"claimed"}')
    topic = topic_of("timed")
    assert "tab=claim" not in read(boss, "change", "timed")
    for slot in range(topic.slots):
        broker.claim(topic, slot, "spark", 1, 60_000, 10)
    assert depth(broker, "timed", "claimed") == 1
    assert "tab=claim" in read(boss, "change", "timed")
    listed = read(boss, "change", "timed", tab="claim")
    assert '{"a":"claimed"}' in listed
    assert ids(listed) == []
    (address,) = set(re.findall(r'<th scope="row" class="rmq-message"><a href="([^"]*)"', listed))
    shown = text(boss.get(address))
    assert "Claimed" in shown and "a Spark query holds it" in shown and "claimed" in shown
    assert "Marked" not in shown
    words = []
    for slot in range(topic.slots):
        broker.renew_claim(topic, slot, "spark", 1, 60_000, seal=True)
        failure = Failure(b'{"a":"claimed"}', error="NoPrice: <none>")
        words += broker.fail_claimed(topic, slot, "spark", 1, [failure])
    assert sorted(words) == ["ok"] + ["stale"] * (topic.slots - 1)
    shown = text(boss.get(address))
    assert "fails when its batch ends" in shown and "NoPrice: <none>" in shown


def claimed(broker: Broker, consumer: str = "spark", count: int = 3) -> None:
    """Let a Spark query hold messages of a topic."""
    topic = topic_of("timed")
    for n in range(count):
        put(broker, "timed", b'{"a":%d}' % n)
    for slot in range(topic.slots):
        broker.claim(topic, slot, consumer, 1, 60_000, 10)
    assert depth(broker, "timed", "claimed") == count


def test_the_dashboard_shows_what_queries_hold_and_that_a_lease_has_ended(
    boss: Client, broker: Broker
) -> None:
    claimed(broker)
    shown = read(boss, "changelist")
    link = f'<a href="{url("change", "timed")}?tab=claim">and 3 claimed</a>'
    assert link in shown and "lease has ended" not in shown
    for slot in range(topic_of("timed").slots):
        broker.renew_claim(topic_of("timed"), slot, "spark", 1, 1, seal=True)
    eventually(lambda: f"{link} · lease has ended" in read(boss, "changelist"), "the lease's end")


def exported(client: Client, name: str, kind: str, **query: str) -> str:
    answer: Any = client.get(url("export", name), query | {"as": kind})
    assert answer.status_code == 200 and answer["X-Content-Type-Options"] == "nosniff"
    return b"".join(answer.streaming_content).decode()


def exported_lines(client: Client, name: str, **query: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported(client, name, "jsonl", **query).splitlines()]


def exported_rows(client: Client, name: str, **query: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exported(client, name, "csv", **query))))


def test_a_list_is_exported_as_json_lines_and_csv(
    broker: Broker, boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_views, "PAGE_EXPORTED", 2)
    kill(broker, "timed", *members("a", 5), error="shop.Boom: 17")
    kill(broker, "timed", b'"=1+1"', error="Other: @x")
    page = text(boss.get(url("change", "timed"), {"tab": "dead", "error": "Boom"}))
    (address,) = re.findall(r'href="([^"]*export[^"]*as=jsonl)"', page)
    assert address == f"{url('export', 'timed')}?tab=dead&error=Boom&as=jsonl"
    found = exported_lines(boss, "timed", tab="dead", error="Boom")
    assert {one["body"]["n"] for one in found} == {f"a{n}" for n in range(5)}
    shown = {(one["state"], one["error_class"], one["encoding"]) for one in found}
    assert shown == {("dead", "shop.Boom", "json")}
    assert LogEntry.objects.get().get_change_message() == "Export (dead, error Boom): 5 exported (admin)"
    table = exported_rows(boss, "timed", tab="dead")
    assert len(table) == 6 and all(row["at"].startswith("20") for row in table)
    (formula,) = [row for row in table if row["error_class"] == "Other"]
    assert formula["body"] == "'=1+1" and {row["slot"].isdigit() for row in table} == {True}
    monkeypatch.setattr(export_views, "MOST_EXPORTED", 3)
    assert len(exported_lines(boss, "timed", tab="dead")) == 3
    assert exported(boss, "timed", "jsonl", tab="retry") == ""
    for query, status in (({"tab": "x"}, 404), ({"tab": "dead", "slot": "99"}, 400)):
        assert boss.get(url("export", "timed"), query | {"as": "csv"}).status_code == status


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_cell_of_an_export_is_a_formula(start: str) -> None:
    assert export_views._cell(f"{start}1") == f"'{start}1"
    assert export_views._cell([f"{start}1"]).startswith("[")
    assert (export_views._cell(None), export_views._cell("\ud800")) == ("", "?")


@pytest.mark.parametrize("number", [-5, -1.5, ExactNumber("-1.50")])
def test_a_negative_number_of_an_export_is_a_number(number: object) -> None:
    assert export_views._cell(number) == repr(number)


def test_an_export_holds_what_its_reader_may_see(
    broker: Broker, boss: Client, staff: Callable[..., Client]
) -> None:
    kill(broker, "secret", b'{"card":"4111222233334444"}', error="shop.Boom: 4111222233334444")
    for kind in ("jsonl", "csv"):
        shown = exported(boss, "secret", kind, tab="dead")
        assert "**** 4444" in shown and "41112222" not in shown
    client = staff("view_topic")
    kill(broker, "timed", b'{"card":"4111222233334444"}', error="shop.Boom: 4111222233334444")
    (one,) = exported_lines(client, "timed", tab="dead")
    assert (one["body"], one["encoding"]) == (None, "hidden")
    assert (one["error"], one["error_class"]) == ("", "shop.Boom")
    assert "41112222" not in exported(client, "timed", "csv", tab="dead")


def listed(client: Client, **query: str) -> list[str]:
    """The topics of the dashboard, in order."""
    page = text(client.get(url("changelist"), query))
    return re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', page)


def test_topics_of_the_dashboard_are_filtered_and_sorted(broker: Broker, boss: Client) -> None:
    kill(broker, "keyed", b"1")
    kill(broker, "secret", b"1", b"2")
    put(broker, "timed", b"1", score=1_000_000)
    put(broker, "ranked", b"1", b"2", b"3")
    Operations(Actor("me", "test")).pause("ranked").result()
    assert listed(boss) == listed(boss, show="nothing", sort="nothing") == list(TOPICS)
    assert listed(boss, show="dead") == ["keyed", "secret"]
    assert listed(boss, show="dead", sort="dead") == ["secret", "keyed"]
    assert (listed(boss, show="late"), listed(boss, show="paused")) == (["timed"], ["ranked"])
    assert listed(boss, sort="name") == sorted(TOPICS)
    assert (listed(boss, sort="age")[0], listed(boss, sort="due")[0]) == ("timed", "ranked")
    assert "No topic matches." in text(boss.get(url("changelist"), {"show": "paused", "q": "tim"}))
    # Links, and what keeps the page fresh, hold all that was chosen.
    page = text(boss.get(url("changelist"), {"show": "dead", "sort": "dead", "q": "e"}))
    assert 'href="?q=e&show=late&sort=dead"' in page and 'aria-sort="descending"' in page
    (live,) = re.findall(r'data-rmq-live="([^"]*)"', page)
    fragment = text(boss.get(live))
    assert re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', fragment) == ["secret", "keyed"]


def test_pinned_topics_are_first_on_the_dashboard_of_that_browser(boss: Client) -> None:
    assert boss.post(url("pin", "keyed"), {"pin": "1"})["Location"] == url("change", "keyed")
    assert listed(boss) == ["keyed", *(name for name in TOPICS if name != "keyed")]
    assert listed(boss, sort="name")[:2] == ["keyed", "ranked"]
    assert "Unpin" in read(boss, "change", "keyed")
    boss.get(url("pin", "keyed"))
    assert listed(boss)[0] == "keyed"
    boss.post(url("pin", "keyed"), {"pin": ""})
    assert listed(boss) == list(TOPICS) and "Unpin" not in read(boss, "change", "keyed")
    assert boss.post(url("pin", "nosuch"), {"pin": "1"}).status_code == 404
    # What a browser sends is only compared with names.
    boss.cookies["rmq_pinned"] = ",".join(["<b>", *map(str, range(100)), "keyed"])
    assert listed(boss) == list(TOPICS)


@pytest.mark.parametrize("name", ["", "timed"])
def test_dead_messages_are_shown_by_cause_and_one_cause_is_replayed(
    boss: Client, broker: Broker, name: str
) -> None:
    page = url("topic_causes", name) if name else url("causes")
    assert "No dead messages." in text(boss.get(page))
    kill(broker, "timed", b"1", b"2", error="shop.Boom: order 1 of 'x'")
    kill(broker, "timed", b"3", error="shop.Boom: <no stock>")
    assert page in text(
        boss.get(url("change", "timed"), {"tab": "dead"}) if name else boss.get(url("changelist"))
    )
    response = boss.get(page)
    shown = text(response)
    assert "order # of '…'" in shown and "&lt;no stock&gt;" in response.content.decode()
    assert "3 dead messages were looked at: all there are." in shown and shown.count("rmq-spark") == 2
    # A narrow column must not break between the number and its sign.
    assert re.findall(r">(\d+)&nbsp;%<", response.content.decode()) == ["67", "33"]
    line = response.context["lines"][0]
    assert (line["group"].count, len(line["samples"])) == (2, 2)
    for address in (*line["samples"], line["edit_url"], line["url"]):
        assert boss.get(address).status_code == 200
    given = {"act": "replay_all", "state": "dead", "error": "shop.Boom", "cause": line["group"].cause}
    asked = text(boss.post(line["act_url"], given))
    assert "Replay 2 dead messages of timed?" in asked
    assert re.search(r"<dt>Cause</dt>\s*<dd>shop.Boom: order # of '…'</dd>", asked)
    assert "Cause: shop.Boom: order # of '…'" in text(boss.get(line["url"]))
    assert "2 replayed" in text(
        boss.post(line["act_url"], {**given, "confirmed": "yes", "asked": "2"}, follow=True)
    )
    assert (depth(broker, "timed", "dead"), depth(broker, "timed", "store")) == (1, 2)
    assert f"cause {line['group'].cause}" in str(LogEntry.objects.get().get_change_message())


def test_a_topic_whose_name_begins_the_address_of_another_page_has_another_address() -> None:
    routes = [str(one.pattern) for one in TopicAdmin(TopicModel, admin.site).get_urls()]
    paths = [route.split("/") for route in routes if not route.startswith("<")]
    assert {first for first, second, *_ in filter(lambda path: len(path) > 2, paths)} == AMBIGUOUS


def test_more_dead_messages_are_looked_at_if_a_person_asks(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause_views, "READ_SECONDS", 0.0)
    kill(broker, "ranked", *members("x", 3_000))
    page = url("topic_causes", "ranked")
    shown = text(boss.get(page))
    assert "of 3,000 dead messages were looked at" in shown and 'href="?look=longer"' in shown
    shown = text(boss.get(page, {"look": "longer"}))
    assert (
        "3,000 dead messages were looked at: all there are." in shown and 'href="?look=longer"' not in shown
    )


def test_claims_say_where_their_query_runs(boss: Client, broker: Broker) -> None:
    topic = topic_of("timed")
    assert broker.hold_consumer(topic, "spark", "d", "c", "etl-2 4711 - -", 60_000, starts=True) is None
    claimed(broker)
    assert "host etl-2, process 4711, since 2" in read(boss, "claims", "timed")


def test_claims_are_listed_by_query_and_returned_after_a_question(boss: Client, broker: Broker) -> None:
    page = url("claims", "timed")
    assert "No Spark query holds messages of this topic." in text(boss.get(page))
    claimed(broker)
    assert page in read(boss, "change", "timed", tab="claim")
    shown = text(boss.get(page))
    assert "<code>spark</code>" in shown and "being claimed" in shown and 'value="return"' in shown
    asked = text(boss.post(page, {"act": "return", "consumer": "spark"}))
    assert "Return 3 messages of spark? Stop the query first." in asked
    assert depth(broker, "timed", "claimed") == 3
    assert not LogEntry.objects.exists()
    carried = {"act": "return", "consumer": "spark", "confirmed": "yes"}
    assert "3 returned" in text(boss.post(page, carried, follow=True))
    assert (depth(broker, "timed", "claimed"), depth(broker, "timed", "store")) == (0, 3)
    assert "return claims" in str(LogEntry.objects.get().get_change_message()).lower()
    assert "This query no longer holds anything." in text(boss.post(page, carried, follow=True))


def test_claims_are_returned_with_a_retry_used(boss: Client, broker: Broker) -> None:
    claimed(broker)
    given = {"act": "spend", "consumer": "spark", "confirmed": "yes"}
    assert "3 returned" in text(boss.post(url("claims", "timed"), given, follow=True))
    assert (depth(broker, "timed", "store"), depth(broker, "timed", "retry")) == (0, 3)


def test_what_cannot_be_done_to_claims_says_so(
    boss: Client, broker: Broker, staff: Callable[..., Client]
) -> None:
    claimed(broker)
    page, given = url("claims", "timed"), {"act": "return", "consumer": "spark", "confirmed": "yes"}
    assert "not available" in text(boss.post(page, {**given, "act": "keep"}, follow=True))
    for consumer in ("", "other", "x" * 9_000, "\0"):
        answer = boss.post(page, {**given, "consumer": consumer}, follow=True)
        assert "This query no longer holds anything." in text(answer)
    viewer = staff("view_topic")
    assert 'name="act"' not in text(viewer.get(page))
    assert viewer.post(page, given).status_code == 403
    assert staff("view_topic", "replay_messages").get(page).status_code == 200
    assert depth(broker, "timed", "claimed") == 3


def test_get_changes_nothing(boss: Client, broker: Broker, prefix: str) -> None:
    kill(broker, "timed", b'{"a":1}')
    put(broker, "timed", b'{"a":2}')
    broker.change_schedule("timed", "spec", Schedule("timed", "timed", every=60).text)

    def everything() -> dict[bytes, bytes]:
        keys = sorted(broker.client.scan_iter(match=f"*{prefix}*"))
        return {key: broker.client.dump(key) for key in keys}

    before = everything()
    for address in addresses(ids_of_dead(broker)).values():
        assert boss.get(address).status_code in (200, 302)
    for tab in ("store", "prepare", "retry", "dead", "claim", "slots", "history"):
        assert boss.get(url("change", "timed"), {"tab": tab}).status_code == 200
    assert everything() == before


def test_who_logs_in_again_in_the_middle_of_an_action_learns_that_nothing_was_done(
    boss: Client, broker: Broker
) -> None:
    kill(broker, "timed", b'{"a":1}')
    given = {"act": "purge", "state": "dead", "name": "timed", "confirmed": "yes"}
    User.objects.filter(is_superuser=True).update(is_active=False)
    login = boss.post(url("act", "timed"), given)
    assert login["Location"].endswith(f"?next={url('act', 'timed')}")
    User.objects.filter(is_superuser=True).update(is_active=True)
    assert "Nothing was done." in text(boss.get(url("act", "timed"), follow=True))
    assert depth(broker, "timed", "dead") == 1


def test_posts_need_the_token(broker: Broker) -> None:
    user = User.objects.create_superuser("root")
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.post(url("act", "timed"), {"act": "pause"}).status_code == 403
    assert not broker.count(topic_of("timed"), 0).paused


def test_names_arrive_quoted_as_everywhere_in_the_admin(boss: Client) -> None:
    page = read(boss, "changelist")
    (address,) = set(re.findall(r'href="([^"?]*under[^"?]*)"', page))
    assert "under_5Fscored.topic" in address
    shown = boss.get(address)
    assert shown.status_code == 200
    assert "under_scored.topic</h1>" in text(shown)
    boss.post(url("act", "under_5Fscored.topic"), {"act": "pause"})
    assert boss.get(LogEntry.objects.get().get_admin_url() or "").status_code == 200


@pytest.mark.urls(__name__)
def test_it_works_in_a_site_of_ones_own(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", b'{"a":1}')
    page = text(boss.get("/operators/django_rmq/topic/"))
    assert '"/admin/' not in page
    assert "/operators/django_rmq/topic/timed/change/" in page
    page = text(boss.get("/operators/django_rmq/topic/timed/change/?tab=dead"))
    assert '"/admin/' not in page
    answer = boss.post("/operators/django_rmq/topic/timed/act/", {"act": "pause"})
    assert answer["Location"].startswith("/operators/")


@pytest.mark.parametrize(
    "query",
    [
        {"tab": "nonsense"},
        {"tab": "dead", "cursor": "nonsense"},
        *({"tab": "dead", "slot": slot} for slot in ("99", "minus")),
        *({"tab": "dead", "age": age} for age in ("older:nan", "nonsense")),
        {"tab": "retry", "age": "older:60"},
        {"tab": "dead", "text": "\x00\ud800"},
        {"tab": "history", "hours": "99999999999999999999"},
        *({"tab": "slots", "first": first} for first in ("-1", "999999")),
    ],
)
def test_strange_queries_are_answered(boss: Client, query: dict[str, str]) -> None:
    safe = {name: value.encode("utf-8", "surrogatepass") for name, value in query.items()}
    assert boss.get(url("change", "timed"), safe).status_code == 200
    assert boss.get(url("live", "timed"), safe).status_code == 200


@pytest.mark.parametrize(
    "message_id",
    [
        *("x", "0.x!", "9.eyJhIjoxfQ", "0." + "A" * 5000),
        *("0.dead.1.0123456789abcdef", "0.dead.nan.0123456789abcdef"),
    ],
)
def test_strange_ids_are_not_found(boss: Client, message_id: str) -> None:
    for page in ("message", "raw"):
        assert boss.get(url(page, "timed", message_id)).status_code == 404
    assert boss.get(url("edit", "timed", message_id)).status_code in (302, 404)
    given = {"act": "replay", "state": "dead", "id": message_id}
    assert boss.post(url("act", "timed"), given).status_code == 302


def test_unknown_topics_are_not_found(boss: Client) -> None:
    for page in ("change", "live", "send", "act", "history"):
        assert boss.get(url(page, "nobody")).status_code == 404


@pytest.mark.parametrize("back", ["//evil.example", "tab=dead&text=%22%3E&next=//evil", "x" * 10_000])
def test_the_way_back_leads_to_the_topic_and_nowhere_else(boss: Client, back: str) -> None:
    answer = boss.post(url("act", "timed"), {"act": "pause", "back": back})
    location = answer["Location"]
    assert location.startswith(f"{url('change', 'timed')}?")
    assert "evil" not in location


def test_who_may_not_read_bodies_sees_no_content(broker: Broker, staff: Callable[..., Client]) -> None:
    kill(broker, "timed", b'{"card":"visa-cardnumber"}')
    put(broker, "keyed", b"ada@example.com")
    client = staff("view_topic")
    page = read(client, "change", "timed", tab="dead")
    links = re.findall(r'href="([^"]*/message/[^"]*)"', page)
    pages = [page, text(client.get(links[0])), read(client, "change", "keyed")]
    keyed = re.findall(r'href="([^"]*/message/[^"]*)"', pages[2])
    pages.append(text(client.get(keyed[0])))
    for shown in pages:
        for hidden in ("visa-cardnumber", "bad card", "eyJjYXJk", "ada@", "YWRhQGV4"):
            assert hidden not in shown
    assert "shop.errors.Boom" in page
    assert 'name="text"' not in page
    seeing = staff("view_topic", "view_bodies")
    assert "visa-cardnumber" in read(seeing, "change", "timed", tab="dead")


def test_a_search_for_text_is_no_way_around(broker: Broker, staff: Callable[..., Client]) -> None:
    kill(broker, "timed", b'{"card":"4111"}')
    client = staff("view_topic", "replay_messages")
    found = [ids(read(client, "change", "timed", tab="dead", text=part)) for part in ("4111", "5222")]
    assert found[0] == found[1] != []
    for part in ("4111", "5222"):
        given = {"act": "replay_all", "state": "dead", "text": part, "confirmed": "yes"}
        answer = client.post(url("act", "timed"), given, follow=True)
        assert "This filter cannot be used for this action." in text(answer)
    assert depth(broker, "timed", "dead") == 1


def test_redacted_bodies_are_in_no_page_and_no_address(boss: Client, broker: Broker) -> None:
    kill(broker, "secret", b'{"card":"visa-cardnumber-4444"}')
    page = read(boss, "change", "secret", tab="dead")
    (link,) = re.findall(r'href="([^"]*/message/[^"]*)"', page)
    for shown in (page, text(boss.get(link))):
        assert "**** 4444" in shown
        for hidden in ("visa-cardnumber", "eyJjYXJk", "bad card"):
            assert hidden not in shown
    assert 'name="text"' not in page
    (message_id,) = ids(page)
    assert boss.get(url("raw", "secret", message_id)).status_code == 403
    given = {"act": "replay", "state": "dead", "id": message_id}
    assert boss.post(url("act", "secret"), given).status_code == 302
    assert depth(broker, "secret", "store") == 1


class Cards:
    """A formatter that shows more than the body."""

    def __call__(self, topic: str, body: Any) -> str:
        return "a card"

    def key(self, topic: str, key: str) -> str:
        return f"key {key[-2:]}"

    def headers(self, topic: str, headers: dict[str, str]) -> dict[str, str]:
        return dict.fromkeys(headers, "***")

    def error(self, topic: str, error: str) -> str:
        raise ValueError(f"it cannot read {error}")


show_cards = Cards()


def reject_cards(topic: str, body: Any) -> str:
    raise ValueError(f"it cannot read {body}")


@pytest.mark.parametrize("formatter", ["redact", "show_cards", "reject_cards", "missing"])
def test_keys_headers_and_slot_bases_of_a_redacted_topic_are_shown_by_its_formatter_alone(
    boss: Client, broker: Broker, formatter: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = topic_of("keyed")
    envelope = Envelope(b'{"card":"cardnumber 9999"}', 0, "cardnumber basis", {"sender": "cardnumber header"})
    broker.send_replace(topic, 0, [1_000], [b"cardnumber-77"], [encode_envelope(envelope)])
    taken = broker.prepare(topic, 0, "W", None, 10)
    failure = Failure(b"cardnumber-77", "rejected", None, "shop.Boom: cardnumber error")
    broker.rollback(topic, 0, taken.receipt, [failure])
    rmq = {**settings.RMQ, "ADMIN": {"FORMATTER": {"keyed": f"{__name__}.{formatter}"}}}
    with override_settings(RMQ=rmq):
        page = boss.get(url("change", "keyed"), {"tab": "dead"})
        message_id = ids(text(page))[0]
        rest = boss.get(f"/api/rmq/topics/keyed/messages/{message_id}/")
        shown = [text(page), read(boss, "message", "keyed", message_id), text(rest)]
        (copy,) = rest.json()["results"]
        assert "cardnumber" not in "".join(shown) + caplog.text
        # Error reporters collect the variables of the frames.
        assert formatter == "missing" or not any(record.exc_info for record in caplog.records)
        assert "shop.Boom" in shown[0] and copy["error_class"] == "shop.Boom"
        if formatter == "show_cards":
            assert all("key 77" in one for one in shown)
            assert copy["headers"] == {"sender": "***"}
            assert "failed (ValueError); the error is withheld" in caplog.text
        else:
            assert formatter != "reject_cards" or "failed (ValueError); the body is withheld" in caplog.text
            assert (copy["key"], copy["headers"]) == (None, {})
        assert (copy["slot_basis"], copy["error"]) == (None, "")
        # Who is trusted with everything sees what is stored.
        (copy_,) = Operations(Actor("shell", "test")).get("keyed", message_id)
        assert (copy_.key, copy_.slot_basis) == ("cardnumber-77", "cardnumber basis")


@pytest.mark.parametrize(
    "error", ["hunter2secret", "hunter2secret\nmore", "two hunter2secret: x", ": hunter2secret"]
)
def test_what_is_no_class_of_an_error_is_shown_to_those_alone_who_may_see_texts(
    staff: Callable[..., Client], broker: Broker, error: str
) -> None:
    kill(broker, "timed", b'{"a":1}', error=error)
    page = read(staff("view_topic"), "change", "timed", tab="dead")
    assert "/message/" in page
    assert "hunter2secret" not in page


def test_the_reason_of_a_burial_has_no_class(staff: Callable[..., Client], broker: Broker) -> None:
    operations = Operations(Actor("alice", "test"))
    put(broker, "timed", b'{"a":1}')
    operations.bury("timed", [id_of(slot_of(b'{"a":1}', 4), b'{"a":1}')], "hunter2secret")
    put(broker, "timed", b'{"b":1}')
    operations.bury_all("timed", "store", why="hunter2secret: x").result()
    page = read(staff("view_topic", "view_bodies"), "change", "timed", tab="dead")
    assert "put into Dead by alice: hunter2secret" in page
    page = read(staff("view_topic"), "change", "timed", tab="dead")
    assert "/message/" in page
    assert "hunter2secret" not in page


def test_a_body_can_be_downloaded_as_it_is(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", b"<script>alert(1)</script>\xff")
    answer = boss.get(url("raw", "timed", ids_of_dead(broker)), {"state": "dead"})
    assert answer.content == b"<script>alert(1)</script>\xff"
    assert answer["Content-Type"].startswith("text/plain")
    assert answer["Content-Disposition"].startswith("attachment")
    assert answer["X-Content-Type-Options"] == "nosniff"


def test_a_message_shows_its_own_limits(broker: Broker, boss: Client) -> None:
    envelope = encode_envelope(Envelope(b"{}", max_retries=2, timeout=7))
    broker.send_replace(topic_of("keyed"), slot_of(b"k", 2), [1_800_000_000_000], [b"k"], [envelope])
    page = text(boss.get(url("message", "keyed", f"{slot_of(b'k', 2)}.aw")))
    assert "<dt>Retries at most</dt><dd>2</dd>" in page
    assert "<dt>Time-out</dt><dd>7 s</dd>" in page


def test_a_key_with_a_dead_and_a_waiting_copy_shows_both(boss: Client, broker: Broker) -> None:
    kill(broker, "keyed", b"k")
    put(broker, "keyed", b"k")
    page = text(boss.get(url("message", "keyed", f"{slot_of(b'k', 2)}.aw")))
    assert page.count("rmq-panel") == 6  # two bodies, two lists of facts, one error, the timeline
    assert "Waiting for its time" in page
    assert "Why it died" in page


def test_one_is_replayed_at_once_and_a_second_person_is_told(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", b'{"a":1}')
    given = {"act": "replay", "state": "dead", "id": ids_of_dead(broker), "back": "tab=dead&error=Boom"}
    first = boss.post(url("act", "timed"), given, follow=True)
    assert first.redirect_chain[0][0].endswith("?tab=dead&error=Boom")
    assert "Replay: 1 replayed." in text(first)
    second = boss.post(url("act", "timed"), given, follow=True)
    assert "Replay: 1 already waiting." in text(second)
    assert depth(broker, "timed", "store") == 1


def test_several_are_asked_for_with_their_count(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", *members("x", 7))
    chosen = ids(read(boss, "change", "timed", tab="dead"))[:5]
    question = boss.post(url("act", "timed"), {"act": "replay", "state": "dead", "id": chosen})
    assert "Replay 5 messages of timed?" in text(question)
    assert depth(broker, "timed", "dead") == 7
    answer = confirm(boss, "timed", question, follow=True)
    assert "5 replayed" in text(answer)
    assert depth(broker, "timed", "dead") == 2
    assert "5 replayed" in LogEntry.objects.get().change_message


@pytest.mark.parametrize("act", ["delete", "bury", "cancel"])
def test_what_cannot_be_undone_is_always_asked_for(boss: Client, broker: Broker, act: str) -> None:
    put(broker, "timed", b'{"a":1}')
    (chosen,) = ids(read(boss, "change", "timed"))
    question = boss.post(url("act", "timed"), {"act": act, "state": "store", "id": chosen})
    assert question.status_code == 200
    assert depth(broker, "timed", "store") == 1
    answers = carried(question) | {"confirmed": "yes", "why": "a mistake"}
    assert boss.post(url("act", "timed"), answers).status_code == 302
    assert depth(broker, "timed", "store") == 0
    assert depth(broker, "timed", "dead") == (act == "bury")
    if act == "bury":
        assert "a mistake" in read(boss, "change", "timed", tab="dead")


def test_what_runs_is_cancelled_by_those_who_may_delete(
    boss: Client, staff: Callable[..., Client], broker: Broker
) -> None:
    put(broker, "timed", b'{"a":1}')
    topic = topic_of("timed")
    slot = slot_of(b'{"a":1}', topic.slots)
    taken = broker.prepare(topic, slot, "W", None, 1)
    (chosen,) = ids(read(boss, "change", "timed", tab="prepare"))
    given = {"act": "cancel", "state": "prepare", "id": chosen}
    assert staff("view_topic").post(url("act", "timed"), given | {"confirmed": "yes"}).status_code == 403
    assert broker.extend(topic, slot, taken.receipt, [b'{"a":1}']) == ["ok"]
    question = staff("view_topic", "delete_messages").post(url("act", "timed"), given)
    assert "Cancel 1 message of timed?" in text(question) and '{"a":1}' not in text(question)
    boss = staff("*")
    question = boss.post(url("act", "timed"), given)
    assert "Cancel 1 message of timed?" in text(question)
    assert '<dd>{"a":1}</dd>' in text(question)
    answer = confirm(boss, "timed", question, follow=True)
    assert "its listener is notified" in text(answer)
    assert [each.level_tag for each in answer.context["messages"]] == ["success"]
    assert broker.extend(topic, slot, taken.receipt, [b'{"a":1}']) == ["cancelled"]
    assert "notified" in LogEntry.objects.get().change_message


def test_waiting_messages_are_rescheduled(boss: Client, broker: Broker) -> None:
    put(broker, "timed", b'{"a":1}')
    put(broker, "ranked", b'{"a":1}')
    given = {"act": "reschedule", "state": "store", "confirmed": "yes"}
    (timed,), (ranked,) = (ids(read(boss, "change", name)) for name in ("timed", "ranked"))
    wrong = boss.post(url("act", "timed"), given | {"id": timed, "due": "nonsense"})
    assert "errorlist" in text(wrong)
    boss.post(url("act", "timed"), given | {"id": timed, "due": "2040-01-02T03:04:05"})
    boss.post(url("act", "ranked"), given | {"id": ranked, "priority": "12345"})
    assert "2040-01-02 03:04:05.000" in read(boss, "message", "timed", timed)
    assert "12,345" in read(boss, "change", "ranked")


def test_purge_wants_the_name_of_the_topic(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", *members("x", 12))
    question = boss.post(url("act", "timed"), {"act": "purge", "state": "dead"})
    assert "Purge 12 messages of timed? (Dead)" in text(question)
    wrong = confirm(boss, "timed", question, name="time")
    assert "errorlist" in text(wrong)
    assert depth(broker, "timed", "dead") == 12
    done = confirm(boss, "timed", question, follow=True, name="timed")
    assert "12 purged" in text(done)
    assert depth(broker, "timed", "dead") == 0


def test_purge_is_not_a_way_to_delete_what_a_filter_chose(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", *members("x", 3))
    given = {"act": "purge", "state": "dead", "error": "Boom", "confirmed": "yes", "name": "timed"}
    answer = boss.post(url("act", "timed"), given, follow=True)
    assert "This filter cannot be used for this action." in text(answer)
    delete = {"act": "delete_all", "state": "dead", "confirmed": "yes"}
    boss.post(url("act", "timed"), delete)
    assert depth(broker, "timed", "dead") == 3
    boss.post(url("act", "timed"), delete | {"error": "Boom"})
    assert depth(broker, "timed", "dead") == 0


def test_a_cause_without_a_class_is_deleted_without_other_messages(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", *members("x", 3), error="no 1 is left")
    kill(broker, "timed", *members("y", 4), error="shop.errors.Other: no")
    page = boss.get(url("topic_causes", "timed")).content.decode()
    (form,) = (each for each in page.split("<form")[1:] if 'name="error" value=""' in each)
    buttons = set(re.findall(r'name="act" value="(\w+)"', form))
    assert buttons == {"replay_all", "delete_all"}
    (cause,) = re.findall(r'name="cause" value="(\w+)"', form)
    chosen = {"state": "dead", "error": "", "cause": cause, "confirmed": "yes", "name": "timed"}
    refused = boss.post(url("act", "timed"), chosen | {"act": "purge"}, follow=True)
    assert "This filter cannot be used for this action." in text(refused)
    assert depth(broker, "timed", "dead") == 7
    boss.post(url("act", "timed"), chosen | {"act": "delete_all"})
    assert depth(broker, "timed", "dead") == 4


def up_to_112(*, messages: int | None = None, **_: Any) -> Limits:
    """Return limits by which a request takes 112 messages at most."""
    most = min(messages or 112, 112)
    return Limits(messages=most, is_counted=most == messages)


@pytest.mark.parametrize(
    ("act", "state"),
    [("replay_all", "dead"), ("delete_all", "dead"), ("delete_all", "store"), ("bury_all", "store")],
)
def test_work_on_what_matches_counts_to_the_number_of_the_question(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch, act: str, state: str
) -> None:
    if state == "dead":
        kill(broker, "ranked", *members("y", 378), error="shop.errors.Other: no")
        kill(broker, "ranked", *members("x", 755))
    else:
        put(broker, "ranked", *members("y", 378), *members("x", 755))
    monkeypatch.setattr(pages, "Limits", up_to_112)
    chosen = {"act": act, "state": state} | ({"error": "Other"} if state == "dead" else {"text": ':"y'})
    with monkeypatch.context() as counting:
        counting.setattr(pages, "Limits", Limits)
        question = boss.post(url("act", "ranked"), chosen)
    assert " 378 " in text(question)
    shown = []
    answer = confirm(boss, "ranked", question)
    while answer.status_code == 200:
        assert "data-rmq-go-on" in text(answer)
        shown.append(re.search(r"([\d,]+) of ([\d,]+):", text(answer)))
        answer = confirm(boss, "ranked", answer)
    assert [found and found.groups() for found in shown] == [("112", "378"), ("224", "378"), ("336", "378")]
    assert ": 378 " in text(boss.get(answer["Location"]))
    assert depth(broker, "ranked", state) == 755
    # One action, one row, however many requests it took; and nothing of it is left in the session.
    (entry,) = LogEntry.objects.all()
    assert ": 378 " in entry.change_message and boss.session["rmq_traces"] == {}


@pytest.mark.parametrize(
    ("name", "answer", "use_tz"),
    [
        ("ranked", {"priority": "20000"}, True),
        ("timed", {"due": "2098-01-02T03:04:05"}, True),
        ("timed", {"due": "2098-01-02T03:04:05"}, False),
    ],
)
def test_all_that_matches_is_rescheduled_in_slices(
    boss: Client,
    broker: Broker,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    name: str,
    answer: dict[str, str],
    *,
    use_tz: bool,
) -> None:
    settings.USE_TZ = use_tz
    put(broker, name, *members("y", 250), *members("x", 100))
    page = boss.get(url("change", name), {"state": "store", "text": ':"y'})
    assert "Reschedule all" in text(page)
    chosen = {"act": "reschedule_all", "state": "store", "text": ':"y'}
    question = boss.post(url("act", name), chosen)
    assert "Reschedule 250 messages" in text(question)
    monkeypatch.setattr(pages, "Limits", up_to_112)
    refused = confirm(boss, name, question)
    assert "This field is required" in text(refused)
    progress = confirm(boss, name, question, follow=False, **answer)
    shown = []
    while progress.status_code == 200:
        found = re.search(r"([\d,]+) of ([\d,]+):", text(progress))
        shown.append(found and found[1])
        progress = confirm(boss, name, progress)
    assert shown == ["112", "224"]
    assert "250 rescheduled" in text(boss.get(progress["Location"]))
    copies = Operations(Actor("a", "b")).listing(name, "store", limit=500).copies
    moved = Counter(copy.priority or copy.at_ms for copy in copies)
    assert max(moved.values()) == 250
    (entry,) = LogEntry.objects.all()
    assert "250 rescheduled" in entry.change_message and "incomplete" not in entry.change_message


def test_work_on_what_could_not_be_counted_names_no_total(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(broker, "ranked", *members("y", 300), error="shop.errors.Other: no")
    kill(broker, "ranked", *members("x", 700))
    monkeypatch.setattr(pages, "Limits", lambda **_: Limits(messages=100))
    question = boss.post(url("act", "ranked"), {"act": "replay_all", "state": "dead", "error": "Other"})
    assert "at least 100" in text(question)
    answer = confirm(boss, "ranked", question)
    assert re.search(r"role=\"status\">100 replayed<", text(answer))
    assert "<progress aria" in text(answer)


def test_the_row_of_an_action_counts_what_its_requests_have_done_so_far(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(broker, "ranked", *members("x", 3_000))
    monkeypatch.setattr(pages, "SLICE_SECONDS", 0.1)
    given = {"act": "replay_all", "state": "dead", "rate": "400", "confirmed": "yes"}
    first = boss.post(url("act", "ranked"), given)
    done_first = depth(broker, "ranked", "store")
    confirm(boss, "ranked", first)
    done = depth(broker, "ranked", "store")
    assert 0 < done_first < done < 3_000
    (entry,) = LogEntry.objects.all()
    assert entry.change_message == f"Replay all (dead, incomplete): {done} replayed (admin)"
    # A name that the session does not know, or another person's row, is not written to.
    boss.post(url("act", "ranked"), {**carried(first), "confirmed": "yes", "run": "x" * 32})
    entry.refresh_from_db()
    assert entry.change_message.endswith(f": {done} replayed (admin)")
    assert LogEntry.objects.count() == 2


def test_breadcrumbs_have_the_markup_of_this_version_of_django(boss: Client) -> None:
    """So that themes style them as those of their own pages."""
    ours, of_django = (
        re.search(r'<(\w+) class="breadcrumbs">', text(boss.get(page)))
        for page in (url("change", "timed"), reverse("admin:auth_group_changelist"))
    )
    assert ours is not None and of_django is not None
    assert ours[1] == of_django[1]
    here = text(boss.get(f"{url('change', 'timed')}?tab=dead"))
    assert f'<a href="{url("changelist")}">Topics</a>' in here
    assert f'<a href="{url("change", "timed")}">timed</a>' in read(boss, "send", "timed")


def test_the_history_shows_the_newest_action_first(boss: Client) -> None:
    for act in ("pause", "resume"):
        boss.post(url("act", "timed"), {"act": act})
    shown = read(boss, "history", "timed")
    assert 0 < shown.index("Resume (slots)") < shown.index("Pause (slots)")
    assert "Actions of commands are only in the log" in shown
    chinese = text(boss.get(url("history", "timed"), headers={"accept-language": "zh-hans"}))
    assert 0 < chinese.index("恢复 (slots)") < chinese.index("暂停 (slots)")


def test_what_dies_again_meanwhile_is_not_replayed_for_ever(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(broker, "ranked", *members("x", 3_000))
    time.sleep(0.01)
    monkeypatch.setattr(pages, "Limits", lambda **_: Limits(messages=1_000))
    answers: dict[str, Any] = {"act": "replay_all", "state": "dead", "confirmed": "yes"}
    for _ in range(10):
        answer = boss.post(url("act", "ranked"), answers)
        if answer.status_code == 302:
            break
        answers = carried(answer) | {"confirmed": "yes"}
        kill(broker, "ranked")
    assert answer.status_code == 302
    assert "Replay all: 3,000 replayed." in text(boss.get(answer["Location"]))
    replayed = sum(broker.audit_ledger(topic_of("ranked"), slot)["revived"] for slot in range(4))
    assert replayed == 3_000


def test_the_question_repeats_the_filter(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", *members("x", 8))
    given = {"act": "replay_all", "state": "dead", "error": "Boom", "age": "newer:3600", "slot": "0"}
    question = text(boss.post(url("act", "timed"), given))
    conditions = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", question)
    assert conditions == [("Error class", "Boom"), ("Age", "Younger than 1 hour"), ("Slot", "0")]
    assert "can be brought back" not in question
    everything = text(boss.post(url("act", "timed"), {"act": "purge", "state": "dead"}))
    assert "<dt>" not in everything
    assert "Deleted messages can be brought back for one hour: the first 100,000 of an action" in everything


def test_buttons_that_destroy_are_red_in_lists_and_on_the_page_of_a_message(
    boss: Client, broker: Broker
) -> None:
    kill(broker, "timed", *members("x", 3))
    listed = read(boss, "change", "timed", tab="dead")
    one = read(boss, "message", "timed", ids(listed)[0])
    for page, red in ((listed, {"delete", "purge"}), (one, {"delete"})):
        buttons = re.findall(r'<button class="([^"]*)" name="act" value="(\w+)"', page)
        acts = {name for _, name in buttons} - {"pause", "resume"}
        assert acts > red
        assert {name for classes, name in buttons if "rmq-is-danger" in classes} == red


def test_an_edited_body_is_replayed(boss: Client, broker: Broker) -> None:
    kill(broker, "timed", b'{"a":1.50}', error="shop.Boom: a is 1\nTraceback")
    message_id = ids_of_dead(broker)
    page = read(boss, "edit", "timed", message_id)
    assert '{\n  "a": 1.50\n}' in page and ">shop.Boom: a is 1</p>" in page
    wrong = boss.post(url("edit", "timed", message_id), {"body": '{"a":'})
    assert "This is not JSON" in text(wrong) and ">shop.Boom: a is 1</p>" in text(wrong)
    done = boss.post(
        url("edit", "timed", message_id), {"body": '{"a":\r\n 12345678901234567.89}'}, follow=True
    )
    assert "1 replayed" in text(done)
    assert waiting("timed") == [b'{"a":12345678901234567.89}']
    assert depth(broker, "timed", "dead") == 0
    again = boss.post(url("edit", "timed", message_id), {"body": '{"a":3}'}, follow=True)
    assert "no longer there" in text(again)


def test_a_body_that_no_field_can_hold_is_not_edited(boss: Client, broker: Broker) -> None:
    name, shown = "under_scored.topic", "under_5Fscored.topic"
    kill(broker, name, b"\x89PNG", b"line\r\nline", b"line")
    addresses = {}
    for copy in Operations(Actor("shell", "test")).listing(name, "dead").copies:
        page = read(boss, "message", shown, copy.id)
        addresses[copy.raw] = (url("edit", shown, copy.id), "Edit and replay" in page)
    assert {raw: has_link for raw, (_, has_link) in addresses.items()} == {
        b"\x89PNG": False,
        b"line\r\nline": True,
        b"line": True,
    }
    answer = boss.get(addresses[b"\x89PNG"][0], follow=True)
    assert answer.redirect_chain and "is not UTF-8 text" in text(answer)
    assert "line ends with CR" in text(boss.get(addresses[b"line\r\nline"][0]))
    assert "line ends with CR" not in text(boss.get(addresses[b"line"][0]))
    assert depth(broker, name, "dead") == 3


def test_retries_left_are_those_of_the_message(boss: Client, broker: Broker) -> None:
    for key, own, left in (("few", 2, 2), ("none", 0, 0), ("all", None, 16)):
        due = datetime.now(UTC) + timedelta(hours=1)
        sent = send_message("keyed", 1, key=key, fixed_time=due, max_retries=own, on_commit=False)
        assert f"<dt>Retries left</dt><dd>{left}</dd>" in read(boss, "message", "keyed", sent.id)


def test_a_priority_is_needed_if_the_topic_has_none(redis_url: str, broker: Broker, boss: Client) -> None:
    topics = {"ranked": {"TYPE": "priority", "SLOTS": 1, "DEFAULT_PRIORITY": 60}}
    assert "errorlist" in text(boss.post(url("send", "ranked"), {"body": "1"}))
    with project_on(broker, REDIS=redis_url, TOPICS=topics, ADMIN={}):
        assert "Send: 1 stored." in text(boss.post(url("send", "ranked"), {"body": "1"}, follow=True))
        assert broker.list_messages(topic_of("ranked"), 0, "store").entries[0].score == 60


def test_a_kept_message_is_named_in_words(redis_url: str, broker: Broker, boss: Client) -> None:
    topics = {"line": {"TYPE": "fifo", "SLOTS": 1, "IDENTITY": "key", "ON_DUPLICATE": "keep"}}
    with project_on(broker, REDIS=redis_url, TOPICS=topics, ADMIN={}):
        for told in ("1 stored", "1 already there, and kept"):
            answer = boss.post(url("send", "line"), {"body": "1", "key": "k"}, follow=True)
            assert f"Send: {told}." in text(answer)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("timed", {"body": '{"a":1}', "fixed_time": "2040-01-02T03:04"}),
        ("ranked", {"body": '{"a":1}', "priority": "77"}),
        ("under_5Fscored.topic", {"body": "line\r\nline"}),
        ("keyed", {"body": "1", "key": "k", "fixed_time": "2040-01-02T03:04:05"}),
    ],
)
def test_a_message_is_sent(boss: Client, broker: Broker, name: str, given: dict[str, str]) -> None:
    assert boss.get(url("send", name)).status_code == 200
    assert boss.post(url("send", name), {"body": ""}).status_code == 200
    done = boss.post(url("send", name), given, follow=True)
    assert "Send: 1 stored." in text(done)
    assert depth(broker, name.replace("_5F", "_"), "store") == 1


def test_a_form_that_is_sent_twice_is_one_message(boss: Client, broker: Broker) -> None:
    (fresh,) = re.findall(r'name="fresh_key" value="([^"]+)"', read(boss, "send", "keyed"))
    given = {"body": "1", "fixed_time": "2040-01-02T03:04", "fresh_key": fresh}
    for _ in range(2):
        boss.post(url("send", "keyed"), given)
    assert depth(broker, "keyed", "store") == 1


def test_a_message_that_cannot_be_sent_is_an_error_of_the_form(boss: Client) -> None:
    past = boss.post(url("send", "timed"), {"body": "1", "fixed_time": "2001-01-01T00:00"})
    assert past.status_code == 200
    assert "errorlist" in text(past)
    low = boss.post(url("send", "ranked"), {"body": "1", "priority": "3"})
    assert "errorlist" in text(low)


def test_a_time_out_is_a_duration_like_those_of_python(boss: Client, broker: Broker) -> None:
    given = {"body": "1", "key": "k", "fixed_time": "2040-01-02T03:04"}
    for wrong in ("1500ms", "0", "soon"):
        assert "errorlist" in text(boss.post(url("send", "keyed"), {**given, "timeout": wrong}))
    assert depth(broker, "keyed", "store") == 0
    for right, seconds in {"12s": 12, "7": 7}.items():
        boss.post(url("send", "keyed"), {**given, "timeout": right}, follow=True)
        (copy,) = Operations(Actor("shell", "test")).listing("keyed", "waiting").copies
        assert copy.timeout == seconds


def test_a_topic_is_paused_and_resumed(boss: Client, broker: Broker) -> None:
    put(broker, "timed", b'{"a":1}')
    assert "4 paused (4 slots)" in text(boss.post(url("act", "timed"), {"act": "pause"}, follow=True))
    assert "paused</span>" in read(boss, "changelist")
    assert broker.prepare(topic_of("timed"), slot_of(b'{"a":1}', 4), "W", None, 10).status == "paused"
    boss.post(url("act", "timed"), {"act": "resume"})
    assert "paused</span>" not in read(boss, "changelist")


def test_a_topic_of_many_slots_shows_a_dated_sample(boss: Client, broker: Broker) -> None:
    topic = topic_of("wide")
    page = read(boss, "change", "wide")
    assert "slots were read" in page
    now = broker.now_ms()
    numbers = (now - 1000, 8192, 8192, 777, 5, 0, 0, 0, 3, 0, *[0] * 15)
    assert broker.store_minute(topic, now // 60_000, " ".join(map(str, numbers)), 60) == "kept"
    page = read(boss, "change", "wide")
    assert "slots were read" not in page
    assert "data from" in page
    assert "772 later" in page
    assert "as of" in read(boss, "changelist")


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("change", "timed"),
        ("send", "timed | Send a message"),
        ("limits", "timed | Limits"),
        ("topic_causes", "timed | Dead by cause"),
        ("claims", "timed | Claims"),
    ],
)
def test_the_title_of_a_page_names_its_topic_and_then_the_page(boss: Client, page: str, title: str) -> None:
    (shown,) = re.findall("<title>(.*)</title>", read(boss, page, "timed"))
    assert shown.removeprefix("(1) ") == f"{title} | Django site admin"


@override_settings(USE_THOUSAND_SEPARATOR=True)
def test_numbers_in_attributes_and_addresses_have_no_separators(
    boss: Client, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(broker, "ranked", *members("x", 1200))
    join(broker, "worker", "wide", pid=1_234_567)
    question = boss.post(url("act", "ranked"), {"act": "replay_all", "state": "dead"})
    monkeypatch.setattr(pages, "Limits", up_to_112)
    progress = confirm(boss, "ranked", question)
    Operations(Actor("a", "b")).start_action("ranked", "replay")
    slots = f"?tab=slots&first={topic_of('wide').slots - 256}"
    for page in (
        progress,
        boss.get(url("background")),
        boss.get(url("background_live")),
        boss.get(url("change", "wide") + slots),
        boss.get(url("live", "wide") + slots),
    ):
        assert re.search(r'(max|first)=["\d]\d{3}', text(page))
        assert not re.search(r'(max|value|first)="?\d+,', text(page))
    assert "1234567" in read(boss, "workers")


def test_priorities_show_no_age(boss: Client, broker: Broker) -> None:
    put(broker, "ranked", b'{"a":1}')
    page = read(boss, "change", "ranked")
    assert "priority topics have no due time" in page
    assert 'name="age"' not in page
    given = {"act": "purge", "state": "store", "age": "older:60", "confirmed": "yes", "name": "ranked"}
    assert boss.post(url("act", "ranked"), given).status_code == 302
    assert depth(broker, "ranked", "store") == 1


def test_the_fragment_has_the_parts_of_the_page(boss: Client) -> None:
    for page, fragment in (
        (url("changelist"), url("dashboard_live")),
        (f"{url('change', 'timed')}?tab=slots", f"{url('live', 'timed')}?tab=slots"),
    ):
        answer = boss.get(fragment)
        assert answer["X-RMQ-Fragment"] == "1"
        parts = re.findall(r'data-rmq-part="(\w+)"', text(answer))
        assert parts
        assert parts == re.findall(r'data-rmq-part="(\w+)"', text(boss.get(page)))


CELL = r'<td class="rmq-cell"[^>]*>([^<]*)</td>'


def test_columns_of_the_settings_show_parts_of_bodies_in_lists_and_files(
    boss: Client, broker: Broker, staff: Callable[..., Client]
) -> None:
    paths = ["customer.city", "lines.0.sku", "card"]
    given = {"FORMATTER": {"secret": f"{__name__}.redact"}, "COLUMNS": {"timed": paths, "secret": paths}}
    long = "L" * 50
    filled = f'{{"customer":{{"city":"{long}"}},"lines":[],"card":"=1+1"}}'.encode()
    put(broker, "timed", b'{"customer":{"city":"<Oslo>"},"lines":[{"sku":17}]}', filled)
    put(broker, "timed", b"not json", b'["customer"]')
    put(broker, "secret", b'{"card":"4111111111111234","customer":{"city":"Oslo"}}')
    with override_settings(RMQ={**settings.RMQ, "ADMIN": given}):
        page = boss.get(url("change", "timed")).content.decode()
        for path in paths:
            assert f'<th scope="col">{path}</th>' in page
        cells = re.findall(CELL, page)
        assert sorted(cells) == sorted(["&lt;Oslo&gt;", "17", "L" * 39 + "…", "=1+1", *["–"] * 8])
        hidden = read(boss, "change", "secret")
        assert re.findall(CELL, hidden) == ["–", "–", "**** 1234"]
        assert "Oslo" not in hidden and "4111" not in hidden
        assert '<th scope="col">card</th>' not in read(boss, "change", "ranked")
        rows = exported_rows(boss, "timed", tab="store")
        cells = [("", "", ""), ("", "", ""), ("<Oslo>", "17", ""), (long, "", "'=1+1")]
        assert sorted(tuple(row[f"body.{path}"] for path in paths) for row in rows) == cells
        (line,) = exported_lines(boss, "secret", tab="store")
        assert line["columns"] == {"customer.city": None, "lines.0.sku": None, "card": "**** 1234"}
        client = staff("view_topic")
        blind = read(client, "change", "timed")
        assert "Oslo" not in blind and set(re.findall(CELL, blind)) == {"–"}
        assert "Oslo" not in exported(client, "timed", "csv", tab="store")
    assert '<th scope="col">card</th>' not in read(boss, "change", "timed")


def test_without_redis_there_is_a_banner_within_three_seconds(staff: Callable[..., Client]) -> None:
    with RedisServer() as server:
        address = server.url
    client = staff("*")
    message_id = "0.eyJhIjoxfQ"
    with override_settings(RMQ={"REDIS": address, "TOPICS": TOPICS}):
        for name, page in addresses(message_id).items():
            if name in ("history", "send", "act", "outbox", "pin", "undo"):
                continue  # they ask a database, or nobody
            began = time.monotonic()
            answer = client.get(page)
            assert time.monotonic() - began < 5 * 3, name
            assert answer.status_code == 503, name
            assert "Redis is unavailable." in text(answer)
            assert f"(server: {get_config().redis})" in text(answer)
            assert answer["Retry-After"]
        given: list[tuple[str, dict[str, str]]] = [
            ("act", {"act": "pause"}),
            ("act", {"act": "purge", "state": "dead"}),
            ("send", {"body": "1", "fixed_time": "2040-01-01T00:00"}),
        ]
        for name, data in given:
            answer = client.post(url(name, "timed"), data)
            assert answer.status_code == 503
        assert '"2040-01-01T00:00"' in text(answer), "the form of the message has lost what was typed"


@pytest.mark.parametrize(
    "redis",
    ["redis://h/1?password=S3CRET&max_connections=abc", "redis://u:S3CRET/x@h/1", "redis://h/1?x=S3CRET"],
)
def test_settings_that_are_wrong_are_told_to_the_log_and_to_no_reader(
    staff: Callable[..., Client], redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = staff("view_topic")
    with override_settings(RMQ={"REDIS": redis, "TOPICS": TOPICS}):
        answer = client.get(url("changelist"))
    page = text(answer)
    assert answer.status_code == 503
    assert "The setting RMQ is not valid." in page
    assert "See the log of the server." in page
    assert "redis://" not in page
    assert "redis://" in caplog.text
    assert "S3CRET" not in page + caplog.text


def test_a_slot_that_cannot_be_read_does_not_hide_the_others(
    boss: Client, broker: Broker, prefix: str
) -> None:
    kill(broker, "timed", *members("x", 8))
    broker.client.set(f"{prefix}timed_0", "a foreign text")
    for page in (url("changelist"), url("change", "timed"), f"{url('change', 'timed')}?tab=slots"):
        answer = boss.get(page)
        assert answer.status_code == 200
        assert "slot 0" in text(answer) or "WRONGTYPE" in text(answer)


def test_nothing_is_marked_safe_and_nothing_is_inline() -> None:
    package = Path(pages.__file__).parents[1]
    sources = [*package.glob("admin/*.py"), *package.glob("templatetags/*.py")]
    assert len(sources) > 10
    for source in sources:
        assert "mark_safe" not in source.read_text(), source
    for template in package.glob("templates/**/*.html"):
        found = template.read_text()
        assert not re.search(r"\|\s*safe|autoescape|\sstyle=|<style|<script(?! src)|\son\w+=", found), (
            template
        )


def test_what_is_carried_is_read_with_care() -> None:
    assert so_far('{"replayed": 3, "evil": 4, "gone": -1}') == {"replayed": 3}
    strange = (None, "", "nonsense", "[]", '{"replayed": "x"}', "[" * 100_000, '{"replayed": Infinity}')
    assert [so_far(each) for each in strange] == [{}] * len(strange)
