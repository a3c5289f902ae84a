"""Senders that die between the commit of their database and the end of their send, and a Redis that is stopped.

    python -m tests.e2e.outbox_deaths --database postgres --deaths 2000
    python -m tests.e2e.outbox_deaths --database sqlite --outage 10000

Each transaction writes what it intends into a table of its own and sends the same; some are rolled back. In the end
Redis must hold exactly what the table says. Prints the outcome as JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import django
import redis
from django.conf import settings
from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, transaction
from django.db import connections as databases

from django_rmq import connections, remove_message, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import ServerTrouble
from django_rmq.outbox import deletion, relay
from django_rmq.outbox.deletion import OutboxSend
from django_rmq.outbox.relay import relay_all
from django_rmq.sending import on_commit
from tests.e2e.postgres import postgres
from tests.support.servers import RedisServer
from tests.support.workers import client_of

SENDER_POINTS = ("before-commit", "after-commit", "after-look", "after-send", "in-delete", "after-delete")
RELAY_POINTS = ("relay-holds", "relay-sent", "relay-before-commit")
ANY = "any-moment"


class Undo(Exception):
    """Rolls back."""


def die() -> NoReturn:
    """End as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def intend(topic: str, name: str, value: int | None) -> None:
    """Write into the database what Redis has to hold. None: nothing."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM intents WHERE name = %s", [name])
        if value is not None:
            cursor.execute("INSERT INTO intents VALUES (%s, %s, %s)", [topic, name, value])


def arm(point: str, at: int) -> None:
    """Have this process die when it comes to ``point`` for the time numbered ``at``."""
    countdown = itertools.count(1)

    def step() -> None:
        if next(countdown) >= at:
            die()

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def armed(*args: Any, **options: Any) -> Any:
            step()
            return real(*args, **options)

        setattr(owner, name, armed)

    def after(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def armed(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            step()
            return found

        setattr(owner, name, armed)

    arms: dict[str, Callable[[], None]] = {
        "before-commit": lambda: before(sys.modules[__name__], "about_to_commit"),
        "after-commit": lambda: before(on_commit, "_flush"),
        "after-look": lambda: after(OutboxSend, "__init__"),
        "after-send": lambda: after(Producer, "attempt"),
        "in-delete": lambda: before(deletion, "delete_free"),
        "after-delete": lambda: after(deletion, "conclude"),
        "relay-holds": lambda: after(relay, "_hold"),
        "relay-sent": lambda: after(Producer, "attempt"),
        "relay-before-commit": lambda: after(relay, "_send"),
        ANY: lambda: None,
    }
    arms[point]()


def about_to_commit() -> None:
    """Stand at the end of a transaction."""


def send_on(own: str, log: int, until: float) -> None:
    """Send, merge, remove and roll back in transactions until the time is over."""
    had: list[str] = []
    for number in itertools.count():
        if time.monotonic() > until:
            return
        name, kind = (
            f"{own}-{number}",
            random.choice(("one", "many", "keyed", "keyed", "remove", "undo", "savepoint")),
        )
        with suppress(Undo), transaction.atomic():
            if kind == "one":
                intend("plain", name, 0)
                send_message("plain", name, priority=100)
                had.append(name)
            elif kind == "many":
                names = [f"{name}-{part}" for part in range(4)]
                for each in names:
                    intend("plain", each, 0)
                send_messages("plain", names, priority=100)
            elif kind == "keyed":
                key = f"{own}-k{random.randrange(2)}"
                intend("keyed", key, number)
                send_message("keyed", number, key=key)
            elif kind == "remove" and had:
                gone = had.pop()
                intend("plain", gone, None)
                remove_message("plain", gone)
            elif kind == "undo":
                intend("plain", name, 0)
                send_message("plain", name, priority=100)
                os.write(log, b"undone\n")
                raise Undo
            elif kind == "savepoint":
                intend("plain", name, 0)
                send_message("plain", name, priority=100)
                with suppress(Undo), transaction.atomic():
                    intend("plain", f"{name}-s", 0)
                    send_message("plain", f"{name}-s", priority=100)
                    os.write(log, b"undone\n")
                    raise Undo
            about_to_commit()
        os.write(log, b"committed\n")


def write_values(own: str, log: int, commits: int, pause: float) -> None:
    """Commit and send rising values of keys that only this process has, with a pause after each."""
    for number in range(commits):
        with transaction.atomic():
            key = f"{own}-k{random.randrange(8)}"
            intend("keyed", key, number)
            send_message("keyed", number, key=key)
        os.write(log, b"committed\n")
        time.sleep(pause)


def relay_on(until: float) -> None:
    while time.monotonic() < until:
        with suppress(ServerTrouble, DatabaseError):
            for _ in relay_all(DEFAULT_DB_ALIAS):
                pass
        time.sleep(0.02)


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a new process; return its id."""
    databases.close_all()
    connections.close()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        random.seed()
        work()
    except BaseException:  # noqa: BLE001 - a forked process must not go on with what its parent does
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


TOPICS = {
    "plain": {"TYPE": "priority", "SLOTS": 4},
    "keyed": {"TYPE": "range_merge", "SLOTS": 4, "TIME_RANGE": 60, "IDENTITY": "key"},
}
GRACE = 0.2


def configure(database: dict[str, Any], redis_url: str) -> None:
    """Set up Django with these servers, and make the tables."""
    settings.configure(
        SECRET_KEY="none",
        INSTALLED_APPS=["django_rmq"],
        DATABASES={"default": database},
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        LOGGING={
            "version": 1,
            "disable_existing_loggers": False,
            "loggers": {"django_rmq": {"level": "CRITICAL"}},
        },
        RMQ={"REDIS": redis_url, "TOPICS": TOPICS, "OUTBOX": {"GRACE": GRACE}},
    )
    django.setup()
    call_command("migrate", "django_rmq", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE intents (topic varchar(10), name varchar(40) PRIMARY KEY, value integer)"
        )


