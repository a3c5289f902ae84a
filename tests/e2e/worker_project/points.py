"""Named points of a worker's life at which it dies by its own hand, as `WORKER_POINTS` says.

The package knows nothing of them: its functions are wrapped before the first fork. Each child chooses one point, at
random among those that killed least so far, and dies at one of the next times it passes there; a child that does
not come by chooses another. Without a point only the pauses before a successor are short. `WORKER_DATA/peace`
ends it. The last line of a process in the ledger is its `kill`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from redis.connection import AbstractConnection

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer import async_executor, batch_run, dispatcher, executor_pool, slot_acquisition
from django_rmq.core.redis.broker import RedisBroker, RedisPipeline
from django_rmq.core.worker_processes import child_process
from django_rmq.worker import worker_process
from tests.e2e import ledger

WORKER_DATA = Path(os.environ.get("WORKER_DATA", "."))

SCRIPTS = {
    "prepare": "prepare",
    "commit": "commit",
    "commit_delivery": "commit_delivery",
    "rollback": "rollback",
    "extend": "extend",
    "acquire": "acquire_slots",
    "heads": "heads",
    "beat": "workers/beat",
    "assign": "workers/assign",
}
"""Sent and answered by every worker now and then."""

OF_AN_END = {"release": "release", "leave": "workers/leave"}
"""Sent and answered by a worker that was told to end."""

OF_RECOVERY = {"held": "list_held"}
"""Sent and answered by a worker that has not heard what a prepare handed out."""

POINTS = (
    *(f"{name}-{when}" for name in (*SCRIPTS, *OF_AN_END, *OF_RECOVERY) for when in ("sent", "answered")),
    "before-thread",
    "after-thread",
    "in-listener",
    "after-listener",
    "after-report",
    "going-on",
    "gone-on",
    "gaining",
    "losing",
    "settling-for",
    "settled-for",
)
RARE = {"assign", "losing", "gaining"}
"""Passed only when workers come or go."""

OF_DATABASE = ("in-transaction", "before-database-commit", "after-database-commit")
"""In a listener, and around the commit of a database transaction: passed only by listeners that have one."""

OF_PARENTS = ("settling-for", "settled-for")
"""Around what a parent does after the death of a child: here it is the parent who dies."""

PATIENCE_SECONDS = 2.0

MOST_PASSES = int(os.environ.get("WORKER_PASSES", "4"))
"""How often a process passes its point, at most."""

KILLS = WORKER_DATA / "kills"
"""One line for each death: its point."""


class Doom:
    """The point at which this process is going to die."""

    def __init__(self) -> None:
        self.point = ""
        self.passes = 0
        self.until = 0.0
        self.loses_reply = False

    def choose(self) -> None:
        """Choose a point, and see to it that it is passed."""
        named = chosen_points()
        if not named:
            return
        deaths = counts()
        by_deaths = sorted(named, key=lambda point: (deaths[point], random.random()))
        self.point = random.choice(by_deaths[: max(3, len(by_deaths) // 3)])
        name = self.point.partition("-")[0]
        self.until = time.monotonic() + PATIENCE_SECONDS
        self.passes = 1 if name in RARE else random.randint(1, MOST_PASSES)
        if name in OF_AN_END:
            self.passes = 1
            ending = threading.Timer(random.uniform(0.5, 1.0), os.kill, (os.getpid(), signal.SIGTERM))
            ending.daemon = True
            ending.start()
        elif name in OF_RECOVERY or self.point in ("going-on", "gone-on"):
            self.passes = 1
            self.loses_reply = True

    def passing(self, point: str) -> None:
        """Die, if this is the point and its time."""
        if not self.point:
            return
        if self.point == point:
            self.passes -= 1
            if self.passes <= 0 and not (WORKER_DATA / "peace").exists():
                die(point)
        elif self.point and time.monotonic() > self.until and not (WORKER_DATA / "peace").exists():
            self.choose()


doom = Doom()


def chosen_points() -> list[str]:
    """The points of children that this run is about."""
    named = os.environ["WORKER_POINTS"]
    chosen = (
        POINTS
        if named == "all"
        else [point for point in (*POINTS, *OF_DATABASE) if point in named.split(",")]
    )
    return [point for point in chosen if point not in OF_PARENTS]


def counts() -> Counter[str]:
    """How many processes have died at each point."""
    return Counter(KILLS.read_text().split()) if KILLS.exists() else Counter()


def die(point: str) -> None:
    """Write the last line of this process, and end it."""
    with KILLS.open("a") as file:
        file.write(f"{point}\n")
    ledger.write_last(WORKER_DATA / "ledger", "kill", 0, 0, 0, point)
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


@contextmanager
def around(before: str, after: str) -> Iterator[None]:
    """Pass one point before and one after."""
    doom.passing(before)
    yield
    doom.passing(after)


def wrapped(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with around(before, after):
            return function(*args, **options)

    return call


def install() -> None:
    """Wrap what a worker does."""
    names = {script: name for group in (SCRIPTS, OF_AN_END, OF_RECOVERY) for name, script in group.items()}
    by_sha = {lua.load(script).sha: name for script, name in names.items()}
    send, receive, run = AbstractConnection.send_packed_command, RedisPipeline.receive, RedisBroker.run

    def sending(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        result = send(self, command, *args, **options)
        packed = command if isinstance(command, bytes) else b"".join(command)
        sent = [name for sha, name in by_sha.items() if sha in packed]
        if doom.loses_reply and "prepare" in sent:
            doom.loses_reply = False
            # The server does it all the same; reading from here on fails.
            self._sock.shutdown(1)
            while self._sock.recv(65536):
                pass
        for name in sent:
            doom.passing(f"{name}-sent")
        return result

    def receiving(self: Any) -> Any:
        called = {call.script for call in self._calls}
        result = receive(self)
        for script in called & set(names):
            doom.passing(f"{names[script]}-answered")
        return result

    def running(self: Any, call: Call) -> Any:
        result = run(self, call)
        if call.script in names:
            doom.passing(f"{names[call.script]}-answered")
        return result

    def settling(*args: Any) -> Any:
        if os.environ["WORKER_POINTS"] == "all" and random.random() < 0.05:
            doom.point, doom.passes = random.choice(OF_PARENTS), 1
            doom.until = float("inf")
        with around(*OF_PARENTS):
            return settle(*args)

    def child(*args: Any) -> int:
        doom.choose()
        return run_child(*args)

    AbstractConnection.send_packed_command = sending  # type: ignore[method-assign]
    RedisPipeline.receive = receiving  # type: ignore[method-assign]
    RedisBroker.run = running  # type: ignore[method-assign]
    taking: tuple[Any, ...] = (executor_pool.ExecutorThread, async_executor.AsyncExecutor)
    for thread in taking:
        thread.put = wrapped(thread.put, "before-thread", "after-thread")
    run_of_batch: Any = batch_run.BatchRun
    run_of_batch._report = wrapped(run_of_batch._report, "after-listener", "after-report")
    worker: Any = dispatcher.Dispatcher
    django: Any = worker_process
    recovery: Any = slot_acquisition.LostReplyRecovery
    recovery.adopt = wrapped(recovery.adopt, "going-on", "gone-on")
    worker.own, worker.disown = wrapped(worker.own, after="gaining"), wrapped(worker.disown, after="losing")
    run_child, django.run_child = django.run_child, child
    settle, django.settle = django.settle, settling
    # They die young here, and shall have successors all the same.
    child_process.LONGEST_PAUSE = child_process.FIRST_PAUSE
