"""MAX_IN_FLIGHT over several commands with several processes each."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.ledger import Line, read
from tests.e2e.processes import Start
from tests.support.brokers import Broker
from tests.support.workers import eventually, live, send

PERMITS = Topic("permits", TopicType.RANGE_MERGE, slots=16, time_range_ms=1, max_in_flight=3)


def most_at_once(lines: list[Line], dead: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """How many listeners ran at once; those of processes that were killed do not count."""
    running: set[tuple[int, int]] = set()
    most = 0
    for line in lines:
        if line.word == "start":
            running.add((line.pid, line.thread))
            most = max(most, len({who for who in running if who[0] not in dead}))
        elif line.word == "end":
            running.discard((line.pid, line.thread))
    return most


def in_flight(broker: Broker) -> int:
    """How many messages are handed out and in time, in one instant.

    What a dead process held has timed out before its permits are free, and lies in Prepare until somebody takes it out.
    """
    pipeline = broker.client.pipeline(transaction=True)
    pipeline.time()
    for slot in range(PERMITS.slots):
        key = slot_keys(broker.prefix, PERMITS.name, slot).prepare
        pipeline.zrange(key, 0, -1, withscores=True)
    (now, _), *slots = pipeline.execute()
    begun = [score // 1000 for entries in slots for _, score in entries]
    return sum(at >= now - PERMITS.timeout for at in begun)


def ended(data: Path) -> int:
    return len({line.name for line in read(data / "ledger") if line.word == "end"})


def test_messages_in_flight_are_limited_over_all_processes_while_they_come_and_die(
    start: Start, broker: Broker, tmp_path: Path
) -> None:
    most = sent = 0

    def send_more(count: int) -> None:
        nonlocal sent
        send(broker, PERMITS, [{"name": f"m{sent + i}", "ms": 25} for i in range(count)])
        sent += count

    def until(count: int) -> None:
        def is_so() -> bool:
            nonlocal most
            most = max(most, in_flight(broker))
            return ended(tmp_path) >= count

        eventually(is_so, f"{count} messages", 60)

    send_more(600)
    first = start("permits", "--processes", "2")
    until(60)
    second = start("permits", "--processes", "2")
    second.ready()

    def both_work() -> bool:
        if live(broker, PERMITS) < 200:
            send_more(200)
        children = {*first.children, *second.children}
        at_work = {line.pid for line in read(tmp_path / "ledger") if line.word == "end"}
        return len(children) == 4 and children <= at_work

    eventually(both_work, "both at work")
    victim = second.children[0]

    os.kill(victim, signal.SIGKILL)
    until(ended(tmp_path) + 40)
    first.signal(signal.SIGTERM)
    until(sent)
    assert first.wait() == 0
    second.end()
    lines = read(tmp_path / "ledger")
    assert most_at_once(lines, {victim}) <= 3
    assert most <= 3, "handed out at a time"
    assert most_at_once(lines) >= 3, "the limit was reached"
    by_process = Counter(line.pid for line in lines if line.word == "end")
    assert len(by_process) >= 4
    assert live(broker, PERMITS) == 0
