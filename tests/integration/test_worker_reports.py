"""What workers report about themselves: who lives and vanished, what runs, and what no worker serves."""

from __future__ import annotations

import asyncio
import html
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from django_rmq.admin.worker_views import SILENT_MS
from django_rmq.conf import get_config
from django_rmq.core.commands import history, reports
from django_rmq.core.commands.reports import delete_reports, read_reports
from django_rmq.core.model.delivered_message import Message, message_id
from django_rmq.core.model.keys import reports_key, stacks_key, times_key, worker_requests_key
from django_rmq.core.model.replies import LATENESS_BUCKETS
from django_rmq.core.model.worker_report import (
    LONGEST_STACK,
    MOST_CALLS,
    MOST_STACKS,
    RunningCall,
    Stack,
    StackRequest,
    decode,
    decode_stacks,
    encode_stack_requests,
)
from django_rmq.core.monitoring import history as recorded_history
from django_rmq.exceptions import InvalidRequest, OperationRefused, ServerUnavailable, UnknownTopic, WrongType
from django_rmq.message_ids import sealed_id
from django_rmq.operations import Actor, Operations, Permission, TopicRule, shared_reads
from django_rmq.operations.worker_overview import REQUEST_MS, STOPPING_MS
from django_rmq.worker import listener_registry, worker_reports
from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess
from django_rmq.worker.worker_reports import FORGET_MS, STACKS_MS, ReportDuty
from tests.support.brokers import project_on
from tests.support.reports import REPORT, join, printed, report
from tests.support.workers import LONG, HeldListener, Listener, Worker, eventually, live, send

NAMES = ("timed", "other", "idle")


@pytest.fixture
def shop(broker: Any) -> Iterator[Any]:
    """A broker with three topics, all of which have listeners."""
    topics = {name: {"TYPE": "range_merge", "SLOTS": 2, "TIME_RANGE": "1ms"} for name in NAMES}
    with project_on(broker, TOPICS=topics, CODE_VERSION="2026.11.3"):
        yield broker


def operations() -> Operations:
    return Operations(Actor("tester", "test"))


def url(page: str, *args: str) -> str:
    return reverse(f"admin:django_rmq_topic_{page}", args=args)


def duty_of(broker: Any, worker: str = "w", batches: Callable[[], Any] = list, **options: Any) -> ReportDuty:
    return ReportDuty(broker, worker, 1, "", batches, lambda: 1.0, **options)


def test_a_report_is_read_as_it_was_written() -> None:
    assert decode(REPORT.encode().encode()) == REPORT


@pytest.mark.parametrize(
    "changed",
    [
        *({"at_ms": at_ms} for at_ms in ("now", -1, 10**400)),
        *({"load": math.nan}, {"memory_mib": math.inf}, {"host": None}, {"pid": []}),
        *({"calls": calls} for calls in (None, [["timed", "id"]], {"a": 1})),
        {"calls": [["timed", "id", "soon", 1, "thread", None, ""]]},
        {"calls": [["timed", "id", 1, 1, "thread"]]},
        {"calls": [["timed", "id", 1, 1, "thread", "half", ""]]},
        {"calls": [["timed", "id", 1, 1, "thread", 0.5, None]]},
    ],
)
def test_a_report_of_another_form_is_not_read(changed: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(REPORT.encode()), **changed})
    assert decode(text.encode()) is None


@pytest.mark.parametrize("text", [b"", b"x", b"[]", b"1", b"\xff", b"[" * 100_000, b"{}"])
def test_a_text_that_is_no_report_is_not_read(text: bytes) -> None:
    assert decode(text) is None


def test_long_texts_and_lists_of_a_report_are_cut() -> None:
    call = list(REPORT.calls[0])
    given = {
        **json.loads(REPORT.encode()),
        "host": "h" * 9_999 + "\ud800",
        "code": "\ud800",
        "calls": [[*call[:5], 0.5, "p" * 999]] * 999,
    }
    found = decode(json.dumps(given).encode())
    assert found is not None
    assert (len(found.host), found.code, len(found.calls)) == (200, "?", MOST_CALLS)
    assert {len(one.progress_text) for one in found.calls} == {200}


def test_a_worker_reports_what_its_threads_run_and_since_when(shop: Any) -> None:
    topic, held = get_config().topic("timed"), HeldListener()
    before_ms = shop.now_ms()
    send(shop, topic, ["secret text"])
    with Worker(shop, topic, held, threads=2) as worker:
        try:
            assert held.begun.wait(LONG)
            dispatcher = worker.dispatcher
            duty = ReportDuty(shop, dispatcher.owner, 2, "2026.11", dispatcher.batches, lambda: 64.5)
            with closing(duty()) as steps:
                assert next(steps) == worker_reports.REPORT_SECONDS
                (found,) = shop.run(read_reports()).items()
                name, one = found
                assert name == dispatcher.owner
                assert (one.threads, one.taken, one.messages, one.running) == (2, 1, 1, 1)
                assert (one.code, one.memory_mib) == ("2026.11", 64.5)
                (call,) = one.calls
                assert (call.topic, call.attempt) == ("timed", 1)
                assert call.thread.startswith("rmq-executor-")
                assert before_ms - 1_000 <= call.since_ms <= one.at_ms <= shop.now_ms()
                # The report names the message, and holds nothing of it.
                assert "secret" not in one.encode()
                since_ms = call.since_ms
                # A delivery that is extended has still begun at the same time.
                next(steps)
                (again,) = shop.run(read_reports())[dispatcher.owner].calls
                assert abs(again.since_ms - since_ms) < 1_000
            # A worker that leaves does not vanish.
            assert shop.run(read_reports()) == {}
        finally:
            held.go.set()


