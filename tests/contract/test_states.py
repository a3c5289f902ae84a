"""Every cell of the table of states and events, for every type of topic, identity and both kinds of gates.

The letters are those of ``docs/state_machine.md``: - absent, W waiting fresh, w waiting for a retry, T resting,
F in flight, FW in flight and one more waiting; D dead, which goes along with any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from django_rmq.core.model.keys import read_wakeup
from django_rmq.core.model.topic import TopicType
from tests.contract.slots import NO_BACKOFF, Make, Slot

A = b"a"
B = b"b"
NEW = {TopicType.RANGE_MERGE: 250, TopicType.PRIORITY: 300, TopicType.FIXED_TIME: 1_800_000_000_700}

states = pytest.mark.parametrize("state", ["-", "W", "w", "T", "F", "FW"])
not_in_flight = pytest.mark.parametrize("state", ["-", "W", "w", "T"])
in_flight = pytest.mark.parametrize("state", ["F", "FW"])


def waiting_score(slot: Slot) -> float:
    return slot.zset("store")[A]


def assert_stale_and_unchanged(slot: Slot, call: Callable[[], list[str] | None]) -> None:
    before, stale = slot.snapshot("stale"), slot.counted("stale")
    assert call() == ["stale"]
    assert slot.snapshot("stale") == before
    assert slot.counted("stale") == stale + 1


# --- sending


@states
def test_send(slot: Slot, state: str) -> None:
    slot.bring(state)
    before = slot.zset("store").get(A)
    merges = slot.topic.type is TopicType.RANGE_MERGE
    [sent] = slot.send(A, score=NEW[slot.topic.type], body=b"new")
    met = "merged" if merges else "replaced"
    word = {"-": "stored", "W": met, "w": "superseded", "T": "superseded", "F": "stored", "FW": met}[state]
    new = slot.now_ms + 250 if merges else NEW[slot.topic.type]
    assert (sent.status, sent.score) == (word, before if word == "merged" else new)
    assert waiting_score(slot) == sent.score
    assert slot.where(A) == ("FW" if "F" in state else "W")
    assert slot.counted("superseded") == slot.counted("dropped") == (1 if state in ("w", "T") else 0)
    if slot.topic.keyed:
        assert slot.hash("body") == {A: slot.envelope(b"new")}


@states
def test_ensure(slot: Slot, state: str) -> None:
    slot.bring(state)
    before, body = slot.zset("store").get(A), slot.hash("body")
    [sent] = slot.ensure([NEW[slot.topic.type]], [A], slot.envelopes(1, b"new"))
    if state == "-":
        assert sent.status == "stored" and waiting_score(slot) == sent.score
        assert slot.where(A) == "W"
    else:
        assert sent.status == "present"
        assert slot.where(A) == state and slot.zset("store").get(A) == before
        assert slot.hash("body") == body


# --- consuming


@states
@pytest.mark.parametrize("owner", ["A", "B"])
def test_prepare(slot: Slot, state: str, owner: str) -> None:
    slot.bring(state)
    answer = slot.take(owner=owner)
    if state in ("W", "w"):
        [delivery] = answer.deliveries
        assert (answer.status, delivery.member) == ("ok", A)
        assert delivery.retries_left == (16 if state == "W" else 15)
        assert delivery.envelope == slot.envelope()
        assert slot.where(A) == "F"
    else:
        shut = slot.topic.serial and "F" in state and owner == "B"
        assert answer.status == ("busy" if shut or state == "FW" else "empty")
        assert not answer.deliveries and slot.where(A) == state


@not_in_flight
@pytest.mark.parametrize("event", ["commit", "release", "extend", "rollback", "reject"])
def test_phase_two_is_stale_where_nothing_is_in_flight(slot: Slot, state: str, event: str) -> None:
    receipt = slot.bring(state)
    assert_stale_and_unchanged(
        slot, lambda: slot.extend(receipt, [A]) if event == "extend" else slot.end(event, receipt, A)
    )


@in_flight
def test_commit(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    assert slot.commit(receipt, [A]) == ["ok"]
    assert slot.where(A) == ("W" if state == "FW" else "-")
    assert_stale_and_unchanged(slot, lambda: slot.commit(receipt, [A]))
    if slot.topic.keyed:
        assert slot.hash("body") == ({A: slot.envelope()} if state == "FW" else {})


@in_flight
@pytest.mark.parametrize(("delay_ms", "back"), [(0, "w"), (None, "T"), (700, "T")])
def test_rollback_with_retries_left(slot: Slot, state: str, delay_ms: int | None, back: str) -> None:
    receipt = slot.bring(state)
    before = slot.zset("store")
    assert slot.fail(receipt, A, delay_ms=delay_ms) == ["ok"]
    if state == "FW":
        assert slot.where(A) == "W" and slot.zset("store") == before
        assert slot.counted("dropped") == 1
    else:
        assert slot.where(A) == back
    assert slot.counted("failed") == 1


@in_flight
def test_rollback_without_back_off_waits_at_once(make: Make, state: str) -> None:
    slot = make(backoff=NO_BACKOFF)
    receipt = slot.bring(state)
    slot.fail(receipt, A)
    assert slot.where(A) == ("w" if state == "F" else "W")


@in_flight
def test_rollback_without_retries_left(make: Make, state: str) -> None:
    slot = make(max_retries=0)
    receipt = slot.bring(state)
    assert slot.fail(receipt, A) == ["ok"]
    assert slot.where(A) == ("D" if state == "F" else "W")


@in_flight
def test_reject(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    assert slot.reject(receipt, A) == ["ok"]
    assert slot.where(A) == ("D" if state == "F" else "WD")
    if slot.topic.keyed and state == "FW":
        assert slot.hash("body") == {A: slot.envelope()}


@states
@pytest.mark.parametrize("max_retries", [0, 16])
def test_time_out(make: Make, state: str, max_retries: int) -> None:
    slot = make(max_retries=max_retries)
    if max_retries == 0 and state in ("w", "T"):
        slot = make(max_retries=1)
    slot.bring(state)
    slot.clock.advance(31)
    assert slot.time_out() == (1 if "F" in state else 0)
    expected = {"F": "T" if max_retries else "D", "FW": "W"}.get(state, state)
    assert slot.where(A) == expected
    assert slot.counted("expired") == (1 if "F" in state else 0)


@states
def test_time_out_touches_nothing_that_may_still_run(slot: Slot, state: str) -> None:
    slot.bring(state)
    before = slot.snapshot()
    assert slot.time_out() == 0
    assert slot.snapshot() == before


@in_flight
def test_release(slot: Slot, state: str) -> None:
    slot.send(A)
    original = waiting_score(slot)
    receipt, _ = slot.take_one()
    if state == "FW":
        slot.clock.advance("5ms")
        slot.send(A, score=NEW[slot.topic.type])
    newer = slot.zset("store").get(A)
    assert slot.release(receipt, [A]) == ["ok"]
    assert slot.where(A) == "W"
    earlier = state == "F" or slot.topic.type is TopicType.RANGE_MERGE
    assert waiting_score(slot) == (original if earlier else newer)
    assert slot.counted("dropped") == (1 if state == "FW" else 0)


def test_release_of_a_retry_gives_back_its_retry(slot: Slot) -> None:
    slot.bring("w")
    before = slot.zset("store")
    receipt, delivery = slot.take_one()
    assert delivery.retries_left == 15
    assert slot.release(receipt, [A]) == ["ok"]
    assert slot.where(A) == "w" and slot.zset("store") == before
    assert slot.take_one()[1].retries_left == 15


@in_flight
def test_extend(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    before = slot.snapshot()
    slot.clock.advance(7)
    assert slot.extend(receipt, [A]) == ["ok"]
    after = slot.snapshot()
    assert after.pop(slot.keys.prepare) == {A: slot.now_ms + 16}
    del before[slot.keys.prepare]
    assert after == before
    assert slot.commit(receipt, [A]) == ["ok"]


@states
def test_promote(slot: Slot, state: str) -> None:
    slot.bring(state)
    assert slot.promote() == 0
    slot.clock.advance(5)
    assert slot.promote() == (1 if state == "T" else 0)
    assert slot.where(A) == ("w" if state == "T" else state)


# --- persons


@states
def test_replay(slot: Slot, state: str) -> None:
    slot.send(A, body=b"dead")
    slot.kill(A)
    slot.bring(state, dead=True)
    # Where bodies differ, the one that runs is the newer one.
    alive = state in ("W", "w", "T", "FW") or (state == "F" and slot.topic.keyed)
    body, delivered = slot.hash("body"), slot.hash("prepare_body")
    assert slot.replay([A]) == ["merged" if alive else "replayed"]
    assert slot.where(A) == (state if alive else {"-": "W", "F": "FW"}[state])
    assert slot.counted("replay_merged" if alive else "revived") == 1
    if slot.topic.keyed:
        assert slot.hash("body") == (body if alive else {A: slot.envelope(b"dead")})
        assert slot.hash("prepare_body") == delivered
    if state == "-":
        assert slot.take_one()[1].retries_left == 16


@states
def test_a_dead_copy_goes_along_with_every_state(slot: Slot, state: str) -> None:
    slot.send(A, body=b"dead")
    slot.kill(A)
    deaths, dead = slot.hash("deaths"), slot.zset("dead")
    slot.bring(state, dead=True)
    slot.send(A)
    slot.take(), slot.promote(), slot.time_out()
    slot.remove([A], "live")
    assert (slot.hash("deaths"), slot.zset("dead")) == (deaths, dead)


@states
def test_replay_of_what_is_not_dead(slot: Slot, state: str) -> None:
    slot.bring(state)
    before = slot.snapshot()
    assert slot.replay([A]) == ["not_found"]
    assert slot.snapshot() == before


FOUND_AS = {
    "-": "not_found", "W": "waiting", "w": "waiting", "T": "resting", "F": "running",
    "FW": "running_and_waiting",
}  # fmt: skip


def assert_body_is_kept_for(slot: Slot, flies: bool) -> None:
    assert slot.hash("body") == {}
    assert slot.hash("prepare_body") == ({A: slot.envelope()} if flies and slot.topic.keyed else {})


@states
def test_bury(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    assert slot.bury([A], "by hand") == [FOUND_AS[state]]
    assert slot.where(A) == {"-": "-", "F": "F", "FW": "FD"}.get(state, "D")
    assert_body_is_kept_for(slot, "F" in state)
    if "F" in state:
        assert slot.fail(receipt, A, delay_ms=0) == ["ok"]
        assert slot.where(A) == "D"
        # The newer copy, which was buried first, is the one that stays.
        assert slot.counted("dropped") == (1 if state == "FW" else 0)
        assert slot.hash("deaths")[A].split(b"\n")[1].startswith(b"by hand" if state == "FW" else b"no")


@states
def test_remove(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    assert slot.remove([A]) == [FOUND_AS[state]]
    assert slot.where(A) == ("F" if "F" in state else "-")
    assert_body_is_kept_for(slot, "F" in state)
    if "F" in state:
        assert slot.fail(receipt, A, delay_ms=0) == ["ok"]
        assert slot.where(A) == "-"
    assert not slot.hash("body") and not slot.hash("failures")


@states
def test_cancel(slot: Slot, state: str) -> None:
    receipt = slot.bring(state)
    assert slot.cancel([A]) == [FOUND_AS[state]]
    assert slot.where(A) == ("F" if "F" in state else "-")
    assert_body_is_kept_for(slot, "F" in state)
    if "F" in state:
        assert slot.extend(receipt, [A]) == ["cancelled"]
        assert slot.fail(receipt, A, delay_ms=0) == ["cancelled"]
        assert slot.where(A) == "-"
    assert slot.counted("cancelled") == ("F" in state)
    assert not slot.hash("body") and not slot.hash("failures")


@states
@pytest.mark.parametrize("which", ["any", "live", "dead"])
def test_remove_with_a_dead_copy(slot: Slot, state: str, which: str) -> None:
    slot.send(A)
    slot.kill(A)
    slot.bring(state, dead=True)
    live = state != "-" and which != "dead"
    found = FOUND_AS[state] if live else "not_found" if which == "live" else "dead"
    assert slot.remove([A], which) == [found]
    if live:
        assert slot.where(A) == ("FD" if "F" in state else "D")
    else:
        left = "" if state == "-" else state
        assert slot.where(A) == (left + "D" if which == "live" else left or "-")


@states
def test_reschedule(slot: Slot, state: str) -> None:
    slot.bring(state)
    new = 300 if slot.topic.is_priority else slot.now_ms + 9_000
    [word] = slot.reschedule([new], [A])
    if state in ("W", "FW"):
        assert word == "waiting" and waiting_score(slot) == new
        assert slot.where(A) == state
    elif state in ("w", "T"):
        assert word == ("refused" if slot.topic.is_priority else "resting")
        assert slot.where(A) == (state if slot.topic.is_priority else "T")
        if not slot.topic.is_priority:
            slot.clock.advance(9)
            assert slot.take_one()[1].retries_left == 15
    else:
        assert word == ("running" if state == "F" else "not_found")
        assert slot.where(A) == state


@states
@pytest.mark.parametrize("emptied", ["store", "retry", "dead"])
def test_purge(slot: Slot, state: str, emptied: str) -> None:
    slot.bring(state)
    gone = {"store": state in ("W", "w", "FW"), "retry": state == "T", "dead": False}[emptied]
    assert slot.purge(emptied) == gone
    left = "F" if state == "FW" else "-"
    assert slot.where(A) == (left if gone else state)
    if gone and left == "-":
        assert not slot.hash("body") and not slot.hash("failures")
    elif slot.topic.keyed and state != "-":
        waits = state != "F" and not gone
        assert slot.hash("body") == ({A: slot.envelope()} if waits else {})
        assert slot.hash("prepare_body") == ({A: slot.envelope()} if "F" in state else {})


@states
def test_purge_of_dead(slot: Slot, state: str) -> None:
    slot.send(A)
    slot.kill(A)
    slot.bring(state, dead=True)
    assert slot.purge("dead") == 1
    assert slot.where(A) == state


@in_flight
@pytest.mark.parametrize("mark", ["bury", "remove"])
@pytest.mark.parametrize("end", ["commit", "rollback", "reject", "release", "time_out"])
def test_a_marked_delivery_keeps_the_gate_shut_and_its_end_is_final(
    slot: Slot, state: str, mark: str, end: str
) -> None:
    receipt = slot.bring(state)
    getattr(slot, mark)([A])
    dead = mark == "bury" and state == "FW"
    assert slot.where(A) == ("FD" if dead else "F")
    if slot.topic.serial:
        assert slot.take(owner="B").status == "busy"
    assert slot.extend(receipt, [A]) == ["ok"]
    assert slot.end(end, receipt, A) == (None if end == "time_out" else ["ok"])
    assert slot.where(A) == ("D" if mark == "bury" else "-")
    assert slot.counted("ended_marked") == 1
    assert not slot.hash("body") and not slot.hash("failures")


@in_flight
@pytest.mark.parametrize("end", ["commit", "rollback", "reject", "release", "time_out"])
def test_a_cancelled_delivery_that_does_not_succeed_ends_as_cancelled(
    slot: Slot, state: str, end: str
) -> None:
    receipt = slot.bring(state)
    slot.cancel([A])
    if slot.topic.serial:
        assert slot.take(owner="B").status == "busy"
    answers = {"time_out": None, "rollback": ["cancelled"], "reject": ["cancelled"]}
    assert slot.end(end, receipt, A) == answers.get(end, ["ok"])
    assert slot.where(A) == "-"
    ended = {name: slot.counted(name) for name in ("committed", "cancelled", "ended_marked")}
    assert ended == {"committed": end == "commit", "cancelled": end != "commit", "ended_marked": 0}
    assert not slot.hash("body") and not slot.hash("failures")


def test_a_listener_that_stopped_because_it_was_cancelled_is_not_called_again_though_the_mark_was_lost(
    slot: Slot,
) -> None:
    receipt = slot.bring("F")
    assert slot.fail(receipt, A, kind="cancelled") == ["ok"]
    assert (slot.where(A), slot.counted("cancelled"), slot.counted("failed")) == ("-", 1, 0)


def test_only_the_delivery_that_runs_is_cancelled(slot: Slot) -> None:
    receipt = slot.bring("F")
    slot.cancel([A])
    slot.send(A, body=b"new")
    assert slot.fail(receipt, A) == ["cancelled"]
    assert slot.where(A) == "W"
    again, _ = slot.take_one()
    assert slot.extend(again, [A]) == ["ok"]
    assert slot.extend(receipt, [A]) == ["stale"]


def test_a_removal_does_not_withdraw_a_cancellation_and_a_burial_does(slot: Slot) -> None:
    receipt = slot.bring("F")
    slot.cancel([A])
    slot.remove([A])
    assert slot.extend(receipt, [A]) == ["cancelled"]
    slot.bury([A])
    assert slot.extend(receipt, [A]) == ["ok"]
    assert slot.fail(receipt, A) == ["ok"]
    assert slot.where(A) == "D"


def test_consumers_are_told_of_what_is_cancelled_in_flight_and_of_nothing_else(slot: Slot) -> None:
    wakeups = slot.broker.wakeups([slot.topic])
    receipt = slot.bring("F")
    slot.remove([A])
    slot.send(B)
    slot.cancel([B, b"absent"])
    slot.cancel([A])
    slot.commit(receipt, [A])
    told: list[tuple[str, int]] = []
    end = time.monotonic() + 5
    while ("look_again", 0) not in told and time.monotonic() < end:
        told += [read_wakeup(number) for _, number in wakeups.get(0.1)]
    wakeups.close()
    assert told.count(("look_again", 0)) == 1


def test_a_message_that_ran_for_too_long_comes_back_alone_and_is_counted(slot: Slot) -> None:
    receipt = slot.bring("F")
    assert slot.fail(receipt, A, kind="overran", delay_ms=0, error="HardTimeout: 5 s") == ["ok"]
    assert (slot.counted("failed"), slot.counted("overran")) == (1, 1)
    slot.send(B, score=50 if slot.topic.is_priority else None)
    taken = slot.take(10)
    assert [delivery.member for delivery in taken.deliveries] in ([A], [B])
    if [delivery.member for delivery in taken.deliveries] == [B]:
        assert slot.commit(taken.receipt, [B]) == ["ok"]
        taken = slot.take(10)
    assert [delivery.member for delivery in taken.deliveries] == [A]


@pytest.mark.parametrize("mark", ["bury", "remove"])
def test_what_is_sent_after_the_mark_lives(slot: Slot, mark: str) -> None:
    receipt = slot.bring("F")
    getattr(slot, mark)([A])
    slot.send(A, body=b"new")
    assert slot.where(A) == "FW"
    assert slot.fail(receipt, A) == ["ok"]
    assert slot.where(A) == ("WD" if mark == "bury" else "W")
    if slot.topic.keyed:
        assert slot.hash("body") == {A: slot.envelope(b"new")}
