"""The planned fail-over of docs/deploy/runbooks.md, step by step, with the commands that an operator types."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.processes import Happened, Start, environment_of, manage, named
from tests.support.brokers import Broker
from tests.support.servers import SentinelGuard, ask, wait_until
from tests.support.workers import audit, client_of, eventually, live, send

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
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