def test_a_message_that_waits_for_a_thread_is_held_and_does_not_run(shop: Any) -> None:
    topic, held = get_config().topic("timed"), HeldListener()
    with Worker(shop, topic, held, threads=1) as worker:
        try:
            send(shop, topic, range(6))
            assert held.begun.wait(LONG)
            duty = duty_of(shop, "w", worker.dispatcher.batches)
            one = duty.report(shop.now_ms())
            assert one.running == one.taken == 1
            assert one.messages >= 1
        finally:
            held.go.set()


def test_a_report_that_cannot_be_written_is_skipped(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    duty = duty_of(shop)
    steps = duty()
    with monkeypatch.context() as patch:
        patch.setattr(type(shop), "pipeline", lambda *_: (_ for _ in ()).throw(ServerUnavailable("away")))
        next(steps)
    next(steps)
    assert list(shop.run(read_reports())) == ["w"]
    steps.close()


def test_reports_of_workers_that_vanished_long_ago_are_deleted(shop: Any) -> None:
    now_ms = shop.now_ms()
    report(shop, "old", at_ms=now_ms - FORGET_MS - 1)
    report(shop, "young", at_ms=now_ms - FORGET_MS + round(LONG * 1000))
    duty = duty_of(shop)
    duty.forget(now_ms)
    assert list(shop.run(read_reports())) == ["young"]
    shop.run(delete_reports("young"))
    duty.forget(now_ms)


def ask(worker: str, request: Any, names: Any = None) -> str:
    return operations().ask_worker(worker, request, names)


def test_a_worker_obeys_each_request_once_and_reports_its_new_state_at_once(shop: Any) -> None:
    obeyed: list[str] = []
    states = {"quiet": "quiet", "resume": "working"}

    def state() -> str:
        return states[obeyed[-1]] if obeyed else "working"

    duty = duty_of(shop, "w" * 32, state=state, obey=obeyed.append, parent=7)
    join(shop, "w" * 32, "timed")
    with closing(duty()) as steps:
        assert next(steps) == worker_reports.REPORT_SECONDS and obeyed == []
        for request in ("quiet", "resume", "quiet"):
            assert ask("w" * 8, request) == "w" * 32
            assert next(steps) == 0.0, "the next report follows at once"
            assert next(steps) == worker_reports.REPORT_SECONDS
            (one,) = shop.run(read_reports()).values()
            assert (one.state, one.parent) == (states[request], 7)
        assert obeyed == ["quiet", "resume", "quiet"]
        # Another version may know other requests.
        shop.run(reports.ask_worker("w" * 32, "dance 1"))
        assert next(steps) == worker_reports.REPORT_SECONDS
        assert obeyed == ["quiet", "resume", "quiet"]


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_quiet_worker_takes_nothing_and_goes_on_with_what_runs(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldListener()
    monkeypatch.setattr(listener_registry, "listeners", lambda: {"timed": Listener("timed", held)})
    topic = get_config().topic("timed")
    process = WorkerProcess([topic], ProcessOptions(threads=1))
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    try:
        send(shop, topic, ["first"])
        assert held.begun.wait(LONG)
        process.obey("quiet")
        assert process._state() == "quiet"
        table = process.dispatcher._table
        # The slot of the first message is kept, without being owned, until the message ends.
        eventually(lambda: len(table) == 1 and not any(one.is_owned for one in list(table.awake.values())))
        send(shop, topic, ["second"])
        held.go.set()
        assert held.wait() == ["first"]
        eventually(lambda: live(shop, topic) == 1)
        # It has no slot to take from, and the slot of the second message is not gained by a change of slots.
        process._follow()
        assert process.coordinator.owned() == {} and live(shop, topic) == 1
        process.obey("resume")
        assert held.wait(2) == ["first", "second"] and process._state() == "working"
        process.obey("stop")
        assert process._state() == "stopping"
        thread.join(LONG)
        assert not thread.is_alive()
    finally:
        held.go.set()
        process.stop()
        thread.join(LONG)


def test_who_cannot_be_asked_is_refused_with_the_reason(shop: Any) -> None:
    for worker in ("12345678aa", "12345678bb", "silent-one", "old-version"):
        join(shop, worker, "timed", "other")
    report(shop, "12345678aa", state="working")
    report(shop, "old-version")
    assert ask("12345678aa", "quiet", ["timed", "other", "idle"]) == "12345678aa"
    for worker, names, reason in (
        ("12345678", None, "more than one live worker"),
        ("1234567", None, "no live worker"),
        ("", None, "no live worker"),
        ("gone-long-ago", None, "no live worker"),
        ("silent-one", None, "takes no requests"),
        ("old-version", None, "takes no requests"),
        ("12345678aa", ["timed"], "topics that you may not see"),
    ):
        with pytest.raises(OperationRefused, match=reason):
            ask(worker, "quiet", names)


def test_a_worker_that_stops_has_not_vanished_until_it_is_silent(shop: Any) -> None:
    now_ms = shop.now_ms()
    report(shop, "stops", state="stopping", at_ms=now_ms + round(LONG * 1000))
    report(shop, "killed", state="stopping", at_ms=now_ms - STOPPING_MS - 1)
    assert [one.id for one in operations().worker_overview().vanished] == ["killed"]


@pytest.mark.django_db
def test_a_worker_is_quieted_resumed_and_stopped_from_its_page(
    shop: Any, staff: Callable[..., Client]
) -> None:
    for number, pid in enumerate((41, 42)):
        join(shop, f"abcdef0{number}99", "timed", pid=pid)
        report(shop, f"abcdef0{number}99", state="working", parent=40, pid=pid)
    page, client = url("workers"), staff("view_topic", "control_workers")
    assert "Quiet worker abcdef00" in client.get(page).content.decode()

    def post(**data: str) -> str:
        return html.unescape(client.post(page, data, follow=True).content.decode())

    def last() -> str:
        return shop.run(reports.read_requests("abcdef0099")).request.partition(" ")[0]

    question = post(act="quiet", worker="abcdef0099")
    assert "take no more messages?" in question and last() == ""
    assert "asked to take no more messages" in post(act="quiet", worker="abcdef0099", confirmed="yes")
    assert last() == "quiet"
    report(shop, "abcdef0099", state="quiet", parent=40)
    shown = client.get(page).content.decode()
    assert "Resume worker abcdef00" in shown and "Quiet worker abcdef01" in shown
    assert "asked to take messages again" in post(act="resume", worker="abcdef0099")
    assert last() == "resume"
    question = post(act="stop", worker="abcdef0099")
    assert "all processes of the command end" in question and "41, 42" in question and last() == "resume"
    assert "asked to stop" in post(act="stop", worker="abcdef0099", confirmed="yes") and last() == "stop"
    assert "o live worker has the id" in post(act="stop", worker="unknown-one", confirmed="yes")
    assert "can be asked to be quiet" in post(act="dance", worker="abcdef0099", confirmed="yes")
    written = list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))
    assert written == [
        f"{act} (worker abcdef0099, process 41 on alpha): 1 asked (admin)"
        for act in ("Quiet", "Resume", "Stop")
    ]
    viewer = staff("view_topic")
    assert "Quiet worker" not in viewer.get(page).content.decode()
    assert viewer.post(page, {"act": "resume", "worker": "abcdef0099"}).status_code == 403