@contextmanager
def database_of(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the entry of DATABASES for a new database."""
    if kind == "sqlite":
        options = {"init_command": "PRAGMA journal_mode=WAL;", "transaction_mode": "IMMEDIATE", "timeout": 60}
        yield {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(folder / "shop.sqlite3"),
            "OPTIONS": options,
        }
        return
    with postgres() as server:
        yield server.settings


# --- the two runs


def run_deaths(deaths: int, log: int) -> Counter[str]:
    """Let so many processes die, each at a point or at any moment; return how many died where."""
    points = itertools.cycle([*SENDER_POINTS, ANY, *SENDER_POINTS, ANY, *RELAY_POINTS])
    died: Counter[str] = Counter()
    living: dict[int, tuple[str, float]] = {}
    numbers = itertools.count()
    while died.total() < deaths or living:
        while len(living) < 4 and died.total() + len(living) < deaths:
            point, at, own = next(points), random.randint(1, 4), f"p{next(numbers)}"
            kill_at = time.monotonic() + (random.uniform(0.01, 0.3) if point == ANY else 8.0)

            def work(point: str = point, at: int = at, own: str = own) -> None:
                arm(point, at)
                until = time.monotonic() + 20
                if point in RELAY_POINTS:
                    relay_on(until)
                else:
                    send_on(own, log, until)

            living[fork(work)] = (point, kill_at)
        for pid, (point, kill_at) in list(living.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > kill_at:
                # A relay that finds nothing never comes to its point.
                living[pid] = (ANY, float("inf"))
                os.kill(pid, signal.SIGKILL)
            elif done:
                if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                    raise RuntimeError(f"a process ended by itself at {point}: {status}")
                died[living.pop(pid)[0]] += 1
        time.sleep(0.002)
    return died


def run_outage(
    commits: int, seconds: float, log: int, server: RedisServer, log_path: Path
) -> dict[str, float]:
    """Stop Redis, commit so many transactions in about so many seconds, start it again under two relays and more commits."""
    writers, share = 4, commits // 4
    pause = seconds * writers / commits

    def writing(number: int) -> Callable[[], None]:
        return lambda: write_values(f"w{number}", log, share + share // 4, pause)

    write_all = [fork(writing(number)) for number in range(writers)]
    while log_path.read_text().count("committed") < commits // 20:
        time.sleep(0.01)
    server.stop()
    began, before = time.monotonic(), log_path.read_text().count("committed")
    relays = [fork(lambda: relay_on(time.monotonic() + 3600)) for _ in range(2)]
    while log_path.read_text().count("committed") < commits:
        time.sleep(0.05)
    without = log_path.read_text().count("committed") - before
    seconds = time.monotonic() - began
    server.start()
    for pid in write_all:
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"a writer failed: {status}")
    for pid in relays:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"seconds_without_redis": round(seconds, 1), "commits_without_redis": without}


def examine(client: redis.Redis) -> dict[str, int]:
    """Relay what was left, and compare what Redis holds with the table of intents."""
    from django_rmq.models import OutboxMessage

    left, deadline = OutboxMessage.objects.count(), time.monotonic() + 60
    while OutboxMessage.objects.exists() and time.monotonic() < deadline:
        for _ in relay_all(DEFAULT_DB_ALIAS):
            pass
        time.sleep(0.05)
    with connection.cursor() as cursor:
        cursor.execute("SELECT topic, name, value FROM intents")
        intended = {(topic, name): value for topic, name, value in cursor.fetchall()}
    held: dict[tuple[str, str], int] = {}
    for topic in get_config().topics.values():
        for slot in range(topic.slots):
            keys = slot_keys("", topic.name, slot)
            bodies: Any = client.hgetall(keys.body)
            members: Any = client.zrange(keys.store, 0, -1)
            for member in members:
                name = member.decode() if topic.keyed else json.loads(member)
                held[topic.name, name] = int(decode_envelope(bodies[member]).body) if topic.keyed else 0
    common = intended.keys() & held.keys()
    return {
        "intended": len(intended),
        "lost": len(intended.keys() - held.keys()),
        "never_committed": len(held.keys() - intended.keys()),
        "outdated": sum(intended[one] != held[one] for one in common),
        "left_to_the_relay": left,
        "left_in_the_outbox": OutboxMessage.objects.count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--deaths", type=int, default=0)
    parser.add_argument("--outage", type=int, default=0, metavar="COMMITS")
    parser.add_argument("--seconds", type=float, default=0.0, help="with --outage: about how long it lasts")
    options = parser.parse_args()
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(appendonly=True, appendfsync="always"))
        configure(stack.enter_context(database_of(options.database, folder)), server.url)
        log_path = folder / "log"
        log = os.open(log_path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        found: dict[str, Any] = {"database": options.database}
        if options.deaths:
            died = run_deaths(options.deaths, log)
            found |= {"deaths": died.total(), "died": dict(sorted(died.items()))}
        if options.outage:
            found |= run_outage(options.outage, options.seconds, log, server, log_path)
        counted = Counter(log_path.read_text().split())
        found |= {
            "commits": counted["committed"],
            "rolled_back": counted["undone"],
            **examine(client_of(server.url)),
        }
        databases.close_all()
        connections.close()
    print(json.dumps({**found, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
