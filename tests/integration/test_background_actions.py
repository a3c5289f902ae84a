"""Actions that workers do in the background: parts under a lease, progress, stop, and the audit trail."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse

from django_rmq import signals
from django_rmq.conf import get_config
from django_rmq.core.commands import reports, stored_actions, stored_results
from django_rmq.core.model.keys import background_actions_key
from django_rmq.core.model.stored_actions import BEAT_MS, MOST_ACTIONS, decode_actions
from django_rmq.exceptions import InvalidRequest, OperationRefused
from django_rmq.operations import Actor, Filter, Operations, audit_trail, bulk, bulk_actions
from django_rmq.operations.authorization import Permission
from django_rmq.worker.worker_process import BackgroundActions
from django_rmq.worker.worker_reports import ReportDuty
from tests.support.brokers import project_on
from tests.support.reports import printed
from tests.support.workers import LONG, eventually, live, send

TOPICS = {
    "letters": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": "1ms"},
    "other": {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms"},
}


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    with project_on(broker, TOPICS=TOPICS):
        yield broker


def operations(*permissions: Permission) -> Operations:
    permits = (lambda one: one in permissions) if permissions else None
    return Operations(Actor("ada", "test", permits=permits))


def make_dead(shop: Any, count: int, name: str = "letters") -> None:
    send(shop, get_config().topic(name), [f"m{number}" for number in range(count)])
    assert operations().bury_all(name, "waiting").result().outcomes == {"buried": count}


def one() -> Any:
    (found,) = operations().background_actions()
    return found


def run_part(action: str, worker: str = "w", is_over: Callable[[], bool] = lambda: False) -> bool:
    context = operations()
    return bulk_actions.run_part(context, action, worker, is_over)


def test_an_action_is_done_in_parts_by_whoever_is_free(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dead(shop, 30)
    monkeypatch.setattr(bulk, "STEP", 4)
    started = operations().start_action("letters", "replay")
    assert (started.action.total, started.action.is_exact, started.done) == (30, True, 0)
    assert one().state(shop.now_ms()) == "waiting" and one().seconds_left(shop.now_ms()) is None
    # The first worker is stopped after two steps: before the first message, and after four.
    looks = iter([False, False, True, True])
    assert run_part(started.action.id, "first", lambda: next(looks, True))
    half = one()
    assert (half.done, half.left, half.worker, half.state(shop.now_ms())) == (4, 26, "first", "running")
    assert half.state(shop.now_ms() + BEAT_MS + 1) == "waiting"
    assert run_part(started.action.id, "second")
    found = one()
    assert (found.outcomes, found.worker) == ({"replayed": 30}, "second")
    assert found.is_complete and found.state(shop.now_ms()) == "done"
    assert live(shop, get_config().topic("letters")) == 30
    assert not run_part(started.action.id), "it has ended"


def test_a_replay_in_the_background_is_announced_when_it_has_ended(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead(shop, 6)
    monkeypatch.setattr(bulk, "STEP", 4)
    told: list[tuple[object, object, object]] = []

    def receive(topic: str, outcomes: object, actor: str, **_: object) -> None:
        told.append((topic, outcomes, actor))

    signals.message_replayed.connect(receive)
    try:
        action = operations().start_action("letters", "replay").action.id
        looks = iter([False, False, True, True])
        assert run_part(action, "first", lambda: next(looks, True)) and not told
        assert run_part(action)
        purge = operations().start_action("letters", "purge", "waiting").action.id
        assert run_part(purge)
    finally:
        signals.message_replayed.disconnect(receive)
    assert told == [("letters", {"replayed": 6}, "ada")]


def test_a_worker_that_was_killed_is_replaced_when_its_lease_has_ended(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead(shop, 6)
    lease_ms = round(5 * LONG * 1000)
    monkeypatch.setattr(bulk_actions, "LEASE_MS", lease_ms)
    action = operations().start_action("letters", "purge").action.id
    # A worker that was killed has begun a part, and does not give the lease back.
    lease = f"action{action}"
    assert shop.run(stored_results.begin_request(lease, lease, "killed", lease_ms))[0] == "new"
    assert not run_part(action) and one().done == 0
    # A lease that is longer than any counts as ended.
    monkeypatch.setattr(bulk_actions, "LEASE_MS", 1)
    assert run_part(action)
    assert one().outcomes == {"purged": 6}
    assert operations().topic("letters").dead == 0


def test_messages_that_die_or_are_sent_later_are_left_alone(shop: Any) -> None:
    make_dead(shop, 3)
    action = operations().start_action("letters", "purge").action.id
    topic = get_config().topic("letters")
    send(shop, topic, ["late"])
    eventually(lambda: operations().bury_all("letters", "waiting").result().outcomes == {"buried": 1})
    assert run_part(action)
    assert one().done <= 3 and one().is_complete
    assert operations().topic("letters").dead >= 1


def test_conditions_hold_in_the_background(shop: Any) -> None:
    make_dead(shop, 4)
    started = operations().start_action("letters", "delete", "dead", Filter(text="m1"))
    assert (started.action.total, started.action.conditions) == (1, {"text": "m1"})
    assert "a text (left out)" in started.action.described and "m1" not in started.action.described
    assert run_part(started.action.id)
    assert one().outcomes == {"deleted": 1} and operations().topic("letters").dead == 3


def test_an_action_is_stopped_with_or_without_a_worker(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dead(shop, 12)
    action = operations().start_action("letters", "replay").action.id
    stopped = operations().stop_action(action)
    assert (stopped.state(shop.now_ms()), stopped.stopped_by, stopped.done) == ("stopped", "ada", 0)
    with pytest.raises(OperationRefused):
        operations().stop_action(action)
    assert not run_part(action)
    # A worker notices it after its step.
    monkeypatch.setattr(bulk, "STEP", 4)
    other = operations().start_action("letters", "replay").action.id
    asked: list[int] = []

    def stop_once() -> bool:
        if len(asked) == 1:
            shop.run(stored_actions.write_action(other, "stopped", "bob"))
        asked.append(1)
        return False

    assert run_part(other, "w", stop_once)
    assert 0 < operations().background_actions()[-1].done < 12
    assert run_part(other)
    ended = operations().background_actions()[-1]
    assert (ended.state(shop.now_ms()), ended.stopped_by) == ("stopped", "bob")


@pytest.mark.parametrize(
    "arguments",
    [
        ("letters", "bury"),
        ("letters", "replay", "waiting"),
        ("letters", "delete", "running"),
        ("letters", "purge", "dead", Filter(error="Boom")),
        ("other", "replay"),
    ],
)
def test_what_cannot_be_done_is_refused(shop: Any, arguments: Any) -> None:
    make_dead(shop, 1)
    with pytest.raises((OperationRefused, InvalidRequest)):
        operations().start_action(*arguments)
    with pytest.raises(InvalidRequest):
        operations().start_action("letters", "replay", rate=0.01)
    assert operations().background_actions() == []


def test_a_bounded_number_is_kept(shop: Any) -> None:
    make_dead(shop, 1)
    for _ in range(MOST_ACTIONS):
        operations().start_action("letters", "replay")
    with pytest.raises(OperationRefused, match="in the background already"):
        operations().start_action("letters", "replay")
    first = operations().background_actions()[0].action.id
    operations().stop_action(first)
    operations().start_action("letters", "replay")
    known = [found.action.id for found in operations().background_actions()]
    assert len(known) == MOST_ACTIONS and first not in known


@pytest.mark.parametrize(
    "value", [b"", b"x", b"[]", b"{}", b'{"id": "a"}', b"[" * 100_000, b"\xff"], ids=range(7)
)
def test_what_another_program_wrote_is_left_out(value: bytes) -> None:
    assert decode_actions([(b"a:", value), (b"a:beat", b"1 w"), (b"b:did.x", b"y"), (b"\xff", b"")]) == []


def test_an_end_with_a_time_that_no_clock_has_hides_no_other_action(shop: Any) -> None:
    make_dead(shop, 1)
    operations().start_action("letters", "replay")
    fields = dict(shop.client.hgetall(background_actions_key(shop.prefix)))
    (name,) = (each.partition(b":")[0] for each in fields if each.endswith(b":"))
    fields |= {b"a:": fields[name + b":"].replace(name, b"a"), b"a:ended": b'{"at_ms":1e999}'}
    assert [one.action.id.encode() for one in decode_actions(fields.items())] == [name]


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_value_of_another_type_stops_no_report(shop: Any) -> None:
    shop.client.set(background_actions_key(shop.prefix), "text")
    duty = ReportDuty(shop, "w", 1, "", list, lambda: 1.0)
    with closing(duty()) as steps:
        next(steps)
        assert list(shop.run(reports.read_reports())) == ["w"]


@pytest.mark.django_db(transaction=True)
def test_a_worker_sees_an_action_with_its_report_and_writes_one_row(
    shop: Any, django_user_model: Any
) -> None:
    user = django_user_model.objects.create_superuser("ada", password="x")
    make_dead(shop, 5)
    asked = Operations(Actor.of_user(user, "admin"))
    asked.start_action("letters", "replay", wanted=Filter(slot=1))
    total = one().action.total
    (row,) = LogEntry.objects.all()
    assert row.change_message == f"Replay all in the background (dead, slot 1): {total} asked (admin)"
    actions = BackgroundActions("worker", bulk_actions.run_parts)
    duty = ReportDuty(shop, "w", 1, "", list, lambda: 1.0, act=actions.begin_if_needed)
    steps = duty()
    next(steps)
    eventually(lambda: one().ended_ms is not None)
    actions.stop()
    actions.join(LONG)
    assert one().worker == "worker"
    (row,) = LogEntry.objects.all()
    assert row.change_message == f"Replay all in the background (dead, slot 1): {total} replayed (admin)"
    # Nothing is open, so that no thread begins.
    before = actions._thread
    next(steps)
    assert actions._thread is before
    steps.close()


def test_an_action_that_is_forgotten_while_it_is_stopped_is_answered_as_it_was(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead(shop, 3)
    action = operations().start_action("letters", "replay").action.id
    do_part = bulk_actions.run_part

    def forget_then(*arguments: Any) -> bool:
        shop.run(stored_actions.delete_action(one()))
        return do_part(*arguments)

    monkeypatch.setattr(bulk_actions, "run_part", forget_then)
    stopped = operations().stop_action(action)
    assert (stopped.action.id, stopped.stopped_by, stopped.ended_ms) == (action, "ada", None)


@pytest.mark.django_db
@pytest.mark.parametrize("by", ["page", "rest", "command"])
def test_an_action_of_a_topic_that_has_left_the_settings_is_stopped(
    shop: Any, staff: Callable[..., Client], by: str
) -> None:
    make_dead(shop, 3)
    action = operations().start_action("letters", "replay").action.id
    with project_on(shop, TOPICS={"other": TOPICS["other"]}):
        table = reverse("admin:django_rmq_topic_background")
        stranger = staff("view_topic", "purge_topic")
        assert f'value="{action}"' not in stranger.get(table).content.decode()
        assert stranger.post(f"/api/rmq/background/{action}/stop/").status_code == 403
        client = staff("view_topic", "replay_messages")
        assert client.get("/api/rmq/background/").json()["results"][0]["action_id"] == action
        if by == "page":
            assert f'value="{action}"' in client.get(table).content.decode()
            client.post(table, {"action": action})
        elif by == "rest":
            assert client.post(f"/api/rmq/background/{action}/stop/").json()["status"] == "stopped"
        else:
            printed("rmqworkers", "--stop-action", action)
        assert one().state(shop.now_ms()) == "stopped"


def test_a_user_whose_primary_key_is_no_number_starts_an_action(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dead(shop, 1)
    written: list[object] = []
    monkeypatch.setattr(audit_trail, "_log_entry", lambda account, *_: written.append(account))
    key = uuid4()
    user = User(username="ada", is_superuser=True)
    monkeypatch.setattr(user, "pk", key)
    action = Operations(Actor.of_user(user, "admin")).start_action("letters", "replay").action.id
    assert run_part(action) and one().is_complete
    assert written == [str(key), str(key)]


@pytest.mark.django_db
def test_an_action_is_started_watched_and_stopped_from_pages(shop: Any, staff: Callable[..., Client]) -> None:
    make_dead(shop, 3)
    client = staff("view_topic", "replay_messages", "purge_topic")
    act = reverse("admin:django_rmq_topic_act", args=["letters"])
    table = reverse("admin:django_rmq_topic_background")

    def post(page: str, **data: str) -> str:
        return html.unescape(client.post(page, data, follow=True).content.decode())

    assert "in the background" in post(act, act="replay_all", state="dead")
    shown = post(act, act="replay_all", state="dead", confirmed="yes", background="yes", rate="50")
    assert "you can leave this page" in shown and "waits for a worker" in shown
    assert "0 of 3" in shown and "0 of 3:" not in shown
    assert one().action.rate == 50
    # A purge wants the name of the topic as before.
    assert "Name of the topic" in post(act, act="purge", state="dead", confirmed="yes", background="yes")
    assert len(operations().background_actions()) == 1
    shown = post(table, action=one().action.id)
    assert "was stopped" in shown and "stopped by" in shown
    assert "runs in the background" in post(table, action="unknown")
    live_page = reverse("admin:django_rmq_topic_background_live")
    assert "Replay all" in client.get(live_page).content.decode()
    operations().start_action("letters", "delete")
    last = operations().background_actions()[-1].action.id
    assert client.post(table, {"action": last}).status_code == 403


@pytest.mark.django_db
def test_rest_and_commands_start_list_and_stop_actions(shop: Any, staff: Callable[..., Client]) -> None:
    make_dead(shop, 3)
    client = staff("view_topic", "replay_messages")

    def post(route: str, data: object = None) -> Any:
        return client.post(f"/api/rmq/{route}", json.dumps(data or {}), content_type="application/json")

    answer = post("topics/letters/background/", {"action": "replay", "rate": 10})
    assert answer.status_code == 202
    started = answer.json()
    assert (started["status"], started["total"], started["exact"]) == ("waiting", 3, True)
    assert client.get("/api/rmq/background/").json()["results"][0]["action_id"] == started["action_id"]
    assert post("topics/letters/background/", {"action": "purge"}).status_code == 403
    assert post("topics/letters/background/", {"action": "dance"}).status_code == 400
    assert post("topics/letters/background/", {"action": "replay", "state": 5}).json()["code"] == "invalid"
    assert post("topics/other/background/", {"action": "replay"}).status_code == 409
    assert post(f"background/{started['action_id']}/stop/").json()["status"] == "stopped"
    assert post(f"background/{started['action_id']}/stop/").status_code == 409

    def command(*arguments: str) -> str:
        return printed(*arguments)

    assert "replay of 3 messages of letters" in command(
        "rmqreplay", "letters", "--all", "--no-input", "--background"
    )
    replay = operations().background_actions()[-1].action.id
    assert f"{replay}: replay of letters (dead)" in command("rmqworkers", "--actions")
    # As over REST, but for what depends on the time.
    listed = json.loads(command("rmqworkers", "--actions", "--json"))
    results = client.get("/api/rmq/background/").json()["results"]
    for one in (*listed, *results):
        del one["rate"], one["seconds_left"]
    assert listed == results and len(listed) == 2
    assert "stopped, 0 of 3" in command("rmqworkers", "--stop-action", replay)
    purge = ("rmqpurge", "letters", "--state", "dead", "--no-input", "--background")
    assert "purge of 3 messages" in command(*purge)
    assert "delete of 1 message of" in command(*purge, "--text", "m1")
    begun = json.loads(command(*purge, "--json"))
    assert (begun["action"], begun["status"], begun["total"]) == ("purge", "waiting", 3)
    ended = json.loads(command("rmqworkers", "--stop-action", begun["action_id"], "--json"))
    assert (ended["action_id"], ended["status"]) == (begun["action_id"], "stopped")
    with pytest.raises(CommandError, match="takes no --limit"):
        command(*purge, "--limit", "1")
