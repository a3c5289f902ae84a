"""What worker processes do beside consuming."""

from __future__ import annotations

import signal

from django_rmq.core.telling import history
from django_rmq.core.words.failures import Failure
from django_rmq.core.words.topics import Topic, TopicType
from tests.brokers import Broker
from tests.e2e.load import shares
from tests.e2e.processes import Happened, Start, named
from tests.workers import audit, eventually, send

FORGETFUL = Topic("forgetful", TopicType.RANGE_MERGE, slots=64, time_range_ms=1, dead_retention=1)
WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)


def bury_everywhere(broker: Broker, count: int) -> None:
    for slot in range(FORGETFUL.slots):
        broker.send_merge(FORGETFUL, slot, 0, [b'{"name":"%d"}' % i for i in range(count)])
        taken = broker.prepare(FORGETFUL, slot, "test", None, count)
        broker.rollback(
            FORGETFUL, slot, taken.receipt, [Failure(each.member, "rejected") for each in taken.deliveries]
        )


def test_two_workers_trim_dead_and_one_goes_on_when_the_other_is_killed(
    start: Start, broker: Broker, happened: Happened
) -> None:
    # Nobody consumes the topic, so that those who are there share it.
    bury_everywhere(broker, 5)
    first, second = start("work"), start("work")
    first.ready()
    second.ready()
    send(broker, WORK, named("x"))
    happened.wait("done", 1)
    eventually(lambda: not sum(ledger.dead for ledger in audit(broker, FORGETFUL)), "trimming", 15)
    second.kill()
    bury_everywhere(broker, 3)
    # The dead worker's part is taken over when its session is over.
    eventually(lambda: not sum(ledger.dead for ledger in audit(broker, FORGETFUL)), "trimming alone", 30)
    assert sum(ledger["purged_dead"] for ledger in audit(broker, FORGETFUL)) == 8 * 64
    first.signal(signal.SIGTERM)
    assert first.wait(25) == 0
    assert "older than DEAD_RETENTION" in first.output
    assert "Traceback" not in first.output


def test_two_workers_write_one_history(start: Start, broker: Broker, happened: Happened) -> None:
    workers = [start("work"), start("work")]
    for worker in workers:
        worker.ready()
    # What moves from one to the other is handed out, and counted, once more.
    eventually(lambda: sorted(shares(broker, "work").values()) == [2, 2], "sharing equally", 25)
    send(broker, WORK, named(*range(50)))
    happened.wait("done", 50)
    eventually(
        lambda: any(one.depth for one in history.read(broker, WORK, 0.1)),
        "the first minute of the history",
        90,
    )
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    # What was counted last is given away by whoever ends.
    minute = broker.now_ms() // 60_000 + 1
    broker.keep_minute(WORK, minute, "", 60)
    records = [raw for raw in broker.minutes(WORK, minute - 5, minute) if raw]
    late = [pair.partition(b":") for raw in records for pair in raw.partition(b"|")[2].split()]
    assert sum(int(count) for _, _, count in late) == 50, records
