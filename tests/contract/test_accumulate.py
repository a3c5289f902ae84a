"""ACCUMULATE: the bodies of merged sends are kept in their order, whatever happens to their message."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.model.envelope import Envelope, decode_envelope, encode_envelope
from django_rmq.core.model.replies import CopyReply, Death, Prepared
from django_rmq.core.model.topic import BackOff, TopicType
from django_rmq.testing import Clock
from tests.contract.slots import CONSTANT, NO_BACKOFF, Make, Slot


def collecting(make_slot: Make, most: int = 100, **options: Any) -> Slot:
    options = {"identity": "key", "max_retries": 3, "backoff": NO_BACKOFF, **options}
    return make_slot(TopicType.RANGE_MERGE, accumulate=most, **options)


def of(*bodies: bytes, **parts: Any) -> bytes:
    return encode_envelope(Envelope(bodies[-1], bodies=bodies, **parts))


def send(slot: Slot, *bodies: bytes, key: bytes = b"k", wait_ms: int = 0) -> list[str]:
    """Send each body to the key, in calls of their own."""
    return [slot.send_merge(wait_ms, [key], [of(body)])[0].status for body in bodies]


def bodies_of(taken: Prepared) -> list[bytes]:
    (given,) = taken.deliveries
    assert given.envelope is not None
    return list(decode_envelope(given.envelope).bodies or ())


def take(slot: Slot) -> tuple[int, list[bytes]]:
    taken = slot.take()
    return taken.receipt, bodies_of(taken)


def waiting(slot: Slot, key: bytes = b"k") -> list[bytes]:
    return list(decode_envelope(slot.hash("body")[key]).bodies or ())


def dead(slot: Slot) -> list[bytes]:
    return list(decode_envelope(Death.parse(slot.hash("deaths")[b"k"]).envelope or b"").bodies or ())


def test_bodies_are_kept_in_the_order_of_sending(make_slot: Make) -> None:
    slot = collecting(make_slot)
    assert send(slot, b"1", b"", b"3:\n\0\xff", b"1") == ["stored", "merged", "merged", "merged"]
    receipt, bodies = take(slot)
    assert bodies == [b"1", b"", b"3:\n\0\xff", b"1"]
    slot.commit(receipt, [b"k"])
    assert slot.hash("body") == {}


def test_several_sends_of_one_call_are_kept_in_their_order(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"0")
    names = [b"k", b"j", b"k", b"j", b"k"]
    sent = slot.send_merge(0, names, [of(b"%d" % n) for n in range(1, 6)])
    assert [one.status for one in sent] == ["merged", "stored", "merged", "merged", "merged"]
    assert (waiting(slot), waiting(slot, b"j")) == ([b"0", b"1", b"3", b"5"], [b"2", b"4"])


def test_headers_and_expiry_are_those_of_the_last_send(make_slot: Make, clock: Clock) -> None:
    slot = collecting(make_slot)
    slot.send_merge(0, [b"k"], [of(b"1", headers={"a": "1"}, expires_ms=slot.now_ms + 5)])
    slot.send_merge(0, [b"k"], [of(b"2", headers={"a": "2"}, expires_ms=slot.now_ms + 90_000)])
    clock.advance(1)
    taken = slot.take()
    assert bodies_of(taken) == [b"1", b"2"]
    assert decode_envelope(taken.deliveries[0].envelope or b"").headers == {"a": "2"}


def test_a_full_message_is_due_at_once_and_refuses_until_it_is_taken(make_slot: Make) -> None:
    slot = collecting(make_slot, 3)
    assert send(slot, b"1", b"2", wait_ms=60_000) == ["stored", "merged"]
    assert slot.take().status == "empty"
    assert send(slot, b"3", b"4", b"5", wait_ms=60_000) == ["merged", "refused", "refused"]
    receipt, bodies = take(slot)
    assert bodies == [b"1", b"2", b"3"]
    assert send(slot, b"6") == ["stored"]
    slot.commit(receipt, [b"k"])
    assert take(slot)[1] == [b"6"]


def test_the_bodies_of_a_message_have_the_size_of_max_body_in_all(make_slot: Make) -> None:
    slot = collecting(make_slot, 10, max_body=60)
    assert send(slot, b"x" * 20, b"y" * 10, b"z" * 20, b"w", wait_ms=60_000) == [
        "stored",
        "merged",
        "refused",
        "merged",
    ]
    assert take(slot)[1] == [b"x" * 20, b"y" * 10, b"w"]


def test_within_one_call_what_does_not_fit_is_refused(make_slot: Make) -> None:
    slot = collecting(make_slot, 2)
    sent = slot.send_merge(60_000, [b"k"] * 4, [of(b"%d" % n) for n in range(4)])
    assert [one.status for one in sent] == ["stored", "merged", "refused", "refused"]
    assert take(slot)[1] == [b"0", b"1"]


@pytest.mark.parametrize("backoff", [NO_BACKOFF, CONSTANT])
def test_a_send_joins_a_message_that_waits_to_be_tried_again(make_slot: Make, backoff: Any) -> None:
    slot = collecting(make_slot, backoff=backoff)
    send(slot, b"1", b"2")
    slot.fail_one(b"k")
    assert send(slot, b"3") == ["superseded"]
    assert take(slot)[1] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("end", ["fail", "release", "time_out"])
def test_a_delivery_that_does_not_succeed_joins_what_was_sent_meanwhile(make_slot: Make, end: str) -> None:
    slot = collecting(make_slot, timeout=5)
    send(slot, b"1", b"2")
    receipt, _ = take(slot)
    send(slot, b"3", b"4")
    slot.end(end, receipt, b"k")
    assert take(slot)[1] == [b"1", b"2", b"3", b"4"]


def test_a_message_that_always_fails_dies_though_sends_go_on(make_slot: Make) -> None:
    slot = collecting(make_slot, 5)
    send(slot, b"0")
    lefts = []
    for n in range(1, 5):
        taken = slot.take()
        lefts.append(taken.deliveries[0].retries_left)
        send(slot, b"%d" % n)
        slot.fail(taken.receipt, b"k")
    assert lefts == [3, 2, 1, 0]
    assert (dead(slot), waiting(slot)) == ([b"0", b"1", b"2", b"3"], [b"4"])


def test_a_lost_claim_takes_along_what_was_sent_meanwhile(make_slot: Make, clock: Clock) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    slot.claim("c", 1, 1_000, 10)
    slot.renew_claim("c", 1, 1_000, seal=True)
    send(slot, b"2")
    clock.advance(2)
    taken = slot.take()
    assert (bodies_of(taken), taken.deliveries[0].retries_left) == ([b"1", b"2"], 2)


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("end", ["fail", "time_out", "claim"])
def test_what_has_joined_a_later_send_has_its_limits(make_slot: Make, end: str, own: int) -> None:
    slot = collecting(make_slot, max_retries=16, timeout=5, backoff=BackOff(1_000, 64_000))
    send(slot, b"1")
    if end == "claim":
        slot.claim("c", 1, 1_000, 10)
    else:
        receipt = slot.take().receipt
    slot.send_merge(0, [b"k"], [of(b"2", max_retries=own)])
    if end == "fail":
        slot.fail(receipt, b"k")
    else:
        slot.clock.advance(7)
        slot.time_out(10)
    lefts, rests = [], []
    while b"k" not in slot.zset("dead"):
        slot.clock.advance(64)
        taken = slot.take()
        lefts.append(taken.deliveries[0].retries_left)
        slot.fail(taken.receipt, b"k")
        rests += [int(due) - slot.now_ms for due in slot.zset("retry").values()]
    assert lefts == list(range(own, -1, -1))
    assert all(500 << n <= rest <= 1_000 << n for n, rest in enumerate(rests)), rests
    assert dead(slot) == [b"1", b"2"]


def test_what_was_sent_meanwhile_is_kept_apart_from_a_rejected_delivery(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    receipt, _ = take(slot)
    send(slot, b"2")
    slot.reject(receipt, b"k")
    assert (dead(slot), waiting(slot)) == ([b"1"], [b"2"])


def test_a_removed_delivery_takes_only_its_own_bodies_along(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    receipt, _ = take(slot)
    slot.remove([b"k"])
    send(slot, b"2")
    slot.fail(receipt, b"k")
    assert waiting(slot) == [b"2"]


def test_a_key_that_dies_twice_keeps_all_its_bodies(make_slot: Make) -> None:
    slot = collecting(make_slot)
    for body in (b"1", b"2"):
        send(slot, body)
        slot.kill(b"k")
    assert dead(slot) == [b"1", b"2"]


def test_a_buried_delivery_and_its_newer_copy_keep_all_their_bodies(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    receipt, _ = take(slot)
    send(slot, b"2")
    slot.bury([b"k"], "")
    slot.fail(receipt, b"k")
    assert dead(slot) == [b"1", b"2"]


def test_a_replay_comes_before_what_waits(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    slot.kill(b"k")
    send(slot, b"2")
    assert slot.replay([b"k"]) == ["merged"]
    assert take(slot)[1] == [b"1", b"2"]


def test_a_replay_beside_a_delivery_waits_behind_it(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    slot.kill(b"k")
    send(slot, b"2")
    receipt, _ = take(slot)
    assert slot.replay([b"k"]) == ["replayed"]
    slot.commit(receipt, [b"k"])
    assert take(slot)[1] == [b"1"]


def test_a_claim_that_is_returned_joins_what_was_sent_meanwhile(make_slot: Make) -> None:
    slot = collecting(make_slot)
    send(slot, b"1")
    slot.claim("c", 1, 60_000, 10)
    send(slot, b"2")
    slot.return_claim("c", 1)
    assert take(slot)[1] == [b"1", b"2"]


@pytest.mark.parametrize("state", ["store", "retry"])
def test_what_moves_to_another_slot_joins_what_was_sent_there(make_slot: Make, state: str) -> None:
    slot = collecting(make_slot)
    slot.shut(7)
    score = f"{slot.now_ms + 5 if state == 'store' else slot.now_ms + 5 + 2 / 1024:.17g}"
    slot.send_merge(0, [b"k"], [of(b"2")])
    slot.move_in(7, 0, 1, [CopyReply(state, b"k", score, b"", of(b"1"))])
    assert waiting(slot) == [b"1", b"2"]


@pytest.mark.parametrize("earlier", [True, False])
def test_of_two_deaths_that_meet_in_a_slot_all_bodies_stay(make_slot: Make, earlier: bool) -> None:
    slot = collecting(make_slot)
    send(slot, b"here")
    slot.kill(b"k")
    slot.shut(7)
    at = slot.now_ms + (-9 if earlier else 9)
    record = b"failed 1 1 %d 5 0 1\n" % at + of(b"moved")
    slot.move_in(7, 0, 1, [CopyReply("dead", b"k", f"{at}", b"", record)])
    assert dead(slot) == ([b"moved", b"here"] if earlier else [b"here", b"moved"])


def test_a_sender_with_other_settings_joins_and_deletes_nothing(make_slot: Make) -> None:
    slot = collecting(make_slot)
    plain = encode_envelope(Envelope(b"123456789"))
    for envelope in (plain, of(b"1"), plain, of(b"2")):
        assert slot.send_merge(0, [b"k"], [envelope])[0].status in ("stored", "merged")
    assert take(slot)[1] == [b"123456789", b"1", b"123456789", b"2"]


def test_debounced_messages_collect_too(make_slot: Make, clock: Clock) -> None:
    slot = collecting(make_slot, 3, debounce=True, max_wait_ms=60_000)
    send(slot, b"1", wait_ms=1_000)
    clock.advance(0.9)
    send(slot, b"2", wait_ms=1_000)
    clock.advance(0.9)
    assert slot.take().status == "empty"
    send(slot, b"3", wait_ms=1_000)
    assert take(slot)[1] == [b"1", b"2", b"3"]
