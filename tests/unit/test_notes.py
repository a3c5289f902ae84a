"""What a process notes outlives it, and what it had not begun is given back."""

from __future__ import annotations

import os
from zlib import crc32

import pytest

from django_rmq.consumer.notes import Notes, Running, give_back
from django_rmq.memory import Clock, InMemoryBroker
from django_rmq.messages import BATCH, Topic, TopicType
from django_rmq.producer import Producer

PLAIN = Topic("plain", TopicType.RANGE_MERGE, slots=2, time_range_ms=1)
OTHER = Topic("other", TopicType.RANGE_MERGE, slots=1, time_range_ms=1)


@pytest.fixture
def notes() -> Notes:
    return Notes(2, [PLAIN, OTHER])


def in_a_child(work: object) -> None:
    """Call a function in a process that then dies."""
    pid = os.fork()
    if pid == 0:
        work()  # type: ignore[operator]
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


def test_what_a_dead_process_ran_is_known_to_its_parent(notes: Notes) -> None:
    def work() -> None:
        notes.owner = "a" * 32
        notes.beat(7, True)
        notes.begin(0, "other", 0, 1 << 40)
        notes.running_of(0)[0] = crc32(b"x") + 1
        notes.begin(1, "plain", 1, 5)
        notes.run(1, [b"y", b"z"])

    in_a_child(work)
    assert notes.owner == "a" * 32
    assert (notes.processed, notes.is_ready) == (7, True)
    assert notes.beaten > 0
    assert notes.running() == {
        Running("other", 0, 1 << 40, crc32(b"x")),
        Running("plain", 1, 5, crc32(b"y")),
        Running("plain", 1, 5, crc32(b"z")),
    }


def test_nothing_runs_between_the_begin_of_a_batch_and_its_first_message(notes: Notes) -> None:
    notes.begin(0, "plain", 1, 5)
    notes.running_of(0)[0] = crc32(b"x") + 1
    notes.begin(0, "plain", 0, 6)
    assert notes.running() == set()


def test_nothing_runs_after_the_end_of_a_batch(notes: Notes) -> None:
    notes.begin(0, "plain", 1, 5)
    notes.run(0, [b"x", b"y"])
    notes.end(0)
    assert notes.running() == set()


def test_a_message_whose_sum_is_zero_counts_as_running(notes: Notes) -> None:
    assert crc32(b"") == 0
    notes.begin(0, "plain", 1, 5)
    notes.run(0, [b""])
    assert notes.running() == {Running("plain", 1, 5, 0)}


def test_a_whole_batch_may_run_in_one_call_without_touching_the_next_thread(notes: Notes) -> None:
    notes.begin(1, "other", 0, 9)
    notes.run(1, [b"x"])
    notes.begin(0, "plain", 1, 5)
    notes.run(0, [str(i).encode() for i in range(BATCH)])
    assert len(notes.running()) == BATCH + 1
    assert Running("other", 0, 9, crc32(b"x")) in notes.running()


def test_a_new_child_begins_with_nothing_and_another_token(notes: Notes) -> None:
    notes.owner = "a" * 32
    notes.beat(3, True)
    notes.begin(0, "plain", 1, 5)
    notes.run(0, [b"x"])
    token = notes.token
    notes.clear()
    assert (notes.owner, notes.beaten, notes.processed, notes.is_ready) == ("", 0, 0, False)
    assert notes.running() == set()
    assert notes.token != token


def test_what_had_not_begun_is_given_back_and_what_ran_is_not(notes: Notes) -> None:
    clock = Clock(1_000_000)
    broker = InMemoryBroker("", clock)
    producer = Producer(broker)  # type: ignore[arg-type]
    producer.send([producer.build(PLAIN, {"n": n}) for n in range(20)])
    clock.advance(seconds=1)
    taken = [broker.prepare(PLAIN, slot, "me", broker.acquire(PLAIN, slot), 100) for slot in range(2)]
    assert all(answer.deliveries for answer in taken)
    notes.owner = "me"
    notes.begin(0, "plain", 1, taken[1].receipt)
    notes.run(0, [taken[1].deliveries[0].member])
    # The same sum in another slot is another message.
    notes.begin(1, "plain", 0, taken[1].receipt + 1000)
    notes.run(1, [taken[0].deliveries[0].member])
    assert give_back(broker, [PLAIN, OTHER], notes) == 19  # type: ignore[arg-type]
    ledgers = [broker.audit(PLAIN, slot) for slot in range(2)]
    assert all(ledger.balanced for ledger in ledgers)
    assert [ledger.prepare for ledger in ledgers] == [0, 1]
    assert sum(ledger.store for ledger in ledgers) == 19
    assert sum(ledger["failed"] + ledger["expired"] for ledger in ledgers) == 0


def test_nothing_of_another_owner_is_given_back(notes: Notes) -> None:
    clock = Clock(1_000_000)
    broker = InMemoryBroker("", clock)
    producer = Producer(broker)  # type: ignore[arg-type]
    producer.send([producer.build(OTHER, {"n": 1})])
    clock.advance(seconds=1)
    broker.prepare(OTHER, 0, "somebody", broker.acquire(OTHER, 0), 10)
    assert give_back(broker, [OTHER], notes) == 0  # type: ignore[arg-type]
    notes.owner = "me"
    assert give_back(broker, [OTHER], notes) == 0  # type: ignore[arg-type]
    assert broker.audit(OTHER, 0).prepare == 1