@pytest.mark.django_db
def test_rest_and_the_command_ask_workers(shop: Any, staff: Callable[..., Client]) -> None:
    join(shop, "abcdef0099", "timed")
    report(shop, "abcdef0099", state="working")
    client = staff("view_topic", "control_workers")
    for request in ("quiet", "resume", "stop"):
        answer = client.post(f"/api/rmq/workers/abcdef0099/{request}/")
        assert (answer.status_code, answer.json()) == (202, {"worker": "abcdef0099", "asked": request})
        assert shop.run(reports.read_requests("abcdef0099")).request.startswith(request)
        assert printed("rmqworkers", f"--{request}", "abcdef00") == f"abcdef0099: asked to {request}\n"
        told = printed("rmqworkers", f"--{request}", "abcdef00", "--json")
        assert json.loads(told) == [answer.json()]
    assert client.post("/api/rmq/workers/unknown-one/stop/").status_code == 409
    assert staff("view_topic").post("/api/rmq/workers/abcdef0099/stop/").status_code == 403
    report(shop, "abcdef0099", state="quiet")
    assert client.get("/api/rmq/workers/").json()["results"][0]["report"]["state"] == "quiet"
    assert "(quiet)" in printed("rmqworkers")
    assert json.loads(printed("rmqworkers", "--json"))[0]["state"] == "quiet"
    output = io.StringIO()
    with pytest.raises(CommandError, match="no live worker"):
        call_command("rmqworkers", "--stop", "abcdef00", "unknown-one", "--json", stdout=output)
    assert json.loads(output.getvalue()) == [{"worker": "abcdef0099", "asked": "stop"}]
    with pytest.raises(CommandError, match="no live worker has the id ''"):
        call_command("rmqworkers", "--stop", "")


def test_workers_are_live_or_vanished_and_topics_are_served_or_not(shop: Any) -> None:
    now_ms = shop.now_ms()
    join(shop, "live", "timed")
    join(shop, "silent", "other", pid=42)
    report(shop, "live")
    report(shop, "gone", pid=77, at_ms=now_ms - 60_000)
    report(shop, "gone-before", at_ms=now_ms - 120_000)
    report(shop, "forgotten", at_ms=now_ms - FORGET_MS - round(LONG * 1000))
    found = operations().worker_overview()
    known = [(one.stats.member.worker.id, one.report is not None) for one in found.workers]
    assert known == [("live", True), ("silent", False)]
    assert [one.id for one in found.vanished] == ["gone", "gone-before"]
    assert found.unserved == ["idle"]


