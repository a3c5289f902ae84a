"""``python -m benchmarks.transactions``: what ``once`` and the outbox add to a project's transactions.

``once``: a listener with ``once`` beside the same one with a transaction of its own, in turns. Both change a balance in
PostgreSQL with one UPDATE. One thread takes the messages from Redis. The time is that from the first call to the end of the
last one.

``outbox``: five kinds of transactions take turns in one process, each of which writes one row of the project: with a second
plain INSERT, with a send without the outbox, with both, and with a send through the outbox, of a message that its body
identifies and of one without a key. A time includes all that follows the commit: the round trip to Redis, and the deletion of
the row. The time until the commit, which is how long the transaction holds its locks, is measured beside it.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
from django.conf import settings

from benchmarks.harness import command_line, conditions, server, text, told, write
from tests.e2e.outbox_deaths import database_of
from tests.e2e.postgres import postgres
from tests.support.workers import Worker, eventually

ONCE_GOAL = 1.3
OUTBOX_GOAL = 2.0
ACCOUNTS = 1_000
WARM_UP = 50
"""Calls of a listener in each turn that are not measured: the first one connects to the database."""


def main() -> int:
    parser = command_line("benchmarks.transactions", __doc__)
    add = parser.add_argument
    add("work", choices=WORKS)
    add(
        "--database",
        choices=("sqlite", "postgres"),
        default="postgres",
        help="once: PostgreSQL (the default)",
    )
    add("--no-fsync", action="store_true", help="do not have PostgreSQL wait for its disk at each commit")
    add("--rounds", type=int, help="turns of each kind (default: 9 of once, 600 of the outbox)")
    add("--each", type=int, help="messages or transactions in a turn (default: 1000 and 1)")
    options = parser.parse_args()
    with ExitStack() as stack:
        client, url = stack.enter_context(server())
        where = conditions(client)
        print(told(where), flush=True)
        if options.database == "postgres":
            database = stack.enter_context(postgres("off" if options.no_fsync else "on")).settings
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            database = stack.enter_context(database_of("sqlite", folder))
        configure(database, url)
        from django.db import connections

        stack.callback(connections.close_all)
        measure, show, goal, rounds, each = WORKS[options.work]
        times = measure(options.rounds or rounds, options.each or each)
    print(f"medians of {options.rounds or rounds} turns of {options.each or each}")
    ratio = show(times)
    write(options.json, where, milliseconds=times, ratio=ratio)
    return 0 if ratio <= goal else 1


def configure(database: dict[str, Any], redis_url: str) -> None:
    """Set up Django with these servers, and make the tables."""
    topic = {"TYPE": "range_merge", "TIME_RANGE": 60}
    paid = {"TYPE": "range_merge", "TIME_RANGE": "1ms", "SLOTS": 4, "IDENTITY": "key", "ORIGIN": True}
    settings.configure(
        SECRET_KEY="none",  # noqa: S106 - it guards nothing
        INSTALLED_APPS=["django.contrib.sessions", "django_rmq", "tests.e2e.bank"],
        DATABASES={"default": {**database, "CONN_MAX_AGE": None}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        RMQ={
            "REDIS": redis_url,
            "TOPICS": {
                "direct": topic,
                "kept": {**topic, "OUTBOX": True},
                "alone": {"OUTBOX": True},
                "paid": paid,
            },
        },
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", run_syncdb=True, verbosity=0)


def measure_once(turns: int, messages: int) -> dict[str, list[float]]:
    """Return the milliseconds of a message in each turn, with a transaction of its own and with ``once``."""
    from django.db import transaction
    from django.db.models import F

    from django_rmq.models import ProcessedMessage
    from django_rmq.worker.once import OnceListener
    from tests.e2e.bank.models import Account

    Account.objects.bulk_create(Account(pk=n) for n in range(1, ACCOUNTS + 1))

    def pay(message: Any) -> None:
        Account.objects.filter(pk=message.body).update(balance=F("balance") + 1)

    def own(message: Any) -> None:
        with transaction.atomic():
            pay(message)

    functions: dict[str, Callable[[Any], object]] = {
        "own": own,
        "once": OnceListener("benchmark", pay, "default"),
    }
    times: dict[str, list[float]] = {"own": [], "once": []}
    for _ in range(turns):
        for name in random.sample(list(functions), 2):
            times[name].append(_time_listener(functions[name], messages))
    expected = (messages + WARM_UP) * turns
    assert ProcessedMessage.objects.count() == expected
    assert sum(Account.objects.values_list("balance", flat=True)) == 2 * expected
    return times


def _time_listener(listener: Callable[[Any], object], messages: int) -> float:
    """Send messages, let a worker with one thread take them, and return the milliseconds of each."""
    from django.db import connections

    from django_rmq.conf import get_config
    from django_rmq.connections import get_broker, get_producer
    from django_rmq.core.consumer.batch_run import Hooks

    topic, producer, count = get_config().topic("paid"), get_producer("worker"), messages + WARM_UP
    producer.send([producer.build(topic, random.randint(1, ACCOUNTS)) for _ in range(count)])
    ends: list[float] = []

    def stamped(message: Any) -> None:
        listener(message)
        ends.append(time.perf_counter())

    hooks = Hooks()._replace(end=connections.close_all)
    with Worker(get_broker("worker"), topic, stamped, threads=1, hooks=hooks):
        eventually(lambda: len(ends) >= count, "all messages", 300)
    return (ends[-1] - ends[WARM_UP - 1]) / messages * 1000


def show_once(times: dict[str, list[float]]) -> float:
    """Print both kinds, and return the ratio of their medians."""
    ratio = statistics.median(times["once"]) / statistics.median(times["own"])
    ratios = [once / own for own, once in zip(times["own"], times["once"], strict=True)]
    rows = [[name, f"{statistics.median(values):.2f}"] for name, values in times.items()]
    print(text(("listener", "ms per message"), rows))
    print(f"× {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} by turn); goal: at most × {ONCE_GOAL}")
    return ratio


UNTIL_COMMIT = "until the commit"
WITHOUT_KEY = "outbox, no key"


def measure_outbox(rounds: int, each: int) -> dict[str, list[float]]:
    """Return the milliseconds of each kind of transaction in each round, also those until the commit of two kinds."""
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

    def insert_and_send() -> None:
        insert()
        send("direct")

    kinds: dict[str, Callable[[], None]] = {
        "insert": insert,
        "send": lambda: send("direct"),
        "insert and send": insert_and_send,
        "outbox": lambda: send("kept"),
        WITHOUT_KEY: lambda: send("alone"),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    times |= {f"{kind} {UNTIL_COMMIT}": [] for kind in ("insert", "outbox", WITHOUT_KEY)}
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
                if f"{kind} {UNTIL_COMMIT}" in times:
                    times[f"{kind} {UNTIL_COMMIT}"].append((sum(committed) - before) / each * 1000)
    return times


def show_outbox(times: dict[str, list[float]]) -> float:
    """Print all kinds, and return how much longer the outbox takes than a plain INSERT for a message without a key."""
    print(
        text(
            ("and one row", "ms"), [[kind, f"{statistics.median(each):.2f}"] for kind, each in times.items()]
        )
    )

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))

    for kind in ("outbox", WITHOUT_KEY):
        until_commit = ratio(f"{kind} {UNTIL_COMMIT}", f"insert {UNTIL_COMMIT}")
        print(
            f"{kind}: to INSERT × {ratio(kind, 'insert'):.2f}, to INSERT and send × {ratio(kind, 'insert and send'):.2f}, to "
            f"INSERT until the commit × {until_commit:.2f}; goal: at most × {OUTBOX_GOAL}"
        )
    return ratio(WITHOUT_KEY, "insert")


WORKS = {
    "once": (measure_once, show_once, ONCE_GOAL, 9, 1_000),
    "outbox": (measure_outbox, show_outbox, OUTBOX_GOAL, 600, 1),
}

if __name__ == "__main__":
    sys.exit(main())
