"""Sending from Django to a real Redis: at once, after the commit, not at all after a rollback, and when Redis is away."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
import redis
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import override_settings
from django.utils import timezone

from django_rmq import (
    InvalidMessage,
    Send,
    ServerUnavailable,
    SlotMoved,
    TopicFull,
    TopicMismatch,
    UnknownTopic,
    aensure_message,
    asend_message,
    asend_messages,
    connections,
    ensure_message,
    remove_message,
    send_message,
    send_messages,
    signals,
)
from django_rmq.conf import get_config
from django_rmq.core.model.body_codec import encode_body
from django_rmq.core.model.envelope import raw_body
from django_rmq.core.producer import bulk_send
from django_rmq.core.producer.bulk_send import ROUND_TRIP
from django_rmq.core.producer.placement import slot_of
from django_rmq.sending import on_commit
from django_rmq.sending.on_commit import failed_sends
from tests.support.brokers import direct
from tests.support.sends import Undo, counted_trips, listening, reslot_until, scores, statuses, waiting
from tests.support.servers import RedisCluster, RedisServer, ReplicaPair, SentinelGuard, TcpProxy

TOPICS = {
    "prices": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5},
    "renders": {"TYPE": "priority", "SLOTS": 4, "SLOT_BASIS": "shop"},
    "orders": {"TYPE": "fixed_time", "SLOTS": 4},
    "jobs": {"SLOTS": 4},
    "small": {"TYPE": "range_merge", "SLOTS": 1, "TIME_RANGE": 5, "MAX_BACKLOG": 2},
    "keyed": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 5, "IDENTITY": "key"},
}


def configured(url: str, prefix: str, **rmq: Any) -> override_settings:
    return override_settings(RMQ={"REDIS": url, "KEY_PREFIX": prefix, "TOPICS": TOPICS, **rmq})


@pytest.fixture(autouse=True)
def _settings(redis_url: str, prefix: str) -> Iterator[None]:
    with configured(redis_url, prefix):
        yield


def test_outside_a_transaction_a_send_goes_at_once_and_tells_what_happened() -> None:
    first = send_message("prices", {"sku": 1})
    again = send_message("prices", {"sku": 1})
    assert (first.status, again.status) == ("stored", "merged")
    assert first.score == again.score
    assert first.slot == slot_of(b'{"sku":1}', 4)
    assert waiting("prices") == [b'{"sku":1}']


@pytest.mark.parametrize("send", [send_message, ensure_message, send_messages, async_to_sync(asend_message)])
@pytest.mark.parametrize(
    ("topic", "option", "wanted"),
    [
        ("prices", "debounce", "takes time_range="),
        ("renders", "prio", "did you mean 'priority'? Topic renders has the type priority"),
        ("orders", "eta", "takes fixed_time= (an aware datetime)"),
        ("jobs", "countdown", "takes delay="),
        ("nobody", "eta", "has no option 'eta'"),
    ],
)
def test_an_unknown_option_of_a_send_names_the_one_of_the_topic(
    send: Callable[..., Any], topic: str, option: str, wanted: str
) -> None:
    with pytest.raises(TypeError) as caught:
        send(topic, [], **{option: 5})
    assert wanted in str(caught.value)


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.django_db(transaction=True)
def test_what_cannot_be_sent_is_refused_at_the_call(in_transaction: bool) -> None:
    with transaction.atomic() if in_transaction else nullcontext():
        with pytest.raises(UnknownTopic, match="did you mean 'prices'"):
            send_message("price", {})
        with pytest.raises(InvalidMessage, match="priority"):
            send_message("renders", {"shop": 1}, priority=3)
        with pytest.raises(InvalidMessage, match="SLOT_BASIS"):
            send_message("renders", {"sku": 1}, priority=30)
    assert waiting("renders") == []


def test_a_full_slot_raises_for_one_message_and_is_a_result_among_many() -> None:
    assert [result.status for result in send_messages("small", [1, 2, 3])] == ["stored", "stored", "refused"]
    with pytest.raises(TopicFull, match="MAX_BACKLOG = 2"):
        send_message("small", 4)
    assert send_message("small", 1).status == "merged"


def test_many_messages_share_options_or_have_their_own() -> None:
    results = send_messages(
        "renders",
        [{"sku": 1, "shop": 7}, Send({"sku": 2, "shop": 7}, priority=900), Send({"sku": 3, "shop": 7})],
        priority=100,
    )
    assert [result.score for result in results] == [100.0, 900.0, 100.0]
    assert len({result.slot for result in results}) == 1


@pytest.mark.parametrize("bad", [0, 500, 999])
def test_one_bad_item_among_a_thousand_is_named_and_nothing_is_written(bad: int) -> None:
    bodies: list[Any] = list(range(1000))
    bodies[bad] = {1, 2}
    with pytest.raises(InvalidMessage, match=f"^item {bad}: body contains"):
        send_messages("prices", bodies)
    with pytest.raises(InvalidMessage, match=f"^item {bad}: body contains"):
        send_messages("prices", iter(bodies))
    assert waiting("prices") == []


def test_a_generator_is_consumed_in_chunks_and_says_how_far_it_came() -> None:
    drawn = 0

    def bodies() -> Iterator[Any]:
        nonlocal drawn
        for n in range(2 * ROUND_TRIP):
            drawn = n
            yield {1, 2} if n == ROUND_TRIP + 7 else n

    said = f"^item {ROUND_TRIP + 7}: .*; the {ROUND_TRIP} messages before it were sent$"
    with pytest.raises(InvalidMessage, match=said):
        send_messages("prices", bodies())
    assert drawn == 2 * ROUND_TRIP - 1
    topic, broker = get_config().topic("prices"), direct(connections.get_broker())
    assert sum(broker.count(topic, slot).store for slot in range(4)) == ROUND_TRIP


@pytest.mark.parametrize("topic", ["prices", "keyed"])
@pytest.mark.parametrize("own", [True, False])
def test_an_error_in_a_later_chunk_says_how_many_were_sent(proxied: TcpProxy, topic: str, own: bool) -> None:
    def bodies() -> Iterator[int]:
        yield from range(ROUND_TRIP)
        if not own:
            raise LookupError("the file ends here")
        proxied.cut()
        yield ROUND_TRIP

    with pytest.raises(ServerUnavailable if own else LookupError) as caught:
        send_messages(topic, bodies())
    if own:
        assert isinstance(caught.value, ServerUnavailable)
        assert caught.value.sent == ROUND_TRIP
    assert caught.value.__notes__ == [f"send_messages had sent {ROUND_TRIP} messages before"]


@pytest.mark.parametrize("topic", ["prices", "keyed", "jobs"])
def test_an_error_of_one_round_trip_says_how_many_were_sent_before_it(
    proxied: TcpProxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind it may have been sent, too. Who goes on from there loses none."""
    monkeypatch.setattr(bulk_send, "ROUND_TRIP", 10)
    bodies = ["LOST" if n == 15 else n for n in range(50)]
    proxied.drop_reply(b"LOST")
    items = [Send(body, key=str(body)) for body in bodies] if topic == "keyed" else bodies
    with listening(signals.message_sent) as announced, pytest.raises(ServerUnavailable) as caught:
        send_messages(topic, items)
    assert caught.value.sent == 10
    assert caught.value.__notes__ == ["send_messages had sent 10 messages before"]
    told = [result for call in announced for result in call["results"]]
    assert len(told) >= 10 and {result.status for result in told} == {"stored"}
    send_messages(topic, items[caught.value.sent :])
    declared, broker = get_config().topic(topic), direct(connections.get_broker())
    stored = [
        raw_body(declared, entry.member, entry.envelope)
        for slot in range(4)
        for entry in broker.list_messages(declared, slot, "store").entries
    ]
    assert set(stored) == {encode_body(declared, body) for body in bodies}


