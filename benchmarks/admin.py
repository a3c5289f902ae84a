"""``python -m benchmarks.admin``: how long the admin's pages take before a large backlog, and how long a script holds Redis.

One topic gets a million waiting and a hundred thousand dead messages (by default), as producers and listeners would
make them; then each page is asked for as a browser would, without the network between.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.harness import command_line, conditions, server, text, told, write
from django_rmq.core.commands import ack, fetch

GOAL_SECONDS = 0.3
GOAL_SCRIPT_MS = 15.0
TITLES = ("page", "median s", "worst s", "script ms", "worst ms", "met")
TOPIC = "price-changes"
ERROR = "requests.exceptions.ConnectTimeout: no answer within 5 s\n" + "  File 'listeners.py', line 1\n" * 12


def main() -> int:
    parser = command_line("benchmarks.admin", __doc__, rounds=7)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--dead", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, server() as (client, url):
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DJANGO_DEBUG": "0",
            "REDIS_URL": url,
            "SHOP_DATA": str(Path(directory) / "shop"),
        }
        where = conditions(client)
        rows = _measure(client, options)
    print(f"{told(where)}\n{text(TITLES, rows)}")
    print(f"goals of the medians: {GOAL_SECONDS:g} s a page, {GOAL_SCRIPT_MS:g} ms for its longest script")
    write(options.json, where, pages=[dict(zip(TITLES, row, strict=True)) for row in rows])
    return int(any(row[-1] == "NO" for row in rows))


def _measure(redis: Redis, options: argparse.Namespace) -> list[list[str]]:
    """Return a row for each page."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)

    from django.contrib.auth.models import User
    from django.test import Client
    from django.urls import reverse

    began = time.perf_counter()
    _fill(options.waiting, options.dead)
    print(
        f"{options.waiting:,} waiting, {options.dead:,} dead, filled in {time.perf_counter() - began:.0f} s"
    )

    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.create_superuser("bench"))
    topic = reverse("admin:django_rmq_topic_change", args=[TOPIC])
    pages = {
        "dashboard": reverse("admin:django_rmq_topic_changelist"),
        "dashboard, renewed": reverse("admin:django_rmq_topic_dashboard_live"),
        "waiting": f"{topic}?tab=store",
        "waiting, next page": "",
        "dead": f"{topic}?tab=dead",
        "dead, next page": "",
        "dead, by error class": f"{topic}?tab=dead&error=ConnectTimeout",
        "dead, text found nowhere": f"{topic}?tab=dead&text=no+such+text",
        "waiting, text found nowhere": f"{topic}?tab=store&text=no+such+text",
        "dead, by age": f"{topic}?tab=dead&age=newer:3600",
        "slots": f"{topic}?tab=slots",
        "history": f"{topic}?tab=history",
    }
    for name in ("waiting", "dead"):
        pages[f"{name}, next page"] = topic + _next(client.get(pages[name]).content.decode())
    redis.config_set("slowlog-log-slower-than", 0)
    redis.config_set("slowlog-max-len", 10_000)

    rows = []
    for name, address in pages.items():
        took, scripts = [], []
        for _ in range(options.rounds):
            redis.slowlog_reset()
            took.append(_timed(client, address))
            scripts.append(_longest_ms(redis))
        met = statistics.median(took) <= GOAL_SECONDS and statistics.median(scripts) <= GOAL_SCRIPT_MS
        seconds = [f"{statistics.median(took):.3f}", f"{max(took):.3f}"]
        script = [f"{statistics.median(scripts):.2f}", f"{max(scripts):.2f}"]
        rows.append([name, *seconds, *script, "yes" if met else "NO"])
    return rows


def _timed(client: Any, address: str) -> float:
    began = time.perf_counter()
    response = client.get(address)
    took = time.perf_counter() - began
    assert response.status_code == 200, response.status_code
    return took


def _longest_ms(redis: Any) -> float:
    """Return how long the longest script took since the log was emptied."""
    found = redis.slowlog_get(10_000)
    return (
        max((entry["duration"] for entry in found if entry["command"].startswith(b"EVAL")), default=0) / 1000
    )


def _next(page: str) -> str:
    return page.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")


def _fill(waiting: int, dead: int) -> None:
    from django_rmq.conf import get_config
    from django_rmq.connections import get_broker, get_producer
    from django_rmq.core.model.replies import Failure

    topic, broker, producer = get_config().topic(TOPIC), get_broker("worker"), get_producer("worker")
    for start in range(0, dead, 20_000):
        bodies = [{"sku": sku, "source": "feed-1"} for sku in range(start, min(start + 20_000, dead))]
        producer.send_bodies(topic, bodies, time_range=1)
        time.sleep(0.01)
        for slot in range(topic.slots):
            while (taken := broker.run(fetch.prepare(topic, slot, "bench", None, 1000))).status == "ok":
                failures = [Failure(one.member, "rejected", None, ERROR) for one in taken.deliveries]
                broker.run(ack.rollback(topic, slot, taken.receipt, failures))
    for start in range(0, waiting, 50_000):
        bodies = [{"sku": sku, "source": "feed-2"} for sku in range(start, min(start + 50_000, waiting))]
        producer.send_bodies(topic, bodies, time_range=3_600_000)


if __name__ == "__main__":
    sys.exit(main())
