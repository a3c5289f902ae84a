"""What status says of messages whose worker dies while it has them, or between their end and Redis."""

from __future__ import annotations

from typing import Any

from django_rmq.core.model.body_codec import encode_json
from django_rmq.core.model.status import MessageStatus, status_of
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from tests.e2e.processes import Happened, Start, is_gone, named
from tests.support.brokers import Broker
from tests.support.workers import eventually, live, send

KEPT = Topic(
    "kept",
    TopicType.RANGE_MERGE,
    slots=4,
    time_range_ms=1,
    max_retries=1,
    backoff=BackOff(0, 0),
    outcome_retention_ms=3_600_000,
)


def told(broker: Broker, body: Any) -> MessageStatus:
    member = encode_json(body)
    slot = slot_of(member, KEPT.slots)
    return status_of(KEPT, slot, member, broker.status(KEPT, slot, member))


def test_messages_that_kill_their_worker_are_told_as_done_or_dead(
    start: Start, broker: Broker, happened: Happened
) -> None:
    well, once, always = [*named("well"), *named("once", do="kill once"), *named("always", do="kill")]
    worker = start("kept")
    # One after the other: a message that is in flight beside one that kills spends an attempt, too.
    for bodies in ([well, once], [always]):
        send(broker, KEPT, bodies)
        eventually(lambda: live(broker, KEPT) == 0, "the ends of all", 60)
    worker.signal()
    worker.wait()
    found = {name: told(broker, body) for name, body in (("well", well), ("once", once), ("always", always))}
    assert {name: (one.state, one.attempts) for name, one in found.items()} == {
        "well": ("done", found["well"].attempts),
        "once": ("done", 2),
        "always": ("dead", 2),
    }
    assert found["always"].reason == "timed_out"
    assert all(one.worker and one.delivered and one.ended for one in found.values())


def test_progress_of_a_dead_worker_is_gone_with_its_delivery(
    start: Start, broker: Broker, happened: Happened
) -> None:
    (body,) = named("x", do="wait")
    send(broker, KEPT, [body])
    first = start("kept", WORKER_TIMEOUT="1")
    happened.wait("begun", 1)
    before = told(broker, body)
    assert (before.state, before.progress, before.attempts) == ("running", 0.5, 1)
    pid = int(before.progress_text)
    first.kill()
    eventually(lambda: is_gone(pid), "the death of the child")
    second = start("kept", WORKER_TIMEOUT="1")
    happened.wait("begun", 2)
    after = told(broker, body)
    assert (after.state, after.progress, after.attempts) == ("running", 0.5, 2)
    assert int(after.progress_text) != pid
    assert after.worker != before.worker
    happened.go()
    eventually(lambda: told(broker, body).state == "done", "the end")
    second.end()
    assert told(broker, body).progress == 1