def test_what_runs_longest_comes_first_and_is_of_live_workers_and_known_topics(shop: Any) -> None:
    join(shop, "a", "timed")
    join(shop, "b", "timed", pid=42)
    calls = [RunningCall(topic, topic, since, 1, "t") for topic, since in (("timed", 500), ("unknown", 1))]
    report(shop, "a", calls=tuple(calls), running=7)
    report(shop, "b", calls=(RunningCall("other", "o", 200, 2, "t"),), running=1)
    report(shop, "gone", calls=(RunningCall("timed", "g", 1, 1, "t"),))
    found = operations().worker_overview()
    assert [(one.worker, one.call.topic) for one in found.running] == [("b", "other"), ("a", "timed")]
    assert found.unreported == 5


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_foreign_value_in_place_of_the_reports_hides_no_worker(shop: Any) -> None:
    join(shop, "live", "timed")
    shop.client.set(reports_key(shop.prefix), "foreign")
    assert [(one.stats.member.worker.id, one.report) for one in operations().worker_overview().workers] == [
        ("live", None)
    ]


@pytest.mark.django_db
def test_the_page_and_rest_show_workers(shop: Any, staff: Callable[..., Client]) -> None:
    join(shop, "0123456789", "timed", "other")
    report(shop, "0123456789", taken=3, messages=5, load=1.25)
    report(shop, "fedcba9876", host="<b>beta</b>", pid=4242)
    client = staff("view_topic")
    for name in ("workers", "workers_live"):
        answer = client.get(url(name))
        page = answer.content.decode()
        assert answer.status_code == 200
        for text in ("01234567", "3 / 4", "2026.11", "fedcba98", "4242", "&lt;b&gt;beta", "80 MiB"):
            assert text in page, text
        assert url("change", "idle") in page
        assert "No worker serves" in page
    assert "workers/" in client.get(url("changelist")).content.decode()


@pytest.mark.django_db
def test_rest_returns_reports_vanished_workers_and_topics_without_one(
    shop: Any, staff: Callable[..., Client]
) -> None:
    join(shop, "live", "timed", "other")
    report(shop, "live", taken=3)
    report(shop, "gone", pid=4242)
    answer = staff("view_topic").get("/api/rmq/workers/").json()
    (one,) = answer["results"]
    assert (one["worker"], one["report"]["taken"], one["report"]["code_version"]) == ("live", 3, "2026.11")
    assert [(each["worker"], each["report"]["pid"]) for each in answer["vanished"]] == [("gone", 4242)]
    assert answer["unserved"] == ["idle"]


def count_calls(broker: Any, topic: str, bucket: int) -> None:
    """Count a hundred calls of the listener of ``topic``, all in one class of durations."""
    took = [100 if one == bucket else 0 for one in range(LATENESS_BUCKETS)]
    broker.run(history.count_times(get_config().topic(topic), [0] * LATENESS_BUCKETS, 0, took, 1_000))


