"""What whole worker processes log while a server is unavailable."""

from __future__ import annotations

import os
import re
import signal
import time

from django_rmq.core.words.topics import Topic, TopicType
from tests.brokers import Broker
from tests.e2e.processes import Happened, Start, named
from tests.servers import RedisServer
from tests.workers import client_of, eventually, send

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
        worker.signal()
        assert worker.wait() == 0
        client.close()
    # Two processes, of each some lines per kind of trouble; and the death with its follower.
    assert 4 <= len(lines) <= 30, "\n".join(lines)
    assert sum("started" in line for line in lines) == 1
    assert "Traceback" not in "\n".join(lines)
    assert all(line.split()[3].isdigit() for line in lines), "each line names its process"
    workers = {line.split()[4] for line in lines}
    assert "-" in workers, "the parent has none"
    assert len(workers) >= 2 and all(re.fullmatch("[0-9a-f]{8}|-", worker) for worker in workers)
