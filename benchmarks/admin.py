"""``python -m benchmarks.admin``: how long the admin's pages take before a large backlog, and how long a script holds Redis.

One topic gets a million waiting and a hundred thousand dead messages (by default), as producers and listeners would
make them; then each page is asked for as a browser would, without the network between. The dead messages have 50 causes, and what
groups them is measured by the CPU of this process and of Redis. Then there are 1,013 topics and 200
workers, and what looks at all of them is measured in the same way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from io import StringIO
from itertools import cycle
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.harness import command_line, conditions, redis_seconds, server, text, told, write
from django_rmq.core.commands import ack, fetch
from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.assignment import TopicSlots
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import write_record
from django_rmq.core.model.keys import history_keys, worker_keys
from django_rmq.core.monitoring.history import HOUR_MINUTES, LONGEST_GAP_MINUTES, HistoryTotals

GOAL_SECONDS = 0.3
GOAL_SCRIPT_MS = 15.0
TITLES = ("page", "median s", "worst s", "script ms", "worst ms", "met")
MANY_GOALS = {
    "survey": (None, 0.05),
    "scrape": (0.3, None),
    "dashboard": (0.15, 0.05),
    "rmqstats": (0.8, None),
}
"""What looks at many topics -> the seconds of CPU that it may take, of Python and of Redis."""
MANY_TITLES = ("many topics", "Python CPU s", "goal", "Redis CPU s", "goal", "met")
MANY_SLOTS, WORKERS = 16, 200
TOPIC = "price-changes"
ERRORS = [
    f"requests.exceptions.ConnectTimeout: no answer from {first}{last} within 5 s\n"
    + "  File 'listeners.py', line 1\n" * 12
    for first in "abcde"
    for last in "abcdefghij"
]
"""What dead messages failed with: errors of 50 causes."""
CAUSES_GOAL = 0.3
WITHOUT_BOUND = "the same with `--limit` of all"
"""The others say how many messages they looked at: pages and REST for up to 0.15 s, commands at 10,000 unless asked for more."""
CAUSES_TITLES = ("dead by cause", "Python CPU s", "Redis CPU s", "together", "goal", "met")


def main() -> int:
    parser = command_line("benchmarks.admin", __doc__, rounds=7)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--dead", type=int, default=100_000)
    parser.add_argument("--topics", type=int, default=1_013)
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
        causes = _measure_causes(client, options)
        # A server of its own: after so many deletions a survey takes Redis up to twice as long.
        with server() as (fresh, fresh_url):
            many = _measure_many(fresh, fresh_url, options)
    print(f"{told(where)}\n{text(TITLES, rows)}")
    print(f"goals of the medians: {GOAL_SECONDS:g} s a page, {GOAL_SCRIPT_MS:g} ms for its longest script")
    print(f"\n{options.dead:,} dead of {len(ERRORS)} causes\n{text(CAUSES_TITLES, causes)}")
    print(f"\n{options.topics:,} topics of {MANY_SLOTS} slots, {WORKERS} workers\n{text(MANY_TITLES, many)}")
    pages = [dict(zip(TITLES, row, strict=True)) for row in rows]
    write(options.json, where, pages=pages, causes=causes, many=many)
    return int(any(row[-1] == "NO" for row in (*rows, *causes, *many)))


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
    assert response.status_code == 200, (address, response.status_code)
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
    errors = cycle(ERRORS)
    for start in range(0, dead, 20_000):
        bodies = [{"sku": sku, "source": "feed-1"} for sku in range(start, min(start + 20_000, dead))]
        producer.send_bodies(topic, bodies, time_range=1)
        time.sleep(0.01)
        for slot in range(topic.slots):
            while (taken := broker.run(fetch.prepare(topic, slot, "bench", None, 1000))).status == "ok":
                failures = [Failure(one.member, "rejected", None, next(errors)) for one in taken.deliveries]
                broker.run(ack.rollback(topic, slot, taken.receipt, failures))
    for start in range(0, waiting, 50_000):
        bodies = [{"sku": sku, "source": "feed-2"} for sku in range(start, min(start + 50_000, waiting))]
        producer.send_bodies(topic, bodies, time_range=3_600_000)


def _measure_causes(redis: Redis, options: argparse.Namespace) -> list[list[str]]:
    """Return a row for each way to see the causes of the dead messages."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client
    from django.urls import reverse

    from django_rmq.operations.shared_reads import DEATHS_SECONDS

    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.get(username="bench"))
    of_topic, of_all = (
        reverse("admin:django_rmq_topic_topic_causes", args=[TOPIC]),
        reverse("admin:django_rmq_topic_causes"),
    )
    command = ("rmqlist", TOPIC, "--state", "dead", "--group-by", "error")
    looks: dict[str, Callable[[], object]] = {
        "page of a topic": lambda: _timed(client, of_topic),
        "page of all topics": lambda: _timed(client, of_all),
        "`GET causes/`": lambda: _timed(client, f"/api/rmq/v1/causes/?topic={TOPIC}"),
        "`rmqlist --group-by error`": lambda: call_command(*command, stdout=StringIO()),
        WITHOUT_BOUND: lambda: call_command(*command, "--limit", str(options.dead), stdout=StringIO()),
    }
    rows = []
    for name, look in looks.items():
        # So long web processes share the counts.
        costs = _costs(redis, look, options.rounds, lambda: time.sleep(DEATHS_SECONDS + 0.2))
        python, server_seconds = map(statistics.median, zip(*costs, strict=True))
        together = statistics.median(map(sum, costs))
        figures = [f"{seconds:.3f}" for seconds in (python, server_seconds, together)]
        has_goal = name != WITHOUT_BOUND
        met = "yes" if not has_goal or together <= CAUSES_GOAL else "NO"
        rows.append([name, *figures, f"≤ {CAUSES_GOAL:g}" if has_goal else "-", met])
    return rows


