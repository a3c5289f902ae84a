"""Worker processes with EVENTS: each forked child tells what it does."""

from __future__ import annotations

import time
from collections import defaultdict

from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.monitoring import events
from tests.e2e.processes import Happened, Start, named
from tests.support.brokers import Broker
from tests.support.workers import send

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)


def test_each_process_tells_what_it_does_to_the_last(
    start: Start, broker: Broker, happened: Happened
) -> None:
    subscription = broker.events()
    worker = start("work", "--processes", "2", "--burst", WORKER_EVENTS="1")
    send(broker, WORK, named(*range(40)))
    heard: defaultdict[str, list[str]] = defaultdict(list)
    processes: set[int] = set()
    end = time.monotonic() + 30
    while len(heard["committed"]) < 40:
        assert time.monotonic() < end, (heard, worker.output)
        for payload in subscription.get(0.2):
            for event in events.decode_events(payload):
                heard[event["event"]] += event["ids"]
                processes.add(event["pid"])
    subscription.close()
    assert worker.wait() == 0
    assert len(set(heard["started"])) == len(set(heard["committed"])) == 40
    assert worker.process.pid not in processes
    assert processes <= {int(line) for line in happened.processes()}
    times = broker.times(WORK)
    assert sum(times.took) == 40 <= sum(times.late), "every process gave its counts away before it ended"
