"""``python -m benchmarks.outbox``: what the outbox adds to a transaction, on SQLite and PostgreSQL with fsync.

Four kinds of transactions take turns in one process, each of which writes one row of the project: with a second plain
INSERT, with a send without the outbox, with both, and with a send through the outbox. A time includes all that follows
the commit: the round trip to Redis, and the deletion of the row. The time until the commit, which is how long the
transaction holds its locks, is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
from django.conf import settings

from tests.e2e.outbox_deaths import database_of
from tests.e2e.postgres import postgres
from tests.support.servers import RedisServer

GOAL = 1.3


def configure(database: dict[str, Any], redis_url: str) -> None:
    """Set up Django with these servers, and make the tables."""
    topic = {"TYPE": "range_merge", "TIME_RANGE": 60}
    settings.configure(
        SECRET_KEY="none",  # noqa: S106 - it guards nothing
        INSTALLED_APPS=["django.contrib.sessions", "django_rmq"],
        DATABASES={"default": {**database, "CONN_MAX_AGE": None}},
        USE_TZ=True,
        RMQ={"REDIS": redis_url, "TOPICS": {"direct": topic, "kept": {**topic, "OUTBOX": True}}},
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def measure(rounds: int, each: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of transaction, and the medians of the rounds' ratios."""
    from django.contrib.sessions.models import Session
    from django.db import transaction
    from django.utils import timezone

    from django_rmq import send_message

    numbers = iter(range(100_000_000))

    def insert() -> None:
        Session.objects.create(
            session_key=f"k{next(numbers)}", session_data="x" * 60, expire_date=timezone.now()
        )

    def send(topic: str) -> None:
        send_message(topic, {"order": next(numbers), "state": "paid"})

    kinds: dict[str, Callable[[], None]] = {
        "insert": insert,
        "send": lambda: send("direct"),
        "insert and send": lambda: (insert(), send("direct"))[0],  # type: ignore[func-returns-value]
        "outbox": lambda: send("kept"),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    until_commit: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, work in kinds.items():
            committed: list[float] = []
            began = time.perf_counter()
            before = 0.0
            for _ in range(each):
                before += time.perf_counter()
                with transaction.atomic():
                    # The first of the callbacks, so what the send does at the commit comes after it.
                    transaction.on_commit(lambda: committed.append(time.perf_counter()))  # noqa: B023
                    insert()
                    work()
            if number:  # the first round opens connections
                times[kind].append((time.perf_counter() - began) / each * 1000)
                until_commit[kind].append((sum(committed) - before) / each * 1000)

    def ratio(to: str, of: dict[str, list[float]]) -> float:
        pairs = zip(of["outbox"], of[to], strict=True)
        return round(statistics.median(ours / theirs for ours, theirs in pairs), 2)

    found = {kind: round(statistics.median(values), 3) for kind, values in times.items()}
    return {
        **found,
        "until the commit": ratio("insert", until_commit),
        "to insert": ratio("insert", times),
        "to insert and send": ratio("insert and send", times),
    }


def main() -> None:
    """Measure one database, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer())
        if options.database == "sqlite":
            database = stack.enter_context(database_of("sqlite", folder))
        else:
            port = stack.enter_context(postgres(fsync="on")).port
            database = {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": "shop",
                "USER": "shop",
                "HOST": "127.0.0.1",
                "PORT": port,
            }
        configure(database, server.url)
        found = measure(options.rounds, options.each)
        from django.db import connections

        connections.close_all()
    if options.json:
        print(json.dumps({"database": options.database, **found}))
        return
    print(
        "| database | INSERT | send | INSERT and send | outbox | outbox to INSERT until the commit "
        "| outbox to INSERT | outbox to INSERT and send |"
    )
    print("| --- " + "| ---: " * 7 + "|")
    millis = " | ".join(f"{found[kind]:.2f} ms" for kind in ("insert", "send", "insert and send", "outbox"))
    ratios = " | ".join(
        f"× {found[name]}" for name in ("until the commit", "to insert", "to insert and send")
    )
    print(f"| {options.database} | {millis} | {ratios} |")
    print(f"goal: at most × {GOAL}")


if __name__ == "__main__":
    main()
