"""The processes of ``outbox_deaths``: senders and relays, some of which kill themselves at a named point."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

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
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM intents WHERE name = %s", [name])
        if value is not None:
            cursor.execute("INSERT INTO intents VALUES (%s, %s, %s)", [topic, name, value])


def arm(point: str, at: int) -> None:
    """Have this process die when it comes to ``point`` for the time numbered ``at``."""
    from django_rmq.core.producer.producer import Producer
    from django_rmq.outbox import relay, storage
    from django_rmq.outbox import storage as sql
    from django_rmq.outbox.storage import OutboxSend
    from django_rmq.sending import on_commit

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
        "in-delete": lambda: before(sql, "delete_free"),
        "after-delete": lambda: after(storage, "conclude"),
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
    from django.db import transaction

    from django_rmq import remove_message, send_message, send_messages

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
    from django.db import transaction

    from django_rmq import send_message

    for number in range(commits):
        with transaction.atomic():
            key = f"{own}-k{random.randrange(8)}"
            intend("keyed", key, number)
            send_message("keyed", number, key=key)
        os.write(log, b"committed\n")
        time.sleep(pause)


def relay_on(until: float) -> None:
    """Relay until the time is over."""
    from django.db import DatabaseError

    from django_rmq.exceptions import ServerTrouble
    from django_rmq.outbox.relay import relay_all

    while time.monotonic() < until:
        with suppress(ServerTrouble, DatabaseError):
            for _ in relay_all():
                pass
        time.sleep(0.02)


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a new process; return its id."""
    from django.db import connections as databases

    from django_rmq import connections

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
