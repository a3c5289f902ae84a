"""What a Spark query fails of the messages that it has claimed: however the claim ends, each uses a retry, or dies."""

from __future__ import annotations

import pytest

from django_rmq.core.model.replies import Failure
from tests.contract.slots import NO_BACKOFF, Make, Slot, drift

A, B, C = b"a", b"b", b"c"
LEASE_MS = 60_000

ends = pytest.mark.parametrize("end", ["ack_claim", "return_claim", "lease"])


def claim(slot: Slot, *members: bytes, seal: bool = True) -> None:
    """Send and claim members."""
    slot.send(*members, score=200 if slot.topic.is_priority else None)
    assert slot.claim("s", 1, LEASE_MS, 10_000).taken == len(members)
    slot.renew_claim("s", 1, LEASE_MS, seal=seal)


def fail(
    slot: Slot, *members: bytes, kind: str = "failed", number: int = 1, consumer: str = "s"
) -> list[str]:
    failures = [Failure(member, kind, error=f"Refused: {member.decode()}") for member in members]
    return list(slot.fail_claimed(consumer, number, failures))


def finish(slot: Slot, end: str) -> None:
    """Let the claim end whole."""
    if end == "lease":
        slot.clock.advance(LEASE_MS / 1000)
        while slot.time_out():
            pass
    else:
        while getattr(slot, end)("s", 1)[1]:
            pass
    assert not slot.zset("claim") and not slot.zset("claimants")
    assert not slot.hash("claim_failed") and not slot.hash("claim_body")
    assert slot.audit_ledger().balanced


def test_only_messages_of_a_sealed_claim_fail_and_each_once(slot: Slot) -> None:
    claim(slot, A, B, seal=False)
    assert fail(slot, A) == ["open"]
    slot.renew_claim("s", 1, LEASE_MS, seal=True)
    before = slot.snapshot()
    assert fail(slot, b"x") == ["not_found"]
    assert slot.snapshot() == before
    assert fail(slot, A, number=2) == fail(slot, A, consumer="t") == ["stale"]
    assert slot.snapshot("stale") == before
    assert fail(slot, A, b"x", A) == ["ok", "not_found", "again"]
    # What was said first stays.
    assert fail(slot, A, B, kind="rejected") == ["again", "ok"]
    assert slot.hash("claim_failed") == {A: b"failed\nRefused: a", B: b"rejected\nRefused: b"}
    assert slot.ack_claim("s", 1) == ("ok", 0)
    assert fail(slot, A) == ["stale"]
    assert slot.counted("stale") == 3


def test_nothing_can_fail_of_a_claim_that_is_being_ended(make_slot: Make) -> None:
    slot = make_slot(identity="key", backoff=NO_BACKOFF)
    slot.send(A, B, C)
    slot.fail_one(A)
    assert slot.claim("s", 1, LEASE_MS, 10).taken == 3
    slot.renew_claim("s", 1, LEASE_MS, seal=True)
    assert slot.ack_claim("s", 1, 1) == ("ok", 2)
    assert fail(slot, *slot.zset("claim")) == ["stale", "stale"]


def test_a_claim_reads_the_same_with_what_has_failed(slot: Slot) -> None:
    claim(slot, A, B)
    before = slot.read_claim("s", 1, 0, 10)
    fail(slot, A)
    assert slot.read_claim("s", 1, 0, 10) == before
    assert (slot.count().claimed, slot.where(A)) == (2, "C")
    [found] = slot.describe_messages([A])
    assert found.claim_failure == b"failed\nRefused: a"


@ends
def test_what_has_failed_uses_a_retry_however_the_claim_ends(slot: Slot, end: str) -> None:
    claim(slot, A, B)
    fail(slot, A)
    finish(slot, end)
    assert slot.where(A) == "T"
    assert slot.hash("failures")[A].startswith(b"failed 1 ")
    assert slot.hash("failures")[A].endswith(b"\nRefused: a")
    assert slot.where(B) == {"ack_claim": "-", "return_claim": "W", "lease": "T"}[end]
    assert slot.counted("acked") == (end == "ack_claim")
    assert slot.counted("claim_returned") == (1 if end == "ack_claim" else 2)
    slot.clock.advance(5)
    answer = slot.take()
    if answer.is_suspect:
        # What has timed out is delivered alone, before it.
        slot.commit(answer.receipt, [B])
        answer = slot.take()
    [found] = [one for one in answer.deliveries if one.member == A]
    assert (found.retries_left, found.envelope) == (15, slot.envelope())


