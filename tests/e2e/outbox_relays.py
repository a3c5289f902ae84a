"""Two relays share an outbox, and one of them stands still in the middle of a step for longer than its transaction may.

    python -m tests.e2e.outbox_relays --database postgres --rows 100000

The relays are real commands, and SIGSTOP stops one. In the end Redis must hold each message once, with its newest state.
Prints the outcome as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import django
from django.core.management import call_command
from django.db import connections as databases
from django.db import transaction

from django_rmq import connections, send_message, send_messages
from django_rmq.conf import get_config
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.keys import slot_keys
from tests.e2e.load import timed
from tests.e2e.processes import environment_of, stands_still
from tests.support.commands import started
from tests.support.databases import SERVERS
from tests.support.servers import RedisServer
from tests.support.workers import eventually

PLAIN, KEYED = "moving-priority", "moving-keyed"
STATES = 3
"""The number of rows that each message with a key has."""

until = partial(timed, seconds=300)


class RelayProcess:
    """One ``rmqoutbox --watch``."""

    def __init__(self, environment: dict[str, str], folder: Path, number: int) -> None:
        self._path = folder / f"relay-{number}"
        self.name = f"relay-{number}"
        command = [sys.executable, "-u", "manage.py", "rmqoutbox", "--watch"]
        self._process = started(command, self._path, {**environment, "PGAPPNAME": self.name})

    @property
    def output(self) -> str:
        return self._path.read_text()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it, and return when all of its threads stand still."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: stands_still(self._process.pid), "standing still")

    def figures(self) -> tuple[float, float]:
        """Return the seconds of CPU until now, and the most MB of memory."""
        folder = Path("/proc", str(self._process.pid))
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        peak = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmHWM"))
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1024

    def end(self) -> int:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(60)


def leave(send: Callable[[], object]) -> None:
    """Commit sends as a process does that dies after its commit."""
    with mock.patch("django_rmq.sending.on_commit._flush"), transaction.atomic():
        send()


def leave_rows(rows: int) -> None:
    """Leave so many rows, a third of them of messages with a key, of which each has several."""
    from django_rmq.models import OutboxMessage

    keys = rows // 3 // STATES
    plain = rows - keys * STATES
    for first in range(0, plain, 1000):
        some = [{"entity": number} for number in range(first, min(first + 1000, plain))]
        leave(partial(send_messages, PLAIN, some, priority=100))
    for state in range(STATES):
        leave_states(range(keys), state)
    OutboxMessage.objects.update(due_ms=1)


def leave_states(keys: range, state: int) -> None:
    """Leave one more state of each of these keys."""
    for first in range(keys.start, keys.stop, 500):
        some = range(first, min(first + 500, keys.stop))

        def send(some: range = some) -> None:
            for key in some:
                send_message(KEYED, {"entity": key, "state": state}, key=f"k{key}")

        leave(send)


def leave_last() -> int:
    """Leave another row of a message that was sent long ago, behind all others, and return its id."""
    from django_rmq.models import OutboxMessage

    leave(partial(send_messages, PLAIN, [{"entity": 0}], priority=100))
    row = OutboxMessage.objects.latest("id")
    OutboxMessage.objects.filter(id=row.id).update(due_ms=1)
    return row.id


def is_there(row: int) -> bool:
    from django_rmq.models import OutboxMessage

    return OutboxMessage.objects.filter(id=row).exists()


def count() -> int:
    from django_rmq.models import OutboxMessage

    return OutboxMessage.objects.count()


def stop_with_rows(relay: RelayProcess, rows: int) -> tuple[int, float, float]:
    """Stop the relay while it holds rows; return how many, when, and how many the other one sent in a second."""
    for _ in range(20):
        relay.stop()
        began, first = time.monotonic(), count()
        last = leave_last()
        # The other relay takes rows by their id, and ends one step before the next one. With the last row it has sent all rows
        # that nobody held.
        spent = until(lambda: not is_there(last), "the last row")  # noqa: B023 - it is called at once
        if left := count():
            return left, began, (first - left) / max(spent, 0.05)
        relay.signal(signal.SIGCONT)
        leave_rows(rows // 2)
        until(lambda: count() < rows // 4, "a quarter of the rows")
    raise RuntimeError("the relay held no row whenever it was stopped")


def examine(plain: int, keys: range, state: int) -> dict[str, int]:
    """Compare what Redis holds with what was committed: all plain messages, and the last state of each key."""
    config = get_config()
    client: Any = connections.get_broker("worker").client  # type: ignore[attr-defined]
    held: dict[str, dict[bytes, bytes]] = {PLAIN: {}, KEYED: {}}
    for name, found in held.items():
        topic = config.topic(name)
        for slot in range(topic.slots):
            slot_of = slot_keys(config.key_prefix, name, slot)
            bodies = client.hgetall(slot_of.body) if topic.keyed else {}
            found |= {member: bodies.get(member, b"") for member in client.zrange(slot_of.store, 0, -1)}
    states = {member: json.loads(decode_envelope(raw).body)["state"] for member, raw in held[KEYED].items()}
    names = {b"k%d" % key for key in keys}
    return {
        "lost": plain - len(held[PLAIN]) + len(names - states.keys()),
        "strange": len(states.keys() - names),
        "outdated": sum(found != state for found in states.values()),
        "left_in_the_outbox": count(),
    }


def run(server: Any, environment: dict[str, str], folder: Path, rows: int) -> dict[str, Any]:
    """Let two relays send the rows, and stop one of them."""
    keys = range(rows // 3 // STATES)
    leave_rows(rows)
    relays = [RelayProcess(environment, folder, number) for number in range(2)]
    try:
        until(lambda: count() < rows, "the first step")
        first, began = count(), time.monotonic()
        until(lambda: count() <= rows // 2, "half of the rows")
        together, half = time.monotonic() - began, count()
        held, stopped, alone = stop_with_rows(relays[0], rows)
        until(lambda: count() == 0, "the end of the transaction of the relay that stands still")
        stood = time.monotonic() - stopped
        # What it held has a newer state now, which Redis has.
        leave_states(keys, STATES)
        until(lambda: count() == 0, "the newer states")
        relays[0].signal(signal.SIGCONT)
        # Where it notices that its transaction was ended decides what the line says.
        until(lambda: relays[0].output, "the line of its log")
        leave_states(keys[:100], STATES)
        until(lambda: count() == 0, "the rest")
        seen = [relay.figures() for relay in relays]
        is_alive = [relay.is_alive for relay in relays]
    finally:
        codes = [relay.end() for relay in relays]
    return {
        "rows": rows,
        "rows_per_second_of_two": round((first - half) / together),
        "rows_per_second_of_one": round(alone),
        "held_by_the_one_that_stood_still": held,
        "seconds_until_others_had_them": round(stood, 1),
        "cpu_seconds": [round(cpu, 1) for cpu, _ in seen],
        "peak_mb": [round(peak) for _, peak in seen],
        "ended_early": is_alive.count(False),
        "exit_codes": codes,
        "tracebacks": sum(relay.output.count("Traceback") for relay in relays),
        **examine(rows - len(keys) * STATES, keys, STATES),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", choices=tuple(SERVERS), default="postgres")
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = stack.enter_context(RedisServer())
        server = stack.enter_context(SERVERS[options.database]())
        given = json.dumps(server.settings)
        environment = environment_of(folder, redis.url, "relays:", WORKER_DATABASE=given)
        os.environ.update(environment)
        django.setup()
        call_command("migrate", "django_rmq", verbosity=0)
        try:
            print(
                json.dumps({"database": options.database, **run(server, environment, folder, options.rows)})
            )
        finally:
            databases.close_all()
            connections.close()


if __name__ == "__main__":
    main()