@pytest.mark.django_db(transaction=True)
def test_an_error_in_a_transaction_counts_nothing_as_sent() -> None:
    with transaction.atomic():
        send_messages("prices", [1, 2])
        with pytest.raises(InvalidMessage) as caught:
            send_messages("prices", iter([*range(ROUND_TRIP), {1, 2}]))
        transaction.set_rollback(True)
    assert caught.value.sent == 0
    assert waiting("prices") == []


@pytest.mark.parametrize("bodies", ["abc", b"abc", {"a": 1}])
def test_one_body_is_no_iterable_of_bodies(bodies: Any) -> None:
    with pytest.raises(TypeError, match="iterable of bodies"):
        send_messages("prices", bodies)


def test_nothing_to_send_is_fine() -> None:
    assert list(send_messages("prices", [])) == list(send_messages("prices", iter(()))) == []


def test_coroutines_send_alike() -> None:
    async def all_of_them() -> list[str]:
        one = await asend_message("prices", 1)
        two = await aensure_message("prices", 1)
        many = await asend_messages("prices", (n for n in range(3)))
        return [result.status for result in (one, two, *many)]

    assert async_to_sync(all_of_them)() == ["stored", "present", "stored", "merged", "stored"]


@pytest.mark.django_db(transaction=True)
def test_inside_a_transaction_a_send_waits_for_the_commit_and_is_completed_by_it() -> None:
    with transaction.atomic():
        result = send_message("prices", {"sku": 1})
        assert (result.status, result.ok) == ("pending", False)
        assert waiting("prices") == []
    assert (result.status, result.ok) == ("stored", True)
    assert result.score > 0
    assert waiting("prices") == [b'{"sku":1}']


