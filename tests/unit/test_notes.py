"""What a process notes outlives it, in cells of threads and event loops, and what it had not begun is given back."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from django_rmq.connections import coordinators
from django_rmq.core import unserved_topics
from django_rmq.core.commands import fetch
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.run_order import FairQueue
from django_rmq.core.consumer.shared_notes import (
    BEGUN,
    DONE,
    MARKS,
    SPARE,
    ProgressCells,
    SharedNotes,
    mark_of,
)
from django_rmq.core.consumer.slots import ConsumedSlot
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery, FailureRecord
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.core.worker_processes import crash_recovery
from django_rmq.core.worker_processes.crash_recovery import DIED, MOST_NAMED, Ending, RecoveryResult, settle
from django_rmq.exceptions import NodeUnavailable, RmqError, ServerUnavailable
from django_rmq.message_ids import sealed_id
from django_rmq.testing import Clock
from django_rmq.worker import worker_process
from tests.support.brokers import OracleBroker
from tests.support.workers import Listener

PLAIN = Topic("plain", TopicType.RANGE_MERGE, slots=2, time_range_ms=1)
OTHER = Topic("other", TopicType.RANGE_MERGE, slots=1, time_range_ms=1)


@pytest.fixture
def notes() -> SharedNotes:
    return SharedNotes(2)


def in_a_child(work: object) -> None:
    """Call a function in a process that then dies."""
    pid = os.fork()
    if pid == 0:
        work()  # type: ignore[operator]
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


def test_what_a_dead_process_had_begun_is_known_to_its_parent(notes: SharedNotes) -> None:
    def work() -> None:
        notes.owner = "a" * 32
        notes.beat(7, True)
        notes.thread(0).take("other", 0, 1 << 40, [b"x"])[0] = DONE
        notes.thread(1).take("plain", 1, 5, [b"y", b"z", b"zz"])[:2] = bytes([DONE, BEGUN])

    in_a_child(work)
    assert notes.owner == "a" * 32
    assert (notes.processed, notes.is_ready) == (7, True)
    assert notes.beaten > 0
    assert notes.begun() == {
        mark_of("other", 0, 1 << 40, b"x"): True,
        mark_of("plain", 1, 5, b"y"): True,
        mark_of("plain", 1, 5, b"z"): False,
    }


def test_nothing_is_begun_by_taking_a_batch(notes: SharedNotes) -> None:
    notes.thread(0).take("plain", 1, 5, [b"x"])
    assert notes.begun() == {}


def sent(*numbers: tuple[Topic, int]) -> tuple[Any, Clock]:
    """Return a broker that has so many messages of these topics, all of which are due, and its clock."""
    clock = Clock(1_000_000)
    broker = OracleBroker("", clock)
    producer = Producer(broker)
    for topic, number in numbers:
        producer.send([producer.build(topic, {"n": n}) for n in range(number)])
    clock.advance(1)
    return broker, clock


def ends(settled: RecoveryResult) -> dict[str, int]:
    """How many messages ended in which way."""
    return {end: count for end in get_args(Ending) if (count := settled.count(end))}


def test_what_was_begun_before_is_remembered_until_there_is_too_much_of_it(notes: SharedNotes) -> None:
    notes.thread(1).take("other", 0, 9, [b"of another thread"])[0] = BEGUN
    for receipt in range(100):
        members = [f"{receipt} {i}".encode() for i in range(BATCH)]
        notes.thread(0).take("plain", 1, receipt, members)[:] = bytes([DONE]) * BATCH
    notes.thread(0).take("plain", 1, 100, [b"last", b"next"])[0] = BEGUN
    begun = notes.begun()
    assert begun[mark_of("other", 0, 9, b"of another thread")] is False
    assert all(begun[mark_of("plain", 1, 99, f"99 {i}".encode())] for i in range(BATCH))
    assert begun[mark_of("plain", 1, 100, b"last")] is False
    assert mark_of("plain", 1, 100, b"next") not in begun
    assert mark_of("plain", 1, 0, b"0 0") not in begun
    assert MARKS - 2 * BATCH < len(begun) <= MARKS + 1


def test_a_new_child_begins_with_nothing_and_another_token(notes: SharedNotes) -> None:
    notes.owner = "a" * 32
    notes.beat(3, True)
    notes.thread(0).take("plain", 1, 5, [b"x"])[0] = DONE
    token = notes.token
    notes.clear()
    assert (notes.owner, notes.beaten, notes.processed, notes.is_ready) == ("", 0, 0, False)
    assert notes.begun() == {}
    assert notes.token != token


def test_what_was_done_is_committed_what_ran_is_charged_and_what_had_not_begun_is_given_back(
    notes: SharedNotes,
) -> None:
    broker, _ = sent((PLAIN, 20))
    taken = [broker.prepare(PLAIN, slot, "me", broker.acquire(PLAIN, slot), 100) for slot in range(2)]
    assert all(answer.deliveries for answer in taken)
    notes.owner = "me"
    ran = [delivery.member for delivery in taken[1].deliveries]
    notes.thread(0).take("plain", 1, taken[1].receipt, ran)[:2] = bytes([DONE, BEGUN])
    # Done in an earlier delivery, or in another slot: these are not the ones that are held.
    others = [delivery.member for delivery in taken[0].deliveries]
    notes.thread(1).take("plain", 0, taken[0].receipt - 1, others)[:1] = bytes([DONE])
    notes.thread(1).take("plain", 1, taken[0].receipt, others)[:1] = bytes([DONE])
    assert ends(settled := settle(broker, [PLAIN, OTHER], notes)) == {
        "committed": 1,
        "released": 18,
        "charged": 1,
    }
    assert settled.named("charged", "plain") == [(1, ran[1])]
    assert settled.by_topic("released") == {"plain": 18}
    ledgers = [broker.audit_ledger(PLAIN, slot) for slot in range(2)]
    assert all(ledger.balanced for ledger in ledgers)
    assert [ledger.prepare for ledger in ledgers] == [0, 0]
    assert sum(ledger.store for ledger in ledgers) == 18
    assert sum(ledger["committed"] for ledger in ledgers) == 1
    assert (sum(ledger["failed"] for ledger in ledgers), ledgers[1]["expired"]) == (0, 1)


@pytest.mark.parametrize("lost", ["heads", "list_held", "all_held"])
def test_the_topics_of_a_node_that_does_not_answer_keep_no_other_from_being_settled(
    notes: SharedNotes, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    broker, _ = sent((OTHER, 3), (PLAIN, 3))
    notes.owner = "me"
    for topic in (OTHER, PLAIN):
        for slot in range(topic.slots):
            broker.prepare(topic, slot, "me", broker.acquire(topic, slot), 100)

    def run_all(broker: Any, calls: Any) -> list[Any]:
        return [error if call.place.topic is OTHER else broker.run(call) for call in calls]

    def all_held(broker: Any, topic: Topic, *rest: Any) -> Any:
        if topic is OTHER:
            raise error
        return fetch.all_held(broker, topic, *rest)

    of_module, name, function = {
        "heads": (unserved_topics, "run_all", run_all),
        "list_held": (crash_recovery, "run_all", run_all),
        "all_held": (crash_recovery, "all_held", all_held),
    }[lost]
    monkeypatch.setattr(of_module, name, function)
    error: RmqError = NodeUnavailable("no answer")
    assert ends(settle(broker, [OTHER, PLAIN], notes)) == {"released": 3}
    error = ServerUnavailable("no answer")
    assert settle(broker, [OTHER, PLAIN], notes).trouble is error


def test_what_ran_in_a_dead_process_rests_as_after_a_time_out_and_is_handed_out_alone(
    notes: SharedNotes,
) -> None:
    broker, clock = sent((OTHER, 3))
    epoch = broker.acquire(OTHER, 0)
    taken = broker.prepare(OTHER, 0, "me", epoch, 100)
    notes.owner = "me"
    members = [delivery.member for delivery in taken.deliveries]
    notes.thread(0).take("other", 0, taken.receipt, members)[0] = BEGUN
    assert ends(settle(broker, [OTHER], notes)) == {"released": 2, "charged": 1}
    [entry] = broker.list_messages(OTHER, 0, "retry").entries
    failure = FailureRecord.parse(entry.record)
    assert (entry.member, failure.kind, failure.error.decode()) == (members[0], "timed_out", DIED)
    clock.advance(OTHER.backoff.base_ms / 1000)
    found = [broker.prepare(OTHER, 0, "another", epoch + 1, 100)]
    while found[-1].deliveries:
        broker.commit(OTHER, 0, found[-1].receipt, [each.member for each in found[-1].deliveries])
        found.append(broker.prepare(OTHER, 0, "another", epoch + 1, 100))
    [suspect] = [answer for answer in found if answer.is_suspect]
    assert [(each.member, each.retries_left) for each in suspect.deliveries] == [(members[0], 15)]


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_log_of_a_death_names_topics_and_messages_and_what_had_not_begun(
    notes: SharedNotes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    broker, _ = sent((OTHER, 20), (PLAIN, 3))
    notes.owner = "me"
    for thread, topic in enumerate((OTHER, PLAIN)):
        for slot in range(topic.slots):
            taken = broker.prepare(topic, slot, "me", broker.acquire(topic, slot), 100)
            members = [delivery.member for delivery in taken.deliveries]
            begun = 12 if topic is OTHER else len(members)
            if members:
                notes.thread(thread).take(topic.name, slot, taken.receipt, members)[:begun] = (
                    bytes([BEGUN]) * begun
                )
    settled = settle(broker, [OTHER, PLAIN], notes)
    monkeypatch.setattr(worker_process, "settle", lambda *_: settled)

    def refuse(*_: Any) -> None:
        raise ServerUnavailable("the limits cannot be changed")

    monkeypatch.setattr(worker_process, "return_permits", refuse)
    monkeypatch.setattr(coordinators, "end_session", lambda *_: None)
    monkeypatch.setattr(worker_process, "connections", SimpleNamespace(get_broker=lambda _: broker))
    # Redis may be lost when a part is settled.
    settled.trouble = ServerUnavailable("no answer") if is_lost else None
    ends_so = pytest.raises(ServerUnavailable, match="no answer") if is_lost else nullcontext()
    with caplog.at_level("INFO", "django_rmq.consumer"), ends_so:
        assert worker_process._settle_for([], notes) == 8
    other, plain = caplog.records
    first = sealed_id("other", *settled.named("charged", "other")[0])
    text = other.getMessage()
    assert text.startswith(
        f"Recorded a time-out for 12 messages of topic other that a dead process was running: {first}, "
    )
    assert text.endswith(" and 2 more; 8 of this topic had not begun, and were given back")
    fields: Any = other
    assert (fields.rmq_event, fields.rmq_topic, fields.rmq_messages) == ("charged_for", "other", 12)
    assert fields.rmq_ids[0] == first and len(fields.rmq_ids) == MOST_NAMED
    assert "3 messages of topic plain" in plain.getMessage() and "not begun" not in plain.getMessage()
    assert '"n"' not in caplog.text


def test_a_message_without_retries_that_ran_in_a_dead_process_is_dead(notes: SharedNotes) -> None:
    topic = replace(OTHER, max_retries=0)
    broker, _ = sent((topic, 1))
    taken = broker.prepare(topic, 0, "me", broker.acquire(topic, 0), 100)
    notes.owner = "me"
    notes.thread(0).take("other", 0, taken.receipt, [taken.deliveries[0].member])[0] = BEGUN
    assert ends(settle(broker, [topic], notes)) == {"charged": 1}
    [entry] = broker.list_messages(topic, 0, "dead").entries
    assert entry.record.startswith(b"timed_out 1 ")


def test_nothing_of_another_owner_is_given_back(notes: SharedNotes) -> None:
    broker, _ = sent((OTHER, 1))
    broker.prepare(OTHER, 0, "somebody", broker.acquire(OTHER, 0), 10)
    assert ends(settle(broker, [OTHER], notes)) == {}
    notes.owner = "me"
    assert ends(settle(broker, [OTHER], notes)) == {}
    assert broker.audit_ledger(OTHER, 0).prepare == 1


def test_what_a_successor_notes_outlives_it_too_and_is_forgotten_with_the_rest(notes: SharedNotes) -> None:
    def work() -> None:
        notes.beat(1, True)
        notes.unready()
        notes.thread(2 + SPARE - 1).take("plain", 1, 5, [b"x"])[0] = DONE

    in_a_child(work)
    assert notes.beaten > 0
    assert not notes.is_ready
    assert notes.begun() == {mark_of("plain", 1, 5, b"x"): True}
    notes.clear()
    notes.thread(2 + SPARE - 1)
    assert notes.begun() == {}


def test_a_process_that_lacks_a_thread_is_not_ready_and_does_not_beat() -> None:
    calls: list[str] = []
    notes = SimpleNamespace(unready=lambda: calls.append("unready"), beat=lambda *given: calls.append("beat"))
    watch = SimpleNamespace(is_whole=False)
    dispatcher = SimpleNamespace(thread_watch=watch, processed=0)
    process: Any = SimpleNamespace(
        dispatcher=dispatcher, _notes=notes, _next_look=math.inf, _settled_at=0.0, _is_stuck=False
    )
    worker_process.WorkerProcess._beat(process)
    watch.is_whole = True
    worker_process.WorkerProcess._beat(process)
    assert calls == ["unready", "beat"]


SERIAL = Topic("serial", TopicType.RANGE_MERGE)
PRIORITY = Topic("priority", TopicType.PRIORITY)


def test_what_ran_while_many_others_came_and_went_is_known_after_a_death() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    long = cells.take("t", 0, 1, [b"long"])
    long[0] = BEGUN
    for receipt in range(2, MARKS // 100):
        short = cells.take("t", 1, receipt, [b"%d" % n for n in range(300)])
        for at in range(300):
            short[at] = DONE
        short.end()
    found = notes.begun()
    assert found[mark_of("t", 0, 1, b"long")] is False
    long[0] = DONE
    assert notes.begun()[mark_of("t", 0, 1, b"long")] is True
    assert len(notes.begun()) == MARKS


def test_what_is_done_stays_known_until_the_other_cells_were_used() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    done = cells.take("t", 0, 1, [b"done"])
    done[0] = DONE
    done.end()
    for receipt in range(2, 10):
        cells.take("t", 1, receipt, [b"%d" % n for n in range(1000)]).end()
    assert notes.begun()[mark_of("t", 0, 1, b"done")] is True


def test_without_room_nothing_is_recorded_and_nothing_is_overwritten() -> None:
    notes = SharedNotes(1)
    cells = ProgressCells(notes.thread(0))
    all_of_them = cells.take("t", 0, 1, [b"%d" % n for n in range(MARKS)])
    for at in range(MARKS):
        all_of_them[at] = BEGUN
    more = cells.take("t", 1, 2, [b"more"])
    more[0] = DONE
    more.end()
    assert set(notes.begun().values()) == {False}


def batch(topic: Topic, slot: ConsumedSlot, score: float = 1.0, receipt: int = 1) -> Batch:
    message = Message(topic, 0, receipt, Delivery(b"m", score, 16))
    return Batch(slot, Listener(topic.name, print), receipt, [message], 0.0)


@pytest.fixture
def turns() -> FairQueue:
    return FairQueue({"serial": 2, "priority": 1})


def test_a_slot_has_one_turn_at_a_time_in_the_order_of_its_receipts(turns: FairQueue) -> None:
    place = ConsumedSlot(SERIAL, 0, 0)
    first, second, third = (batch(SERIAL, place, receipt=receipt) for receipt in (1, 2, 3))
    for each in (first, second, third):
        turns.add(each)
    assert turns.take() == [first]
    assert turns.take() == []
    turns.ended(first)
    assert turns.take() == [second]
    assert turns.remove(third)
    turns.ended(second)
    assert turns.take() == []
    assert not turns


def test_what_is_taken_back_lets_the_next_of_its_slot_go_on(turns: FairQueue) -> None:
    place = ConsumedSlot(SERIAL, 0, 0)
    first, second = batch(SERIAL, place), batch(SERIAL, place, receipt=2)
    turns.add(first)
    turns.add(second)
    assert turns.remove(first)
    assert not turns.remove(first)
    assert turns.take() == [second]
    assert not turns.remove(second), "it runs"


def test_the_highest_priority_has_the_next_turn(turns: FairQueue) -> None:
    batches: list[Any] = [batch(PRIORITY, ConsumedSlot(SERIAL, 0, 0), score) for score in (20.0, 40.0, 30.0)]
    for each in batches:
        turns.add(each)
    assert turns.take() == [batches[1]]
    turns.ended(batches[1])
    assert turns.take() == [batches[2]]


def test_topics_do_not_wait_for_each_other(turns: FairQueue) -> None:
    for _ in range(3):
        turns.add(batch(SERIAL, ConsumedSlot(SERIAL, 0, 0)))
        turns.add(batch(PRIORITY, ConsumedSlot(SERIAL, 0, 0)))
    assert len(turns.take()) == 3
    assert turns