def register_workers(
    redis: Redis, prefix: str, topics: Iterable[str], slots: int, count: int, minutes: int = 3
) -> None:
    """Let workers be there that share the slots of all topics, and the last minutes of the history of each topic."""
    names = tuple(topics)
    keys, now = worker_keys(prefix), time.time_ns() // 1_000_000
    consumed = tuple(TopicSlots(name, slots) for name in names)
    workers = [Worker(f"w{number:03}", "host", number, 1.0, 8, consumed) for number in range(count)]
    pipeline = redis.pipeline(transaction=False)
    for worker in workers:
        pipeline.zadd(keys.sessions, {worker.id: now + 3_600_000})
        pipeline.hset(keys.workers, worker.id, write_record("t" * 32, worker))
    assignment = {
        name: tuple((slot, slot + 1, workers[(at + slot) % count].id) for slot in range(slots))
        for at, name in enumerate(names)
    }
    plan = AssignmentPlan({}).renewed(assignment, now // 1000)  # type: ignore[arg-type]
    pipeline.hset(keys.assignment, "plan", plan.encode())
    for name in ("members", "basis", "number"):
        pipeline.hset(keys.assignment, name, str(now * 1000))
    for name in names:
        pipeline.zadd(f"{prefix}{name}_0", {b"1": 4e12})
    pipeline.execute()
    for ago in range(minutes):
        sample_minute(redis, prefix, names, slots, now - ago * 60_000)


def sample_minute(redis: Redis, prefix: str, topics: Iterable[str], slots: int, now_ms: int) -> None:
    """Write the record of a minute of each topic, as workers do."""
    minute = now_ms // 60_000
    # Ten messages are done in each minute.
    totals = (10 * minute if field.name == "committed" else 0 for field in fields(HistoryTotals))
    # ms slots asked store due prepare claimed retry dead oldest, the totals, undrained
    record = " ".join(map(str, (now_ms, slots, slots, *[0] * 7, *totals, 0)))
    pipeline = redis.pipeline(transaction=False)
    for name in topics:
        pipeline.hset(history_keys(prefix, name).minutes, str(minute), record)
    pipeline.execute()


def _measure_many(redis: Redis, url: str, options: argparse.Namespace) -> list[list[str]]:
    """Return a row for each look at all topics."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.test import Client, override_settings
    from django.urls import reverse

    from django_rmq.metrics.collector import RmqCollector, scrape
    from django_rmq.operations import Actor, Operations

    topics = {f"topic-{n:04}": {"TYPE": "fixed_time", "SLOTS": MANY_SLOTS} for n in range(options.topics)}
    register_workers(redis, "", topics, MANY_SLOTS, WORKERS, HOUR_MINUTES + LONGEST_GAP_MINUTES)
    client = Client(SERVER_NAME="localhost")
    client.force_login(User.objects.get(username="bench"))
    looks: dict[str, Callable[[], object]] = {
        "survey": Operations(Actor("bench", "bench")).survey,
        "scrape": lambda: scrape(RmqCollector(), is_openmetrics=False),
        "dashboard": lambda: _timed(client, reverse("admin:django_rmq_topic_changelist")),
        "rmqstats": lambda: call_command("rmqstats", stdout=StringIO()),
    }

    def renew() -> None:
        time.sleep(2.5)  # So long web processes share a survey.
        sample_minute(redis, "", topics, MANY_SLOTS, time.time_ns() // 1_000_000)

    rows = []
    with override_settings(RMQ={"REDIS": url, "TOPICS": topics}):
        for name, look in looks.items():
            costs = zip(*_costs(redis, look, options.rounds, renew), strict=True)
            row, met = [name], True
            for cost, goal in zip(map(statistics.median, costs), MANY_GOALS[name], strict=True):
                row += [f"{cost:.3f}", f"≤ {goal:g}" if goal else "-"]
                met &= not goal or cost <= goal
            rows.append([*row, "yes" if met else "NO"])
    return rows


def _costs(
    redis: Redis, look: Callable[[], object], rounds: int, prepare: Callable[[], object]
) -> list[tuple[float, float]]:
    """Return the seconds of CPU that this process and Redis take for a look, round by round."""
    look()  # The first one loads what it needs.
    costs = []
    for _ in range(rounds):
        prepare()
        server_before, before = redis_seconds(redis), time.process_time()
        look()
        costs.append((time.process_time() - before, redis_seconds(redis) - server_before))
    return costs


if __name__ == "__main__":
    sys.exit(main())
