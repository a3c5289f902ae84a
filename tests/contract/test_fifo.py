"""fifo topics: places in the order of sending, and slots that hold behind a message that failed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.exceptions import ServerRefused, SlotMoved
from django_rmq.testing import Clock
from tests.contract.keyspaces import Keyspace
from tests.contract.slots import CONSTANT, NO_BACKOFF, START_MS, Make, Slot

STEP = 1 / 1024


@pytest.fixture
def fifo(make_slot: Make) -> Make:
    def make(**options: Any) -> Slot:
        return make_slot(TopicType.FIFO, **{"identity": "key", "backoff": CONSTANT, **options})

    return make


@pytest.fixture
def slot(fifo: Make) -> Slot:
    return fifo()


def send(slot: Slot, *members: bytes, delay_ms: int = 0, body: bytes = b"body", **how: Any) -> list[Any]:
    envelopes = [slot.envelope(body) or b"" for _ in members]
    sent: list[Any] = slot.send_fifo(delay_ms, list(members), envelopes, **how)
    return sent


def words(sent: list[Any]) -> list[str]:
    return [one.status for one in sent]


def take(slot: Slot, limit: int = 10, owner: str = "A") -> list[bytes]:
    return [each.member for each in slot.prepare(owner, None, limit).deliveries]


def taken(slot: Slot, limit: int = 10) -> tuple[int, list[bytes]]:
    prepared = slot.prepare("A", None, limit)
    return prepared.receipt, [each.member for each in prepared.deliveries]


# --- places


def test_messages_are_taken_in_the_order_of_sending_whatever_their_bytes_are(slot: Slot) -> None:
    send(slot, b"z", b"y")
    send(slot, b"a")
    send(slot, b"m", b"b")
    assert take(slot) == [b"z", b"y", b"a", b"m", b"b"]


def test_no_two_messages_have_the_same_place_also_within_one_millisecond(slot: Slot) -> None:
    places = [one.score for name in (b"c", b"b", b"a") for one in send(slot, name)]
    assert places == [START_MS, START_MS + STEP, START_MS + 2 * STEP]


def test_a_lone_message_takes_the_place_behind_which_the_next_ones_come(slot: Slot, clock: Clock) -> None:
    send(slot, b"c")
    clock.advance("1ms")
    places = [one.score for name in (b"b", b"a") for one in send(slot, name)]
    assert places == [START_MS + 1, START_MS + 1 + STEP]
    clock.advance(-0.001)
    [last] = send(slot, b"d")
    assert last.score == START_MS + 1 + 2 * STEP


def test_a_full_millisecond_goes_on_in_the_next(slot: Slot, clock: Clock) -> None:
    names = [b"%04d" % n for n in range(600)]
    places = [one.score for one in send(slot, *names)]
    assert places == sorted(set(places))
    assert places[511] == START_MS + 511 * STEP
    assert places[512] == START_MS + 1
    assert len(take(slot, 1_000)) == 512
    slot.release(*taken_again(slot))
    clock.advance("1ms")
    assert take(slot, 1_000) == names


def taken_again(slot: Slot) -> tuple[int, list[bytes]]:
    held = slot.list_held("A")
    return held[0].receipt, [one.delivery.member for one in held]


def test_a_clock_that_is_set_back_changes_no_order(slot: Slot, clock: Clock) -> None:
    send(slot, b"a")
    clock.advance(-5)
    send(slot, b"b")
    clock.advance("5001ms")
    assert take(slot) == [b"a", b"b"]


def test_a_clock_that_is_set_back_delays_nothing_in_an_empty_slot(slot: Slot, clock: Clock) -> None:
    send(slot, b"a")
    receipt, names = taken(slot)
    slot.commit(receipt, names)
    clock.advance(-5)
    send(slot, b"b")
    assert take(slot) == [b"b"]


def test_a_delayed_message_has_its_place_where_its_delay_ends(slot: Slot, clock: Clock) -> None:
    send(slot, b"late", b"later", delay_ms=1_000)
    send(slot, b"now")
    assert take(slot, 1) == [b"now"]
    slot.commit(*taken_again(slot))
    clock.advance(1)
    send(slot, b"then")
    assert take(slot) == [b"then", b"late", b"later"]


def test_delayed_messages_of_one_millisecond_keep_their_order_and_places(slot: Slot, clock: Clock) -> None:
    first = send(slot, *[b"z%03d" % n for n in range(300)], delay_ms=1_000)
    clock.advance("400ms")
    second = send(slot, *[b"a%03d" % n for n in range(300)], delay_ms=600)
    places = [one.score for one in first + second]
    assert places == sorted(set(places))
    assert places[0] == START_MS + 1_000 + 0.5
    assert places[512] == START_MS + 1_001 + 0.5


@pytest.mark.parametrize("delay_ms", [-1, 10**14 + 1])
def test_a_delay_out_of_bounds_is_refused(slot: Slot, delay_ms: int) -> None:
    with pytest.raises(ServerRefused):
        send(slot, b"a", delay_ms=delay_ms)


def test_a_sender_with_another_slot_count_is_told(slot: Slot) -> None:
    send(slot, b"a")
    with pytest.raises(SlotMoved):
        send(slot.with_topic(slots=2), b"b")


def test_a_full_slot_refuses_what_is_too_much(fifo: Make) -> None:
    slot = fifo(max_backlog=2)
    assert words(send(slot, b"a", b"b", b"c")) == ["stored", "stored", "refused"]
    assert take(slot) == [b"a", b"b"]


# --- duplicates


def test_keep_leaves_out_a_send_that_meets_a_waiting_message_with_its_key(slot: Slot) -> None:
    send(slot, b"a", b"b", body=b"first")
    assert words(send(slot, b"a", body=b"second")) == ["present"]
    [first, _] = slot.prepare("A", None, 10).deliveries
    assert first.member == b"a"
    assert first.envelope.endswith(b"first")


def test_replace_changes_the_body_and_keeps_the_place(fifo: Make) -> None:
    slot = fifo(on_duplicate="replace")
    send(slot, b"a", b"b", body=b"first")
    assert words(send(slot, b"a", body=b"second")) == ["replaced"]
    [first, second] = slot.prepare("A", None, 10).deliveries
    assert first.member == b"a"
    assert first.envelope.endswith(b"second")
    assert second.envelope.endswith(b"first")


@pytest.mark.parametrize(
    ("rule", "word", "body"), [("keep", "present", b"first"), ("replace", "replaced", b"second")]
)
def test_a_message_that_rests_after_a_failure_waits_too(
    fifo: Make, clock: Clock, rule: str, word: str, body: bytes
) -> None:
    slot = fifo(on_duplicate=rule)
    send(slot, b"a", body=b"first")
    receipt, _ = taken(slot)
    slot.rollback(receipt, [Failure(b"a")])
    assert words(send(slot, b"a", body=b"second")) == [word]
    assert take(slot) == []
    clock.advance(1)
    [delivery] = slot.prepare("A", None, 10).deliveries
    assert delivery.retries_left == slot.topic.max_retries - 1
    assert delivery.envelope.endswith(body)


@pytest.mark.parametrize("rule", ["keep", "replace"])
def test_a_send_that_meets_a_running_message_waits_behind_it_as_a_message_of_its_own(
    fifo: Make, rule: str
) -> None:
    slot = fifo(on_duplicate=rule, backoff=NO_BACKOFF)
    send(slot, b"a", b"b", body=b"first")
    slot.fail_one(b"a")
    receipt, _ = taken(slot, 1)
    assert words(send(slot, b"a", body=b"second")) == ["stored"]
    slot.commit(receipt, [b"a"])
    [second, third] = slot.prepare("A", None, 10).deliveries
    assert (second.member, third.member) == (b"b", b"a")
    assert third.envelope.endswith(b"second")
    assert third.retries_left == slot.topic.max_retries


def test_what_is_given_back_keeps_its_place_before_a_newer_send_of_its_key(slot: Slot) -> None:
    send(slot, b"a", b"b", body=b"first")
    receipt, names = taken(slot)
    send(slot, b"a", body=b"second")
    slot.release(receipt, names)
    [first, second] = slot.prepare("A", None, 10).deliveries
    assert (first.member, second.member) == (b"a", b"b")
    assert first.envelope.endswith(b"second")


def test_a_failed_message_gives_way_to_a_newer_send_of_its_key_and_leaves_it_no_failures(
    fifo: Make,
) -> None:
    slot = fifo(backoff=NO_BACKOFF)
    send(slot, b"a", body=b"first")
    for is_met in (False, True):
        receipt, _ = taken(slot)
        if is_met:
            send(slot, b"a", body=b"second")
        slot.rollback(receipt, [Failure(b"a")])
    [delivery] = slot.prepare("A", None, 10).deliveries
    assert delivery.retries_left == slot.topic.max_retries
    assert delivery.envelope.endswith(b"second")
    assert slot.hash("failures") == {}


@pytest.mark.parametrize("rule", ["keep", "replace"])
def test_ensure_leaves_out_what_waits_rests_or_runs(fifo: Make, rule: str) -> None:
    slot = fifo(on_duplicate=rule)
    send(slot, b"a", b"b")
    taken(slot, 1)
    assert words(send(slot, b"a", b"b", b"c", ensure=True)) == ["present", "present", "stored"]


# --- strict


def test_a_strict_slot_holds_behind_a_message_that_failed_until_it_succeeds(slot: Slot, clock: Clock) -> None:
    send(slot, b"a", b"b")
    slot.fail_one(b"a")
    send(slot, b"c")
    assert slot.take().status == "busy"
    clock.advance(1)
    receipt, names = taken(slot, 1)
    assert names == [b"a"]
    slot.commit(receipt, names)
    assert take(slot) == [b"b", b"c"]


def test_a_strict_slot_holds_until_the_message_is_dead(fifo: Make, clock: Clock) -> None:
    slot = fifo(max_retries=1)
    send(slot, b"a", b"b")
    slot.fail_one(b"a")
    clock.advance(1)
    slot.fail_one(b"a")
    assert slot.where(b"a") == "D"
    assert take(slot) == [b"b"]


def test_a_strict_slot_hands_out_nothing_while_something_of_it_is_in_flight(slot: Slot) -> None:
    send(slot, b"a", b"b", b"c")
    receipt, names = taken(slot, 2)
    assert slot.take().status == "busy"
    slot.commit(receipt, names[:1])
    assert slot.take().status == "busy"
    slot.commit(receipt, names[1:])
    assert take(slot) == [b"c"]


def test_what_was_taken_with_a_failed_message_goes_back_to_its_place_uncharged(slot: Slot) -> None:
    send(slot, b"a", b"b", b"c")
    receipt, _ = taken(slot)
    slot.rollback(receipt, [Failure(b"a")])
    slot.release(receipt, [b"c", b"b"])
    slot.clock.advance(1)
    given = slot.take().deliveries
    assert [each.member for each in given] == [b"a", b"b", b"c"]
    full = slot.topic.max_retries
    assert [each.retries_left for each in given] == [full - 1, full, full]


@pytest.mark.parametrize("backoff", [CONSTANT, NO_BACKOFF, BackOff()])
def test_messages_that_failed_together_come_back_in_their_order(fifo: Make, backoff: BackOff) -> None:
    slot = fifo(backoff=backoff)
    names = [b"d", b"c", b"b", b"a"]
    send(slot, *names)
    receipt, _ = taken(slot)
    slot.rollback(receipt, [Failure(name) for name in (b"a", b"c", b"d", b"b")])
    slot.clock.advance(60)
    assert take(slot) == names


def test_of_messages_that_timed_out_together_only_the_first_in_line_is_charged(slot: Slot) -> None:
    names = [b"c", b"b", b"a"]
    send(slot, *names, b"later")
    taken(slot, 3)
    slot.clock.advance(slot.topic.timeout + 1)
    assert slot.take(owner="B").status == "busy"
    assert set(slot.zset("retry")) == {b"c"}
    assert set(slot.zset("store")) == {b"b", b"a", b"later"}
    slot.clock.advance(1)
    suspect = slot.take(owner="B")
    assert [(each.member, each.retries_left) for each in suspect.deliveries] == [(b"c", 15)]
    assert suspect.is_suspect
    slot.commit(suspect.receipt, [b"c"])
    given = slot.take(owner="B")
    assert [(each.member, each.retries_left) for each in given.deliveries] == [
        (b"b", 16),
        (b"a", 16),
        (b"later", 16),
    ]


def test_a_time_out_in_parts_charges_the_first_in_line_alone(slot: Slot, clock: Clock) -> None:
    names = [b"d", b"c", b"b", b"a"]
    send(slot, *names)
    taken(slot)
    clock.advance(slot.topic.timeout + 1)
    assert [slot.time_out(1) for _ in range(5)] == [1, 1, 1, 1, 0]
    assert set(slot.zset("retry")) == {b"d"}
    assert set(slot.zset("store")) == {b"c", b"b", b"a"}


def test_a_send_does_not_wake_who_waits_for_a_strict_slot(slot: Slot, broker: Any) -> None:
    wakeups = broker.wakeups([slot.topic])
    wakeups.get(5)
    send(slot, b"a", b"b")
    receipt, _ = taken(slot, 1)
    slot.take()
    send(slot, b"c")
    slot.commit(receipt, [b"a"])
    heard = wakeups.get(5)
    wakeups.close()
    assert [number for _, number in heard] == [0]


def test_a_place_is_due_from_its_millisecond_on(slot: Slot, clock: Clock) -> None:
    send(slot, b"a", b"b", delay_ms=500)
    prepared = slot.take()
    assert (prepared.status, prepared.next_due) == ("empty", START_MS + 500)
    assert slot.broker.heads(slot.topic, [0]) == [START_MS + 500]
    clock.advance("500ms")
    assert take(slot) == [b"a", b"b"]


# --- loose


def test_a_loose_slot_goes_on_behind_a_message_that_failed(fifo: Make, clock: Clock) -> None:
    slot = fifo(order="loose")
    send(slot, b"a", b"b")
    slot.fail_one(b"a")
    assert take(slot, 1) == [b"b"]
    send(slot, b"c")
    clock.advance(1)
    assert take(slot) == [b"a", b"c"]


def test_a_failure_counts_against_the_retries_of_its_message_alone(fifo: Make, clock: Clock) -> None:
    slot = fifo(max_retries=2, backoff=NO_BACKOFF)
    send(slot, b"a", b"b")
    lefts = []
    for _ in range(3):
        prepared = slot.take(1)
        lefts += [each.retries_left for each in prepared.deliveries]
        slot.rollback(prepared.receipt, [Failure(b"a")])
    assert lefts == [2, 1, 0]
    [delivery] = slot.prepare("A", None, 10).deliveries
    assert (delivery.member, delivery.retries_left) == (b"b", 2)


# --- persons, claims, re-slotting


def test_a_replayed_message_is_the_last_in_line(slot: Slot) -> None:
    send(slot, b"a", b"b")
    slot.bury([b"a"])
    send(slot, b"c")
    assert slot.replay([b"a"]) == ["replayed"]
    send(slot, b"d")
    assert take(slot) == [b"b", b"c", b"a", b"d"]


def test_a_rescheduled_message_has_a_place_of_its_own_at_its_new_time(slot: Slot, clock: Clock) -> None:
    send(slot, b"late", delay_ms=1_000)
    send(slot, b"a", b"b")
    assert slot.reschedule([START_MS + 1_000], [b"a"]) == ["waiting"]
    clock.advance(1)
    assert take(slot) == [b"b", b"late", b"a"]


def test_a_claim_takes_in_the_order_of_sending_and_holds_the_slot(slot: Slot) -> None:
    send(slot, b"z", b"y", b"x")
    assert slot.claim("s", 1, 60_000, 2)[1] == 2
    assert slot.take().status == "busy"
    slot.renew_claim("s", 1, 60_000, seal=True)
    assert list(slot.read_claim("s", 1, 0, 10).rows)[::2] == [b"z", b"y"]
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert take(slot) == [b"x"]


def test_a_claim_waits_behind_a_message_that_failed(slot: Slot, clock: Clock) -> None:
    send(slot, b"a", b"b")
    slot.fail_one(b"a")
    assert slot.claim("s", 1, 60_000, 10)[0] == "busy"
    clock.advance(1)
    assert slot.claim("s", 1, 60_000, 10)[:2] == ("ok", 2)


def test_a_lost_claim_comes_back_in_its_order(fifo: Make, clock: Clock) -> None:
    slot = fifo(backoff=BackOff())
    names = [b"c", b"b", b"a"]
    send(slot, *names)
    slot.claim("s", 1, 1_000, 10)
    slot.renew_claim("s", 1, 1_000, seal=True)
    clock.advance("1001ms")
    assert slot.take().status == "busy"
    clock.advance(60)
    order = []
    for _ in names:
        receipt, given = taken(slot)
        slot.commit(receipt, given)
        order += given
    assert order == names


@pytest.mark.parametrize("state", ["store", "retry"])
def test_what_arrives_from_another_slot_stands_before_what_was_sent_here_since(
    fifo: Make, clock: Clock, state: str
) -> None:
    source, target = fifo(slots=2, name="moving"), None
    send(source, b"a", b"b", body=b"first")
    if state == "retry":
        receipt, _ = taken(source, 1)
        source.rollback(receipt, [Failure(b"a")])
    target = fifo(slots=2, name="moving", index=1)
    for one in (source, target):
        one.shut(1)
    clock.advance("1ms")
    send(target, b"c", b"a", body=b"second")
    handover = source.move_out(1, 1, [("retry", b"a"), ("store", b"a"), ("store", b"b")])
    assert target.move_in(1, 0, handover.ticket, handover.rows) == "in"
    source.move_out(1, 1, [], arrived=handover.ticket)
    target.reopen(1)
    given = target.prepare("A", None, 10).deliveries
    assert [each.member for each in given] == [b"a", b"b", b"c"]
    assert given[0].envelope.endswith(b"second")
    assert given[0].retries_left == target.topic.max_retries - (state == "retry")


def test_a_stranger_s_zadd_stands_where_its_score_puts_it(slot: Slot, keyspace: Keyspace) -> None:
    send(slot, b"b")
    slot.strangers = keyspace.zadd(slot.keys.store, b"a", 5.0)
    slot.strangers += keyspace.zadd(slot.keys.store, b"z", math.inf)
    assert take(slot) == [b"a", b"b"]


# --- everything at once


def plainly_taken(slot: Slot, *members: bytes) -> int:
    """Send members that are their own bodies, take all; return the receipt."""
    slot.send_fifo(0, list(members))
    prepared = slot.prepare("A", None, 1_000)
    assert [each.member for each in prepared.deliveries] == list(members)
    assert prepared.is_plain
    return int(prepared.receipt)


def commits_nothing(slot: Slot, receipt: int, size: int) -> bool:
    before = slot.snapshot()
    return slot.commit_delivery(receipt, size) == [] and slot.snapshot() == before


@pytest.mark.parametrize("size", [1, 2, 500])
def test_everything_in_flight_is_committed_without_naming_it(slot: Slot, size: int) -> None:
    receipt = plainly_taken(slot, *[b"\xff%015d" % n for n in range(size)])
    slot.send_fifo(0, [b"later"])
    assert slot.take().status == "busy"
    assert b"sleeping_until" in slot.hash("control")
    assert slot.commit_delivery(receipt, size) == ["ok"] * size
    assert (slot.zset("prepare"), slot.hash("inflight"), slot.counted("committed")) == ({}, {}, size)
    assert b"sleeping_until" not in slot.hash("control")  # who waits at the gate is woken
    assert commits_nothing(slot, receipt, size)
    assert take(slot) == [b"later"]


def test_what_was_handed_out_since_is_not_committed_with_what_was_before(slot: Slot, clock: Clock) -> None:
    first = plainly_taken(slot, b"a", b"b")
    slot.release(first, [b"a", b"b"])
    second = slot.take(owner="B").receipt
    assert commits_nothing(slot, first, 2)
    assert slot.commit(first, [b"a", b"b"]) == ["stale", "stale"]
    assert slot.commit_delivery(second, 2) == ["ok", "ok"]


def test_what_has_ended_otherwise_is_not_committed_with_the_others(slot: Slot, clock: Clock) -> None:
    receipt = plainly_taken(slot, b"a", b"b", b"c")
    slot.release(receipt, [b"b"])
    assert commits_nothing(slot, receipt, 3)
    assert slot.commit(receipt, [b"a", b"b", b"c"]) == ["ok", "stale", "ok"]
    clock.advance("1ms")
    receipt = slot.take().receipt
    clock.advance(slot.topic.timeout + 1)
    slot.time_out()
    assert commits_nothing(slot, receipt, 1)


@pytest.mark.parametrize("mark", ["remove", "bury", "cancel"])
def test_what_is_marked_is_committed_by_name_only(slot: Slot, mark: str) -> None:
    receipt = plainly_taken(slot, b"a", b"b")
    getattr(slot, mark)([b"b"])
    assert commits_nothing(slot, receipt, 2)
    assert slot.commit(receipt, [b"a", b"b"]) == ["ok", "ok"]
    ended = {"remove": "removed", "bury": "died", "cancel": "committed"}[mark]
    assert slot.counted(ended) == 1 + (mark == "cancel")
    assert slot.commit_delivery(plainly_taken(slot, b"c"), 1) == ["ok"]


@pytest.mark.parametrize("what", ["body", "failure"])
def test_what_has_a_body_or_a_failure_is_committed_by_name_only(fifo: Make, what: str) -> None:
    slot = fifo(backoff=NO_BACKOFF)
    if what == "body":
        send(slot, b"a", b"b")
    else:
        slot.rollback(plainly_taken(slot, b"a", b"b"), [Failure(b"a")])
        slot.release(*taken_again(slot))
    prepared = slot.take()
    assert not prepared.is_plain
    assert commits_nothing(slot, prepared.receipt, 2)
    slot.commit(prepared.receipt, [b"a", b"b"])


def test_only_what_is_plain_is_said_to_be(slot: Slot) -> None:
    slot.release(plainly_taken(slot, b"a"), [b"a"])
    send(slot, b"b")
    assert not slot.take(1).is_plain
    slot.commit(*taken_again(slot))
    assert not slot.take(1).is_plain
    slot.commit(*taken_again(slot))
    assert slot.commit_delivery(plainly_taken(slot, b"c"), 1) == ["ok"]
