"""Workers that die all the time, under load: what `test_kills` does for a minute and `make soak` for an hour."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.ledger import Findings, examine, read
from tests.e2e.load import Load
from tests.e2e.processes import Start, WorkerProcess
from tests.e2e.worker_project.points import POINTS
from tests.support.workers import LONG, eventually, total

FROM_OUTSIDE = "from-outside"
"""Killed by the test at any moment, or with its whole command."""


@dataclass
class Outcome:
    """What a run has come to."""

    kills: Counter[str]
    """Point -> processes that were killed there."""
    seconds: float
    messages: int
    findings: Findings
    charged: int
    died: int


class Chaos:
    """Several commands on one Redis, whose processes kill themselves at named points and are killed at any moment."""

    def __init__(
        self, start: Start, load: Load, data: Path, *, commands: int = 3, processes: int = 3
    ) -> None:
        self.load = load
        self.data = data
        self._start = start
        self._processes = str(processes)
        self._commands = [self._another() for _ in range(commands)]
        self._outside = 0

    def _another(self) -> WorkerProcess:
        return self._start("chaos", "-p", self._processes, "-t", "2", WORKER_POINTS="all", WORKER_TIMEOUT="2")

    def kills(self) -> Counter[str]:
        """Point -> how many processes have died there."""
        path = self.data / "kills"
        found = Counter(path.read_text().split()) if path.exists() else Counter[str]()
        found[FROM_OUTSIDE] = self._outside
        return found

    def run(self, kills: int, seconds: float, *, per_point: int = 0) -> Outcome:
        """Let so many processes die, but at most for so long; then let the survivors finish what is left."""
        began = time.monotonic()
        next_send = next_kill = next_poison = began
        next_command = began + 10
        pause = 0.05
        while time.monotonic() < began + seconds:
            dead = self.kills()
            if dead.total() >= kills and (not per_point or self._reached(dead, per_point)):
                break
            now = time.monotonic()
            if now >= next_send:
                next_send = now + 0.2
                self._send()
            if now >= next_kill:
                next_kill = now + random.uniform(0.2, 1.0)
                self._kill_one()
            if now >= next_command:
                next_command = now + random.uniform(5, 15)
                self._kill_command()
            if now >= next_poison:
                next_poison = now + 4
                self.load.send_poison("fail")
            for i, command in enumerate(self._commands):
                if command.process.poll() is not None:
                    self._commands[i] = self._another()
            time.sleep(pause)
        spent = time.monotonic() - began
        (self.data / "peace").touch()
        # A parent that chose its death before may find it only now; it is no less one of those that died.
        commands = [*self._commands, self._another()]
        self.load.wait(5 * LONG)
        for command in commands:
            # Until then, the signal would kill it.
            eventually(lambda: "Consuming" in command.output or command.process.poll() is not None)  # noqa: B023
            command.signal()
        load = self.load
        by_own_hand = {line.pid for line in read(load.path) if line.word == "kill"}
        for command in commands:
            code = command.wait()
            assert code == 0 or (code == -signal.SIGKILL and command.process.pid in by_own_hand), code
        return Outcome(
            self.kills(),
            spent,
            len(load.due),
            examine(read(load.path), load.due, poison=load.poison),
            load.charged(),
            total(load.broker, load.topic, "died"),
        )

    def _reached(self, dead: Counter[str], per_point: int) -> bool:
        return all(dead[point] >= per_point for point in POINTS)

    def _send(self) -> None:
        if len(self.load.due) - len(self.load.ended()) < 400:
            self.load.send(40, ms=5)
            self.load.send(4, ms=3, do="fail once")
            self.load.send(2, ms=900)

    def _kill_one(self) -> None:
        pids = [pid for command in self._commands for pid in command.children]
        if pids:
            self._killed(random.choice(pids))

    def _killed(self, *pids: int) -> None:
        for pid in pids:
            try:
                self.load.kill(pid)
            except ProcessLookupError:
                continue
            self._outside += 1

    def _kill_command(self) -> None:
        """Kill a parent with its children, or its parent alone, and start another."""
        i = random.randrange(len(self._commands))
        command = self._commands[i]
        if random.random() < 0.5:
            self._outside += 1 + len(self.load.kill_command(command))
        else:
            command.signal(signal.SIGKILL)
            command.process.wait()
            self._outside += 1
        self._commands[i] = self._another()