@pytest.mark.django_db(transaction=True)
def test_what_a_transaction_sent_goes_in_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    send_messages("prices", range(100, 104))
    send_message("orders", 0, fixed_time=timezone.now() + timedelta(hours=1))
    with counted_trips(monkeypatch) as trips:
        with transaction.atomic():
            results = [send_message("prices", n) for n in range(20)]
            with transaction.atomic():
                results += send_messages("prices", [5, 50])
            results.append(send_message("orders", 1, fixed_time=timezone.now() + timedelta(hours=1)))
        assert len(trips) == 1
    assert statuses(*results) == ["stored"] * 20 + ["merged", "stored", "stored"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("more", [False, True])
def test_a_savepoint_that_is_rolled_back_takes_only_its_own_sends_along(more: bool) -> None:
    with transaction.atomic():
        kept = [send_message("prices", "before"), send_message("prices", "also before")]
        with suppress(Undo), transaction.atomic():
            lost = send_message("prices", "inside")
            with transaction.atomic():
                lost_too = send_message("prices", "deep inside")
            raise Undo
        if more:
            kept.append(send_message("prices", "after"))
    assert {result.status for result in kept} == {"stored"}
    assert len(waiting("prices")) == len(kept)
    assert lost.status == lost_too.status == "discarded"


@pytest.mark.django_db(transaction=True)
def test_on_commit_false_sends_now_whatever_becomes_of_the_transaction() -> None:
    with suppress(Undo), transaction.atomic():
        assert send_message("prices", 1, on_commit=False).status == "stored"
        assert statuses(*send_messages("prices", [1, 2], on_commit=False)) == ["merged", "stored"]
        raise Undo
    assert waiting("prices") == [b"1", b"2"]


@pytest.mark.django_db(transaction=True)
def test_a_project_may_send_at_once_by_default(redis_url: str, prefix: str) -> None:
    with configured(redis_url, prefix, ON_COMMIT=False), transaction.atomic():
        assert send_message("prices", 1).status == "stored"
        assert send_message("prices", 2, on_commit=True).status == "pending"


@pytest.mark.django_db(transaction=True)
def test_a_generator_inside_a_transaction_is_validated_at_the_call() -> None:
    with transaction.atomic(), pytest.raises(InvalidMessage, match=r"^item 7000: "):
        send_messages("prices", (n if n != 7000 else {1, 2} for n in range(8000)))
    assert waiting("prices") == []


@pytest.mark.django_db(transaction=True)
def test_the_other_callbacks_of_a_commit_run_in_their_order_and_see_what_was_sent() -> None:
    seen: list[Any] = []
    with transaction.atomic():
        transaction.on_commit(lambda: seen.append(waiting("prices")))
        result = send_message("prices", 1)
        transaction.on_commit(lambda: seen.append((waiting("prices"), result.status)))
    assert seen == [[], ([b"1"], "stored")]


@pytest.mark.django_db(transaction=True)
def test_even_a_fault_of_ours_at_the_commit_stops_no_other_callback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    send_message("prices", 1)
    with monkeypatch.context() as patch, transaction.atomic():
        sent, removed = send_message("prices", 2), remove_message("prices", 1)
        transaction.on_commit(lambda: seen.append("ran"))
        patch.setattr(connections.get_producer(), "attempt", None)
    assert (sent.status, removed.status, seen) == ("failed", "failed", ["ran"])
    assert "TypeError" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_full_slot_at_the_commit_is_refused_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "django_rmq.sending")
    with listening(signals.send_failed) as told, transaction.atomic():
        results = [send_message("small", n) for n in range(3)]
    assert statuses(*results) == ["stored", "stored", "refused"]
    assert [(len(call["results"]), type(call["error"])) for call in told] == [(1, TopicFull)]
    assert "MAX_BACKLOG" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_message_sent_is_raised_once_per_topic_and_call_or_commit() -> None:
    with listening(signals.message_sent) as sent, listening(signals.message_merged) as merged:
        send_messages("prices", [1, 2, 1])
        with transaction.atomic():
            send_message("prices", 3)
            send_message("keyed", 4, key="k")
            send_message("prices", 5)
            assert len(sent) == 1
    told, merges = (
        [(call["topic"], [result.member for result in call["results"]]) for call in calls]
        for calls in (sent, merged)
    )
    assert told == [("prices", [b"1", b"2", b"1"]), ("prices", [b"3", b"5"]), ("keyed", [b"k"])]
    assert merges == [("prices", [b"1"])]


