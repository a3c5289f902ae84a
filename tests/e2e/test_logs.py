"""What whole worker processes log while a server is unavailable."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace

import pytest

from django_rmq.core.model.topic import Topic, TopicType
from tests.e2e.load import shares
from tests.e2e.processes import Happened, Start, named
from tests.support.brokers import Broker
from tests.support.servers import RedisServer
from tests.support.workers import client_of, eventually, send

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
AWAY_SECONDS = 12.0


def test_an_outage_of_redis_costs_a_few_lines_even_if_a_process_dies_meanwhile(
    start: Start, prefix: str, happened: Happened
) -> None:
    with RedisServer(appendonly=True, appendfsync="always") as server:
        client = client_of(server.url)
        broker = Broker(client, prefix)
        send(broker, WORK, named("a"))
        worker = start("work", "-p", "2", "-t", "2", url=server.url)
        happened.wait("done", 1)
        eventually(lambda: sorted(shares(broker, "work").values()) == [2, 2], "both being at work")
        before = len(worker.output.splitlines())
        server.kill()
        time.sleep(1)
        os.kill(worker.children[0], signal.SIGKILL)
        time.sleep(AWAY_SECONDS)
        lines = worker.output.splitlines()[before:]
        server.start()
        eventually(client.ping, "Redis", 30)
        send(broker, WORK, named(*range(20)))
        happened.wait("done", 21)
        worker.end()
        client.close()
    # Two processes, of each some lines per kind of trouble; and the death with its follower.
    assert 4 <= len(lines) <= 30, "\n".join(lines)
    assert sum("started" in line for line in lines) == 1
    assert "Traceback" not in "\n".join(lines)
    assert all(line.split()[3].isdigit() for line in lines), "each line names its process"
    workers = {line.split()[4] for line in lines}
    assert "-" in workers, "the parent has none"
    assert len(workers) >= 2 and all(re.fullmatch("[0-9a-f]{8}|-", worker) for worker in workers)


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "async"])
def test_with_v_2_each_message_that_is_done_has_one_line_with_process_and_worker(
    start: Start, broker: Broker, is_async: bool
) -> None:
    topic = replace(WORK, name="ledger", slots=16)
    send(broker, topic, [{"name": f"m{n}", "ms": 1} for n in range(20)])
    worker = start("ledger", "-p", "1", "-v", "2", "--burst", WORKER_ASYNC=str(int(is_async)))
    assert worker.wait() == 0
    lines = [line for line in worker.output.splitlines() if line.endswith("of topic ledger done")]
    assert len(lines) == 20 == len({line.split()[-5] for line in lines}), worker.output
    pattern = r"[\d-]+ [\d:,]+ DEBUG \d+ [0-9a-f]{8} rmq-[a-z]+-[a-z0-9]+ Message \S+ of topic ledger done"
    assert all(re.fullmatch(pattern, line) for line in lines), lines


def test_a_dependency_that_is_down_costs_one_traceback_for_each_process(
    start: Start, broker: Broker, happened: Happened
) -> None:
    send(broker, replace(WORK, name="brief", slots=1), named(*range(300), do="raise"))
    worker = start("brief", "-p", "1", "--burst")
    assert worker.wait(60) == 0
    assert len(happened.lines("begun")) == 600, "all are tried again"
    assert worker.output.count("Traceback") == 2, worker.output  # one while retries are left, one at death
    failed = [line for line in worker.output.splitlines() if "of topic brief failed" in line]
    assert {line.split()[2] for line in failed} == {"WARNING", "ERROR"} and len(failed) <= 10
