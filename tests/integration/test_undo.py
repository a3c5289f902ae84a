"""What people delete can be brought back for an hour: one message, a selection, a cause, a purge, and in the background."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client, override_settings
from django.urls import reverse

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.commands import operate, stored_actions
from django_rmq.core.model.stored_actions import UNDO_MS, Deletion, decode_deletions
from django_rmq.exceptions import NotPermitted, OperationRefused
from django_rmq.operations import Actor, Filter, Limits, Operations, Trace, bulk, bulk_actions, undo
from django_rmq.operations.authorization import Permission, TopicRule
from tests.support.brokers import Broker, project_on
from tests.support.reports import printed
from tests.support.servers import RedisServer
from tests.support.workers import live, send

TOPICS = {
    "letters": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"},
    "other": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms"},
}


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    with project_on(broker, TOPICS=TOPICS):
        yield broker


def operations(*permissions: Permission, **options: Any) -> Operations:
    permits = (lambda one: one in permissions) if permissions else None
    return Operations(Actor("ada", "test", permits=permits), **options)


def put(shop: Any, count: int, name: str = "letters") -> None:
    send(shop, get_config().topic(name), [f"m{number}" for number in range(count)])


def make_dead(shop: Any, count: int, name: str = "letters") -> None:
    put(shop, count, name)
    assert operations().bury_all(name, "waiting").result().outcomes == {"buried": count}


def waiting() -> int:
    return operations().topic("letters").store


def dead() -> int:
    return operations().topic("letters").dead


def run_all_parts(action: str) -> None:
    context = operations()
    while bulk_actions.run_part(context, action, "w", lambda: False):
        if not [one for one in operations().background_actions() if one.ended_ms is None]:
            break


def test_named_messages_come_back(shop: Any) -> None:
    put(shop, 3)
    ids = [copy.id for copy in operations().listing("letters", "waiting").copies]
    done = operations().delete("letters", ids[:2], "live")
    assert (done.outcomes, done.kept, waiting()) == ({"deleted": 2}, 2, 1)
    (one,) = operations().undoable()
    assert (one.id, one.kind, one.by, one.topic, one.kept) == (done.undo, "delete", "ada", "letters", 2)
    assert one.described.startswith("2 chosen: ") and one.until_ms == one.began_ms + UNDO_MS
    progress = operations().undo(done.undo).result()
    assert (progress.outcomes, progress.done, progress.total) == ({"restored": 2}, 2, 2)
    assert progress.is_complete and waiting() == 3
    assert operations().undoable() == []
    with pytest.raises(OperationRefused, match="nothing to undo"):
        operations().undo(done.undo)


def test_a_cause_and_a_purge_come_back(shop: Any) -> None:
    make_dead(shop, 5)
    (group,) = operations().groups("letters", "dead", "error").rows
    deleted = operations().delete_all("letters", "dead", Filter(cause=group.cause)).result()
    assert (deleted.outcomes, deleted.kept, dead()) == ({"deleted": 5}, 5, 0)
    put(shop, 4, "letters")
    purged = operations().purge("letters", "waiting").result()
    assert (purged.outcomes, purged.kept, waiting()) == ({"purged": 4}, 4, 0)
    assert [one.id for one in operations().undoable()] == [purged.undo, deleted.undo]
    assert operations().undo(deleted.undo).result().outcomes["restored"] == 5
    assert (dead(), waiting()) == (5, 0)
    operations().undo(purged.undo).result()
    assert (dead(), waiting()) == (5, 4)


def test_what_is_deleted_for_good_is_not_listed(shop: Any) -> None:
    make_dead(shop, 2)
    put(shop, 2)
    assert operations().purge("letters", "dead", keep=False).result().undo == ""
    (first, second) = operations().listing("letters", "waiting").copies
    assert operations().delete("letters", [first.id], "live", keep=False).undo == ""
    assert operations().delete_only("letters", second.id, keep=False).undo == ""
    assert operations().delete_all("letters", "waiting", keep=False).result().undo == ""
    assert operations().undoable() == [] and shop.run(stored_actions.read_deletions()) == []


def test_an_action_that_deletes_nothing_leaves_no_trace(shop: Any) -> None:
    put(shop, 1)
    (one,) = operations().listing("letters", "waiting").copies
    operations().delete("letters", [one.id], "live", keep=False)
    assert operations().delete("letters", [one.id], "live").undo == ""
    assert operations().purge("letters", "dead").result().undo == ""
    assert operations().purge("letters", "dead", dry_run=True).result().undo == ""
    assert shop.run(stored_actions.read_deletions()) == []


def test_an_action_of_several_requests_is_undone_as_one(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(shop, 6)
    monkeypatch.setattr(bulk, "STEP", 4)
    trace = Trace()
    first = operations(trace=trace).purge("letters", "waiting", limits=Limits(messages=3)).result()
    second = operations(trace=trace).purge("letters", "waiting").result()
    assert first.undo == second.undo == trace.undo and (first.kept, second.kept) == (3, 6)
    assert operations().undo(first.undo).result().outcomes["restored"] == 6


def test_an_action_in_the_background_is_undone_when_it_has_ended(shop: Any) -> None:
    make_dead(shop, 6)
    started = operations().start_action("letters", "purge").action
    assert operations().undoable() == []
    run_all_parts(started.id)
    (one,) = operations().undoable()
    assert (one.id, one.kept, one.by, dead()) == (started.id, 6, "ada", 0)
    operations().undo(started.id).result()
    assert dead() == 6
    for_good = operations().start_action("letters", "delete", keep=False).action
    run_all_parts(for_good.id)
    assert (dead(), operations().undoable()) == (0, [])


def test_an_action_that_goes_on_is_not_undone(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dead(shop, 12)
    monkeypatch.setattr(bulk, "STEP", 4)
    started = operations().start_action("letters", "purge").action
    context = operations()
    looks = iter([False, False, True])
    assert bulk_actions.run_part(context, started.id, "w", lambda: next(looks, True))
    with pytest.raises(OperationRefused, match="stop it first"):
        operations().undo(started.id)
    operations().stop_action(started.id)
    deleted = 12 - dead()
    assert operations().undo(started.id).result().outcomes["restored"] == deleted > 0
    assert dead() == 12


def test_the_bounds_of_what_is_kept(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "MOST_MESSAGES", 4)
    put(shop, 10)
    purged = operations().purge("letters", "waiting").result()
    assert purged.done == 10 and 1 <= purged.kept <= 4
    monkeypatch.setattr(undo, "MOST_MESSAGES", 100)
    monkeypatch.setattr(undo, "ALL_BYTES", 1)
    put(shop, 3)
    assert operations().purge("letters", "waiting").result().undo == ""
    monkeypatch.undo()
    monkeypatch.setattr(undo, "MOST_DELETIONS", 1)
    put(shop, 3)
    assert operations().purge("letters", "waiting").result().undo == ""


def test_a_full_server_lets_people_delete() -> None:
    with RedisServer() as server:
        rmq = {"REDIS": server.url, "TOPICS": TOPICS}
        client = redis.Redis.from_url(server.url)
        broker = Broker(client, "")
        with override_settings(RMQ=rmq), connections.replaced_broker(broker):
            make_dead(broker, 6)
            put(broker, 4)
            ids = [copy.id for copy in operations().listing("letters", "waiting").copies]
            client.config_set("maxmemory", "1")
            done = operations().delete("letters", ids, "live")
            assert (done.outcomes, done.undo) == ({"deleted": 4}, "")
            purged = operations().purge("letters", "dead").result()
            assert (purged.outcomes, purged.undo, purged.kept) == ({"purged": 6}, "", 0)
            assert operations().undoable() == []
        client.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Broker]]:
    """A server that is full when a count is written, so many times; then it has memory again."""
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:

        def fill(name: str, times: int) -> Broker:
            count, sizes = getattr(stored_actions, name), chain(repeat("1", times), repeat("0"))

            def count_when_full(*arguments: Any) -> Any:
                client.config_set("maxmemory", next(sizes))
                return count(*arguments)

            monkeypatch.setattr(stored_actions, name, count_when_full)
            return broker

        broker = Broker(client, "")
        rmq = {"REDIS": server.url, "TOPICS": TOPICS}
        with override_settings(RMQ=rmq), connections.replaced_broker(broker):
            yield fill


@pytest.mark.parametrize("step", [4, 1_000])
def test_what_a_full_server_refused_to_count_as_kept_can_be_undone(
    small: Callable[[str, int], Broker], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    # Each count writes two fields: the messages and their bytes.
    put(small("count_deletion", 2), 12)
    monkeypatch.setattr(bulk, "STEP", step)
    assert operations().purge("letters", "waiting").result().outcomes == {"purged": 12}
    (one,) = operations().undoable()
    assert one.kept > 0 and one.kept_bytes > 0
    assert operations().undo(one.id).result().outcomes["restored"] == one.kept == waiting()


def test_named_messages_whose_count_a_full_server_refused_can_be_undone(
    small: Callable[[str, int], Broker],
) -> None:
    put(small("count_deletion", 2), 12)
    ids = [copy.id for copy in operations().listing("letters", "waiting").copies]
    done = operations().delete("letters", ids, "live")
    (one,) = operations().undoable()
    assert (done.outcomes, done.undo, done.kept) == ({"deleted": 12}, one.id, one.kept)
    assert operations().undo(one.id).result().outcomes["restored"] == one.kept == waiting()


@pytest.mark.parametrize("name", ["count_action", "count_deletion"])
@pytest.mark.parametrize("step", [4, 1_000])
def test_what_a_full_server_refused_to_count_in_the_background_is_counted_later(
    small: Callable[[str, int], Broker], monkeypatch: pytest.MonkeyPatch, step: int, name: str
) -> None:
    make_dead(small(name, 2 if name == "count_deletion" else 1), 12)
    monkeypatch.setattr(bulk, "STEP", step)
    run_all_parts(operations().start_action("letters", "purge").action.id)
    (action,), (one,) = operations().background_actions(), operations().undoable()
    assert (action.is_complete, action.outcomes, dead()) == (True, {"purged": 12}, 0)
    assert operations().undo(one.id).result().outcomes["restored"] == one.kept == dead()


def test_after_an_hour_there_is_nothing_to_undo(shop: Any) -> None:
    put(shop, 1)
    old = Deletion("old", "purge", "letters", 4, "waiting", "ada", "test", shop.now_ms() - UNDO_MS)
    shop.run(stored_actions.write_deletion("old", "", old.encode()))
    shop.run(stored_actions.count_deletion("old", "kept", 1))
    assert operations().undoable() == []
    with pytest.raises(OperationRefused):
        operations().undo("old")
    operations().purge("letters", "waiting").result()
    assert [one.id for one in shop.run(stored_actions.read_deletions())] != ["old"]
    assert len(shop.run(stored_actions.read_deletions())) == 1


@pytest.mark.parametrize("age_ms", [UNDO_MS, 0], ids=["after its hour", "after its undo"])
def test_an_action_keeps_nothing_that_nobody_could_bring_back(shop: Any, age_ms: int) -> None:
    began_ms = shop.now_ms() - age_ms
    action = Deletion("long", "purge", "letters", 4, "waiting", "ada", "test", began_ms)
    shop.run(stored_actions.write_deletion("long", "", action.encode()))
    if not age_ms:
        shop.run(stored_actions.write_deletion("long", "undone", "ada"))
    put(shop, 6)
    trash = undo.Trash.opened(shop, action)
    calls = [operate.purge(get_config().topic("letters"), slot, "store") for slot in range(4)]
    assert sum(trash.run(shop, calls)) == 6
    assert (trash.kept, trash.undo, waiting()) == (0, "", 0)


def test_a_topic_with_another_slot_count_is_not_undone(shop: Any) -> None:
    record = Deletion("resized", "purge", "letters", 8, "waiting", "ada", "test", shop.now_ms())
    shop.run(stored_actions.write_deletion("resized", "", record.encode()))
    shop.run(stored_actions.count_deletion("resized", "kept", 1))
    with pytest.raises(OperationRefused, match="another slot count"):
        operations().undo("resized")


def test_an_undo_needs_the_permission_of_the_deletion_and_knows_of_the_topic(shop: Any) -> None:
    make_dead(shop, 2)
    purged = operations().purge("letters", "dead").result().undo
    with pytest.raises(NotPermitted, match="purge_topic"):
        operations(Permission.VIEW, Permission.DELETE).undo(purged)
    assert len(operations(Permission.VIEW).undoable()) == 1
    hidden = TopicRule(lambda topic, permission: topic.name != "letters")
    stranger = Operations(Actor("eve", "test", rule=hidden))
    assert stranger.undoable() == []
    with pytest.raises(OperationRefused, match="nothing to undo"):
        stranger.undo(purged)
    with pytest.raises(OperationRefused, match="nothing to undo"):
        operations().undo(purged, ["other"])
    assert dead() == 0


@pytest.mark.django_db
def test_an_undo_is_in_the_audit_trail(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    make_dead(shop, 2)
    ada = Operations(Actor.of_user(User.objects.create_superuser("ada"), "admin"))
    purged = ada.purge("letters", "dead").result().undo
    with caplog.at_level("INFO", "django_rmq.audit"):
        ada.undo(purged).result()
    assert "undo purge (dead): 2 restored by ada (admin) on topic letters" in caplog.text
    assert LogEntry.objects.order_by("-pk")[0].change_message == "Undo purge (dead): 2 restored (admin)"


def test_what_others_wrote_into_the_list_is_left_out() -> None:
    good = Deletion("a", "purge", "t", 1, "d", "b", "v", 1)
    fields = [
        (b"a:", good.encode().encode()),
        (b"a:kept", b"2"),
        (b"b:", b"{}"),
        (b"c:kept", b"1"),
        (b"d:", good.encode().encode()),
        (b"e:", b"\xff"),
        (b"f:", b"[" * 10_000),
    ]
    (found,) = decode_deletions(fields)
    assert (found.id, found.kept) == ("a", 2)
    assert decode_deletions([(b"a:", good.encode().encode()), (b"a:kept", b"x")]) == []


def test_the_command_says_how_to_undo_and_undoes(shop: Any) -> None:
    make_dead(shop, 3)
    line = printed("rmqpurge", "letters", "--state", "dead", "--no-input").splitlines()[-1]
    assert line.startswith("To bring 3 back: manage.py rmqpurge letters --undo ")
    assert "3 restored" in printed("rmqpurge", "letters", "--undo", line.split()[-1]) and dead() == 3
    told = printed("rmqpurge", "letters", "--state", "dead", "--no-input", "--for-good", "--json")
    assert "undo" not in json.loads(told) and operations().undoable() == []
    with pytest.raises(CommandError, match="--state"):
        call_command("rmqpurge", "letters")


@pytest.mark.django_db
def test_the_api_names_the_undo_lists_it_and_undoes(shop: Any, staff: Any) -> None:
    make_dead(shop, 2)
    put(shop, 1)
    client: Client = staff("view_topic", "view_bodies", "delete_messages", "purge_topic")
    base = "/api/rmq/v1/"
    (copy,) = operations().listing("letters", "waiting").copies
    first = client.delete(f"{base}topics/letters/messages/{copy.id}/?copy=live").json()
    assert first == {"id": copy.id, "outcome": "deleted", "undo": first.get("undo")}
    purge = client.post(
        f"{base}topics/letters/purge/", {"state": "dead"}, content_type="application/json"
    ).json()
    assert purge["kept"] == 2
    listed = client.get(f"{base}deletions/").json()["results"]
    deletions = [(one["undo"], one["action"], one["kept"]) for one in listed]
    assert deletions == [(purge["undo"], "purge", 2), (first["undo"], "delete", 1)]
    for deletion in (first["undo"], purge["undo"]):
        answer = client.post(f"{base}deletions/{deletion}/undo/")
        assert answer.status_code == 200 and answer.json()["complete"]
    assert client.post(f"{base}deletions/{purge['undo']}/undo/").status_code == 409
    assert (dead(), live(shop, get_config().topic("letters"))) == (2, 1)
    gone = client.delete(f"{base}topics/letters/messages/{copy.id}/?copy=live&keep=false").json()
    assert "undo" not in gone
    body = {"state": "dead", "keep": False}
    purge = client.post(f"{base}topics/letters/purge/", body, content_type="application/json").json()
    assert "undo" not in purge and operations().undoable() == []


def carried(page: str) -> dict[str, str]:
    """Return the hidden fields of a page's question, or of its form that undoes."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


