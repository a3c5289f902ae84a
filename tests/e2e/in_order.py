"""A strict fifo topic under failures, kills and take-overs; an independent program then reads what happened."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from tests.e2e.processes import Start, WorkerProcess
from tests.support.brokers import Broker
from tests.support.commands import completed
from tests.support.workers import audit, eventually, live

IN_LINE = Topic(
    "in-line",
    TopicType.FIFO,
    slots=64,
    identity="key",
    slot_basis="entity",
    timeout=2,
    max_retries=100,
    backoff=BackOff(50, 50),
)
CHUNK = 5_000
MOST_WAITING = 200_000


class InOrder:
    """Workers that are killed while they serve ``messages`` messages of ``entities`` entities."""

    def __init__(self, start: Start, broker: Broker, data: Path, messages: int, entities: int = 100) -> None:
        self.kills: Counter[str] = Counter()
        self._start, self._broker, self._data = start, broker, data
        self._messages, self._entities = messages, entities
        self._error: BaseException | None = None

    def run(self, seconds: float) -> dict[str, Any]:
        """Kill for so long at most, let the survivors finish, and return the verdict."""
        commands = [self._another() for _ in range(2)]
        for command in commands:
            command.ready()
        began = time.monotonic()
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        next_kill, next_command = began + 0.2, began + 2
        while (sender.is_alive() or live(self._broker, IN_LINE)) and time.monotonic() < began + seconds:
            now = time.monotonic()
            if now >= next_kill:
                next_kill = now + random.uniform(0.3, 1.5)
                self._kill_child(random.choice(commands))
            if now >= next_command:
                next_command = now + random.uniform(4, 8)
                at = random.randrange(len(commands))
                commands[at].kill()
                self.kills["commands"] += 1
                commands[at] = self._another()
            time.sleep(0.05)
        sender.join()
        if self._error is not None:
            raise self._error
        limit = 60 + self._messages / 500
        eventually(lambda: live(self._broker, IN_LINE) == 0, "serving everything", limit)
        spent = time.monotonic() - began
        for command in commands:
            command.signal()
        for command in commands:
            command.wait()
        ledgers = audit(self._broker, IN_LINE)
        return {
            "seconds": round(spent, 1),
            "kills": dict(self.kills),
            "failed": sum(ledger["failed"] for ledger in ledgers),
            "timed out": sum(ledger["expired"] for ledger in ledgers),
            "given back": sum(ledger["released"] for ledger in ledgers),
            "died": sum(ledger["died"] for ledger in ledgers),
            **self._checked(),
        }

    def _another(self) -> WorkerProcess:
        return self._start("in-line", "-p", "2", "-t", "2")

    def _send(self) -> None:
        producer = Producer(self._broker)
        numbers: Counter[int] = Counter()
        try:
            for first in range(0, self._messages, CHUNK):
                built = []
                for n in range(first, min(first + CHUNK, self._messages)):
                    entity = n % self._entities
                    numbers[entity] += 1
                    built.append(producer.build(IN_LINE, {"entity": entity, "number": numbers[entity]}))
                producer.send(built)
                while first + CHUNK - self._served() > MOST_WAITING:
                    time.sleep(0.1)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the run
            self._error = error

    def _served(self) -> int:
        return sum(ledger["committed"] for ledger in audit(self._broker, IN_LINE))

    def _kill_child(self, command: WorkerProcess) -> None:
        children = command.children
        if children:
            try:
                os.kill(random.choice(children), signal.SIGKILL)
            except ProcessLookupError:
                return
            self.kills["processes"] += 1

    def _checked(self) -> dict[str, Any]:
        checker = Path(__file__).with_name("in_order_checker.py")
        log = self._data / "in-line"
        done = completed(
            [sys.executable, checker, log, str(self._entities), str(self._messages)], seconds=600
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found