@ends
def test_what_was_rejected_is_dead_however_the_claim_ends(slot: Slot, end: str) -> None:
    claim(slot, A, B)
    fail(slot, A, kind="rejected")
    finish(slot, end)
    assert slot.where(A) == "D"
    death = slot.hash("deaths")[A]
    assert death.startswith(b"rejected 1 ") and b"\nRefused: a" in death
    assert death.endswith(slot.envelope() or b"")
    assert slot.replay([A]) == ["replayed"] and slot.where(A) == "W"


@ends
def test_what_has_no_retries_left_dies_with_its_error(make_slot: Make, end: str) -> None:
    slot = make_slot(max_retries=0)
    claim(slot, A, B)
    fail(slot, A)
    finish(slot, end)
    assert slot.where(A) == "D"
    assert slot.hash("deaths")[A].startswith(b"failed 1 ")


@ends
def test_what_was_sent_again_takes_the_place_of_what_failed(slot: Slot, end: str) -> None:
    claim(slot, A)
    slot.send(A)
    fail(slot, A)
    finish(slot, end)
    assert slot.where(A) == "W"
    assert slot.counted("dropped") == 1
    slot.clock.advance(1)
    assert slot.take_one()[1].retries_left == 16


def test_a_retry_that_fails_again_uses_the_next_one_and_keeps_its_first_score(slot: Slot) -> None:
    slot.send(A)
    original = slot.zset("store")[A]
    slot.fail_one(A, delay_ms=0)
    assert slot.claim("s", 1, LEASE_MS, 10).taken == 1
    slot.renew_claim("s", 1, LEASE_MS, seal=True)
    fail(slot, A)
    finish(slot, "ack_claim")
    record = slot.hash("failures")[A].split(b"\n")[0].split(b" ")
    assert (record[:2], float(record[4])) == ([b"failed", b"2"], original)
    slot.clock.advance(5)
    assert slot.take_one()[1].retries_left == 14


def test_what_failed_rests_as_long_as_after_a_time_out(make_slot: Make) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    claim(slot, A)
    fail(slot, A)
    finish(slot, "ack_claim")
    assert slot.where(A) == "w"


@pytest.mark.parametrize("end", ["ack_claim", "return_claim"])
def test_a_claim_ends_in_steps_in_which_no_message_is_left_out(make_slot: Make, end: str) -> None:
    slot = make_slot(backoff=NO_BACKOFF)
    names = [b"%04d" % n for n in range(1_000)]
    claim(slot, *names)
    failed, rejected = names[:500], names[500:600]
    assert set(fail(slot, *failed)) == set(fail(slot, *rejected, kind="rejected")) == {"ok"}
    assert getattr(slot, end)("s", 1) == ("ok", 600)
    # Interrupted: the end of the lease goes on as it was begun.
    finish(slot, "lease")
    assert slot.zset("dead").keys() == set(rejected)
    assert slot.hash("failures").keys() == set(failed)
    assert slot.zset("store").keys() == {*failed, *(names[600:] if end == "return_claim" else [])}
    assert slot.counted("acked") == (400 if end == "ack_claim" else 0)


def test_who_sleeps_is_woken_for_what_failed(make_slot: Make) -> None:
    slot = make_slot(backoff=NO_BACKOFF, serial=False)
    claim(slot, A, B)
    fail(slot, A)
    assert slot.take().status == "empty"
    with slot.woken():
        assert slot.ack_claim("s", 1) == ("ok", 0)
    assert slot.take_one()[1].member == A


def test_an_error_is_kept_up_to_1024_bytes_and_whatever_is_in_it(slot: Slot) -> None:
    claim(slot, A)
    text = "no\nrejected 7\0\r\n" + "x" * 2_000
    assert slot.fail_claimed("s", 1, [Failure(A, error=text)]) == ["ok"]
    finish(slot, "ack_claim")
    assert slot.hash("failures")[A].partition(b"\n")[2] == text[:1024].encode()


def test_records_without_a_message_are_found(slot: Slot) -> None:
    claim(slot, A)
    fail(slot, A)
    slot.keyspace.hset(slot.keys.claim_failed, b"gone", b"failed\n")
    assert slot.find_orphans("claim_failed").members == [b"gone"]


def test_a_claim_that_was_never_sealed_costs_nothing_when_its_lease_ends(slot: Slot) -> None:
    slot.send(A)
    score = slot.zset("store")[A]
    assert slot.claim("s", 1, LEASE_MS, 10).taken == 1
    slot.clock.advance(LEASE_MS / 1000)
    assert slot.time_out() == 1
    assert slot.zset("store") == {A: score}
    assert slot.read_claim("s", 1).state == "returned"
    assert slot.renew_claim("s", 1, LEASE_MS, seal=True) is None
    assert drift(slot).claims == 0
