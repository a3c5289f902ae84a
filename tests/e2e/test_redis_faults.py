"""Redis dies, freezes, or its replies are lost under whole worker processes: they go on, and lose and overlap nothing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from django_rmq.core import lua
from tests.e2e.ledger import read
from tests.e2e.load import CHAOS, Load
from tests.e2e.processes import Start, WorkerProcess
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, TcpProxy
from tests.support.workers import client_of, eventually, total

pytestmark = pytest.mark.proof

GOAL_SECONDS = 2.0
"""From PING answering to consuming."""

LONGEST_CALL = 12.0
"""Seconds that a call to Redis may block a thread: the worker's sockets time out after 5, and the machine may be busy."""


@contextmanager
def load_on(server: RedisServer, prefix: str, data: Path) -> Iterator[Load]:
    client = client_of(server.url)
    try:
        yield Load(Broker(client, prefix), data, CHAOS)
    finally:
        client.close()


def two_commands(start: Start, url: str) -> list[WorkerProcess]:
    how = {"url": url, "WORKER_STALLS": "1", "WORKER_TIMEOUT": "2"}
    workers = [start("chaos", "-p", "2", "-t", "2", **how) for _ in range(2)]
    for worker in workers:
        worker.ready()
    return workers


def finish(load: Load, workers: list[WorkerProcess]) -> None:
    """Let all come to its end, and compare."""
    load.wait(90)
    for worker in workers:
        worker.signal()
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    found = load.examine()
    print(f"{len(load.due)} messages, {load.charged()} charged, {len(found.doubled)} run twice")
    assert total(load.broker, CHAOS, "died") == 0
    assert not [name for name in found.runs if found.runs[name] > 4], "nothing was handed out again and again"


def longest_call(data: Path) -> float:
    path = data / "stalls"
    return (
        max((float(line.split(" ")[0]) for line in path.read_text().splitlines()), default=0)
        if path.exists()
        else 0
    )


def consumes_again(load: Load) -> float:
    """Return after how many seconds from now a message begins."""
    began = time.monotonic_ns()
    load.send(40, ms=10)

    def has_begun() -> bool:
        return any(line.word == "start" and line.at > began for line in read(load.path)[-20:])

    eventually(has_begun, "consuming", 5 * GOAL_SECONDS)
    return (time.monotonic_ns() - began) / 1e9


TROUBLES: dict[
    str, tuple[Callable[[RedisServer, TcpProxy], None], Callable[[RedisServer, TcpProxy], None], list[float]]
] = {
    "killed": (lambda server, _: server.kill(), lambda server, _: server.start(), [0.1, 1.0, 5.0]),
    # Shorter than a call's patience, longer than the time-out of messages; longer than everything.
    "frozen": (lambda server, _: server.pause(), lambda server, _: server.resume(), [3.0, LONGEST_CALL + 2]),
    "cut off": (lambda _, proxy: proxy.cut(), lambda _, proxy: proxy.mend(), [0.5, 6.0]),
}
"""What happens to Redis -> how it begins, how it ends, and how many seconds are between."""


@pytest.mark.parametrize("trouble", TROUBLES)
def test_workers_go_on_behind_a_redis_that_was(
    start: Start, prefix: str, tmp_path: Path, trouble: str
) -> None:
    begin, end, durations = TROUBLES[trouble]
    with (
        RedisServer(appendonly=True, appendfsync="always") as server,
        TcpProxy(server.port) as proxy,
        load_on(server, prefix, tmp_path) as load,
    ):
        workers = two_commands(start, proxy.url)
        for seconds in durations:
            load.send(400, ms=10)
            load.wait_for(len(load.due) - 300)
            begin(server, proxy)
            time.sleep(seconds)
            end(server, proxy)
            print(f"consuming {consumes_again(load):.2f} s after {seconds} s in which Redis was {trouble}")
        finish(load, workers)
        assert (trouble == "frozen") <= longest_call(tmp_path) < LONGEST_CALL


def replace_processes(workers: list[WorkerProcess]) -> None:
    workers[0].signal(signal.SIGHUP)


NOTHING: Callable[[list[WorkerProcess]], None] = lambda workers: None  # noqa: E731

SCRIPTS = {
    "prepare": NOTHING,
    "commit": NOTHING,
    "commit_delivery": NOTHING,
    "rollback": NOTHING,
    "extend": NOTHING,
    "heads": NOTHING,
    "list_held": NOTHING,
    "acquire": NOTHING,
    "acquire_slots": replace_processes,
    "release": replace_processes,
    "workers/beat": NOTHING,
    "workers/assign": replace_processes,
    "workers/leave": replace_processes,
}
"""Script -> what makes workers send it."""
IN_DOUBT = ("list_held", "acquire")
"""What workers send once the reply of a prepare is lost, because they have to ask what they hold."""


def test_replies_of_every_script_in_turn_are_lost(start: Start, prefix: str, tmp_path: Path) -> None:
    with RedisServer() as server, TcpProxy(server.port) as proxy, load_on(server, prefix, tmp_path) as load:
        workers = two_commands(start, proxy.url)
        for script, provoke in SCRIPTS.items():
            load.send(100, ms=10)
            load.send(10, ms=1, do="fail once")
            load.send(4, ms=900)
            lost = ["prepare", script] if script in IN_DOUBT else [script]
            proxy.drop_reply(*(lua.load(each).sha for each in lost))
            end = time.monotonic() + 120
            while True:
                provoke(workers)
                try:
                    proxy.wait_for_drop(1.0)
                    break
                except TimeoutError:
                    assert time.monotonic() < end, f"no reply of {script} was lost"
                    load.send(20, ms=10)
            print(f"{script}: consuming after {consumes_again(load):.2f} s")
        finish(load, workers)
        assert longest_call(tmp_path) < LONGEST_CALL