def test_a_receiver_that_raises_stops_nothing() -> None:
    def broken(**kwargs: Any) -> None:
        raise RuntimeError

    signals.message_sent.connect(broken)
    try:
        assert send_message("prices", 1).status == "stored"
    finally:
        signals.message_sent.disconnect(broken)


def test_redis_away_raises_for_what_is_sent_at_once(proxied: TcpProxy) -> None:
    proxied.cut()
    for send in (lambda: send_message("prices", 1), lambda: send_messages("prices", [1, 2])):
        with pytest.raises(ServerUnavailable):
            send()
    proxied.mend()
    assert send_message("prices", 1).status == "stored"


@pytest.mark.django_db(transaction=True)
def test_redis_away_at_the_commit_is_logged_counted_and_signalled_and_stops_no_callback(
    proxied: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    before = failed_sends["prices"]
    caplog.set_level(logging.ERROR, "django_rmq.sending")
    with listening(signals.send_failed) as told, transaction.atomic():
        results = [send_message("prices", 1), send_message("prices", 2)]
        other = send_message("keyed", 3, key="k")
        transaction.on_commit(lambda: seen.append("ran"))
        proxied.cut()
    assert seen == ["ran"]
    assert {result.status for result in (*results, other)} == {"failed"}
    assert failed_sends["prices"] - before == 2
    assert [(call["topic"], call["results"]) for call in told] == [("prices", results), ("keyed", [other])]
    assert {type(call["error"]) for call in told} == {ServerUnavailable}
    assert "2 message(s) of topic prices could not be sent after the database commit" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_an_outage_under_many_commits_costs_one_line_and_is_counted_and_signalled_in_full(
    proxied: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    send_message("prices", 0)
    before = failed_sends["prices"]
    proxied.cut()
    with listening(signals.send_failed) as told, caplog.at_level(logging.ERROR, "django_rmq.sending"):
        for n in range(10):
            with transaction.atomic():
                send_message("prices", n)
    (line,) = [record for record in caplog.records if record.name == "django_rmq.sending"]
    assert line.exc_info
    assert failed_sends["prices"] - before == len(told) == 10


@pytest.mark.django_db(transaction=True)
def test_a_topic_never_sent_to_may_be_sent_to_while_redis_is_away_until_the_commit(proxied: TcpProxy) -> None:
    proxied.cut()
    with transaction.atomic():
        result = send_message("orders", 1, fixed_time=timezone.now() + timedelta(hours=1))
        proxied.mend()
    assert result.status == "stored"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_redis_that_hangs_costs_a_transaction_of_many_topics_one_time_out(
    proxied: TcpProxy, monkeypatch: pytest.MonkeyPatch, is_warm: bool
) -> None:
    """No definition is known, as in a process that has just started."""
    monkeypatch.setitem(connections.SOCKET_TIMEOUTS, "web", 0.5)
    connections.close()
    asked: list[str] = []
    real = connections.agree

    def agree(topic: Any) -> None:
        asked.append(topic.name)
        real(topic)

    monkeypatch.setattr(connections, "agree", agree)
    due = timezone.now() + timedelta(hours=1)
    if is_warm:
        real(get_config().topic("keyed"))
    proxied.swallow()
    monkeypatch.setattr(on_commit, "OUTAGE_SECONDS", 600.0)
    with transaction.atomic():
        results = [send_message("prices", 1), send_message("orders", 1, fixed_time=due)]
        results.append(send_message("keyed", 1, key="k"))
    with transaction.atomic():
        results.append(send_message("prices", 2))
    proxied.let_through()
    assert {result.status for result in results} == {"failed"}
    assert asked == ["prices"]
    assert on_commit._outage is not None
    monkeypatch.setattr(on_commit, "_outage", on_commit._outage._replace(until=0.0))
    with transaction.atomic():
        result = send_message("prices", 3)
    assert result.status == "stored", "a while later it is asked again"


@pytest.mark.slow
@pytest.mark.usefixtures("real_waits")
def test_a_web_process_waits_for_redis_a_second_at_most(proxied: TcpProxy) -> None:
    for broker, seconds in ((connections.get_broker("web"), 1.0), (connections.get_broker("worker"), 5.0)):
        kwargs = direct(broker).client.connection_pool.connection_kwargs
        assert kwargs["socket_timeout"] == seconds
    proxied.delay(1.5)
    with pytest.raises(ServerUnavailable, match=r"[Tt]imeout"):
        send_message("prices", 1)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_what_replicas_confirm_is_told_at_once_and_after_the_commit(prefix: str) -> None:
    with ReplicaPair() as pair, configured(pair.primary.url, prefix):
        one = send_message("prices", 1, replicas=1)
        assert (one.status, one.replicas, one.durable) == ("stored", 1, True)
        many = send_messages("prices", [1, 2, 3], replicas=1)
        assert [each.durable for each in many] == [True] * 3
        assert ensure_message("prices", 1, replicas=1, fsync=True).durable is False
        with transaction.atomic():
            plain = send_message("prices", 4)
            later = send_message("prices", 5, replicas=1)
            assert (later.status, later.replicas, later.durable) == ("pending", None, False)
        assert (later.status, later.replicas, later.durable) == ("stored", 1, True)
        assert (plain.status, plain.replicas, plain.durable) == ("stored", None, True)
        pair.link.cut()
        assert not send_message("prices", 6, replicas=1).durable
        connections.close()


@pytest.mark.slow
def test_a_cluster_is_reached_by_the_url_of_any_node(prefix: str) -> None:
    with RedisCluster() as server:
        dead = f"redis://127.0.0.1:{server.primaries[0].port}"
        alive = f"redis://127.0.0.1:{server.replicas[2].port}"
        with configured("", prefix, REDIS={"CLUSTER": [dead, alive]}):
            assert send_messages("prices", range(100)).counts() == {"stored": 100}
            assert len(waiting("prices")) == 100
            connections.close()
            server.primaries[0].kill()
            server.wait_for_promotion(server.replicas[0])
            assert send_messages("prices", range(100)).counts() == {"merged": 100}
            connections.close()


def cached(location: str, **options: Any) -> override_settings:
    """The cache "rmq" is at this address."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}
    local = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    return override_settings(CACHES={"default": local, "rmq": cache})


@pytest.mark.slow
def test_sends_find_the_primary_that_the_sentinels_have_made(prefix: str) -> None:
    with SentinelGuard() as guard:
        cache = cached(f"redis://{guard.SERVICE}/0", SENTINELS=guard.addresses)
        with cache, configured("rmq", prefix):
            assert send_message("prices", 1, replicas=1).durable
            guard.primary.kill()
            with pytest.raises(ServerUnavailable):
                send_message("prices", 2)
            guard.wait_for_promotion()
            assert send_message("prices", 1).status == "merged"
            assert send_message("prices", 2).status == "stored"
            connections.close()


def test_the_first_send_registers_the_topic_and_settings_that_differ_are_refused(
    redis_url: str, prefix: str
) -> None:
    send_message("prices", 1)
    assert direct(connections.get_broker()).definitions()["prices"]["slots"] == 4
    other = {"prices": {"TYPE": "priority", "SLOTS": 8}}
    with configured(redis_url, prefix, TOPICS=other), pytest.raises(TopicMismatch) as caught:
        send_message("prices", 1, priority=20)
    assert "SLOTS is 8 here and 4 in Redis" in str(caught.value)
    assert "TYPE is 'priority' here and 'range_merge' in Redis" in str(caught.value)


def test_a_slot_with_another_count_than_the_registered_one_refuses_and_says_both() -> None:
    send_message("prices", 1)
    broker, topic = direct(connections.get_broker()), get_config().topic("prices")
    for slot in range(8):
        broker.configure(replace(topic, slots=8), slot)
    with pytest.raises(SlotMoved, match=r"a different number of slots, but 4 in the settings"):
        send_message("prices", 2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("at", ["begun", "shut", "finished"])
def test_sends_follow_a_topic_that_is_re_slotted(at: str) -> None:
    send_message("prices", 0)
    reslot_until("prices", at)
    with transaction.atomic():
        late = send_message("prices", 1)
    results = [late, send_message("prices", 2), *send_messages("prices", range(3, 60))]
    for body, result in enumerate(results, 1):
        crc = zlib.crc32(b"%d" % body)
        is_moved = at == "finished" or (at == "shut" and crc % 4 < 2)
        assert (result.status, result.slot) == ("stored", crc % (16 if is_moved else 4))
    assert [remove_message("prices", body) for body in range(60)] == ["waiting"] * 60


@pytest.mark.django_db(transaction=True)
def test_a_topic_with_slots_that_no_definition_explains_keeps_no_other_topic_from_its_new_slots() -> None:
    send_message("prices", 0)
    send_message("jobs", 0)
    reslot_until("prices", "finished")
    broker, jobs = direct(connections.get_broker()), get_config().topic("jobs")
    for slot in range(8):
        broker.configure(replace(jobs, slots=8), slot)
    with transaction.atomic():
        lost, moved = send_message("jobs", 1), send_messages("prices", range(1, 20))
    assert lost.status == "failed"
    assert {result.status for result in moved} == {"stored"}


def test_the_options_of_the_cache_alias_reach_the_server(prefix: str) -> None:
    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "open sesame")
        options = {"PASSWORD": "open sesame", "CONNECTION_POOL_KWARGS": {"client_name": "shop"}}
        with cached(server.url, **options), configured("rmq", prefix):
            assert send_message("prices", 1).status == "stored"
            client = direct(connections.get_broker()).client
            assert client.client_getname() == "shop"
            kwargs = client.connection_pool.connection_kwargs
            assert (kwargs["decode_responses"], kwargs["protocol"]) == (False, 2)
            assert kwargs["health_check_interval"] == 0
            assert kwargs["retry"].get_retries() == 0


def test_each_purpose_has_connections_of_its_own_and_keeps_them() -> None:
    web: Any = connections.get_broker("web")
    worker: Any = connections.get_broker("worker")
    assert web is not worker
    assert web.client.connection_pool is not worker.client.connection_pool
    assert connections.get_broker("web") is web
    assert connections.get_producer() is connections.get_producer()
    assert connections.get_producer().broker is web


def test_new_settings_are_new_connections(redis_url: str, prefix: str) -> None:
    before = connections.get_broker()
    with configured(redis_url, prefix):
        assert connections.get_broker() is not before


def test_a_forked_process_shares_no_connection_with_its_parent() -> None:
    parent = connections.get_broker()
    send_message("prices", 1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child must not run the rest of the tests
        try:
            child = connections.get_broker()
            status = send_message("prices", 1).status
            os.write(writer, f"{child is not parent} {status}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"True merged"
    os.close(reader)
    os.close(writer)
    assert send_message("prices", 1).status == "merged"


def test_the_broker_in_memory_is_one_for_all_purposes() -> None:
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}):
        assert send_message("prices", UUID(int=1)).status == "stored"
        assert connections.get_broker("web") is connections.get_broker("worker")
        assert waiting("prices") == [b'"00000000-0000-0000-0000-000000000001"']
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": TOPICS}):
        assert waiting("prices") == []


@pytest.mark.parametrize(
    ("topic", "body", "options", "address"),
    [
        ("prices", {"sku": 1}, {}, {"body": {"sku": 1}}),
        ("renders", {"sku": 1, "shop": 7}, {"priority": 50}, {"body": {"sku": 1, "shop": 7}}),
        ("keyed", {"sku": 1}, {"key": "k1"}, {"key": "k1"}),
        ("prices", {"sku": 2}, {"slot_basis": "b"}, {"body": {"sku": 2}, "slot_basis": "b"}),
    ],
)
def test_a_message_is_taken_back_by_what_it_was_sent_with(
    topic: str, body: Any, options: dict[str, Any], address: dict[str, Any]
) -> None:
    send_message(topic, body, **options)
    assert remove_message(topic, **address) == "waiting"
    assert waiting(topic) == []
    assert remove_message(topic, **address) == "not_found"


def test_taking_back_by_the_wrong_name_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="pass the body, not key="):
        remove_message("prices", key="k1")
    with pytest.raises(InvalidMessage, match="pass key= or id="):
        remove_message("keyed", {"sku": 1})


def test_without_time_zones_in_the_project_a_naive_time_is_one_of_its_zone() -> None:
    aware = datetime(2090, 7, 1, 12, tzinfo=ZoneInfo("Asia/Tokyo"))
    naive = datetime(2090, 7, 1, 12)  # noqa: DTZ001 - what a project without USE_TZ has
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo"):
        send_message("orders", 1, fixed_time=naive)
        send_messages("orders", [2, Send(3, fixed_time=naive)], fixed_time=naive)
        ensure_message("orders", 4, fixed_time=naive)
    assert list(scores("orders").values()) == [aware.timestamp() * 1000] * 4
    with override_settings(USE_TZ=True), pytest.raises(InvalidMessage, match="is naive"):
        send_message("orders", 1, fixed_time=naive)
