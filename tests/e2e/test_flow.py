"""FLOW "auto" in a real worker process: a listener becomes a hundred times slower beside a quick one."""

from __future__ import annotations

import signal
import statistics
from pathlib import Path

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.ledger import Line, examine, read
from tests.e2e.processes import Happened, Start, named
from tests.support.brokers import Broker
from tests.support.workers import eventually, send

FLOWING = Topic("flowing", TopicType.RANGE_MERGE, slots=32, time_range_ms=1, flow="auto")
WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
CAPACITY = 3


def at_once(lines: list[Line]) -> list[int]:
    """How many listeners ran when each one began."""
    running, found = 0, []
    for line in lines:
        running += {"start": 1, "end": -1}[line.word]
        if line.word == "start":
            found.append(running)
    return found


def has_settled(path: Path, before: int) -> bool:
    """Whether the last 40 calls ran beside as few others as the bottleneck takes."""
    # A listener that has been called may wait: that many run beyond the bottleneck, a fourth at most.
    slow = at_once(read(path))[before:][-40:]
    return len(slow) == 40 and 2 <= statistics.median(slow) <= 4 and statistics.mean(slow) < 6


def test_a_listener_that_becomes_slow_settles_and_its_neighbour_goes_on(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path
) -> None:
    path = tmp_path / "flowing"
    names = [f"m{i}" for i in range(3000)]
    send(broker, FLOWING, [{"name": name} for name in names])
    worker = start("flowing", "work", "--threads", "12")
    worker.ready()

    def begun() -> int:
        return sum(line.word == "start" for line in read(path))

    eventually(lambda: begun() >= 600, "600 quick calls", 60)
    (tmp_path / "slower").touch()
    before = begun()
    for part in range(5):
        send(broker, WORK, named(*(f"w{part}-{i}" for i in range(100))))
        happened.wait("done", 100 * (part + 1))
    eventually(lambda: has_settled(path, before), "settling at what the bottleneck takes", 90)
    (tmp_path / "slower").unlink()
    eventually(lambda: sum(line.word == "end" for line in read(path)) >= 3000, "all", 90)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    lines = read(path)
    findings = examine(lines, dict.fromkeys(names, 0))
    assert findings.clean(), findings
    assert not findings.doubled
