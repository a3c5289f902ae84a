"""A thousand topics and two hundred workers: what is read and computed grows with their number, and pages are pages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from benchmarks.admin import register_workers
from django_rmq.admin.dashboard import TOPICS_SHOWN
from django_rmq.conf import get_config
from django_rmq.metrics.collector import RmqCollector
from django_rmq.operations import Actor, Operations, shared_reads
from tests.support.brokers import Broker, project_on

pytestmark = pytest.mark.django_db

COUNT, WORKERS, SLOTS = 1_000, 200, 4
TOPICS = {f"topic-{number:04}": {"TYPE": "fixed_time", "SLOTS": SLOTS} for number in range(COUNT)}
CPU_SECONDS = 1.0


@pytest.fixture(scope="module")
def many(redis_url: str) -> Iterator[Broker]:
    """A broker with all topics, all workers, an assignment, and two minutes of history of each topic."""
    import redis

    client = redis.Redis.from_url(redis_url)
    prefix = "many-topics:"
    broker = Broker(client, prefix)
    register_workers(client, prefix, TOPICS, SLOTS, WORKERS)
    with project_on(broker, REDIS=redis_url, KEY_PREFIX=prefix, TOPICS=TOPICS):
        yield broker
    client.delete(*client.scan_iter(f"*{prefix}*"))
    client.close()


def cpu(call: Callable[[], Any]) -> float:
    """Seconds of this thread's CPU, the least of three: others work on this machine, too."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found)


def operations() -> Operations:
    return Operations(Actor("me", "test"))


@pytest.mark.slow
def test_a_thousand_topics_and_two_hundred_workers_are_looked_at_within_a_second_of_cpu(many: Broker) -> None:
    seen = operations().survey()
    assert (len(seen.topics), seen.workers) == (COUNT, WORKERS)
    assert {(one.consumers, one.threads, one.owned_slots) for one in seen.topics} == {
        (WORKERS, 8 * WORKERS, SLOTS)
    }
    assert cpu(operations().survey) < 5 * CPU_SECONDS


@pytest.mark.slow
def test_the_metrics_of_a_thousand_topics_cost_a_second_of_cpu(many: Broker) -> None:
    def scrape() -> int:
        return sum(len(family.samples) for family in RmqCollector().collect())

    assert scrape() > 30 * COUNT
    assert cpu(scrape) < 5 * CPU_SECONDS


@pytest.fixture
def boss(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("boss"))
    return client


def page(client: Client, name: str = "changelist", **query: str) -> str:
    response = client.get(reverse(f"admin:django_rmq_topic_{name}"), query)
    assert response.status_code == 200
    return response.content.decode()


def rows(text: str) -> list[str]:
    return re.findall(r'<th scope="row"><a href="[^"]*">([^<]*)</a>', text)


@pytest.mark.slow
def test_the_dashboard_shows_a_page_of_topics_under_the_totals_of_all(many: Broker, boss: Client) -> None:
    names = list(TOPICS)
    for query, first in (({}, 0), ({"p": "2"}, 1), ({"p": "10"}, 9), ({"p": "99"}, 9), ({"p": "x"}, 0)):
        text = page(boss, **query)
        assert rows(text) == names[first * TOPICS_SHOWN :][:TOPICS_SHOWN]
        assert f"Page {first + 1} of 10, 1000 topics" in re.sub(r"1.000", "1000", text)
        tiles = re.findall(r'rmq-tile-value">([^<]*)<', text)
        assert [re.sub(r"\D", "", tile) for tile in tiles] == ["1000", "0", "0", "0", "10000", "200"]
    assert 'rel="prev"' not in page(boss) and 'rel="next" href="?p=2"' in page(boss)
    last = page(boss, p="10")
    assert 'rel="next"' not in last and 'rel="prev" href="?p=9"' in last
    assert cpu(lambda: page(boss)) < 5 * CPU_SECONDS


def test_what_keeps_a_page_fresh_fetches_that_page_alone(many: Broker, boss: Client) -> None:
    text = page(boss, p="3", q="topic")
    (live,) = re.findall(r'data-rmq-live="([^"]*)"', text)
    answer = boss.get(live.replace("&amp;", "&"))
    fragment = answer.content.decode()
    assert answer["X-RMQ-Fragment"] == "1"
    assert rows(fragment) == rows(text) == list(TOPICS)[200:300]
    assert len(fragment) < 400_000


def test_charts_add_up_all_topics_that_are_listed_on_every_page(
    many: Broker, boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(**query: str) -> str:
        (legend,) = re.findall(r"</svg>done\s*<strong>([^<]*)</strong>", page(boss, **query))
        return re.sub(r"\D", "", legend)

    assert [done(), done(p="3"), done(q="topic-012"), done(q="topic-01")] == ["10000", "10000", "100", "1000"]
    # The sums of very many topics are read once a minute.
    monkeypatch.setattr(shared_reads, "KEPT_MS", 2_000)
    topics = [get_config().topic(name) for name in TOPICS]
    assert operations().shared_hour(topics) is operations().shared_hour(topics)
    assert operations().shared_hour(topics[:200]) != operations().shared_hour(topics)


def test_topics_are_found_by_a_part_of_their_names(many: Broker, boss: Client) -> None:
    text = page(boss, q=" TOPIC-012 ")
    assert rows(text) == [f"topic-012{digit}" for digit in range(10)]
    assert 'value="TOPIC-012"' in text
    assert "No topic matches." in page(boss, q="<nothing>")
    assert rows(page(boss, q="topic-", p="2")) == list(TOPICS)[100:200]


def test_each_page_costs_the_same_round_trips_whatever_the_number_of_topics(
    many: Broker, boss: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[int] = []
    pool = type(many.client.connection_pool)
    get = pool.get_connection

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        trips.append(1)
        return get(self, *args, **kwargs)

    many.load_scripts()
    monkeypatch.setattr(pool, "get_connection", counted)
    page(boss)
    first = len(trips)
    RmqCollector._measure(get_config())
    # What has been read less than a moment ago is not read again, so a slow machine makes one or two more.
    assert first < 20 and len(trips) - first < 17