@pytest.mark.django_db
def test_a_person_deletes_and_undoes_in_the_admin(shop: Any, staff: Any) -> None:
    make_dead(shop, 3)
    client: Client = staff("view_topic", "view_bodies", "delete_messages", "purge_topic")
    address = reverse("admin:django_rmq_topic_act", args=["letters"])
    (copy, *_) = operations().listing("letters", "dead").copies
    given = {"act": "delete", "state": "dead", "id": copy.id, "back": "tab=dead"}
    question = client.post(address, given).content.decode()
    assert "Deleted messages can be brought back" in question and 'name="for_good"' in question
    done = client.post(address, {**given, "confirmed": "yes"}, follow=True).content.decode()
    assert dead() == 2
    (deletion,) = re.findall(r'name="deletion" value="(\w+)"', done)
    fields = {"deletion": deletion, "topic": "letters", "back": "tab=dead"}
    assert carried(done[done.index("rmq-undo") :]).items() >= {("topic", "letters"), ("back", "tab=dead")}
    answer = client.post(reverse("admin:django_rmq_topic_undo"), fields)
    assert answer["Location"].endswith("/letters/change/?tab=dead")
    assert "Undo: 1 brought back." in client.get(answer["Location"]).content.decode() and dead() == 3
    again = client.post(reverse("admin:django_rmq_topic_undo"), fields, follow=True).content.decode()
    assert "here is nothing to undo" in again
    for_good = {**given, "confirmed": "yes", "for_good": "on"}
    assert "rmq-undo" not in client.post(address, for_good, follow=True).content.decode()
    assert dead() == 2 and operations().undoable() == []


