"""What a Spark consumer holds: the column C of the table of states, the gate, leases, and what ends a claim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import ServerRefused, WrongType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, START_MS, TYPES, Make, Slot, each_type, slot_of_each
from tests.oracle.upkeep import CONSUMERS, TOMBSTONE_MS

A = b"a"
LEASE_MS = 60_000
NEW = {TopicType.RANGE_MERGE: 250, TopicType.PRIORITY: 300, TopicType.FIXED_TIME: 1_800_000_000_700}

states = pytest.mark.parametrize("state", ["-", "W", "w", "T", "F", "FW", "C", "CW"])
claimed = pytest.mark.parametrize("state", ["C", "CW"])


def claim(
    slot: Slot, number: int = 1, limit: int = 100, lease_ms: int = LEASE_MS, consumer: str = "s"
) -> int:
    """Claim and seal; return how many."""
    answer = slot.claim(consumer, number, lease_ms, limit)
    assert answer.status == "ok", answer
    slot.renew_claim(consumer, number, lease_ms, seal=True)
    return int(answer.taken)


def read(slot: Slot, number: int = 1, consumer: str = "s") -> dict[bytes, bytes | None]:
    """Return members and bodies of a claim."""
    found = slot.read_claim(consumer, number, 0, 1000)
    members = found.rows[::2]
    return dict(zip(members, found.envelopes or [None] * len(members), strict=True))


# --- the table


@states
@pytest.mark.parametrize("owner", ["s", "t"])
def test_claim(slot: Slot, state: str, owner: str) -> None:
    receipt = slot.bring(state)
    number = 2 if owner == "s" and "C" in state else 1
    before = slot.snapshot()
    answer = slot.claim(owner, number, LEASE_MS, 10)
    if state in ("W", "w"):
        assert (answer.status, answer.taken, answer.size) == ("ok", 1, 1)
        assert slot.where(A) == "C"
        assert slot.hash("body") == {}
        assert slot.hash("claim_body") == ({A: slot.envelope()} if slot.topic.keyed else {})
        assert slot.hash("control")[b"owner"] == owner.encode()
        return
    if "C" in state:
        assert answer.status == ("unfinished" if owner == "s" else "busy")
    elif "F" in state and slot.topic.serial:
        assert answer.status == "busy"
    else:
        assert (answer.status, answer.taken, answer.size) == ("ok", 0, 0)
    after = slot.snapshot()
    for dump in (before, after):
        dump.pop(slot.keys.control, None)
    assert after == before
    if "F" in state:
        assert slot.commit(receipt, [A]) == ["ok"]


@claimed
def test_send_meets_a_claimed_message_as_one_in_flight(slot: Slot, state: str) -> None:
    slot.bring(state)
    [sent] = slot.send(A, score=NEW[slot.topic.type], body=b"new")
    met = "merged" if slot.topic.type is TopicType.RANGE_MERGE else "replaced"
    assert sent.status == ("stored" if state == "C" else met)
    assert slot.where(A) == "CW"
    if slot.topic.keyed:
        assert slot.hash("body") == {A: slot.envelope(b"new")}
        assert read(slot) == {A: slot.envelope()}


@claimed
def test_ensure_finds_a_claimed_message_present(slot: Slot, state: str) -> None:
    slot.bring(state)
    before = slot.zset("store")
    [sent] = slot.ensure([NEW[slot.topic.type]], [A], slot.envelopes(1, b"new"))
    assert sent.status == "present"
    assert slot.where(A) == state and slot.zset("store") == before


@claimed
@pytest.mark.parametrize("owner", ["A", "s"])
def test_prepare_never_takes_what_is_claimed(slot: Slot, state: str, owner: str) -> None:
    slot.bring(state)
    answer = slot.take(owner=owner)
    shut = slot.topic.serial and owner == "A"
    assert answer.status == ("busy" if shut or state == "CW" else "empty")
    assert not answer.deliveries and slot.where(A) == state


def test_prepare_gives_what_is_not_claimed_where_there_is_no_gate(make: Make) -> None:
    slot = make(serial=False)
    slot.bring("CW")
    slot.send(b"b")
    receipt, delivery = slot.take_one()
    assert delivery.member == b"b"
    slot.commit(receipt, [b"b"])
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.take_one()[1].member == A


@claimed
def test_phase_two_is_stale_for_what_is_claimed(slot: Slot, state: str) -> None:
    slot.bring(state)
    before = slot.snapshot("stale")
    assert slot.commit(1, [A]) == slot.release(1, [A]) == slot.extend(1, [A]) == slot.fail(1, A) == ["stale"]
    assert slot.snapshot("stale") == before


@claimed
def test_ack(slot: Slot, state: str) -> None:
    slot.bring(state)
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.where(A) == ("W" if state == "CW" else "-")
    assert slot.counted("acked") == 1
    assert not slot.hash("claim_body") and not slot.zset("claimants")
    if slot.topic.keyed:
        assert slot.hash("body") == ({A: slot.envelope()} if state == "CW" else {})
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.counted("acked") == 1


@claimed
@pytest.mark.parametrize("max_retries", [0, 16])
@pytest.mark.parametrize("by", ["time_out", "prepare", "claim"])
def test_the_end_of_a_lease_spends_a_retry(make: Make, state: str, max_retries: int, by: str) -> None:
    slot = make(max_retries=max_retries)
    slot.bring(state)
    slot.clock.advance((LEASE_MS - 1) / 1000)
    assert slot.time_out() == 0 and slot.where(A) == state
    if by == "time_out" or state == "CW":
        slot.clock.advance("1ms")
        assert slot.time_out() == 1
    else:
        slot.clock.advance("1ms")
        if by == "prepare":
            assert not slot.take().deliveries
        else:
            assert not slot.claim("t", 1, LEASE_MS, 10).taken
    assert slot.where(A) == {"C": "T" if max_retries else "D", "CW": "W"}[state]
    assert slot.counted("claim_returned") == 1
    assert not slot.zset("claimants") and not slot.hash("claim_body")
    assert slot.read_claim("s", 1).state == "lost"
    assert slot.ack_claim("s", 1)[0] == "stale" and slot.renew_claim("s", 1, LEASE_MS) is None
    if state == "C" and max_retries:
        assert slot.hash("failures")[A].startswith(b"timed_out 1 ")
        slot.clock.advance(5)
        _, delivery = slot.take_one()
        assert (delivery.retries_left, delivery.envelope) == (15, slot.envelope())
    elif state == "C" and slot.topic.keyed:
        assert slot.hash("deaths")[A].endswith(slot.envelope() or b"")


def test_a_claimed_retry_spends_the_next_one(slot: Slot) -> None:
    slot.bring("w")
    claim(slot)
    slot.clock.advance(LEASE_MS / 1000)
    assert slot.time_out() == 1
    slot.clock.advance(5)
    assert slot.take_one()[1].retries_left == 14


@claimed
def test_a_claim_given_back_is_as_if_it_had_never_been(slot: Slot, state: str) -> None:
    slot.send(A)
    original = slot.zset("store")[A]
    claim(slot)
    if state == "CW":
        slot.clock.advance("5ms")
        slot.send(A, score=NEW[slot.topic.type])
    newer = slot.zset("store").get(A)
    assert slot.return_claim("s", 1) == ("ok", 0)
    assert slot.where(A) == "W"
    earlier = state == "C" or slot.topic.type is TopicType.RANGE_MERGE
    assert slot.zset("store")[A] == (original if earlier else newer)
    assert slot.counted("dropped") == (1 if state == "CW" else 0)
    slot.clock.advance(1)
    assert slot.take_one()[1].retries_left == 16
    assert slot.read_claim("s", 1).state == "returned"
    assert slot.return_claim("s", 1) == ("ok", 0)
    assert slot.ack_claim("s", 1)[0] == "stale"


def test_a_claim_given_back_as_failed_spends_a_retry(slot: Slot) -> None:
    slot.bring("C")
    assert slot.return_claim("s", 1, spent=True) == ("ok", 0)
    assert slot.where(A) == "T"
    assert slot.read_claim("s", 1).state == "lost"


@claimed
@pytest.mark.parametrize("action", ["bury", "remove"])
def test_a_person_takes_nothing_from_a_claim(slot: Slot, state: str, action: str) -> None:
    slot.bring(state)
    found = "running" if state == "C" else "running_and_waiting"
    assert getattr(slot, action)([A]) == [found]
    # On keyed topics the newer copy stays: it would be dead before the older one ends.
    stays = slot.topic.keyed and (action, state) == ("bury", "CW")
    buried = "CW" if stays else "CD"
    assert slot.where(A) == (buried if (action, state) == ("bury", "CW") else "C")
    assert slot.hash("body") == ({A: slot.envelope()} if stays else {})
    assert read(slot) == {A: slot.envelope()}
    slot.clock.advance(LEASE_MS / 1000)
    slot.time_out()
    assert slot.where(A).startswith("W" if stays else "T")


@claimed
def test_what_spark_has_claimed_cannot_be_cancelled(slot: Slot, state: str) -> None:
    slot.bring(state)
    assert slot.cancel([A]) == ["claimed" if state == "C" else "waiting"]
    assert slot.where(A) == "C" and slot.hash("body") == {}
    assert read(slot) == {A: slot.envelope()}


@claimed
def test_reschedule(slot: Slot, state: str) -> None:
    slot.bring(state)
    new = 300 if slot.topic.is_priority else slot.now_ms + 9_000
    assert slot.reschedule([new], [A]) == ["running" if state == "C" else "waiting"]
    assert slot.where(A) == state and slot.zset("store").get(A) == (None if state == "C" else new)


@claimed
@pytest.mark.parametrize("emptied", ["store", "retry", "dead"])
def test_purge_never_touches_a_claim(slot: Slot, state: str, emptied: str) -> None:
    slot.bring(state)
    gone = emptied == "store" and state == "CW"
    assert slot.purge(emptied) == gone
    assert slot.where(A) == ("C" if gone else state)
    assert read(slot) == {A: slot.envelope()}


@claimed
def test_replay(slot: Slot, state: str) -> None:
    slot.send(A, body=b"dead")
    slot.kill(A)
    slot.send(A)
    claim(slot)
    if state == "CW":
        slot.send(A)
    # Where bodies differ, the claimed one is the newer one.
    merged = state == "CW" or slot.topic.keyed
    assert slot.replay([A]) == ["merged" if merged else "replayed"]
    assert slot.where(A) == (state if merged else "CW")
    assert read(slot) == {A: slot.envelope()}


# --- the failure record


@pytest.mark.parametrize("gone", ["purge", "remove", "bury"])
def test_what_is_known_of_a_claimed_messages_failures_outlives_its_newer_copy(slot: Slot, gone: str) -> None:
    slot.bring("w")
    claim(slot)
    slot.send(A)
    known = slot.hash("failures")
    assert set(known) == {A}
    slot.purge("store") if gone == "purge" else getattr(slot, gone)([A])
    assert slot.hash("failures") == known
    assert slot.ack_claim("s", 1) == ("ok", 0)
    stays = slot.topic.keyed and gone == "bury"
    assert slot.hash("failures") == (known if stays else {})


def test_a_newer_copy_keeps_what_is_known_of_failures_when_the_claimed_one_is_acknowledged(
    slot: Slot,
) -> None:
    slot.bring("w")
    claim(slot)
    slot.send(A)
    known = slot.hash("failures")
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.hash("failures") == known != {}


def test_ack_walks_in_steps_where_failures_are_to_be_tidied_up(make_slot: Make) -> None:
    slot = make_slot(identity="key", backoff=NO_BACKOFF, serial=False)
    names = [b"%d" % n for n in range(10)]
    slot.send(*names)
    answer = slot.take(3)
    slot.fail(answer.receipt, *(delivery.member for delivery in answer.deliveries))
    assert claim(slot) == 10
    slot.send(names[0])
    assert slot.ack_claim("s", 1, 4) == ("ok", 6)
    # Interrupted: it reads as empty, holds the gate, and ends as acknowledged by whoever comes.
    assert slot.read_claim("s", 1, 0, 10) == ("acked", 1, 0, [], [])
    assert slot.claim("s", 2, LEASE_MS, 10).status == "unfinished"
    assert slot.return_claim("s", 1) == ("stale", 0)
    slot.clock.advance(LEASE_MS / 1000)
    assert slot.time_out(4) == 4 and slot.time_out(4) == 2
    assert slot.counted("acked") == 10 and slot.counted("claim_returned") == 0
    assert set(slot.hash("failures")) <= {names[0]}
    assert slot.where(names[0]) == "W" and slot.hash("body") == {names[0]: slot.envelope()}


# --- the gate


def test_a_claim_holds_the_gate_until_it_has_ended(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(b"a", b"b")
    claim(slot, limit=1)
    assert slot.take(owner="A").status == slot.take(owner="B").status == "busy"
    assert slot.hash("control")[b"sleeping_until"] == b"9007199254740992"
    with slot.woken():
        assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.take(owner="B").status == "ok"
    assert slot.claim("s", 2, LEASE_MS, 1).status == "busy"


def test_the_gate_opens_for_what_waits_though_all_that_was_claimed_dies(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, max_retries=0)
    slot.send(b"a", b"b")
    claim(slot, limit=1)
    assert slot.take(owner="A").status == "busy"
    with slot.woken():
        slot.return_claim("s", 1, spent=True)
    assert len(slot.zset("dead")) == 1


@pytest.mark.parametrize("end", ["return_claim", "time_out", "lost"])
def test_every_end_of_a_claim_opens_the_gate_and_says_so(make_slot: Make, end: str) -> None:
    slot = make_slot(TopicType.FIXED_TIME, backoff=CONSTANT)
    slot.send(b"a", b"b")
    claim(slot, limit=1)
    due = slot.take(owner="A").next_due
    assert due == slot.now_ms + LEASE_MS
    assert slot.broker.heads(slot.topic, [0], upkeep=True) == [due]
    with slot.woken():
        if end == "time_out":
            slot.clock.advance(LEASE_MS / 1000)
            slot.time_out()
        else:
            slot.return_claim("s", 1, spent=end == "lost")
    assert slot.take(owner="B").status == "ok"


@pytest.mark.parametrize("sealed", [False, True])
@slot_of_each([*TYPES, TopicType.FIFO], backoff=CONSTANT, order="loose")
def test_what_else_waits_is_taken_while_a_lost_claim_comes_back(slot: Slot, sealed: bool) -> None:
    slot.send(*(b"%d" % n for n in range(5)))
    assert slot.claim("s", 1, LEASE_MS, 5).taken == 5
    if sealed:
        slot.renew_claim("s", 1, LEASE_MS, seal=True)
    slot.send(b"new")
    assert slot.take(1, owner="A").status == "busy"
    slot.clock.advance(LEASE_MS / 1000)
    # The first step of its return opens the gate, and says so.
    with slot.woken():
        assert slot.time_out(1) == 1 and len(slot.zset("claim")) == 4
    answer = slot.take(1, owner="A")
    if slot.topic.type is TopicType.FIFO:
        # What comes back has its place before what else waits.
        assert answer.status == "busy" and len(slot.zset("claim")) == 3
        return
    assert answer.status == "ok"
    [delivery] = answer.deliveries
    assert delivery.member not in slot.zset("claim")
    # Nobody goes on with a claim that has ended, and nobody claims before all of it is back.
    assert slot.renew_claim("s", 1, LEASE_MS, seal=True) is None and slot.ack_claim("s", 1)[0] == "stale"
    assert slot.claim("s", 2, LEASE_MS, 1).status == slot.claim("t", 1, LEASE_MS, 1).status == "busy"
    assert slot.commit(answer.receipt, [delivery.member]) == ["ok"]
    while slot.zset("claimants"):
        slot.time_out(1)
    assert slot.claim("s", 2, LEASE_MS, 9).status == "ok"


def test_one_consumer_at_a_time_claims_a_slot(slot: Slot) -> None:
    slot.send(b"a", b"b")
    claim(slot, limit=1)
    assert slot.claim("t", 1, LEASE_MS, 1).status == "busy"
    slot.ack_claim("s", 1)
    assert slot.claim("t", 1, LEASE_MS, 1).status == "ok"


def test_a_paused_slot_is_not_claimed_from_and_goes_on_with_its_upkeep(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, backoff=CONSTANT)
    slot.send(b"a")
    claim(slot)
    slot.pause()
    assert slot.ack_claim("s", 1) == ("ok", 0)
    slot.send(b"b")
    assert slot.claim("s", 2, LEASE_MS, 10).status == "paused"
    slot.pause(False)
    assert claim(slot, 2) == 1
    slot.pause()
    slot.clock.advance(LEASE_MS / 1000)
    assert slot.claim("s", 3, LEASE_MS, 10).status == "paused"
    assert slot.where(b"b") == "T"


# --- numbers, seals and late requests


def test_a_claim_grows_until_it_is_sealed(slot: Slot) -> None:
    slot.send(*(b"%d" % n for n in range(5)))
    first = slot.claim("s", 1, LEASE_MS, 2)
    assert (first.taken, first.size, first.more) == (2, 2, True)
    assert slot.read_claim("s", 1, 0, 10) == ("open", 1, 2, [], [])
    assert slot.ack_claim("s", 1) == ("open", 2)
    second = slot.claim("s", 1, LEASE_MS, 2)
    assert (second.taken, second.size) == (2, 4)
    assert slot.renew_claim("s", 1, LEASE_MS, seal=True) == 4
    # A request that was long on its way.
    assert slot.claim("s", 1, LEASE_MS, 2).status == "stale"
    assert len(read(slot)) == 4
    slot.ack_claim("s", 1)
    assert slot.claim("s", 1, LEASE_MS, 2).status == "stale"
    assert slot.claim("s", 2, LEASE_MS, 2).taken == 1


def test_what_is_claimed_and_sent_again_is_not_claimed_twice(slot: Slot) -> None:
    slot.bring("-")
    slot.send(A)
    slot.claim("s", 1, LEASE_MS, 1)
    slot.send(A)
    answer = slot.claim("s", 1, LEASE_MS, 1)
    assert (answer.status, answer.taken, answer.size) == ("ok", 0, 1)
    assert slot.where(A) == "CW"


def test_a_claim_looks_past_a_window_that_runs_already(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(*(b"%d" % n for n in range(5)), score=50)
    slot.claim("s", 1, LEASE_MS, 5)
    slot.send(*(b"%d" % n for n in range(5)), score=60)
    slot.send(b"low", score=40)
    answer = slot.claim("s", 1, LEASE_MS, 3)
    assert (answer.taken, answer.size) == (1, 6)


def test_a_sealed_claim_reads_the_same_until_it_ends_and_then_as_nothing(slot: Slot) -> None:
    slot.send(*(b"%d" % n for n in range(5)))
    scores = slot.zset("store")
    claim(slot)
    whole = slot.read_claim("s", 1, 0, 1000)
    assert dict(zip(whole.rows[::2], map(float, whole.rows[1::2]), strict=True)) == scores
    assert [*slot.read_claim("s", 1, 0, 2).rows, *slot.read_claim("s", 1, 2, 9).rows] == whole.rows
    slot.send(*(b"%d" % n for n in range(9)), body=b"new")
    assert slot.read_claim("s", 1, 0, 1000) == whole == slot.read_claim("s", 0, 0, 1000)
    assert slot.read_claim("s", 2, 0, 1000).state == slot.read_claim("t", 1, 0, 1000).state == "none"
    slot.clock.advance(LEASE_MS / 1000)
    # Lost from the first step on, though most of it is still there.
    assert slot.time_out(1) == 1
    assert slot.read_claim("s", 1, 0, 1000) == ("lost", 1, 0, [], [])
    assert slot.ack_claim("s", 1)[0] == "stale"
    while slot.time_out(1):
        pass
    assert slot.zset("claim") == {}


def test_renewal_keeps_a_claim_and_is_stale_for_any_other(slot: Slot) -> None:
    slot.bring("C")
    slot.clock.advance((LEASE_MS - 1) / 1000)
    assert slot.renew_claim("s", 1, LEASE_MS) == 1
    assert slot.renew_claim("s", 2, LEASE_MS) is slot.renew_claim("t", 1, LEASE_MS) is None
    slot.clock.advance((LEASE_MS - 1) / 1000)
    assert slot.time_out() == 0 and slot.where(A) == "C"


def test_a_claim_that_the_ledger_does_not_know_reads_as_lost(slot: Slot) -> None:
    slot.bring("C")
    slot.keyspace.delete(slot.keys.claims)
    assert read(slot) == {}
    assert slot.ack_claim("s", 1)[0] == "stale"
    slot.clock.advance(LEASE_MS / 1000)
    slot.time_out()
    assert slot.where(A) == "T"


def test_how_a_claim_ended_is_remembered_for_thirty_days(make_slot: Make, clock: Clock) -> None:
    slot = make_slot()
    slot.send(b"a")
    claim(slot)
    slot.ack_claim("s", 1)
    assert slot.hash("claims") == {b"s": b"1 acked %d" % START_MS}
    clock.advance(TOMBSTONE_MS / 1000)
    slot.send(b"b")
    claim(slot, consumer="t")
    assert set(slot.hash("claims")) == {b"s", b"t"}
    slot.ack_claim("t", 1)
    clock.advance("1ms")
    slot.send(b"c")
    claim(slot, consumer="u")
    assert set(slot.hash("claims")) == {b"t", b"u"}


def test_a_slot_forgets_the_consumer_that_ended_longest_ago(make_slot: Make, clock: Clock) -> None:
    slot = make_slot()
    slot.send(b"a")
    claim(slot, consumer="holder", limit=1)
    for n in range(CONSUMERS - 1):
        slot.keyspace.hset(slot.keys.claims, b"c%d" % n, b"1 acked %d" % (START_MS - abs(n - 7)))
    clock.advance("1ms")
    assert slot.claim("t", 1, LEASE_MS, 1).status == "busy"
    remembered = set(slot.hash("claims"))
    assert len(remembered) == CONSUMERS - 1
    assert b"holder" in remembered and b"c7" in remembered and b"c6" in remembered
    assert b"c%d" % (CONSUMERS - 2) not in remembered, "it ended first"
    slot.ack_claim("holder", 1)


def test_more_short_consumers_than_are_remembered_get_what_they_ask_for(make_slot: Make) -> None:
    slot = make_slot()
    slot.configure()
    for n in range(CONSUMERS - 50):
        slot.keyspace.hset(slot.keys.claims, b"earlier%d" % n, b"1 acked %d" % START_MS)
    for n in range(150):
        slot.send(b"%d" % n)
        slot.clock.advance("1ms")
        claim(slot, consumer=f"c{n}", limit=1)
        assert slot.ack_claim(f"c{n}", 1)[0] == "ok"
    assert len(slot.hash("claims")) == CONSUMERS == slot.broker.count_consumers(slot.topic, slot.index)


# --- what may be taken


@each_type
def test_a_claim_takes_what_is_due_in_the_order_of_the_topic(slot: Slot) -> None:
    slot.send(b"a", b"b")
    if slot.topic.type is not TopicType.PRIORITY:
        slot.send(b"later", score=slot.due_in(1))
    assert slot.claim("s", 1, LEASE_MS, 1).taken == 1
    assert slot.zset("claim").keys() == {b"a"}
    answer = slot.claim("s", 1, LEASE_MS, 9)
    assert (answer.taken, answer.more) == (1, False)


def test_a_claim_is_bounded_in_messages_and_bytes(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    slot.send(*(b"%04d" % n for n in range(1_200)), score=50)
    assert slot.claim("s", 1, LEASE_MS, 5_000).taken == 1_000
    assert slot.claim("s", 1, LEASE_MS, 100, 30).taken == 2
    assert slot.claim("s", 1, LEASE_MS, 100, 1).taken == 1


@each_type
@pytest.mark.parametrize(
    ("sent", "limit", "taken"),
    [
        pytest.param(30_000, 99_999, 30_000, id="all"),
        pytest.param(30_000, 26_000, 26_000, id="all-but-a-few"),
        pytest.param(30_000, 25_999, 4_000, id="too-many-to-carry-back"),
        pytest.param(3_000, 1_501, 1_501, id="more-than-half"),
        pytest.param(3_000, 1_500, 1_500, id="half"),
        pytest.param(3_000, 1, 1, id="one"),
    ],
)
def test_what_can_go_as_it_is_is_claimed_in_one_step(slot: Slot, sent: int, limit: int, taken: int) -> None:
    names = [b"%05d" % n for n in range(sent - 1)]
    for first in range(0, len(names), 1_000):
        slot.send(
            *names[first : first + 1_000],
            score=None if slot.topic.type is TopicType.RANGE_MERGE else 40_000 - first,
        )
        slot.clock.advance("1ms")
    slot.zadd(b"half", 20.5 if slot.topic.type is TopicType.PRIORITY else 16.25)
    scores = slot.zset("store")
    answer = slot.claim("s", 1, LEASE_MS, limit, 1 << 53)
    assert (answer.taken, answer.size, answer.more) == (taken, taken, taken < sent)
    claimed, left = slot.zset("claim"), slot.zset("store")
    assert {**claimed, **left} == scores and len(left) == sent - taken
    order = sorted(
        scores.items(), key=lambda row: (row[1], row[0]), reverse=slot.topic.type is TopicType.PRIORITY
    )
    assert claimed == dict(order[:taken])
    if left:
        # What is claimed already has to be left out from now on, so each is looked at.
        slot.send(next(iter(claimed)))
        answer = slot.claim("s", 1, LEASE_MS, 2_500, 1 << 53)
        assert (answer.taken, answer.more) == (1_000, True)
    slot.renew_claim("s", 1, LEASE_MS, seal=True)
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert len(slot.zset("store")) == (sent - taken - 999 if left else 0)


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME])
@pytest.mark.parametrize(
    ("later", "taken", "more"),
    [pytest.param(4_000, 7_000, False, id="few"), pytest.param(4_001, 4_000, True, id="many")],
)
def test_what_is_not_due_stays_when_all_that_is_due_is_claimed(
    slot: Slot, later: int, taken: int, more: bool
) -> None:
    slot.send(*(b"%05d" % n for n in range(7_000)), score=slot.due_in(0))
    slot.send(*(b"later %05d" % n for n in range(later)), score=slot.due_in(5_000))
    answer = slot.claim("s", 1, LEASE_MS, 99_999, 1 << 53)
    assert (answer.taken, answer.more) == (taken, more)
    assert not any(member.startswith(b"later") for member in slot.zset("claim"))
    found = slot.count()
    assert (found.store, found.due) == (7_000 + later - taken, 7_000 - taken)
    # What has stayed is found, is taken when it is due, and is not lost with the claim.
    slot.renew_claim("s", 1, LEASE_MS, seal=True), slot.ack_claim("s", 1)
    slot.clock.advance(5)
    assert slot.claim("s", 2, LEASE_MS, 99_999, 1 << 53).taken == later + 7_000 - taken


def test_long_messages_go_in_one_step_as_far_as_their_bytes_allow(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(*(b"%0200d" % n for n in range(1_500)), score=50)
    answer = slot.claim("s", 1, LEASE_MS, 5_000, 200 * 1_200)
    assert (answer.taken, answer.more) == (1_200, True)
    slot.renew_claim("s", 1, LEASE_MS, seal=True), slot.ack_claim("s", 1)
    answer = slot.claim("s", 2, LEASE_MS, 5_000, 200 * 7 + 199)
    assert (answer.taken, answer.more) == (7, True)
    slot.renew_claim("s", 2, LEASE_MS, seal=True), slot.ack_claim("s", 2)
    answer = slot.claim("s", 3, LEASE_MS, 5_000)
    assert (answer.taken, answer.more) == (293, False)


def test_only_a_whole_slot_is_claimed_whatever_its_bytes(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(*(b"%0480000d" % n for n in range(18)), score=50)
    # A MiB is copied, or looked at, at most.
    assert [slot.claim("s", 1, LEASE_MS, 9, 1 << 53).taken for _ in range(2)] == [2, 2]
    assert [slot.return_claim("s", 1) for _ in range(2)] == [("ok", 2), ("ok", 0)]
    answer = slot.claim("s", 2, LEASE_MS, 18, 18 * 480_000 - 1)
    assert (answer.taken, answer.more) == (2, True)
    assert slot.return_claim("s", 2) == ("ok", 0)
    # Of the others as much goes back.
    answer = slot.claim("s", 3, LEASE_MS, 15, 1 << 53)
    assert (answer.taken, answer.more) == (2, True)
    assert slot.return_claim("s", 3) == ("ok", 0)
    answer = slot.claim("s", 4, LEASE_MS, 16, 1 << 53)
    assert (answer.taken, answer.more) == (16, True)


def test_small_messages_go_four_times_as_many_bytes_at_a_time_as_large_ones(make_slot: Make) -> None:
    slot = make_slot()
    slot.send(*(b"%016384d" % n for n in range(600)), score=50)
    assert slot.claim("s", 1, LEASE_MS, 290, 1 << 53).taken == 256
    for _ in range(2):
        slot.return_claim("s", 1)
    slot.send(b"%016385d" % 999, score=60)
    assert slot.claim("s", 2, LEASE_MS, 290, 1 << 53).taken == 63


@pytest.mark.parametrize("identity", ["body", "key"])
@pytest.mark.parametrize("end", ["return", "spend", "lease", "ack", "ack failed"])
def test_a_claim_ends_in_steps_of_no_more_bytes_than_it_began_in(
    make_slot: Make, end: str, identity: str
) -> None:
    slot = make_slot(identity=identity, backoff=NO_BACKOFF)
    members = [b"%02d" % n for n in range(5)]
    if identity == "body":
        members = [member + b"m" * 480_000 for member in members]
    for member in members:
        slot.send(member, body=b"b" * 480_000)
    if end == "ack":
        # Only what is known of failures makes the acknowledgement look at the messages.
        receipt, delivery = slot.take_one()
        slot.fail(receipt, delivery.member)
    while slot.claim("s", 1, LEASE_MS, 5, 1 << 53).more:
        pass
    slot.renew_claim("s", 1, LEASE_MS, seal=True)
    if end == "ack failed":
        assert slot.fail_claimed("s", 1, [Failure(members[3])]) == ["ok"]
    step: Callable[[], object] = {
        "return": lambda: slot.return_claim("s", 1),
        "spend": lambda: slot.return_claim("s", 1, spent=True),
        "lease": slot.time_out,
    }.get(end, lambda: slot.ack_claim("s", 1))
    if end == "lease":
        slot.clock.advance(LEASE_MS / 1000)
    held = []
    while slot.zset("claimants"):
        step()
        held.append(len(slot.zset("claim")))
    assert held == [3, 1, 0]


@pytest.mark.parametrize("identity", ["body", "key"])
def test_a_claim_reads_no_more_than_may_be_moved(make_slot: Make, identity: str) -> None:
    slot = make_slot(identity=identity, serial=False)
    slot.send(b"runs")
    slot.take()
    # How many are read is estimated from the longest, which is the only long one here.
    sizes = [*[10] * 49, 500_000]
    for n, size in enumerate(sizes):
        if identity == "key":
            slot.send(b"%02d" % n, body=b"b" * size)
        else:
            slot.send(b"%02d" % n + b"m" * size)
    answer = slot.claim("s", 1, LEASE_MS, 50)
    assert (answer.taken, answer.more) == (2, True)
    answer = slot.claim("s", 1, LEASE_MS, 50)
    assert (answer.taken, answer.more) == (48, False)


def test_a_claim_moves_no_more_bytes_than_it_may_if_it_did_not_see_the_longest(make_slot: Make) -> None:
    slot = make_slot(serial=False)
    slot.send(b"runs")
    slot.take()
    # Of 200 every second one is looked at.
    for n in range(200):
        slot.send(b"%03d" % n + b"m" * (300_000 if n % 2 == 0 else 1_000))
    answer = slot.claim("s", 1, LEASE_MS, 200)
    assert answer.more and 0 < sum(map(len, slot.zset("claim"))) <= 4_194_304


def test_what_runs_stays_in_store_when_the_others_are_claimed(make_slot: Make) -> None:
    slot = make_slot(serial=False)
    slot.send(b"a", b"b", b"c")
    receipt, delivery = slot.take_one()
    assert delivery.member == b"a"
    slot.send(b"a", score=200)
    assert slot.claim("s", 1, LEASE_MS, 3).taken == 2
    assert set(slot.zset("claim")) == {b"b", b"c"} and slot.zset("store") == {b"a": 200}
    slot.commit(receipt, [b"a"])


@slot_of_each(TYPES, identity="key")
def test_nothing_is_claimed_before_its_time_though_each_is_looked_at(slot: Slot) -> None:
    slot.send(b"later", score=50 if slot.topic.is_priority else slot.due_in(1))
    assert slot.claim("s", 1, LEASE_MS, 10).taken == (slot.topic.type is TopicType.PRIORITY)


def test_an_expired_message_dies_instead_of_being_claimed(make_slot: Make) -> None:
    slot = make_slot(identity="key")
    slot.send_replace([50, 50], [b"a", b"b"], [slot.envelope(expires_ms=slot.now_ms + 5), slot.envelope()])
    slot.clock.advance("6ms")
    assert slot.claim("s", 1, LEASE_MS, 10).taken == 1
    assert (slot.where(b"a"), slot.where(b"b")) == ("D", "C")


def test_a_claim_supersedes_the_resting_retry_of_a_message_that_a_stranger_sent(make_slot: Make) -> None:
    slot = make_slot(backoff=CONSTANT)
    slot.bring("T")
    slot.zadd(A, 60)
    assert claim(slot) == 1
    assert slot.where(A) == "C" and slot.counted("dropped") == 1


def test_what_rests_and_times_out_is_brought_along_by_a_claim(make_slot: Make) -> None:
    slot = make_slot(TopicType.FIXED_TIME, serial=False, backoff=NO_BACKOFF)
    slot.send(b"a", b"b")
    receipt, delivery = slot.take_one()
    slot.fail(receipt, delivery.member, delay_ms=1_000)
    slot.take_one()
    slot.clock.advance(31)
    assert claim(slot) == 2
    assert slot.counted("expired") == 1


@pytest.mark.parametrize(("number", "lease_ms"), [(0, 1), (1, 0), (1, 86_400_001)])
def test_numbers_and_leases_out_of_bounds_are_refused(slot: Slot, number: int, lease_ms: int) -> None:
    slot.send(A)
    before = slot.snapshot()
    with pytest.raises(ServerRefused):
        slot.claim("s", number, lease_ms, 1)
    assert slot.snapshot() == before


def test_a_caller_with_another_slot_count_claims_nothing(slot: Slot) -> None:
    slot.send(A)
    before = slot.snapshot()
    assert slot.with_topic(slots=64).claim("s", 1, LEASE_MS, 1).status == "moved"
    assert slot.snapshot() == before


# --- looking


def test_claims_are_counted_audited_and_listed(slot: Slot) -> None:
    slot.send(b"a", b"b")
    claim(slot, limit=1)
    assert (slot.count().claimed, slot.count().store) == (1, 1)
    ledger = slot.audit_ledger()
    assert (ledger.claimed, ledger["claimed"], ledger.balanced) == (1, 1, True)
    [entry] = slot.list_messages("claim").entries
    assert (entry.member, entry.envelope) == (next(iter(slot.zset("claim"))), slot.envelope())
    assert slot.search_messages("claim", entry.member).entries[0].member == entry.member


def test_a_configuration_that_would_read_claimed_priorities_anew_is_refused(make_slot: Make) -> None:
    slot = make_slot()
    slot.bring("C")
    assert slot.with_topic(max_retries=20).configure() == "refused"


@pytest.mark.parametrize("name", ["claim", "claims", "claim_body", "claim_failed"])
def test_prepare_names_a_key_of_another_type_while_something_is_claimed(make_slot: Make, name: str) -> None:
    slot = make_slot(identity="key")
    slot.send(A)
    claim(slot)
    slot.fail_claimed("s", 1, [Failure(A)])
    with slot.foreign(name):
        before = slot.snapshot()
        with pytest.raises(WrongType):
            slot.take()
        assert slot.snapshot() == before
