"""``python -m benchmarks.once``: what a listener with ``once`` costs beside the same one with a transaction of its own.

Both change a balance in PostgreSQL with one UPDATE, in turns, on the same servers. One thread takes the messages from Redis.
The time is that from the first call to the end of the last one.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import django

from example_project.demo.embedded_redis import start_redis
from tests.e2e.postgres import Postgres, postgres
from tests.e2e.processes import environment_of, manage
from tests.support.workers import Worker, client_of, eventually

ACCOUNTS = 1_000
WARM_UP = 50
"""Calls that are not measured: the first one connects to the database."""
GOAL = 1.3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.once", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000, help="messages in a turn (default 1000)")
    parser.add_argument("--turns", type=int, default=9, help="turns of each listener (default 9)")
    parser.add_argument(
        "--fsync", action="store_true", help="have PostgreSQL wait for its disk at each commit"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rmq-once-") as folder,
        postgres("on" if options.fsync else "off") as database,
    ):
        server = start_redis(f"{folder}/redis")
        try:
            own, once = _measured(database, server.url, folder, options.messages, options.turns)
        finally:
            server.stop()
    ratios = [with_once / with_own for with_own, with_once in zip(own, once, strict=True)]
    ratio = statistics.median(once) / statistics.median(own)
    print(
        f"{options.turns} turns of {options.messages} messages each, fsync {'on' if options.fsync else 'off'}"
    )
    print(f"transaction of its own  {statistics.median(own) * 1e6:8.0f} us per message (median)")
    print(f"once                    {statistics.median(once) * 1e6:8.0f} us per message (median)")
    print(f"ratio {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} by turn); goal: at most {GOAL}")
    return 0 if ratio <= GOAL else 1


def _measured(
    database: Postgres, url: str, folder: str, messages: int, turns: int
) -> tuple[list[float], list[float]]:
    """Return the seconds per message in each turn, with a transaction of its own and with ``once``."""
    os.environ |= environment_of(
        folder,  # type: ignore[arg-type]
        url,
        "bench:",
        DJANGO_SETTINGS_MODULE="tests.e2e.bank.settings",
        BANK_PORT=str(database.port),
    )
    migrated = manage(dict(os.environ), "migrate", "--run-syncdb", "-v", "0")
    assert migrated.returncode == 0, migrated.stderr
    database.query(f"INSERT INTO bank_account SELECT n, 0 FROM generate_series(1, {ACCOUNTS}) AS n")  # noqa: S608 - a constant
    django.setup()
    from django.db import transaction
    from django.db.models import F

    from django_rmq.worker.once import OnceListener
    from tests.e2e.bank.models import Account

    def pay(message: Any) -> None:
        Account.objects.filter(pk=message.body).update(balance=F("balance") + 1)

    def own(message: Any) -> None:
        with transaction.atomic():
            pay(message)

    turn = _Turn(url, messages)
    found: dict[str, list[float]] = {"own": [], "once": []}
    functions: dict[str, Callable[[Any], None]] = {
        "own": own,
        "once": OnceListener("benchmark", pay, "default"),
    }
    for _ in range(turns):
        for name in random.sample(list(functions), 2):
            found[name].append(turn.run(functions[name]))
    rows = int(database.query("SELECT count(*) FROM django_rmq_processedmessage"))
    total = int(database.query("SELECT sum(balance) FROM bank_account"))
    assert (rows, total) == ((messages + WARM_UP) * turns, (messages + WARM_UP) * turns * 2)
    return found["own"], found["once"]


class _Turn:
    """A turn of one listener: messages are sent first, and then taken by a worker with one thread."""

    def __init__(self, url: str, messages: int) -> None:
        from django_rmq.conf import get_config
        from django_rmq.core.consumer.thread_executor import Hooks
        from django_rmq.core.producer.producer import Producer
        from django_rmq.core.redis.broker import RedisBroker

        self._messages = messages
        self._broker = RedisBroker(client_of(url), "bench:")
        self._producer = Producer(self._broker)
        self._topic = replace(get_config().topic("transfers"), slots=4)
        self._hooks = Hooks()

    def run(self, listener: Callable[[Any], None]) -> float:
        """Return the seconds per message."""
        from django.db import connections

        count = self._messages + WARM_UP
        bodies = [random.randint(1, ACCOUNTS) for _ in range(count)]
        self._producer.send([self._producer.build(self._topic, body) for body in bodies])
        ends: list[float] = []

        def stamped(message: Any) -> None:
            listener(message)
            ends.append(time.perf_counter())

        hooks = self._hooks._replace(end=connections.close_all)
        with Worker(self._broker, self._topic, stamped, threads=1, hooks=hooks):
            eventually(lambda: len(ends) >= count, "all messages", 300)
        return (ends[-1] - ends[WARM_UP - 1]) / self._messages


if __name__ == "__main__":
    sys.exit(main())
