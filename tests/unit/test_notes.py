"""What a process notes outlives it, and what it had not begun is given back."""

from __future__ import annotations

import os

import pytest

from django_rmq.consumer.notes import MARKS, Notes, mark_of, settle
from django_rmq.memory import Clock, InMemoryBroker
from django_rmq.messages import BATCH, Topic, TopicType
from django_rmq.producer import Producer

PLAIN = Topic("plain", TopicType.RANGE_MERGE, slots=2, time_range_ms=1)
OTHER = Topic("other", TopicType.RANGE_MERGE, slots=1, time_range_ms=1)


@pytest.fixture
def notes() -> Notes:
    return Notes(2)


def in_a_child(work: object) -> None:
    """Call a function in a process that then dies."""
    pid = os.fork()
    if pid == 0:
        work()  # type: ignore[operator]
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)


def test_what_a_dead_process_had_begun_is_known_to_its_parent(notes: Notes) -> None:
    def work() -> None:
        notes.owner = "a" * 32
        notes.beat(7, True)
        notes.thread(0).take("other", 0, 1 << 40)
        notes.thread(0).end(notes.thread(0).begin(b"x"))
        notes.thread(1).take("plain", 1, 5)
        at = notes.thread(1).begin_all([b"y", b"z", b"zz"])
        notes.thread(1).end_all(at, [False, True, False])

    in_a_child(work)
    assert notes.owner == "a" * 32
    assert (notes.processed, notes.is_ready) == (7, True)
    assert notes.beaten > 0
    assert notes.begun() == {
        mark_of("other", 0, 1 << 40, b"x"): True,
        mark_of("plain", 1, 5, b"y"): False,
        mark_of("plain", 1, 5, b"z"): True,
        mark_of("plain", 1, 5, b"zz"): False,
    }


def test_nothing_is_begun_by_taking_a_batch(notes: Notes) -> None:
    notes.thread(0).take("plain", 1, 5)
    assert notes.begun() == {}


def test_what_was_begun_before_is_remembered_until_there_is_too_much_of_it(notes: Notes) -> None:
    notes.thread(1).take("other", 0, 9)
    notes.thread(1).begin(b"of another thread")
    for receipt in range(3):
        notes.thread(0).take("plain", 1, receipt)
        for i in range(MARKS // 2):
            notes.thread(0).end(notes.thread(0).begin(str(i).encode()))
    notes.thread(0).begin(b"last")
    begun = notes.begun()
    assert mark_of("other", 0, 9, b"of another thread") in begun
    assert {begun.get(mark_of("plain", 1, receipt, b"7")) for receipt in (1, 2)} == {True}
    assert mark_of("plain", 1, 0, b"7") not in begun
    assert len(begun) == MARKS + 1
    assert not begun[mark_of("plain", 1, 2, b"last")], "what was done at its place says nothing of it"


def test_lists_and_single_messages_take_turns_to_the_end_of_the_memory_and_from_its_beginning(
    notes: Notes,
) -> None:
    marks = notes.thread(0)
    marks.take("plain", 0, 1)
    for i in range(200):
        marks.end_all(marks.begin_all([f"{i} {j}".encode() for j in range(BATCH)]), [True] * BATCH)
        marks.begin(str(i).encode())
    begun = notes.begun()
    assert not begun[mark_of("plain", 0, 1, b"199")]
    assert all(begun[mark_of("plain", 0, 1, f"199 {j}".encode())] for j in range(BATCH))
    assert MARKS - BATCH <= len(begun) <= MARKS


def test_a_new_child_begins_with_nothing_and_another_token(notes: Notes) -> None:
    notes.owner = "a" * 32
    notes.beat(3, True)
    notes.thread(0).take("plain", 1, 5)
    notes.thread(0).begin(b"x")
    token = notes.token
    notes.clear()
    assert (notes.owner, notes.beaten, notes.processed, notes.is_ready) == ("", 0, 0, False)
    assert notes.begun() == {}
    assert notes.token != token


def test_what_was_done_is_committed_what_had_not_begun_is_given_back_and_the_rest_is_left(
    notes: Notes,
) -> None:
    clock = Clock(1_000_000)
    broker = InMemoryBroker("", clock)
    producer = Producer(broker)  # type: ignore[arg-type]
    producer.send([producer.build(PLAIN, {"n": n}) for n in range(20)])
    clock.advance(seconds=1)
    taken = [broker.prepare(PLAIN, slot, "me", broker.acquire(PLAIN, slot), 100) for slot in range(2)]
    assert all(answer.deliveries for answer in taken)
    notes.owner = "me"
    notes.thread(0).take("plain", 1, taken[1].receipt)
    notes.thread(0).end(notes.thread(0).begin(taken[1].deliveries[1].member))
    notes.thread(0).begin(taken[1].deliveries[0].member)
    # Begun in an earlier delivery, or in another slot: these are not the ones that are held.
    notes.thread(1).take("plain", 0, taken[0].receipt - 1)
    notes.thread(1).begin(taken[0].deliveries[0].member)
    notes.thread(1).take("plain", 1, taken[0].receipt)
    notes.thread(1).begin(taken[0].deliveries[0].member)
    assert settle(broker, [PLAIN, OTHER], notes) == (1, 18)  # type: ignore[arg-type]
    ledgers = [broker.audit(PLAIN, slot) for slot in range(2)]
    assert all(ledger.balanced for ledger in ledgers)
    assert [ledger.prepare for ledger in ledgers] == [0, 1]
    assert sum(ledger.store for ledger in ledgers) == 18
    assert sum(ledger["committed"] for ledger in ledgers) == 1
    assert sum(ledger["failed"] + ledger["expired"] for ledger in ledgers) == 0


def test_nothing_of_another_owner_is_given_back(notes: Notes) -> None:
    clock = Clock(1_000_000)
    broker = InMemoryBroker("", clock)
    producer = Producer(broker)  # type: ignore[arg-type]
    producer.send([producer.build(OTHER, {"n": 1})])
    clock.advance(seconds=1)
    broker.prepare(OTHER, 0, "somebody", broker.acquire(OTHER, 0), 10)
    assert settle(broker, [OTHER], notes) == (0, 0)  # type: ignore[arg-type]
    notes.owner = "me"
    assert settle(broker, [OTHER], notes) == (0, 0)  # type: ignore[arg-type]
    assert broker.audit(OTHER, 0).prepare == 1
