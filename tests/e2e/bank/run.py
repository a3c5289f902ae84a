"""``python -m tests.e2e.bank.run``: transfers between accounts, while everything dies; each has to happen exactly once.

Workers are killed at named points and at any moment, or stand still until others have their messages. The sender is
killed as well. Redis fails over without its last writes, and PostgreSQL crashes. Ends with 1 if a balance is wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from django_rmq.core.commands import operate
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import RmqError
from tests.e2e.bank.servers import FailingRedis
from tests.e2e.postgres import Postgres, postgres
from tests.e2e.processes import WorkerProcess, environment_of, manage
from tests.support.brokers import Broker
from tests.support.commands import ROOT, completed, started
from tests.support.workers import client_of

TRANSFERS = Topic(
    "transfers",
    TopicType.RANGE_MERGE,
    slots=32,
    time_range_ms=1,
    identity="key",
    origin=True,
    timeout=2,
    max_retries=200,
    backoff=BackOff(200, 200),
)
"""As in the settings."""

POINTS = (
    "prepare-sent,prepare-answered,commit-sent,commit-answered,commit_delivery-sent,commit_delivery-answered,rollback-sent,rollback-answered,release-sent,"
    "before-thread,after-thread,in-transaction,before-database-commit,after-database-commit,"
    "after-listener,after-report,going-on,gone-on"
)
STILL = 300.0
"""Seconds in which something of the rest has to be done."""
AHEAD = 300
"""How many transfers are sent before the deaths that belong to them."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    transfers: int = 100_000
    accounts: int = 1_000
    kills: int = 5_000
    """Worker processes to kill."""
    fail_overs: int = 20
    """Fail-overs of Redis, each of which loses the last writes."""
    restarts: int = 2
    """Restarts of PostgreSQL: crashes and orderly ones in turn."""
    commands: int = 2
    processes: int = 4
    """Worker processes of each command."""
    seconds: float = 7_200.0
    """After so long the rest is transferred in peace."""
    seed: int = 0
    once: bool = True
    points: str = POINTS
    """Where processes kill themselves."""


@dataclass
class Outcome:
    """What a run has come to."""

    kills: Counter[str] = field(default_factory=Counter)
    """Point -> processes that died there."""
    fail_overs: int = 0
    lost_bytes: int = 0
    restarts: int = 0
    stops: int = 0
    """Workers that stood still for longer than the time-out of their messages, and went on."""
    senders: int = 0
    """Senders that were killed."""
    skipped: int = 0
    """Deliveries of transfers that had been made already."""
    replayed: int = 0
    seconds: float = 0.0
    is_right: bool = False
    report: str = ""

    def is_whole(self, plan: Plan) -> bool:
        """Return whether everything that was planned has happened."""
        return (
            self.kills.total() >= plan.kills
            and self.fail_overs >= plan.fail_overs
            and self.restarts >= plan.restarts
        )


