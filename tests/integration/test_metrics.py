"""What Prometheus is told: exact counts of all processes, at a bounded price, and to nobody who may not know."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import include, path
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from django_rmq import connections
from django_rmq.conf import get_config
from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.assignment import TopicSlots
from django_rmq.core.coordination.redis_coordinator import RedisCoordinator
from django_rmq.core.model.keys import slot_keys, times_key
from django_rmq.core.model.replies import LATENESS_BUCKETS, Delivery, Failure
from django_rmq.core.model.schedule import Schedule
from django_rmq.core.model.server_checks import ServerInfo
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring import history
from django_rmq.core.monitoring.history import EDGES_MS, TimesCount
from django_rmq.metrics import RmqCollector, collector
from django_rmq.metrics.collector import metrics
from django_rmq.operations import stats
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker, project_on
from tests.support.servers import absent
from tests.support.workers import Heard, broker_on, eventually, finish, flush, total
from tests.support.workers import Worker as RunningWorker

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"
TOPICS = {
    "work": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 60, "BACKOFF": 0, "MAX_RETRIES": 1},
    "ranked": {"TYPE": "priority", "SLOTS": 2, "SERIAL": False},
    "large": {"TYPE": "fixed_time", "SLOTS": 8_192},
}
urlpatterns = [path("metrics/rmq", include("django_rmq.metrics.urls"))]


@pytest.fixture(params=["redis", "cluster"])
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    with ExitStack() as stack:
        broker = stack.enter_context(broker_on(request))
        rmq = {"REDIS": "redis://127.0.0.1:1/0", "METRICS": {"TOKEN": TOKEN}, "TOPICS": TOPICS}
        stack.enter_context(override_settings(RMQ=rmq, ROOT_URLCONF=__name__))
        stack.enter_context(connections.replaced_broker(broker))
        yield broker


@pytest.fixture
def oracle() -> Iterator[tuple[Any, Clock]]:
    """A broker in memory and its time."""
    clock = Clock(1_800_000_000_000)
    broker = OracleBroker("m:", clock)
    with project_on(broker, BROKER="memory", TOPICS=TOPICS):
        yield broker, clock


@pytest.fixture
def single(redis_url: str, redis_client: Any, prefix: str) -> Iterator[Broker]:
    """A broker beside the connections of the project."""
    with override_settings(RMQ={"REDIS": redis_url, "KEY_PREFIX": prefix, "TOPICS": TOPICS}):
        yield Broker(redis_client, prefix)
        connections.close()


def topic(name: str) -> Topic:
    return get_config().topic(name)


def scraped() -> dict[tuple[str, ...], float]:
    """Return every sample: (name, label values in the order of their names) → value."""
    registry = CollectorRegistry()
    registry.register(RmqCollector())
    return samples(generate_latest(registry).decode())


def sample(broker: Any, clock: Clock, of: Topic) -> None:
    """Sample a topic, as workers do."""
    (duty,) = history.sampling(broker, [of], 1, lambda _: True)
    for pause in duty():
        clock.advance(pause)
        if history.latest(broker, [of]) != [None]:
            break


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def live_through_everything(broker: Any) -> None:
    """Make each thing that is counted happen once or a few times in slot 0 of `work`."""
    work = topic("work")
    broker.send_merge(work, 0, 0, [b"%d" % n for n in range(1, 8)])
    broker.send_merge(work, 0, 0, [b"1"])
    broker.send_merge(work, 0, 3_600_000, [b"later"])
    epoch = broker.acquire(work, 0)
    taken = broker.prepare(work, 0, "A", epoch, 6)
    assert [delivery.member for delivery in taken.deliveries] == [b"%d" % n for n in range(1, 7)]
    broker.commit(work, 0, taken.receipt, [b"1"])
    failures = [Failure(b"2"), Failure(b"3", "rejected"), Failure(b"6", "overran")]
    broker.rollback(work, 0, taken.receipt, failures)
    assert broker.cancel(work, 0, [b"5"]) == ["running"]
    broker.rollback(work, 0, taken.receipt, [Failure(b"5")])
    broker.release(work, 0, taken.receipt, [b"4"])
    assert broker.commit(work, 0, taken.receipt, [b"1"]) == ["stale"]
    broker.acquire(work, 0)
    assert broker.prepare(work, 0, "A", epoch, 1).status == "fenced"
    assert broker.replay(work, 0, [b"3"]) == ["replayed"]


def test_counters_are_those_of_the_ledger(broker: Any) -> None:
    live_through_everything(broker)
    found = scraped()
    assert found["rmq_up",] == 1
    counted = {name: found[f"rmq_{name}_total", "work"] for name in collector.COUNTERS}
    assert counted == {
        "messages_sent": 9,
        "messages_merged": 1,
        "messages_died": 1,
        "messages_replayed": 1,
        "deliveries": 6,
        "deliveries_committed": 1,
        "deliveries_cancelled": 1,
        "deliveries_released": 1,
        "reports_stale": 1,
        "calls_fenced": 1,
    }
    reasons = {"error": 1, "timeout": 0, "overran": 1, "rejected": 1}
    assert {reason: found["rmq_deliveries_failed_total", reason, "work"] for reason in reasons} == reasons
    states = ("waiting", "running", "claimed", "resting", "dead")
    messages = {state: found["rmq_messages", state, "work"] for state in states}
    assert sum(messages.values()) == 6 and messages["dead"] == messages["running"] == 0
    assert found["rmq_messages_due", "work"] <= 5
    assert found["rmq_slots", "work"] == 4
    assert found["rmq_messages_sent_total", "ranked"] == 0
    assert ("rmq_oldest_due_age_seconds", "ranked") not in found
    assert found["rmq_oldest_due_age_seconds", "work"] >= 0
    assert found["rmq_undrained_seconds", "ranked"] == 0
    assert ("rmq_undrained_seconds", "work") not in found


def test_time_outs_have_a_reason_of_their_own(oracle: tuple[Any, Clock]) -> None:
    broker, clock = oracle
    broker.send_merge(topic("work"), 0, 0, [b"1"])
    broker.prepare(topic("work"), 0, "A", None, 1)
    clock.advance(31)
    broker.time_out(topic("work"), 0)
    found = scraped()
    assert found["rmq_deliveries_failed_total", "timeout", "work"] == 1
    assert found["rmq_deliveries_failed_total", "error", "work"] == 0


@pytest.mark.parametrize("sampled", [True, False])
def test_it_is_told_how_long_a_slot_of_priorities_has_not_been_drained(
    oracle: tuple[Any, Clock], sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, clock = oracle
    broker.send_replace(topic("ranked"), 0, [50], [b"1"])
    clock.advance(10_800)
    broker.send_replace(topic("ranked"), 0, [60], [b"2"])
    if sampled:
        monkeypatch.setattr(stats, "LIVE_SLOTS", 0)
        sample(broker, clock, topic("ranked"))
    found = scraped()
    assert 10_800 <= found["rmq_undrained_seconds", "ranked"] < 10_920


def test_what_runs_and_what_could_be_taken_though_no_worker_looks_have_ages(
    oracle: tuple[Any, Clock],
) -> None:
    broker, clock = oracle
    work = topic("work")
    broker.send_merge(work, 0, 0, [b"1"])
    runs = broker.prepare(work, 0, "A", None, 1)
    broker.send_merge(work, 1, 0, [b"2"])
    rests = broker.prepare(work, 1, "A", None, 1)
    broker.rollback(work, 1, rests.receipt, [Failure(b"2", "failed", 5_000)])
    broker.send_merge(work, 2, 0, [b"3"])
    broker.prepare(work, 2, "A", None, 1)
    found = scraped()
    assert found["rmq_messages_due", "work"] == found["rmq_oldest_due_age_seconds", "work"] == 0
    clock.advance(work.timeout - 1)
    broker.extend(work, 0, runs.receipt, [b"1"])
    clock.advance(11)
    found = scraped()
    assert found["rmq_messages_due", "work"] == 2, "what has rested, and what has timed out"
    assert found["rmq_oldest_due_age_seconds", "work"] == work.timeout + 10 - 5
    assert found["rmq_oldest_running_seconds", "work"] == work.timeout + 10
    assert found["rmq_oldest_running_seconds", "ranked"] == 0


def test_a_topic_of_very_many_slots_is_told_as_workers_sampled_it(
    redis_client: Any, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "LIVE_SLOTS", 64)
    clock = Clock(1_800_000_000_000)
    broker: Any = Broker(redis_client, prefix, clock)
    with project_on(broker, BROKER="memory", TOPICS=TOPICS):
        broker.send_replace(topic("large"), 5_000, [1_799_999_000_000], [b"1"])
        found = scraped()
        for unknown in (("messages_sent_total",), ("messages", "waiting"), ("measured_age_seconds",)):
            assert (f"rmq_{unknown[0]}", *unknown[1:], "large") not in found
        sample(broker, clock, topic("large"))
        found = scraped()
        assert found["rmq_messages_sent_total", "large"] == found["rmq_messages", "waiting", "large"] == 1
        assert found["rmq_calls_fenced_total", "large"] == 0
        assert 1_000 <= found["rmq_oldest_due_age_seconds", "large"] < 1_120
        assert 0 < found["rmq_measured_age_seconds", "large"] < 120
        assert found["rmq_measured_age_seconds", "work"] == 0


def test_counters_of_very_many_former_slots_are_those_that_workers_sampled(
    oracle: tuple[Any, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "LIVE_SLOTS", 64)
    broker, clock = oracle
    work = topic("work")
    broker.define(work)
    broker.send_merge(work, 1, 0, [b"now"])
    broker.send_merge(replace(work, slots=128), 100, 0, [b"before"])
    broker.purge(replace(work, slots=128), 100, "store")
    broker.redefine("work", lambda known: {**known, "reslot": {"former": [128]}})
    connections.refresh_definitions(at_once=True)
    assert connections.with_former_slots(work, 100).slots == 100
    found = scraped()
    assert ("rmq_messages_sent_total", "work") not in found
    assert found["rmq_messages", "waiting", "work"] == 1
    sample(broker, clock, connections.with_former_slots(work, 1_000))
    found = scraped()
    assert found["rmq_messages_sent_total", "work"] == 2
    assert found["rmq_messages", "waiting", "work"] == 1 and found["rmq_measured_age_seconds", "work"] == 0


class Families(Collector):
    """Yields given families."""

    def __init__(self, families: list[Metric]) -> None:
        self.families = families

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return self.families


def test_the_text_of_a_scrape_says_what_the_client_of_prometheus_would_say(broker: Any) -> None:
    live_through_everything(broker)
    broker.count_times(topic("work"), [3, 0, 1, *[0] * 21], 17, [0, 2, *[0] * 21, 5], 1_234_567)
    odd = collector.MetricTable(
        "gauge", "odd", "Odd.", ("a", "b"), [(('quoted "x" \\ and\nmore', "100 %s"), 1e17), (("é", ""), 0.1)]
    )
    tables = [*RmqCollector().tables(), odd]
    assert {table.kind for table in tables} == {"gauge", "counter", "histogram"}
    registry = CollectorRegistry()
    registry.register(Families([table.family() for table in tables]))
    for is_openmetrics, client, parse in (
        (False, generate_latest, text_string_to_metric_families),
        (True, openmetrics.generate_latest, openmetrics_parser.text_string_to_metric_families),
    ):
        ours = collector.text_of(tables, is_openmetrics=is_openmetrics).decode()
        assert list(parse(ours)) == list(parse(client(registry).decode()))
        assert ours.endswith("# EOF\n") == is_openmetrics


def test_asking_often_or_from_many_threads_asks_redis_once(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ours = [], RmqCollector()
    look = RmqCollector._measure

    def counted(config: Any) -> Any:
        asked.append(config)
        return look(config)

    monkeypatch.setattr(RmqCollector, "_measure", staticmethod(counted))
    threads = [threading.Thread(target=lambda: list(ours.collect())) for _ in range(8)]
    monkeypatch.setattr(collector, "CACHE_SECONDS", 60.0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    # Other settings are other topics.
    with override_settings(RMQ={"BROKER": "memory", "TOPICS": {}}):
        list(ours.collect())
    assert len(asked) == 2


def test_registering_asks_nobody() -> None:
    with override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS}):
        registry = CollectorRegistry(auto_describe=True)
        registry.register(RmqCollector())


def test_while_redis_is_away_only_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with override_settings(RMQ={"REDIS": "redis://127.0.0.1:1/0", "TOPICS": TOPICS}):
        assert scraped() == {("rmq_up",): 0}
    assert "Metrics cannot be read" in caplog.text


def test_a_slot_that_cannot_be_read_is_told_and_the_others_count(single: Broker, prefix: str) -> None:
    single.send_merge(topic("work"), 0, 0, [b"1"])
    single.client.set(slot_keys(prefix, "work", 1).retry, "foreign")
    found = scraped()
    assert found["rmq_slots_unreadable", "work"] == 1
    assert found["rmq_messages_sent_total", "work"] == found["rmq_messages", "waiting", "work"] == 1


def test_slots_and_workers(single: Broker) -> None:
    found = scraped()
    assert (found["rmq_workers",], found["rmq_slots_unowned", "work"]) == (0, 4)
    assert ("rmq_slots_unowned", "ranked") not in found, "no slot of it has an owner"
    worker = Worker("w1", "here", 1, 0.0, 3, (TopicSlots("work", 4, True), TopicSlots("ranked", 2, False)))
    coordinator = RedisCoordinator(single, worker, lambda _: None, lambda _: None, session_seconds=60)
    coordinator.start()
    try:
        eventually(lambda: scraped()["rmq_slots_owned", "work"] == 4, "owning")
        found = scraped()
        assert (found["rmq_workers",], found["rmq_slots_unowned", "work"]) == (1, 0)
        assert found["rmq_topic_workers", "ranked"] == found["rmq_topic_workers", "work"] == 1
        assert (found["rmq_topic_threads", "work"], found["rmq_topic_workers", "large"]) == (3, 0)
    finally:
        coordinator.stop(5.0)
    for slot in range(2):
        single.pause(topic("work"), slot, True)
    assert scraped()["rmq_slots_paused", "work"] == 2


def test_durations_are_counted_for_good_and_are_cumulative(broker: Any) -> None:
    count, now = TimesCount(broker), 1_800_000_000_000.0
    for _ in range(2):
        late = [Delivery(b"m", now - late, 16) for late in (-0.4, 1, 1.5, 4_000)]
        count.note(topic("work"), late, now)
        count.note_calls(topic("work"), [0.0004, 0.03, 100_000.0])
        flush(count)
    broker.store_minute(topic("work"), 1, "", 60)
    times = broker.times(topic("work"))
    assert (sum(times.late), sum(times.took)) == (8, 6)
    assert times.late_ms == 2 * round(1 + 1.5 + 4_000)
    found = scraped()
    assert found["rmq_delivery_lateness_seconds_count", "work"] == 8
    assert found["rmq_delivery_lateness_seconds_bucket", "0.001", "work"] == 4
    assert found["rmq_delivery_lateness_seconds_bucket", "0.002", "work"] == 6
    assert found["rmq_delivery_lateness_seconds_bucket", "5.0", "work"] == 8
    assert found["rmq_listener_duration_seconds_bucket", "0.05", "work"] == 4
    assert found["rmq_listener_duration_seconds_bucket", "86400.0", "work"] == 4
    assert found["rmq_listener_duration_seconds_bucket", "+Inf", "work"] == 6
    assert found["rmq_listener_duration_seconds_sum", "work"] == pytest.approx(200_000.0608)
    assert ("rmq_delivery_lateness_seconds_count", "ranked") not in found
    assert found["rmq_listener_duration_seconds_count", "ranked"] == 0
    assert broker.count_times(topic("work"), [0] * LATENESS_BUCKETS, 0, [1, 2, *[0] * 22], 5) == 2


def test_single_durations_and_long_lists_are_counted_in_the_same_classes(broker: Any) -> None:
    edges = [float(edge) for edge in EDGES_MS]
    values = [-1.0, 0.0, *edges, *(edge + 1e-6 for edge in edges), *(edge * 1.01 for edge in edges), 1e12]
    seconds = [value / 1000 for value in reversed(values)]
    alone, together = TimesCount(broker), TimesCount(broker)
    for one in seconds:
        alone.note_calls(topic("work"), [one])
    together.note_calls(topic("work"), seconds)
    found = []
    for count in (alone, together):
        before = broker.times(topic("work")).took
        flush(count)
        after = broker.times(topic("work")).took
        found.append([new - old for new, old in zip(after, before, strict=True)])
    assert found[0] == found[1]
    assert sum(found[0]) == len(values)


@pytest.mark.parametrize("size", [None, 10])
def test_a_worker_counts_every_call_of_a_listener(broker: Any, size: int | None) -> None:
    count, heard = TimesCount(broker), Heard()
    work = topic("work")
    broker.send_merge(work, 0, 0, [b"%d" % number for number in range(40)])

    def listen(argument: Any) -> None:
        messages = argument if size else [argument]
        for message in messages:
            heard.note(message.body)
            if message.body == 7:
                raise ValueError("seven")

    finish(RunningWorker(broker, work, listen, batch_size=size, took=count.note_calls, burst=True))
    flush(count)
    times = broker.times(work)
    deliveries = total(broker, work, "committed") + total(broker, work, "failed")
    if size is None:
        assert sum(times.took) == deliveries == 41
    else:
        # One of them fails as a whole and goes on one by one; the retry comes alone.
        assert 4 + 10 + 1 <= sum(times.took) <= 40
    assert times.took_us > 0


def test_a_foreign_key_is_told_of(single: Broker, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    single.client.set(times_key(prefix, "work"), "foreign")
    count = TimesCount(single)
    count.note_calls(topic("work"), [0.1])
    flush(count)
    assert "could not be recorded" in caplog.text
    found = scraped()
    assert found["rmq_up",] == 1
    # Redis keeps the other figures of this topic under other keys, so they are there, and so are those of the other topics.
    assert found["rmq_messages_sent_total", "work"] == 0
    assert ("rmq_listener_duration_seconds_count", "work") not in found
    assert found["rmq_listener_duration_seconds_count", "ranked"] == 0
    assert f"'times_{{{prefix}rmq:history:work}}'" in caplog.text


@pytest.fixture
def page(broker: Any, django_user_model: type[User]) -> Client:
    return Client()


def answer(shown: str = "", user: Any = None, method: str = "get", **headers: str) -> HttpResponse:
    if shown:
        headers["Authorization"] = shown
    request = getattr(RequestFactory(), method)("/metrics/rmq", headers=headers)
    if user is not None:
        request.user = user
    return metrics(request)


def test_the_page_answers_who_shows_the_token(broker: Any) -> None:
    response = answer(f"Bearer {TOKEN}")
    assert response.status_code == 200
    assert samples(response.content.decode())["rmq_up",] == 1
    assert response["Content-Type"].startswith("text/plain; version=")
    assert "no-cache" in response["Cache-Control"]
    openmetrics = answer(f"bearer {TOKEN}", Accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics["Content-Type"].startswith("application/openmetrics-text")
    assert openmetrics.content.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer \u00fc"]
)
def test_the_page_answers_nobody_else(broker: Any, shown: str) -> None:
    for user in (None, AnonymousUser()):
        response = answer(shown, user)
        assert (response.status_code, response["WWW-Authenticate"][:6]) == (401, "Bearer")
        assert b"rmq_" not in response.content


def test_without_a_token_it_takes_a_permission(broker: Any, db: None, django_user_model: type[User]) -> None:
    with project_on(broker, BROKER="memory", TOPICS=TOPICS):
        user = django_user_model.objects.create_user("ann")
        for shown in ("", "Bearer None", "Bearer "):
            assert answer(shown, user).status_code == 403
        user.user_permissions.add(Permission.objects.get(codename="view_topic"))
        assert answer("", django_user_model.objects.get(pk=user.pk)).status_code == 200
        user.is_active = False
        user.save()
        assert answer("", django_user_model.objects.get(pk=user.pk)).status_code == 403


class OnlyRanked:
    """Hides all topics from users but one."""

    def has_object_permission(self, request: Any, view: Any, topic: Topic) -> bool:
        return topic.name == "ranked" and request.user.username == view.request.user.username


@pytest.mark.parametrize(
    ("names", "status"), [(["work", "ranked"], 401), (["ranked"], 200)], ids=["some", "all"]
)
def test_who_may_not_know_of_all_topics_gets_the_page_with_the_token_only(
    broker: Any, django_user_model: type[User], db: None, names: list[str], status: int
) -> None:
    settings = {"API": {"PERMISSION": f"{__name__}.OnlyRanked"}, "METRICS": {"TOKEN": TOKEN}}
    with project_on(broker, TOPICS={name: TOPICS[name] for name in names}, **settings):
        user = django_user_model.objects.create_user("ann")
        assert answer("", user).status_code == 401
        user.user_permissions.add(Permission.objects.get(codename="view_topic"))
        user = django_user_model.objects.get(pk=user.pk)
        response = answer("", user)
        assert (response.status_code, b"rmq_" in response.content) == (status, status == 200)
        assert answer(f"Bearer {TOKEN}", user).status_code == 200


def test_the_page_is_read_only_and_asks_for_no_login(broker: Any) -> None:
    assert answer(f"Bearer {TOKEN}", method="post").status_code == 405
    names = ("sessions.middleware.Session", "auth.middleware.Authentication", "auth.middleware.LoginRequired")
    sessions = "django.contrib.sessions.backends.signed_cookies"
    middleware = [f"django.contrib.{name}Middleware" for name in names]
    with override_settings(MIDDLEWARE=middleware, SESSION_ENGINE=sessions):
        client = Client()
        assert client.get("/metrics/rmq").status_code == 401
        assert client.get("/metrics/rmq", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_beside_django_prometheus(redis_url: str, prefix: str) -> None:
    """In the registry that django-prometheus shows, in a process of its own: registries are global."""
    code = """