def test_no_more_running_messages_are_listed_than_the_bound(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package has a function of the same name as the module.
    monkeypatch.setattr(import_module("django_rmq.operations.worker_overview"), "MOST_RUNNING", 2)
    join(shop, "a", "timed", "other")
    since = (("timed", 10), ("other", 20), ("timed", 30), ("timed", 40))
    calls = tuple(RunningCall(topic, topic, at_ms, 1, "t") for topic, at_ms in since)
    report(shop, "a", calls=calls, running=7)
    found = operations().running_messages()
    assert ([one.call.since_ms for one in found.messages], found.unlisted) == ([10, 20], 5)
    # Those of topics that one may not see are neither listed nor counted.
    found = operations().running_messages(["timed"])
    assert ([one.call.since_ms for one in found.messages], found.unlisted) == ([10, 30], 4)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_foreign_value_in_place_of_the_usual_times_hides_no_running_message(shop: Any) -> None:
    join(shop, "a", "timed")
    shop.client.set(times_key(shop.prefix, "timed"), "foreign")
    report(shop, "a", calls=(RunningCall("timed", "i", 1, 1, "t"),))
    found = operations().running_messages()
    assert ([one.call.id for one in found.messages], found.usual) == (["i"], {})


@pytest.mark.django_db
def test_the_page_of_running_messages_names_worker_thread_and_usual_times(
    shop: Any, staff: Callable[..., Client]
) -> None:
    join(shop, "0123456789", "timed", "other")
    count_calls(shop, "timed", 9)
    now_ms = shop.now_ms()
    hung = RunningCall("timed", "1~abcdefghij", now_ms - 7_200_000, 3, "rmq-executor-<b>7</b>")
    report(shop, "0123456789", calls=(hung,), running=4, host="alpha", pid=4242)
    client, plain = staff("view_topic", "delete_messages"), staff("view_topic")
    for name in ("running", "running_live"):
        answer = client.get(url(name))
        page = answer.content.decode()
        assert answer.status_code == 200
        message = url("message", "timed", hung.id)
        for text in (message, "abcdefgh", "rmq-executor-&lt;b&gt;7", "alpha", "4242", "01234567", "995 ms"):
            assert text in page, text
        assert "3 other messages run that are not listed" in page
        assert '<strong class="rmq-dead">2' in page
        assert 'value="cancel"' in page
    # By its last report it has run for a moment, and may have ended since.
    report(shop, "0123456789", calls=(hung._replace(since_ms=now_ms - 60_000),), at_ms=now_ms - 59_900)
    assert '<strong class="rmq-dead">' not in client.get(url("running")).content.decode()
    assert 'value="cancel"' not in plain.get(url("running")).content.decode()
    dashboard = client.get(url("changelist")).content.decode()
    assert url("running") in dashboard


@pytest.mark.django_db
def test_the_page_of_running_messages_says_that_nothing_runs(shop: Any, staff: Callable[..., Client]) -> None:
    page = staff("view_topic").get(url("running")).content.decode()
    assert "No message is running." in page
    assert staff().get(url("running")).status_code == 403


@pytest.mark.django_db
def test_rest_lists_running_messages(shop: Any, staff: Callable[..., Client]) -> None:
    join(shop, "live", "timed", "other")
    count_calls(shop, "timed", 9)
    since_ms = shop.now_ms() - 60_000
    calls = (
        RunningCall("timed", "1~id", since_ms, 2, "thread"),
        RunningCall("other", "2~id", since_ms, 1, "loop"),
    )
    report(shop, "live", calls=calls, running=5, pid=4242)
    answer = staff("view_topic").get("/api/rmq/running/").json()
    one, other = answer["results"]
    assert (one["topic"], one["id"], one["since_ms"], one["attempt"]) == ("timed", "1~id", since_ms, 2)
    assert (one["worker"], one["host"], one["pid"], one["thread"]) == ("live", "alpha", 4242, "thread")
    assert one["running_ms"] == answer["now_ms"] - since_ms >= 60_000
    assert 500 <= one["p50_ms"] < one["p99_ms"] <= 1_000
    assert (other["p50_ms"], other["p99_ms"], answer["unlisted"]) == (None, None, 3)


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_worker_reports_the_progress_of_what_it_runs_without_a_round_trip(shop: Any, kind: str) -> None:
    topic, go, began = get_config().topic("timed"), threading.Event(), threading.Event()
    written: list[bool] = []

    def hang(message: Message) -> None:
        written.extend([message.progress(0.25, "first"), message.progress(0.5, "é" * 300)])
        began.set()
        assert go.wait(5 * LONG)

    async def ahang(message: Message) -> None:
        written.append(await message.aprogress(0.25, "first"))
        written.append(await message.aprogress(0.5, "é" * 300))
        began.set()
        # It blocks the loop, which is all that the worker has to do.
        assert go.wait(5 * LONG)

    send(shop, topic, [1])
    with Worker(shop, topic, hang if kind == "thread" else ahang) as worker:
        try:
            assert began.wait(LONG)
            # The topic has no OUTCOME_RETENTION, so nothing is written for its status.
            assert written == [False, False]
            duty = duty_of(shop, "w", worker.dispatcher.batches)
            (call,) = duty.report(shop.now_ms()).calls
            assert (call.progress, call.progress_text) == (0.5, "é" * 100)
        finally:
            go.set()


@pytest.mark.django_db
def test_progress_is_shown_with_its_text_to_who_may_read_bodies(
    shop: Any, staff: Callable[..., Client]
) -> None:
    join(shop, "live", "timed", "other")
    now_ms = shop.now_ms()
    calls = (
        RunningCall("timed", "1~id", now_ms, 1, "thread", 0.999, "<b>card 4111</b>"),
        RunningCall("other", "2~id", now_ms, 1, "thread"),
    )
    report(shop, "live", calls=calls, running=2)
    reader, viewer = staff("view_topic", "view_bodies"), staff("view_topic")
    running = url("running")
    page = reader.get(running).content.decode()
    assert "99 %" in page and "&lt;b&gt;card 4111" in page
    page = viewer.get(running).content.decode()
    assert "99 %" in page and "card 4111" not in page
    told = {one["topic"]: one for one in reader.get("/api/rmq/running/").json()["results"]}
    assert (told["timed"]["progress"], told["timed"]["progress_text"]) == (0.999, "<b>card 4111</b>")
    assert (told["other"]["progress"], told["other"]["progress_text"]) == (None, "")
    told = {one["topic"]: one for one in viewer.get("/api/rmq/running/").json()["results"]}
    assert (told["timed"]["progress"], told["timed"]["progress_text"]) == (0.999, "")
    # A topic whose bodies are redacted shows no text to anybody.
    redacted = {"FORMATTER": {"timed": "tests.browser.shop.redaction.hide_numbers"}}
    with project_on(shop, **settings.RMQ, ADMIN=redacted):
        assert "card 4111" not in reader.get(running).content.decode()
    report(shop, "live", calls=calls[1:], running=1)
    assert "Progress" not in reader.get(running).content.decode()


def stacks(message: str, topic: str = "timed") -> Any:
    return operations().message_stacks(topic, message)


def ask_for(message: str, topic: str = "timed") -> list[str]:
    return operations().ask_for_stacks(topic, message)


def reads_stacks(broker: Any, worker: str) -> list[Stack]:
    (found,) = broker.run(reports.read_stacks([worker]))
    return list(found)


def hang_in_depth(began: threading.Event, go: threading.Event, secret: str) -> None:
    began.set()
    assert go.wait(5 * LONG), secret


@pytest.mark.parametrize("kind", ["thread", "blocked loop", "waiting coroutine"])
def test_a_worker_answers_where_a_listener_is(shop: Any, kind: str) -> None:
    topic, go, began = get_config().topic("timed"), threading.Event(), threading.Event()

    def hang(message: Any) -> None:
        hang_in_depth(began, go, message.body)

    async def block(message: Any) -> None:
        hang_in_depth(began, go, message.body)

    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def linger(message: Any) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loops.append((loop, end))
        # It is called once the coroutine waits.
        loop.call_soon(began.set)
        await end.wait()

    def release() -> None:
        go.set()
        for loop, end in loops:
            loop.call_soon_threadsafe(end.set)

    listener = {"thread": hang, "blocked loop": block, "waiting coroutine": linger}[kind]
    innermost = "wait" if kind == "waiting coroutine" else "hang_in_depth"
    send(shop, topic, ["secret text"])
    with Worker(shop, topic, listener) as worker:
        try:
            assert began.wait(LONG)
            owner = worker.dispatcher.owner
            join(shop, owner, "timed")
            steps = duty_of(shop, owner, worker.dispatcher.batches, state=lambda: "working")()
            next(steps)
            (call,) = shop.run(read_reports())[owner].calls
            before_ms = shop.now_ms()
            assert ask_for(call.id) == [owner]
            (one,) = stacks(call.id).workers
            assert one.is_awaited and one.stack is None and one.call.thread == call.thread
            next(steps)
            (one,) = stacks(call.id).workers
            assert not one.is_awaited and before_ms <= one.asked_ms <= shop.now_ms()
            text = one.stack.text
            assert f", in {listener.__name__}\n" in text and f", in {innermost}\n" in text
            assert "test_worker_reports.py" in text and "secret text" not in text
            assert text.index(f", in {listener.__name__}\n") < text.index(f", in {innermost}\n")
            # It is named in each way in which the admin and REST name a message.
            (batch,) = worker.dispatcher.batches()
            (member,) = [each.delivery.member for each in batch.messages]
            slot, _, sealed = call.id.partition("~")
            for name in (message_id(int(slot), member), f"{slot}.prepare.1.0~{sealed}"):
                assert stacks(name).workers == [one]
            # It is answered once, and again if somebody asks again.
            shop.run(reports.write_stacks(owner, []))
            next(steps)
            assert reads_stacks(shop, owner) == []
            shop.run(reports.ask_for_stacks(owner, f'[["{call.id}",{before_ms + 100_000}]]'))
            next(steps)
            assert [each.id for each in reads_stacks(shop, owner)] == [call.id]
            release()
            eventually(lambda: not worker.dispatcher.batches())
            shop.run(reports.ask_for_stacks(owner, f'[["{call.id}",{before_ms + 200_000}]]'))
            next(steps)
            (one,) = stacks(call.id).workers
            assert (one.call, one.stack.text, one.asked_ms) == (None, "", before_ms + 200_000)
        finally:
            release()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_call_that_exceeded_max_runtime_stays_in_the_report(shop: Any) -> None:
    topic = replace(get_config().topic("timed"), slots=1, max_runtime=0.1)
    go, began = threading.Event(), threading.Event()
    send(shop, topic, [1])
    with Worker(shop, topic, lambda message: hang_in_depth(began, go, ""), threads=1) as worker:
        try:
            assert began.wait(LONG)
            dispatcher = worker.dispatcher
            [hung] = dispatcher._pool.threads
            eventually(lambda: dispatcher._pool.threads != [hung], "replacing")
            one = duty_of(shop, batches=dispatcher.batches).report(1)
            assert [(call.topic, call.thread) for call in one.calls] == [
                ("timed", "rmq-executor-0 (replaced)")
            ]
            assert (one.running, one.taken) == (1, 0), "its successor is free"
            [stack] = worker_reports.stacks_of(dispatcher.batches(), [StackRequest(one.calls[0].id, 5)], 7)
            assert ", in hang_in_depth\n" in stack.text
        finally:
            go.set()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_stack_is_cut_to_its_innermost_calls(shop: Any) -> None:
    topic, go, began = get_config().topic("timed"), threading.Event(), threading.Event()

    def even(depth: int) -> None:
        odd(depth - 1) if depth else hang_in_depth(began, go, "")

    def odd(depth: int) -> None:
        even(depth - 1)

    send(shop, topic, [1])
    with Worker(shop, topic, lambda message: even(200)) as worker:
        try:
            assert began.wait(LONG)
            batches = worker.dispatcher.batches()
            (call,) = worker_reports.running_calls(batches, 1)
            (one,) = worker_reports.stacks_of(batches, [StackRequest(call.id, 5)], 7)
            assert (one.id, one.asked_ms, one.at_ms) == (call.id, 5, 7)
            assert LONGEST_STACK / 2 < len(one.text) <= LONGEST_STACK
            assert one.text.startswith('  File "') and ", in hang_in_depth\n" in one.text
        finally:
            go.set()


def test_requests_for_stacks_that_were_not_read_stay(shop: Any) -> None:
    slot_ids = [sealed_id("timed", 0, b"%d" % number) for number in range(MOST_STACKS + 2)]
    join(shop, "w" * 10, "timed")
    calls = tuple(RunningCall("timed", one, 1, 1, "t") for one in slot_ids)
    report(shop, "w" * 10, state="working", calls=calls)
    for one in (slot_ids[0], slot_ids[1], slot_ids[0]):
        ask_for(one)
    (asked,) = shop.run(reports.read_stack_requests(["w" * 10]))
    assert [one.id for one in asked] == [slot_ids[1], slot_ids[0]]
    # A request to be quiet is another one, and what is older than a minute has been read or lost.
    ask("w" * 10, "quiet")
    old = StackRequest("0~old", shop.now_ms() - REQUEST_MS - 1)
    shop.run(reports.ask_for_stacks("w" * 10, encode_stack_requests([old])))
    for one in slot_ids:
        ask_for(one)
    (asked,) = shop.run(reports.read_stack_requests(["w" * 10]))
    assert [one.id for one in asked] == slot_ids[-MOST_STACKS:]
    assert shop.run(reports.read_requests("w" * 10)).request.startswith("quiet ")


@pytest.mark.parametrize("text", ["x", "[]", "1", "[[1]]", '[["id","now"]]', "[" * 100_000, '{"a":1}'])
def test_what_is_no_request_for_stacks_is_not_answered(shop: Any, text: str) -> None:
    duty = duty_of(shop)
    shop.run(reports.ask_for_stacks("w", text))
    with closing(duty()) as steps:
        next(steps)
        assert reads_stacks(shop, "w") == []
        assert decode_stacks(text.encode()) == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_redis_forgets_stacks_and_requests_for_them(shop: Any) -> None:
    join(shop, "w" * 10, "timed")
    one = sealed_id("timed", 0, b"1")
    report(shop, "w" * 10, state="working", calls=(RunningCall("timed", one, 1, 1, "t"),))
    ask_for(one)
    assert 0 < shop.client.pttl(worker_requests_key(shop.prefix)) <= REQUEST_MS
    duty = duty_of(shop, "w" * 10)
    with closing(duty()) as steps:
        next(steps)
        assert 0 < shop.client.pttl(stacks_key(shop.prefix)) <= STACKS_MS
        # A foreign value in their place delays no other request, and no report.
        shop.client.set(stacks_key(shop.prefix), "foreign")
        shop.run(reports.ask_for_stacks("w" * 10, "[]"))
        next(steps)
        assert list(shop.run(read_reports())) == ["w" * 10]
        with pytest.raises(WrongType):
            stacks(one)


def test_a_stack_is_asked_only_of_a_worker_that_runs_the_message(shop: Any) -> None:
    one, other = (sealed_id("timed", 0, raw) for raw in (b"1", b"2"))
    join(shop, "w" * 10, "timed")
    report(shop, "w" * 10, calls=(RunningCall("timed", one, 1, 1, "t"),))
    with pytest.raises(OperationRefused, match="takes no requests"):
        ask_for(one)
    (shown,) = stacks(one).workers
    assert (shown.asked_ms, shown.stack, shown.is_awaited) == (None, None, False)
    report(shop, "w" * 10, calls=(RunningCall("timed", one, 1, 1, "t"),), state="working")
    with pytest.raises(OperationRefused, match="no worker reports"):
        ask_for(other)
    assert stacks(other).workers == []
    for call in (ask_for, stacks):
        with pytest.raises(InvalidRequest):
            call("nonsense")
        with pytest.raises(UnknownTopic):
            call(one, "unknown")
    # Another topic has other sealed ids, and who may not see bodies names no message by a guess of one.
    plain = message_id(0, b"1")
    assert ask_for(plain) == ["w" * 10]
    blind = Actor("tester", "test", permits=lambda permission: permission != Permission.VIEW_BODIES)
    with pytest.raises(OperationRefused, match="no worker reports"):
        Operations(blind).ask_for_stacks("timed", plain)


@pytest.mark.django_db
def test_the_page_of_a_stack_asks_and_shows_the_answer(shop: Any, staff: Callable[..., Client]) -> None:
    one = sealed_id("timed", 0, b"1")
    join(shop, "0123456789", "timed")
    now_ms = shop.now_ms()
    call = RunningCall("timed", one, now_ms, 1, "rmq-executor-<b>7</b>")
    report(shop, "0123456789", state="working", calls=(call,), running=1)
    client, viewer = staff("view_topic", "view_stack"), staff("view_topic")
    running, page = url("running"), url("stack", "timed", one)
    assert page in client.get(running).content.decode()
    assert page not in viewer.get(running).content.decode()
    assert viewer.get(page).status_code == viewer.post(page).status_code == 403

    def shown(name: str = "stack") -> str:
        answer = client.get(url(name, "timed", one))
        assert answer.status_code == 200
        return html.unescape(answer.content.decode())

    assert "has not been asked" in shown() and "Ask for the stack" in shown()
    answer = client.post(page)
    assert (answer.status_code, answer["Location"]) == (302, page)
    for name in ("stack", "stack_live"):
        assert "answers with its next report" in shown(name)
    assert "Ask again" in shown()
    (entry,) = LogEntry.objects.values_list("object_id", "change_message")
    asked_of = f"message {one}, worker 0123456789, process 41 on alpha"
    assert entry == ("timed", f"Show stack ({asked_of}): 1 asked (admin)")
    (asked,) = shop.run(reports.read_stack_requests(["0123456789"]))
    # Whatever the worker is, people are not left waiting.
    old = [StackRequest(one, asked[0].asked_ms - SILENT_MS - 1)]
    shop.run(reports.ask_for_stacks("0123456789", encode_stack_requests(old)))
    assert "There is no answer." in shown()
    answered = Stack(one, asked[0].asked_ms, now_ms, "  File <script>, in hang\n")
    shop.run(reports.write_stacks("0123456789", [answered]))
    raw = client.get(page).content.decode()
    assert "File &lt;script&gt;, in hang" in raw and "There is no answer." not in raw
    shop.run(reports.write_stacks("0123456789", [answered._replace(text="")]))
    assert "the worker did not run the message" in shown()
    # What no worker runs is said, in place of an error.
    other = url("stack", "timed", sealed_id("timed", 0, b"2"))
    followed = client.post(other, follow=True).content.decode()
    assert "o worker reports that it runs this message" in followed
    for bad in ("nonsense", "9" * 2_000):
        address = url("stack", "timed", bad)
        assert client.get(address).status_code == client.post(address).status_code == 404
    live = url("stack_live", "timed", "nonsense")
    assert client.get(live).status_code == 404


@pytest.mark.django_db
def test_rest_asks_for_a_stack_and_returns_it(shop: Any, staff: Callable[..., Client]) -> None:
    one = sealed_id("timed", 0, b"1")
    join(shop, "0123456789", "timed")
    call = RunningCall("timed", one, shop.now_ms(), 1, "loop")
    report(shop, "0123456789", state="working", calls=(call,), pid=4242)
    client, route = staff("view_topic", "view_stack"), f"/api/rmq/topics/timed/messages/{one}/stack/"
    answer = client.post(route)
    assert (answer.status_code, answer.json()) == (202, {"workers": ["0123456789"]})
    (found,) = client.get(route).json()["results"]
    assert (found["worker"], found["host"]) == ("0123456789", "alpha")
    assert (found["pid"], found["thread"]) == (4242, "loop")
    assert (found["awaited"], found["at_ms"], found["stack"]) == (True, None, "")
    stack = Stack(one, found["asked_ms"], found["asked_ms"] + 1, "  File\n")
    shop.run(reports.write_stacks("0123456789", [stack]))
    (found,) = client.get(route).json()["results"]
    assert (found["awaited"], found["at_ms"], found["stack"]) == (False, stack.at_ms, "  File\n")
    for permissions in (["view_topic"], ["view_stack"]):
        other = staff(*permissions)
        assert other.get(route).status_code == other.post(route).status_code == 403
    assert client.post(route.replace(one, sealed_id("timed", 0, b"2"))).status_code == 409
    assert client.get(route.replace(one, "nonsense")).status_code == 400
    by_body = "/api/rmq/topics/timed/messages/-/stack/?body=1"
    assert client.get(by_body).status_code == 403
    may_read = staff("view_topic", "view_stack", "view_bodies")
    assert may_read.get(by_body).json()["results"][0]["worker"] == "0123456789"


def test_a_shared_answer_about_workers_is_shown_to_each_actor_as_he_may_see_it(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "KEPT_MS", 60_000)
    monkeypatch.setattr(shared_reads, "OTHERS_SECONDS", 3_600.0)
    join(shop, "live", "timed", "other")
    long_ago = shop.now_ms() - 24 * 3_600_000
    call = RunningCall("timed", "1~id", long_ago, 1, "thread", 0.5, "card 4111")
    report(shop, "live", calls=(call,), running=1, threads=1, taken=1)
    rule = TopicRule(lambda topic, needed: topic.name == "timed")
    viewer = Operations(Actor("viewer", "test", permits=lambda needed: needed is Permission.VIEW, rule=rule))

    def seen(by: Operations) -> tuple[str, set[str]]:
        overview = shared_reads.shared_workers(by)
        (running,), (stuck,) = overview.running, overview.stuck
        return running.call.progress_text, {topic.name for topic in stuck.worker.member.worker.topics}

    for _ in range(2):
        assert seen(viewer) == ("", {"timed"})
        assert seen(operations()) == ("card 4111", {"timed", "other"})


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_worker_samples_the_counters_of_former_slots_too(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_registry, "listeners", lambda: {"timed": Listener("timed", HeldListener())})
    sampled: list[int] = []

    def sampling(_broker: object, topics: Any, _minutes: int, _is_ours: object, with_slots: Any) -> list[Any]:
        sampled.extend(with_slots(topic).slots for topic in topics if topic.name == "timed")
        return []

    monkeypatch.setattr(recorded_history, "sampling", sampling)
    topic = get_config().topic("timed")
    shop.define(topic)
    shop.redefine("timed", lambda known: {**known, "reslot": {"former": [8]}})
    WorkerProcess([topic], ProcessOptions(threads=1))
    assert sampled == [8]
