"""Five workers with schedules, killed at random while their clock moves over a change of daylight saving.

    python -m tests.e2e.schedule_workers --url redis://... --prefix p: --start 2026-03-28T20:00Z --hours 10 --seconds 8

The clock is a key in Redis. A worker also kills itself now and then before or after a request of its duty. Prints what
came of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from datetime import datetime
from typing import Any, NoReturn

import django
import redis
from django.conf import settings

from django_rmq import connections, listener, schedules
from django_rmq.conf import get_config
from django_rmq.core.schedules.stepper import Stepper
from django_rmq.worker.startup import check_start, chosen_topics
from django_rmq.worker.worker_process import ProcessOptions, WorkerProcess
from tests.support.brokers import direct, set_clock

WORKERS = 5
STEP_MS = 300_000
"""By how much the clock moves at once."""
DEATH = 0.02
"""How probably a worker dies at a request of its duty."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "nightly": {"CRON": "0 3 * * *"},
    "in-the-gap": {"CRON": "30 2 * * *"},
    "half-hourly": {"CRON": "*/30 * * * *"},
    "interval": {"EVERY": 600},
}


def configure(url: str, prefix: str) -> None:
    """Set up Django with the schedules."""
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "django_rmq"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
        RMQ={
            "REDIS": url,
            "KEY_PREFIX": prefix,
            "AUTODISCOVER": None,
            "HISTORY_RETENTION": None,
            "CONSUMER": {"POLL_INTERVAL": 0.05, "THREADS": 2},
            "TOPICS": {"ticks": {"TYPE": "fixed_time", "IDENTITY": "key", "SLOTS": 8}},
            "SCHEDULES": {
                name: {"TOPIC": "ticks", "TIMEZONE": "Europe/Berlin", "CATCH_UP": "all", **options}
                for name, options in SCHEDULES.items()
            },
        },
    )
    django.setup()


def work(url: str, prefix: str) -> NoReturn:
    """Be a worker: its consumer and its schedules live by the clock in Redis, its membership by the real one."""
    local = threading.local()

    def client() -> redis.Redis:
        if not hasattr(local, "client"):
            local.client = redis.Redis.from_url(url)
        found: redis.Redis = local.client
        return found

    def clock() -> int:
        raw: Any = client().get(f"{prefix}clock")
        return int(raw) * 1000

    @listener("ticks")
    def tick(message: Any) -> None:
        client().rpush(f"{prefix}seen", message.key)

    stepping = connections.get_broker("web")
    for broker in (stepping, connections.get_broker("worker")):
        set_clock(broker, clock)
    run = stepping.run

    def run_or_die(call: Any) -> Any:
        fate = 0.5 if client().exists(f"{prefix}calm") else random.random()
        if fate < DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        found = run(call)
        if fate > 1 - DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    stepping.run = run_or_die  # type: ignore[method-assign]

    class Hasty(Stepper):
        """Looks again at once: the clock of the test runs thousands of times as fast as its duty expects."""

        def step_each(self, records: Any, now_ms: int, also: str = "") -> float:
            return min(super().step_each(records, now_ms, also), 0.02)

    made: Any = lambda: Hasty(stepping, get_config().topics)  # noqa: E731
    schedules.stepper = made
    worker = WorkerProcess(check_start(chosen_topics()), ProcessOptions(threads=2))
    worker.run()
    os._exit(0)


class Crew:
    """The worker processes."""

    def __init__(self, url: str, prefix: str) -> None:
        self._made = (url, prefix)
        self.pids: list[int] = []
        self.deaths = 0

    def fill(self) -> None:
        """Replace those that died."""
        for pid in list(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.pids.remove(pid)
                self.deaths += 1
        while len(self.pids) < WORKERS:
            pid = os.fork()
            if not pid:
                random.seed()
                try:
                    work(*self._made)
                except BaseException:  # noqa: BLE001 - a fork must not come back here
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            self.pids.append(pid)

    def kill(self, pid: int) -> None:
        """End one of them as a crash does."""
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        for pid in self.pids:
            self.kill(pid)
            os.waitpid(pid, 0)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def simulate(client: Any, prefix: str, crew: Crew, start_ms: int, end_ms: int, seconds: float) -> None:
    """Move the clock from start to end, now and then a little back, and kill workers meanwhile."""
    steps = (end_ms - start_ms) // STEP_MS
    for number in range(1, steps + 1):
        now_ms = start_ms + number * STEP_MS
        client.set(f"{prefix}clock", now_ms)
        if random.random() < 0.1:
            client.set(f"{prefix}clock", now_ms - 90_000)
        crew.fill()
        if random.random() < 0.3:
            crew.kill(random.choice(crew.pids))
        time.sleep(seconds / steps)
    client.set(f"{prefix}clock", end_ms)


def found(url: str, prefix: str) -> dict[str, Any]:
    """Return what is in Redis: what was consumed, what waits, and what the ledger says."""
    client: Any = redis.Redis.from_url(url)
    broker, topic = direct(connections.get_broker("coordinator")), get_config().topic("ticks")
    # What waits is taken next: looked at first, it cannot be overlooked between both.
    waits = [
        key.decode() for slot in range(topic.slots) for key in client.zrange(f"{prefix}ticks_{slot}", 0, -1)
    ]
    audits = [broker.audit_ledger(topic, slot) for slot in range(topic.slots)]
    seen = [key.decode() for key in client.lrange(f"{prefix}seen", 0, -1)]
    return {
        "seen": sorted(set(seen)),
        "waiting": sorted(waits),
        "written": sum(one["stored"] for one in audits),
        "held": sum(one.prepare + one.retry + one.dead for one in audits),
        "delivered_again": sum((Counter(seen) - Counter(set(seen))).values()),
        "states": {one.name: one.state for one in broker.read_schedules()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--prefix", "--start"):
        parser.add_argument(name, required=True)
    parser.add_argument("--hours", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args()
    configure(asked.url, asked.prefix)
    client = redis.Redis.from_url(asked.url)
    start_ms, end_ms = ms(asked.start), ms(asked.start) + asked.hours * 3_600_000
    client.set(f"{asked.prefix}clock", start_ms)
    crew = Crew(asked.url, asked.prefix)
    try:
        crew.fill()
        # The first declaration counts from the start.
        until = time.monotonic() + 30
        while not client.exists(f"{asked.prefix}rmq:schedules") and time.monotonic() < until:
            crew.fill()
            time.sleep(0.05)
        time.sleep(0.5)
        simulate(client, asked.prefix, crew, start_ms, end_ms, asked.seconds)
        # From here on nobody dies, so that what was sent is soon consumed.
        client.set(f"{asked.prefix}calm", 1)
        until = time.monotonic() + 60
        told = found(asked.url, asked.prefix)
        while time.monotonic() < until and (
            told["held"]
            or len(told["waiting"]) > len(SCHEDULES)
            or set(told["states"].values()) != {"written"}
        ):
            crew.fill()
            # What the last ones to die held times out. It takes 600 s to the next tick, and this at most 300.
            client.incrby(f"{asked.prefix}clock", 1_000)
            time.sleep(0.2)
            told = found(asked.url, asked.prefix)
    finally:
        crew.end()
    told = found(asked.url, asked.prefix)
    print(json.dumps({**told, "deaths": crew.deaths}))


if __name__ == "__main__":
    main()