import django
from django.conf import settings
settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="django_prometheus.urls", ALLOWED_HOSTS=["*"],
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_prometheus", "django_rmq"],
    MIDDLEWARE=["django_prometheus.middleware.PrometheusBeforeMiddleware",
                "django_prometheus.middleware.PrometheusAfterMiddleware"],
    RMQ={"REDIS": URL, "KEY_PREFIX": PREFIX, "TOPICS": {"work": {"TYPE": "range_merge", "SLOTS": 2}}},
)
django.setup()
from django_rmq.connections import SOCKET_TIMEOUTS
SOCKET_TIMEOUTS["web"] = 60.0
from django.test import Client
from prometheus_client import REGISTRY
from django_rmq.metrics import RmqCollector
REGISTRY.register(RmqCollector())
text = Client().get("/metrics").content.decode()
assert 'rmq_messages_sent_total{topic="work"} 0.0' in text, text
assert "django_http_requests" in text
"""
    code = f"URL, PREFIX = {redis_url!r}, {prefix!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def told_names() -> set[str]:
    with project_on(OracleBroker("m:"), BROKER="memory", TOPICS=TOPICS, OUTBOX=True):
        broker: Any = connections.get_broker()
        info = {"role": "master", "used_memory": "5", "maxmemory": "9", "evicted_keys": "1"}
        server = ServerInfo("Redis", info, {"maxmemory-policy": "allkeys-lru"})
        broker.servers = lambda: [server]
        live_through_everything(broker)
        broker.change_schedule("nightly", "spec", Schedule("nightly", "work", every=60).text)
        (record,) = broker.read_schedules()
        broker.plan_tick("nightly", record.generation, record.at, record.at + 1, "work", 0)
        broker.settle_tick("nightly", record.generation, record.at + 1, "written")
        found = {name for name, *_ in scraped()}
    histograms = {SUFFIXES.sub("", name) for name in found if name.endswith("_bucket")}
    return {
        name for name in found if SUFFIXES.sub("", name) not in histograms and not name.endswith("_created")
    } | histograms


def named(text: str) -> set[str]:
    names = set(re.findall(r"\brmq_[a-z_]+", text))
    return {SUFFIXES.sub("", name) for name in names}


@pytest.mark.django_db
def test_dashboard_and_alerts_name_only_what_is_told() -> None:
    told = told_names()
    dashboard = json.loads((ROOT / "monitoring" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries.append(dashboard["templating"]["list"][1]["definition"])
    alerts = yaml.safe_load((ROOT / "monitoring" / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    expressions = [rule["expr"] for rule in rules]
    assert len(queries) > 20 and len(rules) > 8
    for expression in (*queries, *expressions):
        assert named(expression) and named(expression) <= told, expression
        assert expression.count("(") == expression.count(")")
        states = collector.OUTBOX_STATES if "rmq_outbox" in expression else collector.STATES
        for labels in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)[!=]", labels)) <= {"topic", "state", "reason"}
            assert set(re.findall(r'state="(\w+)"', labels)) <= set(states)
    assert set().union(*map(named, queries)) == told, "the dashboard shows everything"
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def linted(text: str) -> subprocess.CompletedProcess[str]:
    promtool = shutil.which("promtool") or absent("promtool is not installed: apt-get install prometheus")
    return subprocess.run(
        [promtool, "check", "metrics"], input=text, check=False, capture_output=True, text=True, timeout=60
    )


def test_the_names_pass_the_linter_of_prometheus(broker: Any) -> None:
    live_through_everything(broker)
    registry = CollectorRegistry()
    registry.register(RmqCollector())
    found = linted(generate_latest(registry).decode())
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    assert linted("# HELP rmq_sent Sent.\n# TYPE rmq_sent counter\nrmq_sent 1\n").returncode == 3


@pytest.mark.django_db
def test_the_docs_name_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| `rmq_")]
    assert set().union(*(named(line.split("|")[1]) for line in table)) == told_names()


def test_edges_are_told_as_numbers_of_seconds() -> None:
    family = collector.HistogramTable("took", "Took.", [("work", [1] * LATENESS_BUCKETS, 1.0)]).family()
    edges = [sample.labels["le"] for sample in family.samples if "le" in sample.labels]
    assert edges == [*(str(ms / 1000) for ms in EDGES_MS), "+Inf"]


def test_the_checks_name_a_token_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with override_settings(RMQ={"BROKER": "memory", "METRICS": {"TOKEN": "short-secret"}}):
        from django.core.management.base import SystemCheckError

        with pytest.raises(SystemCheckError) as raised:
            call_command("check")
    assert "TOKEN" in str(raised.value) and "short-secret" not in str(raised.value)