@pytest.mark.django_db
def test_a_purge_of_several_requests_is_undone_as_one_in_the_admin(
    shop: Any, staff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead(shop, 9)
    monkeypatch.setattr(bulk, "STEP", 2)
    monkeypatch.setattr("django_rmq.admin.action_views.Limits", lambda **_: Limits(messages=3))
    client: Client = staff("view_topic", "purge_topic")
    address = reverse("admin:django_rmq_topic_act", args=["letters"])
    given = {"act": "purge", "state": "dead", "name": "letters", "confirmed": "yes"}
    answer, requests = client.post(address, given), 1
    while answer.status_code == 200 and requests < 50:
        answer = client.post(address, carried(answer.content.decode()) | {"confirmed": "yes"})
        requests += 1
    assert requests > 2 and dead() == 0
    (one,) = operations().undoable()
    assert one.kept == 9


@pytest.mark.django_db
def test_the_page_of_actions_lists_what_can_be_undone_and_by_whom(shop: Any, staff: Any) -> None:
    make_dead(shop, 2)
    purged = operations().purge("letters", "dead").result().undo
    page = reverse("admin:django_rmq_topic_background")
    viewer = staff("view_topic").get(page).content.decode()
    assert "by ada" in viewer and purged not in viewer
    assert purged in staff("view_topic", "purge_topic").get(page).content.decode()
    refused = staff("view_topic").post(reverse("admin:django_rmq_topic_undo"), {"deletion": purged})
    assert refused.status_code == 403 and dead() == 0
