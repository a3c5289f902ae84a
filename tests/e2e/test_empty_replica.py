"""A fail-over to a replica that has nothing: what is not a message comes back by itself, and everybody goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django_rmq.core.commands.ticks import read_schedules
from tests.e2e.processes import ROOT, Happened, Start, environment_of, manage
from tests.support.brokers import Broker
from tests.support.servers import RedisServer, TcpProxy, ask
from tests.support.workers import client_of, eventually

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
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", SENDER], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
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
