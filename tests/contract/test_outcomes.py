"""OUTCOME_RETENTION: what became of a message is kept for a while, and what a listener has reported about its progress."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.replies import Outcome, Progress, digest, parse
from django_rmq.core.model.topic import TopicType
from django_rmq.testing import Clock
from tests.contract.slots import NO_BACKOFF, TYPES, Make, Slot, slot_of_each
from tests.oracle.slot import MOST_OUTCOMES

HOUR = 3_600_000


@pytest.fixture(params=[*TYPES, TopicType.FIFO], ids=lambda kind: kind.value)
def kept(request: pytest.FixtureRequest, make_slot: Make) -> Slot:
    """A slot of each type that keeps outcomes for an hour."""
    return keeping(make_slot, request.param)


def keeping(make_slot: Make, kind: TopicType = TopicType.FIXED_TIME, **options: Any) -> Slot:
    return make_slot(
        kind, **{"outcome_retention_ms": HOUR, "backoff": NO_BACKOFF, "order": "loose", **options}
    )


def outcome(slot: Slot, member: bytes = b"a") -> Outcome:
    raw = slot.status(member).outcome
    assert raw is not None, "nothing is kept"
    found = parse(raw)
    assert isinstance(found, Outcome)
    return found


@pytest.mark.parametrize("names", ["named", "unnamed", "noted once"])
def test_success_is_kept_with_when_how_often_and_by_whom(kept: Slot, clock: Clock, names: str) -> None:
    kept.send(b"a", b"b")
    receipt = kept.take(owner="worker one\n").receipt
    delivered_ms = kept.now_ms
    clock.advance(2)
    once = (b"b", b"a") if names == "noted once" else ()
    ended = kept.commit(receipt, [b"a", b"b"]) if names == "named" else kept.commit_delivery(receipt, 2, once)
    assert ended == ["ok", "ok"]
    found = outcome(kept, b"b")
    assert found._replace(delivered_ms=None) == Outcome(
        "done", "", 1, None, delivered_ms + 2_000, "", "worker one\n"
    )
    assert found.delivered_ms is not None
    assert abs(found.delivered_ms - delivered_ms) <= 1


def end_together(slot: Slot, *members: bytes) -> None:
    """Send messages, and end their delivery as a whole, with one note for all of them."""
    slot.send(*members)
    taken = slot.take(len(members))
    assert taken.is_alone
    assert slot.commit_delivery(taken.receipt, len(members), members) == ["ok"] * len(members)


def end_alone(slot: Slot, member: bytes) -> None:
    """Send a message, and remove it, which is noted for this message alone."""
    slot.send(member)
    slot.remove([member])


def test_a_whole_delivery_is_noted_once(kept: Slot) -> None:
    end_together(kept, b"a", b"b", b"c")
    assert len(kept.zset("delivery_outcomes")) == 1
    assert not kept.hash("outcomes")
    assert {outcome(kept, member).state for member in (b"a", b"b", b"c")} == {"done"}
    assert kept.status(b"d").outcome is None


def test_digests_that_are_not_of_all_members_do_not_count(kept: Slot) -> None:
    kept.send(b"a", b"b")
    assert kept.commit_delivery(kept.take().receipt, 2, (b"a",)) == ["ok", "ok"]
    assert outcome(kept, b"b").state == "done"
    assert kept.hash("outcomes").keys() == {digest(b"a"), digest(b"b")}


@pytest.mark.parametrize("later_ms", [-5_000, 0, 1, 5_000])
def test_the_last_end_counts_also_after_a_clock_was_set_back(kept: Slot, clock: Clock, later_ms: int) -> None:
    for end, state in ((end_alone, "removed"), (end_together, "done")) * 2 + ((end_together, "done"),) * 2:
        end(kept, b"a")
        found = outcome(kept)
        assert (found.state, found.ended_ms) == (state, kept.now_ms)
        clock.advance(later_ms / 1_000)


def test_the_end_of_a_delivery_replaces_its_progress(kept: Slot) -> None:
    end_together(kept, b"a", b"b")
    kept.send(b"a", b"b")
    receipt = kept.take(2).receipt
    kept.progress(receipt, b"a", 500, b"half")
    assert isinstance(parse(kept.status(b"a").outcome), Progress)
    kept.commit_delivery(receipt, 2, (b"a", b"b"))
    assert outcome(kept).state == "done"


def test_attempts_and_the_last_error_are_those_of_the_failures_before(kept: Slot) -> None:
    kept.send(b"a", b"b")
    for error in ("shop.Down: no\nanswer", "a remark"):
        receipt = kept.take().receipt
        kept.fail(receipt, b"a", b"b", error="shop.Down: no\nanswer" if error == "a remark" else "x.Y: z")
    receipt = kept.take().receipt
    kept.commit(receipt, [b"a"])
    kept.fail(receipt, b"b", kind="rejected", error=" shop.Bad <b>: no")
    assert outcome(kept)[:3] == ("done", "", 3)
    assert outcome(kept).error_class == "shop.Down"
    assert outcome(kept, b"b")[:3] == ("dead", "rejected", 3)
    assert outcome(kept, b"b").error_class == ""


@pytest.mark.parametrize("kind", ["failed", "undecodable", "timed_out"])
def test_a_message_that_fails_for_the_last_time_is_kept_as_dead(make_slot: Make, kind: str) -> None:
    slot = keeping(make_slot, max_retries=0)
    slot.send(b"a")
    slot.fail(slot.take().receipt, b"a", kind=kind, error="shop.Bad: no")
    assert outcome(slot)[:3] == ("dead", kind, 1)
    assert outcome(slot).error_class == "shop.Bad"


def test_a_failure_that_is_tried_again_leaves_nothing(kept: Slot) -> None:
    kept.send(b"a")
    kept.fail(kept.take().receipt, b"a", delay_ms=5)
    assert kept.status(b"a").outcome is None


@pytest.mark.parametrize("by", ["time_out", "prepare"])
def test_a_delivery_that_times_out_for_the_last_time_names_the_worker_that_had_it(
    make_slot: Make, clock: Clock, by: str
) -> None:
    slot = keeping(make_slot, max_retries=0)
    slot.send(b"a")
    slot.take(owner="dead one")
    clock.advance(32)
    slot.time_out() if by == "time_out" else slot.take(owner="another")
    assert outcome(slot)[:3] == ("dead", "timed_out", 1)
    assert outcome(slot).worker == "dead one"


def test_what_expires_before_its_delivery_is_kept_without_one(make_slot: Make, clock: Clock) -> None:
    slot = keeping(make_slot, identity="key")
    envelope = slot.envelope(expires_ms=slot.now_ms + 5)
    slot.send_replace([slot.now_ms], [b"a"], [envelope])
    clock.advance(1)
    assert slot.take().status == "empty"
    assert outcome(slot) == Outcome("dead", "lapsed", 0, None, slot.now_ms, "", "")


def test_what_fails_and_expires_in_one_call_ended_without_a_delivery(make_slot: Make, clock: Clock) -> None:
    slot = keeping(make_slot, identity="key")
    slot.send_replace([slot.now_ms], [b"a"], [slot.envelope(expires_ms=slot.now_ms + 9_000)])
    slot.take()
    clock.advance(32)
    slot.take()
    assert outcome(slot) == Outcome("dead", "lapsed", 1, None, slot.now_ms, "", "")


@pytest.mark.parametrize("act", ["remove", "cancel"])
def test_what_a_person_removes_is_kept_as_removed(kept: Slot, act: str) -> None:
    kept.send(b"a", b"b", b"c")
    receipt = kept.take(2).receipt
    in_hand = [member for member in (b"a", b"b") if member in kept.zset("prepare")]
    kept.fail(receipt, in_hand[0], delay_ms=HOUR)
    getattr(kept, act)([b"a", b"b", b"c"])
    for member in {b"a", b"b", b"c"} - {in_hand[1]}:
        assert outcome(kept, member)[:3] == ("removed", "", int(member == in_hand[0]))
        assert outcome(kept, member).delivered_ms is None
    assert kept.status(in_hand[1]).outcome is None, "it runs"
    kept.commit(receipt, [in_hand[1]])
    end = "removed" if act == "remove" else "done"
    assert outcome(kept, in_hand[1])[:3] == (end, "", 1)


def test_what_was_done_once_and_is_cancelled_before_it_runs_again_is_no_longer_done(kept: Slot) -> None:
    kept.send(b"a")
    kept.commit(kept.take().receipt, [b"a"])
    kept.send(b"a")
    assert kept.cancel([b"a"]) == ["waiting"]
    assert outcome(kept)[:3] == ("removed", "", 0)


@pytest.mark.parametrize("act", ["remove", "cancel"])
def test_a_removed_copy_behind_one_that_runs_leaves_nothing(make_slot: Make, act: str) -> None:
    slot = keeping(make_slot)
    slot.send(b"a")
    slot.take()
    slot.send(b"a")
    assert getattr(slot, act)([b"a"]) == ["running_and_waiting"]
    assert slot.status(b"a").outcome is None


def test_purged_and_buried_messages_are_kept(kept: Slot) -> None:
    kept.send(b"a", b"b")
    kept.bury([b"a"], "no")
    assert outcome(kept)[:4] == ("dead", "buried", 0, None)
    kept.purge("store")
    assert outcome(kept, b"b")[:4] == ("removed", "", 0, None)
    kept.purge("dead")
    assert outcome(kept)[:2] == ("dead", "buried"), "it ended when it died"


def test_a_buried_delivery_is_kept_when_it_ends(kept: Slot) -> None:
    kept.send(b"a")
    receipt = kept.take().receipt
    kept.bury([b"a"])
    assert kept.status(b"a").outcome is None
    kept.release(receipt, [b"a"])
    assert outcome(kept)[:3] == ("dead", "buried", 1)


def test_what_a_lost_claim_kills_is_kept(make_slot: Make, clock: Clock) -> None:
    slot = keeping(make_slot, max_retries=0)
    slot.send(b"a")
    slot.claim("spark", 1, 1_000, 10)
    slot.renew_claim("spark", 1, 1_000, seal=True)
    clock.advance(2)
    slot.time_out()
    assert outcome(slot) == Outcome("dead", "timed_out", 1, None, slot.now_ms, "", "")


def test_a_zombie_cannot_say_what_became_of_a_message(kept: Slot, clock: Clock) -> None:
    kept.send(b"a")
    old = kept.take().receipt
    clock.advance(32)
    kept.time_out()
    clock.advance(1)
    new = kept.take().receipt
    before = kept.snapshot("stale")
    assert kept.commit(old, [b"a"]) == ["stale"]
    assert kept.fail(old, b"a", kind="rejected") == ["stale"]
    assert kept.progress(old, b"a", 900, b"nearly") == "stale"
    assert kept.snapshot("stale") == before
    assert kept.progress(new, b"a", 100, b"just begun") == "ok"
    assert kept.progress(old, b"a", 900, b"nearly") == "stale"
    found = kept.status(b"a")
    assert parse(found.outcome) == Progress(new, 0.1, kept.now_ms, "just begun")


def test_progress_is_replaced_by_the_next_report_and_by_the_end(kept: Slot) -> None:
    kept.send(b"a")
    receipt = kept.take().receipt
    for thousandths, said in ((0, b""), (333, b"a \n\0\xff"), (1000, b"done")):
        assert kept.progress(receipt, b"a", thousandths, said) == "ok"
        found = parse(kept.status(b"a").outcome)
        assert found == Progress(receipt, thousandths / 1000, kept.now_ms, said.decode(errors="replace"))
    kept.commit(receipt, [b"a"])
    assert outcome(kept).state == "done"
    assert kept.progress(receipt, b"a", 5, b"") == "stale"
    assert outcome(kept).state == "done"


def test_what_is_too_old_cannot_be_seen_and_goes_with_the_next_end(kept: Slot, clock: Clock) -> None:
    kept.send(b"a")
    kept.commit(kept.take().receipt, [b"a"])
    clock.advance((HOUR - 1) / 1000)
    assert outcome(kept).state == "done"
    clock.advance("1ms")
    assert kept.status(b"a").outcome is None
    kept.send(b"b")
    kept.commit(kept.take().receipt, [b"b"])
    assert set(kept.hash("outcomes")) == set(kept.zset("outcome_times")) == {digest(b"b")}


def test_a_whole_delivery_that_is_too_old_cannot_be_seen_and_goes_with_the_next_end(
    kept: Slot, clock: Clock
) -> None:
    end_together(kept, b"a", b"b")
    clock.advance((HOUR - 1) / 1000)
    assert outcome(kept).state == "done"
    clock.advance("1ms")
    assert kept.status(b"a").outcome is None
    end_together(kept, b"c")
    assert len(kept.zset("delivery_outcomes")) == 1


def test_a_slot_keeps_the_deliveries_of_the_latest_ten_thousand(make_slot: Make, clock: Clock) -> None:
    slot = keeping(make_slot)
    names = [b"%05d" % n for n in range(MOST_OUTCOMES + 1_500)]
    for start in range(0, len(names), 500):
        end_together(slot, *names[start : start + 500])
        clock.advance("1ms")
    assert len(slot.zset("delivery_outcomes")) == MOST_OUTCOMES / 500
    assert slot.status(names[1_499]).outcome is None
    assert outcome(slot, names[1_500]).state == "done"


def test_a_slot_keeps_the_latest_ten_thousand(make_slot: Make, clock: Clock) -> None:
    slot = keeping(make_slot)
    names = [b"%05d" % n for n in range(MOST_OUTCOMES + 500)]
    for start in range(0, len(names), 500):
        slot.send(*names[start : start + 500])
        slot.commit(slot.take(500).receipt, names[start : start + 500])
        clock.advance("1ms")
    assert len(slot.hash("outcomes")) == len(slot.zset("outcome_times")) == MOST_OUTCOMES
    assert slot.status(names[499]).outcome is None
    assert slot.status(names[500]).outcome is not None


def test_the_keys_go_by_themselves(make_slot: Make) -> None:
    slot = keeping(make_slot, outcome_retention_ms=60_000)
    slot.send(b"a")
    slot.commit(slot.take().receipt, [b"a"])
    end_together(slot, b"b")
    if not hasattr(slot.broker, "client"):
        return  # memory ends with its process
    for key in (slot.keys.outcomes, slot.keys.outcome_times, slot.keys.delivery_outcomes):
        assert 0 < slot.broker.client.execute_command("PTTL", key) <= 60_000


@slot_of_each([*TYPES, TopicType.FIFO], max_retries=0)
def test_a_topic_without_it_keeps_nothing_and_has_no_such_keys(slot: Slot) -> None:
    slot.send(b"a", b"b", b"c")
    receipt = slot.take(2).receipt
    slot.commit(receipt, [b"a"])
    slot.fail(receipt, b"b")
    slot.remove([b"c"])
    assert not slot.hash("outcomes")
    assert not slot.zset("outcome_times")
    assert slot.status(b"a").outcome is None


def test_a_topic_that_no_longer_keeps_outcomes_shows_none(make_slot: Make) -> None:
    slot = keeping(make_slot)
    slot.send(b"a")
    slot.commit(slot.take().receipt, [b"a"])
    assert slot.with_topic(outcome_retention_ms=None).status(b"a").outcome is None


def test_a_status_shows_every_state_and_no_body(make_slot: Make) -> None:
    slot = keeping(make_slot, identity="key", max_retries=3)
    slot.send(b"dead", b"flying", body=b"secret")
    receipt = slot.take(owner="W").receipt
    slot.fail(receipt, b"dead", kind="rejected", error="shop.Bad: no")
    slot.send(b"dead")
    found = slot.status(b"dead")
    assert found.store is not None
    assert found.dead is not None
    assert b"shop.Bad: no" in (found.death or b"")
    assert b"secret" not in (found.death or b"")
    assert slot.status(b"flying").in_flight.startswith(b"%d " % receipt)
    assert slot.status(b"flying").owner == "W"
    assert slot.status(b"nobody")[:8] == (None,) * 8


def test_retiring_a_slot_forgets_its_outcomes(make_slot: Make) -> None:
    slot = keeping(make_slot)
    slot.send(b"a")
    slot.commit(slot.take().receipt, [b"a"])
    end_together(slot, b"b")
    assert slot.retire() == "retired"
    assert slot.snapshot() == {}
