"""Listeners that hang, are cancelled or lose their thread: what people and probes see, and who gets the other messages."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core.model.topic import BackOff, Topic, TopicType
from tests.e2e import ledger
from tests.e2e.ledger import Line
from tests.e2e.processes import ONE_SLOT, WORK, Happened, Start, manage, named, probed
from tests.support.brokers import Broker
from tests.support.embedded_server import free_port
from tests.support.workers import audit, eventually, live, send, total

HUNG = Topic("shared", TopicType.RANGE_MERGE, slots=4, time_range_ms=1, serial=False)
TOPICS = ("work", "shared")
PATIENCE = 120.0


@pytest.mark.slow
def test_messages_behind_hung_listeners_are_late_and_workers_with_free_threads_get_them(
    start: Start, broker: Broker, happened: Happened, environment: dict[str, str]
) -> None:
    workers = [start(*TOPICS, "--threads", "4") for _ in range(2)]
    for worker in workers:
        worker.ready()
    send(broker, HUNG, named(*(f"hung {n}" for n in range(40)), do="hang"))
    happened.wait("begun", 8)
    send(broker, WORK, named(*range(500)))

    def stats() -> dict[str, dict[str, Any]]:
        told = manage(environment, "rmqstats", *TOPICS, "--json")
        assert told.returncode == 0, told.stderr
        return {row["topic"]: row for row in json.loads(told.stdout)}

    def is_late() -> bool:
        found = manage(environment, "rmqhealth", *TOPICS, "--max-age", "5s", "--max-running", "5s", "--json")
        troubles = {
            (one["check"], one["topic"]) for one in json.loads(found.stdout)["findings"] if not one["ok"]
        }
        wanted = {("age", "work"), ("age", "shared"), ("running", "shared")}
        assert (found.returncode == 1) == bool(troubles)
        return wanted <= troubles

    eventually(is_late, "health being red", PATIENCE)
    rows = stats()
    assert (rows["work"]["due"], rows["work"]["running"]) == (500, 0)
    assert (rows["shared"]["due"], rows["shared"]["running"]) == (32, 8)
    assert rows["work"]["oldest_due_seconds"] > 5 and rows["shared"]["oldest_running_seconds"] > 5
    assert rows["work"]["oldest_running_seconds"] is None

    start("work", "--threads", "4").ready()
    eventually(lambda: total(broker, WORK, "committed") == 500, "a worker with free threads", PATIENCE)
    assert total(broker, HUNG, "committed") == 0

    happened.go()
    eventually(lambda: live(broker, HUNG) == 0, "the end of all", PATIENCE)
    assert len(happened.lines("done")) == 540
    for topic in (HUNG, WORK):
        assert total(broker, topic, "failed") == total(broker, topic, "stale") == 0
    for worker in workers:
        assert "came too late" not in worker.output
        assert "No thread is free for topics: shared, work" in worker.output


def test_a_worker_without_a_free_thread_is_not_ready_and_gives_up_its_slots_until_one_is_free(
    start: Start, broker: Broker, happened: Happened
) -> None:
    port = free_port()
    worker = start(
        "work", "--threads", "2", "--health-addr", f"127.0.0.1:{port}", WORKER_LISTENERS="impatient"
    )
    worker.ready()
    eventually(lambda: probed(port, "ready") == 200, "being ready", PATIENCE)
    send(broker, WORK, named(*range(40), do="hang"))
    happened.wait("begun", 2)
    eventually(lambda: probed(port, "ready") == 503, "being full", PATIENCE)
    assert sum(ledger.prepare for ledger in audit(broker, WORK)) == 2
    happened.go()
    eventually(lambda: probed(port, "ready") == 200, "being ready again", PATIENCE)
    eventually(lambda: live(broker, WORK) == 0, "the end of all", PATIENCE)
    worker.end()


@pytest.mark.slow
def test_a_process_that_cannot_replace_a_thread_is_not_ready_and_gives_way(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path, environment: dict[str, str]
) -> None:
    port = free_port()

    def health() -> int:
        threadless = {**environment, "WORKER_LISTENERS": "threadless"}
        return manage(threadless, "rmqhealth", "one-slot", "--patience", "0").returncode

    worker = start(
        "one-slot",
        *("-t", "1", "--health-addr", f"127.0.0.1:{port}"),
        WORKER_LISTENERS="threadless",
        WORKER_GIVE_UP="2",
    )
    worker.ready()
    eventually(lambda: probed(port, "ready") == 200, "being ready", 20)
    eventually(lambda: health() == 0, "being well", 20)
    first = worker.child()
    (tmp_path / "no-threads").touch()
    send(broker, ONE_SLOT, named("ends its thread", do="die"))
    happened.wait("begun", 1)
    send(broker, ONE_SLOT, named("comes after it"))
    eventually(lambda: probed(port, "ready") != 200, "not being ready", 20)
    eventually(lambda: worker.children != [first], "the end of the process", 30)
    eventually(lambda: health() != 0, "being unwell", 20)
    assert probed(port, "ready") != 200
    assert "cannot be replaced" in worker.output
    (tmp_path / "no-threads").unlink()
    happened.wait("begun", 2)
    eventually(lambda: probed(port, "ready") == 200, "being ready again", 30)
    worker.end()


@pytest.mark.slow
def test_the_watchdog_counts_while_a_thread_cannot_be_replaced(
    start: Start, broker: Broker, happened: Happened, tmp_path: Path
) -> None:
    worker = start(
        "one-slot", *("-t", "1", "--watchdog", "8"), WORKER_LISTENERS="threadless", WORKER_GIVE_UP="600"
    )
    worker.ready()
    send(broker, ONE_SLOT, named("ends its thread", do="die"))
    happened.wait("begun", 1)
    (tmp_path / "no-threads").touch()
    send(broker, ONE_SLOT, named("comes after it"))
    assert worker.wait() == 4
    assert "has made no progress for 8 s" in worker.output


HANGING = Topic(
    "hanging",
    TopicType.RANGE_MERGE,
    slots=16,
    time_range_ms=1,
    max_retries=2,
    backoff=BackOff(0, 0),
    hard_timeout=1,
)


def overlapping(lines: list[Line]) -> list[tuple[Line, Line]]:
    """Return where a run began in a slot although an earlier one of the slot still wrote that it lives."""
    last = {(line.slot, line.receipt, line.name): line.at for line in lines if line.word in ("alive", "end")}
    starts = [line for line in lines if line.word == "start"]
    found = []
    before: dict[int, Line] = {}
    for line in starts:
        earlier = before.get(line.slot)
        if earlier is not None and last.get((earlier.slot, earlier.receipt, earlier.name), 0) > line.at:
            found.append((earlier, line))
        before[line.slot] = line
    return found


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_listeners_that_hang_are_ended_and_their_neighbours_are_neither_charged_nor_lost(
    start: Start, broker: Broker, tmp_path: Path, is_async: bool
) -> None:
    hung = [{"name": f"hung{n}", "ms": 1, "do": "hang"} for n in range(6)]
    slow = [{"name": f"slow{n}", "ms": 150} for n in range(120)]
    send(broker, HANGING, [*slow[:60], *hung, *slow[60:]])
    more = {"WORKER_LISTENERS": "stopping", "WORKER_ASYNC": str(int(is_async))}
    worker = start("hanging", "--processes", "2", "-t", "3", "--shutdown-timeout", "1", **more)
    eventually(lambda: live(broker, HANGING) == 0, "everything", 90)
    worker.end()
    lines = ledger.read(tmp_path / "ledger")
    ended = Counter(line.name for line in lines if line.word == "end")
    assert set(ended) == {message["name"] for message in (*hung, *slow)}, "nothing is lost"
    assert not overlapping(lines)
    names = ("committed", "failed", "overran", "expired", "died")
    counted = {name: total(broker, HANGING, name) for name in names}
    overran = counted["overran"]
    assert counted == {"committed": 126, "failed": overran, "overran": overran, "expired": 0, "died": 0}
    # On a busy machine one that is only slow may be ended as well.
    assert 6 <= overran <= worker.output.count("longer than HARD_TIMEOUT")
    assert ("a listener exceeded HARD_TIMEOUT" in worker.output) == (not is_async)


def test_a_listener_that_hangs_because_nobody_reads_what_it_prints_is_ended(
    start: Start, broker: Broker
) -> None:
    send(broker, HANGING, [{"name": "printing", "ms": 1, "do": "print"}])
    worker = start(
        "hanging", "--processes", "2", "-t", "2", "--shutdown-timeout", "1", WORKER_LISTENERS="stopping"
    )
    eventually(lambda: live(broker, HANGING) == 0, "the end of the message", 30)
    worker.end()
    assert (total(broker, HANGING, "overran"), total(broker, HANGING, "committed")) == (1, 1)
    assert "a listener exceeded HARD_TIMEOUT" in worker.output


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_a_listener_that_lets_no_other_thread_work_is_ended_by_the_watchdog(
    start: Start, broker: Broker, tmp_path: Path, is_async: bool
) -> None:
    messages = [{"name": "holding", "ms": 1, "do": "hold"}, *({"name": f"n{n}", "ms": 20} for n in range(20))]
    send(broker, HANGING, messages)
    more = {"WORKER_LISTENERS": "stopping", "WORKER_ASYNC": str(int(is_async))}
    worker = start("hanging", "--processes", "2", "-t", "2", "--watchdog", "3", **more)
    eventually(lambda: live(broker, HANGING) == 0, "everything", 120)
    worker.signal()
    worker.wait()
    assert {line.name for line in ledger.read(tmp_path / "ledger") if line.word == "end"} == {
        message["name"] for message in messages
    }
    assert (total(broker, HANGING, "committed"), total(broker, HANGING, "died")) == (21, 0)
    assert "has made no progress for 3 s and is killed" in worker.output


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_a_command_cancels_what_runs_in_another_process(
    start: Start, broker: Broker, tmp_path: Path, environment: dict[str, str], is_async: bool
) -> None:
    body = {"name": "waiting", "ms": 1, "do": "wait"}
    send(broker, HANGING, [body])
    more = {"WORKER_LISTENERS": "stopping", "WORKER_ASYNC": str(int(is_async)), "WORKER_HARD_TIMEOUT": "600"}
    worker = start("hanging", "--processes", "2", "-t", "1", **more)
    eventually(lambda: any(one.word == "alive" for one in ledger.read(tmp_path / "ledger")), "running", 30)
    text = '{"name":"waiting","ms":1,"do":"wait"}'
    answer = manage({**environment, **more}, "rmqcancel", "hanging", "--body", text)
    assert answer.stdout == "hanging: 1 notified\n", answer
    eventually(lambda: live(broker, HANGING) == 0, "the end")
    worker.end()
    assert [line.word for line in ledger.read(tmp_path / "ledger") if line.word == "cancelled"] == [
        "cancelled"
    ]
    assert total(broker, HANGING, "cancelled") == 1


@pytest.mark.proof
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_hard_time_outs_cancellations_and_kills_lose_and_overlap_nothing(
    start: Start, broker: Broker, tmp_path: Path, is_async: bool
) -> None:
    chance = random.Random(19)
    hung = [{"name": f"hung{n}", "ms": 1, "do": "hang"} for n in range(60)]
    slow = [{"name": f"slow{n}", "ms": 100} for n in range(900)]
    waits = [{"name": f"wait{n}", "ms": 1, "do": "wait"} for n in range(60)]
    mixed = chance.sample([*hung, *slow, *waits], k=1020)
    send(broker, HANGING, mixed)
    more = {"WORKER_LISTENERS": "stopping", "WORKER_ASYNC": str(int(is_async))}
    arguments = ("hanging", "--processes", "2", "-t", "4", "--shutdown-timeout", "1")
    workers = [start(*arguments, **more) for _ in range(2)]
    kills, end = 0, time.monotonic() + 240
    while live(broker, HANGING) and time.monotonic() < end:
        lines = ledger.read(tmp_path / "ledger")
        for line in lines:
            if line.name.startswith("wait") and line.word == "start":
                member = b'{"do":"wait","ms":1,"name":"%s"}' % line.name.encode()
                broker.cancel(HANGING, line.slot, [member])
        if lines and kills < 30 and chance.random() < 0.3:
            for child in chance.choice(workers).children[:1]:
                os.kill(child, signal.SIGKILL)
                kills += 1
        # Also between the last kill and the stop: a process that dies while its command stops is not a clean end.
        time.sleep(0.25)
    assert live(broker, HANGING) == 0
    for worker in workers:
        worker.signal()
    assert [worker.wait() for worker in workers] == [0, 0]
    lines = ledger.read(tmp_path / "ledger")
    names = ("committed", "cancelled", "removed", "failed", "overran", "expired", "died")
    counted = {name: total(broker, HANGING, name) for name in names}
    print(f"{kills} kills, {len(lines)} lines, {counted}")
    ended = {line.name for line in lines if line.word == "end"}
    left = {message["name"] for message in (*hung, *slow)} - ended
    assert len(left) <= counted["died"], left
    assert not overlapping(lines)
    assert counted["failed"] == counted["overran"] >= len(hung) - kills * 8
    assert counted["cancelled"] + counted["removed"] <= len(waits)
    assert sum(counted[name] for name in ("committed", "cancelled", "removed", "died")) == len(mixed)
