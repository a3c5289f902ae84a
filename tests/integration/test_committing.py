"""What waits for a commit: removals in order with sends, and results that know a rollback the moment it happens.

The garbage collector is off in all of these: nothing may wait for it.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.db import connections as databases
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, TransactionTestCase, override_settings
from django.urls import path
from django.utils import timezone

from django_rmq import (
    ConfigurationError,
    InvalidMessage,
    RemoveResult,
    SendResult,
    ServerUnavailable,
    UnknownTopic,
    acancel_message,
    aremove_message,
    cancel_message,
    connections,
    ensure_message,
    remove_message,
    send_message,
    send_messages,
    signals,
)
from django_rmq.conf import get_config
from django_rmq.core import lua
from django_rmq.core.producer.bulk_send import ROUND_TRIP
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.sending.on_commit import failed_sends
from django_rmq.testing import RMQTestMixin, assert_message_sent, assert_no_messages, captured_messages
from tests.support.brokers import direct
from tests.support.sends import Undo, counted_trips, listening, reslot_until, statuses, waiting
from tests.support.servers import RedisCluster, TcpProxy

pytestmark = pytest.mark.django_db(transaction=True)

TOPICS = {
    "prices": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5},
    "renders": {"TYPE": "priority", "SLOTS": 4},
    "orders": {"TYPE": "fixed_time", "SLOTS": 4},
    "keyed": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5, "IDENTITY": "key"},
}


def configured(url: str, prefix: str, **rmq: Any) -> override_settings:
    return override_settings(RMQ={"REDIS": url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, **rmq})


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    with configured(redis_url, prefix):
        yield


@pytest.fixture(autouse=True, scope="module")
def _without_garbage_collector() -> Iterator[None]:
    # What the files before have left is not ours, nor is a socket among it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_removal_waits_for_the_commit_and_is_completed_by_it() -> None:
    send_message("prices", 1)
    with transaction.atomic():
        found = remove_message("prices", 1)
        missing = remove_message("prices", 2)
        assert (found, found.status, found.topic, found.member) == ("pending", "pending", "prices", b"1")
        assert waiting("prices") == [b"1"]
    assert statuses(found, missing) == ["waiting", "not_found"]
    assert waiting("prices") == []


def test_a_removal_of_a_rolled_back_transaction_or_savepoint_removes_nothing() -> None:
    send_messages("prices", [1, 2])
    with suppress(Undo), transaction.atomic():
        lost = remove_message("prices", 1)
        raise Undo
    assert statuses(lost) == ["discarded"]
    with transaction.atomic():
        with suppress(Undo), transaction.atomic():
            lost = remove_message("prices", 1)
            raise Undo
        assert statuses(lost) == ["discarded"]
        done = remove_message("prices", 2)
    assert statuses(lost, done) == ["discarded", "waiting"]
    assert waiting("prices") == [b"1"]


def test_a_cancellation_obeys_the_commit_like_a_removal() -> None:
    send_messages("prices", [1, 2])
    with suppress(Undo), transaction.atomic():
        lost = cancel_message("prices", 1)
        raise Undo
    with transaction.atomic():
        found = cancel_message("prices", 1)
        assert found == "pending"
        assert cancel_message("prices", 2, on_commit=False) == "waiting"
    assert statuses(lost, found) == ["discarded", "waiting"]
    assert async_to_sync(acancel_message)("prices", 1) == "not_found"


def test_outside_a_transaction_the_result_is_the_word_itself() -> None:
    send_message("keyed", 1, key="k")
    found = remove_message("keyed", key="k")
    assert isinstance(found, str)
    assert (found, found.status, f"{found}") == ("waiting", "waiting", "waiting")
    assert {"waiting": 1}[found] == 1
    assert pickle.loads(pickle.dumps(found)) == "waiting"


def test_on_commit_false_removes_now_and_the_settings_may_say_so(redis_url: str, prefix: str) -> None:
    send_messages("prices", [1, 2, 3])
    with suppress(Undo), transaction.atomic():
        assert remove_message("prices", 1, on_commit=False) == "waiting"
        with configured(redis_url, prefix, ON_COMMIT=False):
            assert remove_message("prices", 2) == "waiting"
            assert remove_message("prices", 3, on_commit=True) == "pending"
        raise Undo
    assert waiting("prices") == [b"3"]


def test_coroutines_remove_alike() -> None:
    send_message("prices", 1)

    async def both() -> list[str]:
        return [await aremove_message("prices", 1), await aremove_message("prices", body=1)]

    assert async_to_sync(both)() == ["waiting", "not_found"]
    send_message("prices", 1)
    with transaction.atomic():
        assert async_to_sync(aremove_message)("prices", 1, using="default") == "pending"
    assert waiting("prices") == []


def test_a_removal_that_cannot_be_is_refused_at_the_call() -> None:
    with transaction.atomic():
        with pytest.raises(UnknownTopic):
            remove_message("price", 1)
        with pytest.raises(InvalidMessage, match="pass key="):
            remove_message("keyed", 1)


SENDS: dict[str, dict[str, Any]] = {
    "prices": {},
    "renders": {"priority": 50},
    "orders": {"fixed_time": timezone.now() + timedelta(hours=1)},
    "keyed": {"key": "k"},
}


def remove(topic: str) -> RemoveResult:
    return remove_message(topic, key="k") if topic == "keyed" else remove_message(topic, 1)


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("topic", list(SENDS))
def test_a_send_and_a_removal_of_one_message_end_as_their_order_says_in_one_pipeline(
    topic: str, was_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = send_message(topic, 1, **SENDS[topic])
    if not was_there:
        remove(topic)
    with counted_trips(monkeypatch) as trips:
        with transaction.atomic():
            sent, removed = send_message(topic, 1, **SENDS[topic]), remove(topic)
        assert len(trips) == 1
        assert sent.status == "stored" if not was_there else sent.status in ("merged", "replaced")
        assert removed.status == "waiting"
        assert waiting(topic) == []
        if was_there:
            send_message(topic, 1, **SENDS[topic])
        trips.clear()
        with transaction.atomic():
            removed, sent = remove(topic), send_message(topic, 1, **SENDS[topic])
        assert len(trips) == 1
    assert (removed.status, sent.status) == ("waiting" if was_there else "not_found", "stored")
    assert waiting(topic) == [first.member]


@pytest.mark.parametrize("order", list(permutations(["send", "ensure", "remove", "remove other"])))
def test_whatever_a_transaction_does_to_one_message_happens_in_order(order: tuple[str, ...]) -> None:
    acts: dict[str, Callable[[], SendResult | RemoveResult]] = {
        "send": lambda: send_message("prices", 1),
        "ensure": lambda: ensure_message("prices", 1),
        "remove": lambda: remove_message("prices", 1),
        "remove other": lambda: remove_message("prices", 2),
    }
    with transaction.atomic():
        results = {name: acts[name]() for name in order}
    here, expected = False, {}
    for name in order:
        if name == "send":
            expected[name], here = "merged" if here else "stored", True
        elif name == "ensure":
            expected[name], here = "present" if here else "stored", True
        elif name == "remove":
            expected[name], here = "waiting" if here else "not_found", False
        else:
            expected[name] = "not_found"
    assert {name: result.status for name, result in results.items()} == expected
    assert waiting("prices") == ([b"1"] if here else [])


def test_the_order_holds_over_several_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = range(ROUND_TRIP)
    build = RedisBroker.pipeline
    halves: list[str] = []

    def pipeline(self: RedisBroker) -> Any:
        made = build(self)

        def noted(half: str, run: Callable[[], Any]) -> Callable[[], Any]:
            def noting() -> Any:
                halves.append(half)
                return run()

            return noting

        made.send = noted("send", made.send)  # type: ignore[method-assign]
        made.receive = noted("receive", made.receive)  # type: ignore[method-assign]
        return made

    connections.agree(get_config().topic("prices"))
    monkeypatch.setattr(RedisBroker, "pipeline", pipeline)
    with transaction.atomic():
        send_messages("prices", bodies)
        removed = [remove_message("prices", body) for body in (0, ROUND_TRIP - 1)]
        again = send_message("prices", 0)
    # Two trips on two connections could overtake each other.
    assert halves == ["send", "receive"] * 2
    assert statuses(*removed, again) == ["waiting", "waiting", "stored"]
    topic, broker = get_config().topic("prices"), direct(connections.get_broker())
    assert sum(broker.count(topic, slot).store for slot in range(4)) == ROUND_TRIP - 1


@pytest.mark.parametrize("is_removed_last", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("at", ["begun", "shut", "finished"])
def test_the_order_holds_while_the_topic_is_re_slotted(at: str, known: bool, is_removed_last: bool) -> None:
    send_messages("prices", range(40))
    wider = reslot_until("prices", at)
    if known:
        send_messages("prices", range(100, 140))  # refused by some slot, and so the new count is known
    with transaction.atomic():
        earlier = [remove_message("prices", body) for body in (*range(40), *range(100, 140))]
        for body in range(40, 80):
            if is_removed_last:
                send_message("prices", body)
                remove_message("prices", body)
            else:
                remove_message("prices", body)
                send_message("prices", body)
    if known:
        assert statuses(*earlier) == ["waiting"] * 80
    pages = [direct(connections.get_broker()).list_messages(wider, slot, "store") for slot in range(16)]
    there = {int(entry.member) for page in pages for entry in page.entries}
    assert there & set(range(40, 80)) == (set() if is_removed_last else set(range(40, 80)))


@pytest.mark.parametrize("known", ["remove", "send_merge"])
@pytest.mark.parametrize("is_removed_last", [True, False])
def test_the_order_holds_where_redis_has_forgotten_some_of_the_scripts(
    known: str, is_removed_last: bool, redis_client: redis.Redis
) -> None:
    # A pipeline: from now on this process believes that Redis has all scripts.
    send_messages("prices", [1, 2])
    remove_message("prices", 1)
    redis_client.script_flush()
    redis_client.script_load(lua.load(known).text)
    with transaction.atomic():
        if is_removed_last:
            send_message("prices", 1)
        remove_message("prices", 1)
        if not is_removed_last:
            send_message("prices", 1)
    assert waiting("prices") == [*([] if is_removed_last else [b"1"]), b"2"]


@pytest.mark.parametrize("known", ["remove", "send_merge"])
@pytest.mark.parametrize("is_removed_last", [True, False])
def test_the_order_holds_where_nodes_of_a_cluster_have_forgotten_some_of_the_scripts(
    known: str, is_removed_last: bool, redis_cluster: RedisCluster, prefix: str
) -> None:
    with configured("", prefix, REDIS={"CLUSTER": f"redis://127.0.0.1:{redis_cluster.primaries[0].port}"}):
        send_messages("prices", range(40))  # every slot, so every node believes that it has all scripts
        for node in redis_cluster.primaries:
            with redis.Redis.from_url(node.url) as client:
                client.script_flush()
                client.script_load(lua.load(known).text)
        with transaction.atomic():
            for body in range(40):
                if is_removed_last:
                    send_message("prices", body)
                remove_message("prices", body)
                if not is_removed_last:
                    send_message("prices", body)
        assert len(waiting("prices")) == (0 if is_removed_last else 40)
        connections.close()


def send_and_undo() -> SendResult:
    with suppress(Undo), transaction.atomic():
        result = send_message("prices", "lost")
        assert result.status == "pending"
        raise Undo
    return result


class WithRealTransactions(RMQTestMixin, TransactionTestCase):
    def test_the_transaction_is_rolled_back(self) -> None:
        assert send_and_undo().status == "discarded"
        self.assertNoMessages("prices")
        self.assertMessageSent("prices", count=0)

    def test_an_exception_passes_through_nested_blocks(self) -> None:
        with suppress(Undo), transaction.atomic():
            outer = send_message("prices", "outer")
            with transaction.atomic(), transaction.atomic(savepoint=False):
                inner = send_message("prices", "inner")
                raise Undo
        assert statuses(outer, inner) == ["discarded", "discarded"]
        self.assertNoMessages()

    def test_a_block_without_a_savepoint_dooms_the_one_around_it(self) -> None:
        with transaction.atomic():
            kept = send_message("prices", "kept")
            with transaction.atomic():
                with suppress(Undo), transaction.atomic(savepoint=False):
                    lost = send_message("prices", "lost")
                    raise Undo
                assert statuses(lost) == ["pending"]
            assert lost.status == "discarded"
        assert statuses(kept, lost) == ["stored", "discarded"]

    def test_set_rollback_needs_no_exception(self) -> None:
        with transaction.atomic():
            lost = send_message("prices", 1)
            transaction.set_rollback(True)
        assert lost.status == "discarded"
        self.assertNoMessages()

    def test_a_transaction_after_another_one(self) -> None:
        lost = send_and_undo()
        with transaction.atomic():
            stored = send_message("prices", "lost")
            assert statuses(lost, stored) == ["discarded", "pending"]
        assert statuses(lost, stored) == ["discarded", "stored"]
        self.assertMessageSent("prices", count=1)


class WithoutCommits(RMQTestMixin, TestCase):
    def test_a_block_is_rolled_back_while_callbacks_are_captured(self) -> None:
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            lost = send_and_undo()
            assert lost.status == "discarded"
            kept = send_message("prices", "kept")
        assert statuses(lost, kept) == ["discarded", "stored"]
        assert len(callbacks) == 1
        self.assertMessageSent("prices", count=1, body="kept")

    def test_callbacks_that_are_captured_send_and_remove_in_order(self) -> None:
        with self.captureOnCommitCallbacks(execute=True):
            first, second = send_message("prices", 1), send_message("prices", 2)
            removed = remove_message("prices", 1)
            assert removed.status == "pending"
        assert statuses(first, second, removed) == ["stored", "stored", "waiting"]
        assert waiting("prices") == [b"2"]

    def test_callbacks_that_a_test_runs_by_itself_send_their_own_messages_only(self) -> None:
        with self.captureOnCommitCallbacks() as ours:
            first = send_message("prices", 1)
        with self.captureOnCommitCallbacks() as theirs:
            second = send_message("prices", 2)
        assert statuses(first, second) == ["pending", "pending"]
        for callback in ours:
            callback()
        assert statuses(first, second) == ["stored", "pending"]
        for callback in (*ours, *theirs):
            callback()
        assert statuses(first, second) == ["stored", "stored"]
        assert waiting("prices") == [b"1", b"2"]

    def test_a_callback_that_sends_is_run_as_well(self) -> None:
        results: list[SendResult] = []
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: results.append(send_message("prices", 1)))
        assert statuses(*results) == ["stored"]


@pytest.mark.parametrize("deliver", [False, True])
def test_captured_messages_know_a_rollback_too(deliver: bool) -> None:
    with captured_messages(deliver=deliver) as sent:
        with suppress(Undo), transaction.atomic():
            send_message("prices", 1)
            lost = remove_message("prices", 1)
            raise Undo
        assert statuses(lost, *(message.result for message in sent)) == ["discarded", "discarded"]
        assert_no_messages()
        with transaction.atomic():
            found = remove_message("prices", 1)
            send_message("prices", 1, replicas=0)
            with suppress(Undo), transaction.atomic():
                send_message("prices", 2)
                raise Undo
            assert_message_sent("prices", count=1)
    assert found.status == "not_found"
    assert statuses(*(message.result for message in sent)) == ["discarded", "stored", "discarded"]
    assert waiting("prices") == ([b"1"] if deliver else [])


def view(request: HttpRequest, ends: str) -> HttpResponse:
    remove_message("prices", "old")
    result = send_message("prices", "new")
    request.META["results"].append(result)
    if ends == "error":
        raise Undo
    return HttpResponse(result.status)


urlpatterns = [path("<ends>/", view)]


@override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[], ALLOWED_HOSTS=["testserver"])
def test_a_request_is_a_transaction_with_atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    send_message("prices", "old")
    results: list[SendResult] = []
    client = Client(raise_request_exception=False)
    assert client.get("/error/", results=results).status_code == 500
    assert statuses(*results) == ["discarded"]
    assert waiting("prices") == [b'"old"']
    assert client.get("/well/", results=results).content == b"pending"
    assert statuses(*results) == ["discarded", "stored"]
    assert waiting("prices") == [b'"new"']


@pytest.fixture
def two(tmp_path: Path, django_db_blocker: Any) -> Iterator[Any]:
    """Two databases of files, without tables: ``one`` and ``other``."""
    files = {"ENGINE": "django.db.backends.sqlite3", "OPTIONS": {}, "HOST": "", "PORT": ""}
    for name in ("one", "other"):
        databases.databases[name] = {**databases.databases["default"], **files, "NAME": tmp_path / name}
    with django_db_blocker.unblock():
        yield
        for name in ("one", "other"):
            databases[name].close()
            del databases[name], databases.databases[name]


@pytest.mark.usefixtures("two")
def test_each_database_has_its_own_commit() -> None:
    with transaction.atomic(using="other"):
        with suppress(Undo), transaction.atomic(using="one"):
            lost = send_message("prices", "of one", using="one")
            kept = send_message("prices", "of other", using="other")
            removed = remove_message("prices", "of other", using="other")
            raise Undo
        assert statuses(lost, kept, removed) == ["discarded", "pending", "pending"]
        with transaction.atomic(using="one"):
            first = send_message("prices", "first", using="one")
        assert statuses(first, kept) == ["stored", "pending"]
        assert send_message("prices", "now").status == "stored"
    assert statuses(kept, removed) == ["stored", "waiting"]
    assert waiting("prices") == [b'"first"', b'"now"']


@pytest.mark.usefixtures("two")
def test_a_connection_that_is_closed_in_a_transaction_has_rolled_back() -> None:
    with transaction.atomic(using="one"):
        lost = send_message("prices", 1, using="one")
        databases["one"].close()
        assert lost.status == "discarded"
    assert waiting("prices") == []


@pytest.mark.usefixtures("two")
def test_autocommit_that_is_turned_off_by_hand() -> None:
    transaction.set_autocommit(False, using="other")
    for act in (send_message, remove_message):
        said = r"autocommit is off on the database 'other'.*on_commit=False"
        with pytest.raises(ConfigurationError, match=said):
            act("prices", 1, using="other")
        act("prices", 0, using="other", on_commit=False)
    with transaction.atomic(using="other"):
        lost = send_message("prices", 1, using="other")
    assert statuses(lost) == ["pending"]
    transaction.rollback(using="other")
    assert lost.status == "discarded"
    with transaction.atomic(using="other"):
        sent = send_message("prices", 2, using="other")
        removed = remove_message("prices", 2, using="other")
        also = send_message("prices", 3, using="other")
    transaction.commit(using="other")
    assert statuses(sent, removed, also) == ["pending"] * 3
    transaction.set_autocommit(True, using="other")
    assert statuses(lost, sent, removed, also) == ["discarded", "stored", "waiting", "stored"]
    assert waiting("prices") == [b"3"]


def test_callbacks_may_send_and_remove_and_begin_transactions_of_their_own() -> None:
    results: dict[str, Any] = {}

    def first() -> None:
        results["at once"] = remove_message("prices", "of the transaction")
        with transaction.atomic():
            results["inner"] = send_message("prices", "inner")
            results["also inner"] = remove_message("prices", "inner")
        with suppress(Undo), transaction.atomic():
            results["lost"] = send_message("prices", "lost")
            raise Undo
        assert results["lost"].status == "discarded"
        assert outer.status == "pending"

    with transaction.atomic():
        transaction.on_commit(first)
        outer = send_message("prices", "of the transaction")
        transaction.on_commit(lambda: results.update(last=remove_message("prices", "of the transaction")))
        after = send_message("prices", "after")
    assert {name: result.status for name, result in results.items()} == {
        "at once": "not_found",
        "inner": "stored",
        "also inner": "waiting",
        "lost": "discarded",
        "last": "waiting",
    }
    assert statuses(outer, after) == ["stored", "stored"]
    assert waiting("prices") == [b'"after"']


def test_a_callback_that_raises_before_ours_stops_ours_and_the_result_says_so() -> None:
    def broken() -> None:
        raise Undo

    with suppress(Undo), transaction.atomic():
        transaction.on_commit(broken)
        lost = send_message("prices", 1)
    assert lost.status == "discarded"
    assert waiting("prices") == []


@pytest.mark.parametrize("in_a_savepoint", [False, True])
def test_what_was_rolled_back_is_not_kept_in_memory(in_a_savepoint: bool) -> None:
    send_message("prices", 1)  # what is made once is made
    tracemalloc.start()
    try:
        with transaction.atomic():
            before = tracemalloc.get_traced_memory()[0]
            with suppress(Undo), transaction.atomic():
                for n in range(100):
                    send_message("prices", f"{n:0100000d}")
                assert tracemalloc.get_traced_memory()[0] - before > 10_000_000
                raise Undo
            if in_a_savepoint:
                assert tracemalloc.get_traced_memory()[0] - before < 500_000
        assert tracemalloc.get_traced_memory()[0] - before < 500_000
    finally:
        tracemalloc.stop()


def test_a_connection_remembers_no_call_that_is_over() -> None:
    for _ in range(20):
        send_and_undo()
        with transaction.atomic():
            send_message("prices", 1)
            for _ in range(20):
                send_and_undo()
            kept = send_message("prices", 2)
            assert len(kept._call().others) <= 3  # type: ignore[attr-defined]


def test_what_was_sent_is_not_kept_by_its_callback() -> None:
    with transaction.atomic():
        result = send_message("prices", 1)
        call = result._call()  # type: ignore[attr-defined]
        assert len(call.messages) == 1
    assert (len(call.messages), len(call.results)) == (0, 0)


def test_a_result_that_waits_can_be_shown_copied_and_pickled() -> None:
    send_message("prices", 1)
    with transaction.atomic():
        sent, removed = send_message("prices", 2), remove_message("prices", 1)
        copies = [pickle.loads(pickle.dumps(result)) for result in (sent, removed)]
        assert isinstance(sent, SendResult)
        assert "status='pending'" in repr(sent)
    assert "status='stored'" in repr(sent)
    assert [copied.status for copied in copies] == ["pending", "pending"]
    assert pickle.loads(pickle.dumps(removed)).status == copy.copy(removed).status == "waiting"
    assert copy.copy(sent).score == sent.score > 0
    assert [result.status for result in (sent, removed)] == ["stored", "waiting"]
    assert removed == "pending"  # a word does not change; its status does


def test_redis_unavailable_raises_for_what_is_removed_at_once(proxied: TcpProxy) -> None:
    proxied.cut()
    with pytest.raises(ServerUnavailable):
        remove_message("prices", 1)


def test_redis_unavailable_at_the_commit_is_logged_and_signalled(
    proxied: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    before = failed_sends["prices"]
    caplog.set_level(logging.ERROR, "django_rmq.sending")
    with listening(signals.remove_failed) as told, transaction.atomic():
        removals = [remove_message("prices", 1), remove_message("prices", 2)]
        sent = send_message("prices", 3)
        proxied.cut()
    assert statuses(*removals, sent) == ["failed"] * 3
    (call,) = told
    assert (call["topic"], call["results"], type(call["error"])) == ("prices", removals, ServerUnavailable)
    assert failed_sends["prices"] - before == 1
    events = [record.__dict__["rmq_event"] for record in caplog.records]
    assert sorted(events) == ["remove_failed", "send_failed"]
    assert "2 message(s) of topic prices could not be removed after the database commit" in caplog.text


def test_what_is_only_captured_is_not_removed_from_a_server() -> None:
    send_message("prices", 1)
    with captured_messages():
        assert remove_message("prices", 1) == "not_found"
        with transaction.atomic():
            result = remove_message("prices", 1)
        assert result == "pending"
    assert waiting("prices") == [b"1"]
    with captured_messages(deliver=True):
        assert remove_message("prices", 1) == "waiting"