class Run:
    """A run of a plan, with its files in ``data``."""

    def __init__(
        self, plan: Plan, data: Path, redis: FailingRedis, postgres: Postgres, progress: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self._data = data
        self._redis = redis
        self._postgres = postgres
        self._progress = progress
        self._list = data / "transfers.csv"
        self._random = random.Random(plan.seed)
        self._outside = 0
        self._environment = {
            "DJANGO_SETTINGS_MODULE": "tests.e2e.bank.settings",
            "BANK_PORT": str(postgres.port),
            "BANK_ONCE": "1" if plan.once else "0",
            "WORKER_PASSES": "6",
        }
        self._commands: list[WorkerProcess] = []
        self._sender: subprocess.Popen[bytes] | None = None

    def run(self) -> Outcome:
        """Do all of it; the outcome says whether every balance is right."""
        began = time.monotonic()
        self._prepare()
        try:
            self._commands = [self._command() for _ in range(self.plan.commands)]
            self._trouble(began + self.plan.seconds)
            (self._data / "peace").touch()
            self._allow(self.plan.transfers)
            self._finish()
        finally:
            if self._sender is not None:
                self._sender.kill()
                self._sender.wait()
            for command in self._commands:
                command.kill()
        self.outcome.kills = self._kills()
        self.outcome.lost_bytes = sum(self._redis.lost_bytes)
        again = self._data / "again"
        self.outcome.skipped = again.stat().st_size if again.exists() else 0
        self.outcome.seconds = time.monotonic() - began
        self._audit()
        return self.outcome

    # --- before and after

    def _prepare(self) -> None:
        accounts = range(1, self.plan.accounts + 1)
        with self._list.open("w", newline="") as file:
            writer = csv.writer(file)
            for _ in range(self.plan.transfers):
                source, target = self._random.sample(accounts, 2)
                writer.writerow([source, target, self._random.randint(1, 10_000)])
        environment = environment_of(self._data, self._redis.url, "bank:", **self._environment)
        migrated = manage(environment, "migrate", "--run-syncdb", "-v", "0")
        assert migrated.returncode == 0, migrated.stderr
        self._postgres.query(
            f"INSERT INTO bank_account SELECT number, 0 FROM generate_series(1, {self.plan.accounts}) AS number"
        )
        self._allow(0)

    def _finish(self) -> None:
        """Wait until everything that was sent is done, as long as it becomes less; replay what has died."""
        least, moved = self._left(), time.monotonic()
        while any(left := self._left()):
            now = time.monotonic()
            if left < least:
                least, moved = left, now
            assert now < moved + STILL, "left: {} to send, {} in the outbox, {} in Redis".format(*left)
            self._keep_alive()
            time.sleep(0.2)
        for command in self._commands:
            command.signal()
        for command in self._commands:
            command.wait()

    def _left(self) -> tuple[float, float, float]:
        """Replay what has died, and return how many transfers are to be sent, in the outbox, and in Redis."""
        sent = int(self._postgres.query("SELECT count(*) FROM bank_order"))
        kept = int(self._postgres.query("SELECT count(*) FROM django_rmq_outboxmessage"))
        client = client_of(self._redis.url)
        broker = Broker(client, "bank:")
        try:
            counts = [broker.count(TRANSFERS, slot) for slot in range(TRANSFERS.slots)]
            for slot, count in enumerate(counts):
                if count.dead:
                    dead = [
                        entry.member
                        for entry in broker.list_messages(TRANSFERS, slot, "dead", limit=100).entries
                    ]
                    broker.run(operate.replay(TRANSFERS, slot, dead))
                    self.outcome.replayed += len(dead)
            held = float(sum(count.held for count in counts))
        except RmqError:
            held = math.inf
        finally:
            client.close()
        return self.plan.transfers - sent, kept, held

    def _audit(self) -> None:
        figures = str(self.plan.accounts), str(self._postgres.port)
        audited = completed(
            [sys.executable, ROOT / "tests/e2e/bank/audit.py", self._list, *figures], seconds=600
        )
        self.outcome.is_right = audited.returncode == 0
        self.outcome.report = audited.stdout + audited.stderr

    # --- trouble

    def _trouble(self, end: float) -> None:
        """Kill and stop things until the plan is fulfilled, or the time is over."""
        plan, outcome = self.plan, self.outcome
        next_kill = next_stop = next_command = next_look = time.monotonic() + 1
        while time.monotonic() < end:
            now, done = time.monotonic(), self._progress_of_plan()
            self._allow(min(plan.transfers, int(plan.transfers * done) + AHEAD))
            self._keep_alive()
            if done >= 1 and outcome.fail_overs >= plan.fail_overs and outcome.restarts >= plan.restarts:
                return
            if outcome.fail_overs < plan.fail_overs and done >= (outcome.fail_overs + 0.5) / plan.fail_overs:
                self._redis.fail_over()
                outcome.fail_overs += 1
            if outcome.restarts < plan.restarts and done >= (outcome.restarts + 0.7) / plan.restarts:
                self._postgres.restart("immediate" if outcome.restarts % 2 == 0 else "fast")
                outcome.restarts += 1
            if now >= next_kill:
                next_kill = now + self._random.uniform(0.5, 2.5)
                self._kill_one()
            if now >= next_stop:
                next_stop = now + self._random.uniform(2, 6)
                self._stop_one()
            if now >= next_command:
                next_command = now + self._random.uniform(10, 30)
                self._kill_command()
            if now >= next_look:
                next_look = now + 5
                self._progress(
                    f"{self._kills().total()} of {plan.kills} deaths, {outcome.fail_overs} fail-overs, "
                    f"{outcome.restarts} restarts"
                )
            time.sleep(0.05)

    def _progress_of_plan(self) -> float:
        return min(1.0, self._kills().total() / self.plan.kills) if self.plan.kills else 1.0

    def _kills(self) -> Counter[str]:
        path = self._data / "kills"
        found = Counter(path.read_text().split()) if path.exists() else Counter[str]()
        found["from-outside"] = self._outside
        return found

    def _allow(self, transfers: int) -> None:
        path = self._data / "allowed"
        path.with_suffix(".new").write_text(str(transfers))
        path.with_suffix(".new").replace(path)

    def _keep_alive(self) -> None:
        """Start what has ended."""
        for at, command in enumerate(self._commands):
            if command.process.poll() is not None:
                self._commands[at] = self._command()
        if self._sender is None or self._sender.poll() not in (None, 0):
            program: list[str | Path] = [sys.executable, "-m", "tests.e2e.bank.sender", self._list]
            environment = environment_of(self._data, self._redis.url, "bank:", **self._environment)
            self._sender = started(program, self._data / "sender.log", environment)

    def _command(self) -> WorkerProcess:
        options = {**self._environment, "WORKER_POINTS": self.plan.points}
        return WorkerProcess(
            self._data, self._redis.url, "bank:", "-p", str(self.plan.processes), "-t", "2", **options
        )

    def _kill_one(self) -> None:
        pids = [pid for command in self._commands for pid in command.children]
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(pids), signal.SIGKILL)
                self._outside += 1

    def _stop_one(self) -> None:
        """Let a worker stand still until its messages have timed out, so that two workers have them."""
        pids = [pid for command in self._commands for pid in command.children]
        if pids:
            pid = self._random.choice(pids)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.outcome.stops += 1
            going_on = threading.Timer(TRANSFERS.timeout + 1.5, _go_on, (pid,))
            going_on.daemon = True
            going_on.start()

    def _kill_command(self) -> None:
        """Kill a parent with its children, or the sender."""
        if self._sender is not None and self._sender.poll() is None and self._random.random() < 0.5:
            self._sender.kill()
            self._sender.wait()
            self.outcome.senders += 1
            return
        command = self._random.choice(self._commands)
        self._outside += 1 + len(command.children)
        command.kill()


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bank.run", description=__doc__)
    for one in fields(Plan)[:-2]:
        kind: type = type(one.default)
        parser.add_argument(
            f"--{one.name.replace('_', '-')}", type=kind, default=one.default, help=f"default {one.default}"
        )
    parser.add_argument(
        "--without-once", action="store_true", help="show that balances are wrong without once"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write plan and outcome to this file")
    options = vars(parser.parse_args())
    path, without = options.pop("json"), options.pop("without_once")
    plan = Plan(**options, once=not without)
    with tempfile.TemporaryDirectory() as folder, postgres() as database, FailingRedis() as redis:
        outcome = Run(plan, Path(folder), redis, database, print).run()
    found = {"plan": asdict(plan), "outcome": vars(outcome)}
    print(json.dumps(found, indent=2))
    print("\n".join(outcome.report.splitlines()[-20:]))
    if not outcome.is_whole(plan):
        print("not everything that was planned has happened: raise --seconds")
    if path:
        path.write_text(json.dumps(found, indent=2))
    return 0 if outcome.is_right and outcome.is_whole(plan) else 1


if __name__ == "__main__":
    sys.exit(main())
