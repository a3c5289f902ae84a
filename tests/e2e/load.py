"""A load of messages whose listener keeps the ledger, and who owns the slots meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django_rmq.core.model.topic import BackOff, Topic, TopicType
from tests.e2e.ledger import Findings, examine, read, write
from tests.e2e.processes import WorkerProcess, is_gone
from tests.support.brokers import Broker, ClusterBroker
from tests.support.workers import LONG, describe, eventually, live, members, send, total

LEDGER = Topic(
    "ledger", TopicType.RANGE_MERGE, slots=16, time_range_ms=1, max_retries=2, backoff=BackOff(0, 0)
)
CHAOS = Topic("chaos", TopicType.RANGE_MERGE, slots=64, time_range_ms=1, backoff=BackOff(0, 0))
TAKEN_OVER = Topic("taken-over", TopicType.RANGE_MERGE, slots=64, time_range_ms=1, timeout=5)
POISON = Topic("poison", TopicType.RANGE_MERGE, slots=2, time_range_ms=1, backoff=BackOff(0, 0))
KILLING = Topic(
    "killing", TopicType.RANGE_MERGE, slots=8, time_range_ms=1, max_retries=2, backoff=BackOff(0, 0)
)


class Load:
    """Messages of a topic whose listener keeps the ledger, and what became of them."""

    def __init__(self, broker: Broker | ClusterBroker, data: Path, topic: Topic) -> None:
        self.broker = broker
        self.topic = topic
        self.path = data / "ledger"
        self.due: dict[str, int] = {}
        self.poison: set[str] = set()
        self._ended: set[str] = set()
        self._read = 0

    def send(self, count: int, ms: float = 5, do: str = "") -> None:
        """Send so many messages of so many ms of work each."""
        names = [f"m{len(self.due) + i}" for i in range(count)]
        self.due |= dict.fromkeys(names, int(time.time() * 1000))
        send(self.broker, self.topic, [{"name": name, "ms": ms, "do": do} for name in names])

    def send_poison(self, do: str = "kill") -> None:
        """Send one that kills its process, or that fails, whenever it runs."""
        name = f"poison{len(self.poison)}"
        self.poison.add(name)
        self.due[name] = int(time.time() * 1000)
        send(self.broker, self.topic, [{"name": name, "ms": 0, "do": do}])

    def kill(self, pid: int) -> None:
        """Kill a process with -9, and write it down."""
        write(self.path, "killing", pid)
        os.kill(pid, signal.SIGKILL)
        self._note_death(pid)

    def kill_command(self, worker: WorkerProcess) -> list[int]:
        """Kill a command with all its children, and write it down; return the children."""
        worker.stop()  # It starts no other child meanwhile.
        children = worker.children
        # On a busy machine their messages may time out and run elsewhere before the test knows that they are dead.
        for pid in children:
            write(self.path, "killing", pid)
        worker.kill()
        for pid in children:
            self._note_death(pid)
        return children

    def _note_death(self, pid: int) -> None:
        """Write down that a process was killed, when it is gone."""
        eventually(lambda: is_gone(pid), "dying")
        write(self.path, "killed", pid)

    def ended(self) -> set[str]:
        """The messages that have run to their end, by what was written since the last look."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + bool(whole)
            for line in whole.decode().splitlines():
                if line.startswith("end "):
                    self._ended.add(line.rpartition(" ")[2])
        return self._ended

    def at_work(self) -> set[int]:
        """The processes that have begun a message."""
        return {line.pid for line in read(self.path) if line.word == "start"}

    def wait_for(self, count: int, seconds: float = LONG) -> None:
        """Return when so many messages have run to their end."""
        eventually(lambda: len(self.ended()) >= count, f"{count} messages ending", seconds)

    def wait(self, seconds: float = LONG) -> None:
        """Return when nothing waits or runs any more."""
        eventually(
            lambda: (
                len(self.ended()) >= len(self.due) - len(self.poison) and live(self.broker, self.topic) == 0
            ),
            "finishing",
            seconds,
        )

    def examine(self) -> Findings:
        """Compare; an assertion fails where anything is wrong."""
        found = examine(read(self.path), self.due, poison=self.poison)
        assert found.clean(), found
        return found

    def charged(self) -> int:
        """Deliveries that cost a retry."""
        return total(self.broker, self.topic, "expired") + total(self.broker, self.topic, "failed")


def shares(broker: Broker | ClusterBroker, topic: str = "ledger") -> dict[int, int]:
    """Process id -> how many slots of the topic it owns."""
    by_worker: Counter[str] = Counter()
    for holding in describe(broker):
        if holding.topic == topic:
            by_worker[holding.worker] += holding.stop - holding.start
    return {member.worker.pid: by_worker[member.worker.id] for member in members(broker)}


def owned_by(broker: Broker, worker: WorkerProcess, topic: str = "ledger") -> int:
    """How many slots of the topic the processes of a command own."""
    children = worker.children
    return sum(count for pid, count in shares(broker, topic).items() if pid in children)


def timed(condition: Callable[[], Any], what: str, seconds: float) -> float:
    """Wait for a condition; return how long that took."""
    began = time.monotonic()
    eventually(condition, what, seconds)
    return time.monotonic() - began
