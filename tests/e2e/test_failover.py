"""Fail-overs: the planned one of docs/deploy/runbooks.md, loses nothing; behind one to an empty replica all go on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django_rmq.core.commands.schedules import read_schedules
from tests.e2e.processes import WORK, Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.commands import started
from tests.support.servers import RedisServer, SentinelGuard, TcpProxy, ask, wait_until
from tests.support.workers import audit, client_of, eventually, live, send

COUNT = 1_200


def test_a_planned_failover_loses_nothing_and_repeats_nothing(
    start: Start, prefix: str, tmp_path: Path, happened: Happened
) -> None:
    with SentinelGuard(down_after_ms=60_000) as guard:
        sentinels = ",".join(f"{host}:{port}" for host, port in guard.addresses)
        environment = {"RMQ_TEST_SENTINELS": sentinels}

        def call(*arguments: str) -> subprocess.CompletedProcess[str]:
            return manage(environment_of(tmp_path, guard.primary.url, prefix, **environment), *arguments)

        def managed(*arguments: str) -> str:
            done = call(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        def in_flight() -> int:
            found: list[dict[str, Any]] = json.loads(managed("rmqstats", "work", "--json"))
            return int(found[0]["running"])

        with client_of(guard.primary.url) as client:
            broker = Broker(client, prefix)
            worker = start("work", **environment)
            worker.ready()
            send(broker, WORK, named(*range(COUNT // 2), do="send"))
            happened.wait("done", 100)
            managed("rmqpause", "--all")
            wait_until(lambda: in_flight() == 0, "nothing in flight")
            # However long the command takes, something waits during the fail-over.
            send(broker, WORK, named(*range(COUNT // 2, COUNT), do="send"))
            before = live(broker, WORK)
            assert COUNT // 2 <= before < COUNT
        for sentinel in guard.sentinels:
            # A sentinel that was paused would otherwise do nothing for 30 s, and then abort the fail-over.
            ask(sentinel.port, "SENTINEL", "DEBUG", "tilt-trigger", 60_000)
            ask(sentinel.port, "SENTINEL", "SET", guard.SERVICE, "failover-timeout", 60_000)
        ask(guard.sentinels[0].port, "SENTINEL", "FAILOVER", guard.SERVICE)
        guard.wait_for_promotion()
        with client_of(guard.replica.url) as client:
            broker = Broker(client, prefix)
            assert live(broker, WORK) == before, "nothing was lost"
            wait_until(lambda: call("rmqhealth", "work").returncode == 0, "all being well", 60)
            managed("rmqresume", "--all")
            eventually(lambda: live(broker, WORK) == 0, "an empty queue", 60)
            audit(broker, WORK)
            assert re.search(r"work: balanced over 4 slots", managed("rmqaudit", "work"))
        ran = Counter(happened.lines("done"))
        assert len(ran) == COUNT and set(ran.values()) == {1}
        worker.end()


SCHEDULES = {"every-second": {"TOPIC": "ticks", "EVERY": 1, "CATCH_UP": "none"}}
GOAL = 10.0
"""Within so many seconds everything goes on; a busy machine gets five times as many."""
SENDER = """
import itertools, sys, time
import django
django.setup()
from django.utils import timezone
from django_rmq import send_message
from django_rmq.exceptions import RmqError
for number in itertools.count():
    try:
        print(send_message("ticks", {}, key=f"sent-{number}", fixed_time=timezone.now()).status, number, flush=True)
    except RmqError as error:
        print(type(error).__name__, number, flush=True)
    time.sleep(0.05)
"""


@contextmanager
def sender(environment: dict[str, str], path: Path) -> Iterator[None]:
    """Send until the end of the block, and write down what was answered."""
    process = started([sys.executable, "-c", SENDER], path, environment)
    try:
        yield
        assert process.poll() is None, path.read_text()
    finally:
        process.kill()
        process.wait()


def test_all_go_on_after_a_replica_without_data_was_promoted(
    start: Start, prefix: str, tmp_path: Path, happened: Happened
) -> None:
    # It has never reached its primary.
    with (
        RedisServer() as primary,
        RedisServer(replicaof="127.0.0.1 1") as replica,
        TcpProxy(primary.port) as way,
    ):
        url = f"redis://127.0.0.1:{way.port}/0"
        options = {"WORKER_LISTENERS": "scheduled", "WORKER_SCHEDULES": json.dumps(SCHEDULES)}
        environment = environment_of(tmp_path, url, prefix, **options)
        sent = tmp_path / "sent"
        workers = [start("--threads", "2", url=url, **options) for _ in range(2)]
        for worker in workers:
            worker.ready()

        def ticks() -> set[str]:
            return {name for name in happened.lines("done") if name.startswith("every-second")}

        def answers() -> list[list[str]]:
            return [line.split() for line in sent.read_text().splitlines()]

        with sender(environment, sent):
            eventually(lambda: len(ticks()) >= 2 and len(answers()) > 10, "work before the fail-over")
            primary.kill()
            way.target_port = replica.port
            eventually(lambda: answers()[-1][0] != "stored", "a send that fails")
            before, promoted = ticks(), time.monotonic()
            ask(replica.port, "REPLICAOF", "NO", "ONE")
            took = {}
            number = int(answers()[-1][1])

            def consumed() -> bool:
                later = {
                    f"sent-{one}" for status, one in answers() if status == "stored" and int(one) > number
                }
                return len(later & set(happened.lines("done"))) > 3

            eventually(consumed, "messages sent and consumed", 5 * GOAL)
            took["messages"] = time.monotonic() - promoted
            eventually(lambda: len(ticks() - before) >= 3, "three more ticks", 5 * GOAL)
            took["three ticks"] = time.monotonic() - promoted
            client = client_of(replica.url)
            broker = Broker(client, prefix)
            eventually(lambda: "ticks" in broker.definitions(), "the definition of the topic", 5 * GOAL)
            assert [one.name for one in broker.run(read_schedules())] == ["every-second"]

            def are_there() -> bool:
                found = manage(environment, "rmqworkers", "--json")
                return found.returncode == 0 and len(json.loads(found.stdout)) == len(workers)

            eventually(are_there, "both workers", 5 * GOAL)
            eventually(lambda: manage(environment, "rmqhealth").returncode == 0, "health", 5 * GOAL)
            client.close()
        print({what: round(seconds, 1) for what, seconds in took.items()})
        heard = [name for name in happened.lines("done") if name.startswith("every-second")]
        assert len(heard) == len(set(heard)), "each tick once"
        for worker in workers:
            worker.end()
            assert "Traceback" not in worker.output
