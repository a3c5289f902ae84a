"""Values that RMQ did not write, in every key of a slot: they stop that slot at most, and only while they are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from django_rmq.core.commands.script_call import AtSlot, Call
from django_rmq.core.consumer import acks
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.keys import SlotKeys, slot_keys
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.worker_processes.crash_recovery import settle
from django_rmq.exceptions import RmqError, Unreadable, WrongType
from tests.support.brokers import Broker
from tests.support.workers import Heard, Worker, eventually, send

TOPIC = Topic("attacked", TopicType.RANGE_MERGE, slots=256, time_range_ms=0, timeout=1, backoff=BackOff(0, 0))
OTHER = Topic("other", TopicType.RANGE_MERGE, slots=4, time_range_ms=0)

SETS = ("store", "prepare", "retry", "dead", "claimants", "claim")
SCORES = ["-inf", "inf", "-5", "0.5", "1e20", "1e300"]
CONTROL = [
    "owner",
    "epoch",
    "deliveries",
    "paused",
    "timeout",
    "max_retries",
    "sleeping_until",
    "slots",
    "moving",
]
VALUES = [b"", b"x", b"-1", b"nan", b"9" * 30, b"1.5", b"\xff\xfe\0", b"1 x"]


class Attack(NamedTuple):
    """A value put into a key of a slot."""

    key: str
    field: bytes
    value: Any

    def put(self, broker: Broker, slot: int) -> None:
        key = getattr(slot_keys(broker.prefix, TOPIC.name, slot), self.key)
        if self.key in SETS:
            broker.client.execute_command("ZADD", key, self.value, self.field)
        else:
            broker.client.hset(key, self.field, self.value)

    def take_away(self, broker: Broker, slot: int) -> None:
        key = getattr(slot_keys(broker.prefix, TOPIC.name, slot), self.key)
        if self.key in SETS:
            broker.client.zrem(key, self.field)
        else:
            broker.client.hdel(key, self.field)


def attacks() -> Iterator[Attack]:
    for key in SlotKeys._fields:
        if key in SETS:
            yield from (Attack(key, b"\xff", score) for score in SCORES)
        else:
            fields = [name.encode() for name in CONTROL] if key == "control" else [b"1", b"\xff"]
            values = VALUES if key == "control" else VALUES[1::3]
            yield from (Attack(key, field, value) for field in fields for value in values)


ATTACKS = dict(zip(range(1, 256, 1), attacks(), strict=False))
"""Slot -> what is put there."""
FREE = sorted(set(range(TOPIC.slots)) - set(ATTACKS))


def put(broker: Broker, slot: int, body: str) -> None:
    broker.send_merge(TOPIC, slot, 0, [b'"%s"' % body.encode()])


def bodies_heard(heard: Heard, wanted: set[str]) -> Callable[[], bool]:
    return lambda: wanted <= set(heard.bodies)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "while it works"])
def test_foreign_values_stop_their_slot_at_most_and_nothing_when_they_are_gone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(acks, "REST_SECONDS", 0.2)
    assert len(ATTACKS) == len(list(attacks())) and FREE, "each has a slot of its own"
    heard = Heard()

    def listener(message: Message) -> None:
        if isinstance(message.body, str):
            heard(message)

    def attack() -> None:
        for slot, each in ATTACKS.items():
            each.put(broker, slot)

    if when == "before":
        attack()
    worker = Worker(
        broker, [TOPIC, OTHER], listener, threads=4, poll_seconds=0.1, on_moved=lambda topic: None
    )
    with worker:
        if when != "before":
            worker.asleep()
            attack()
        for slot in range(TOPIC.slots):
            # Some values refuse sends into their slot as well.
            with nullcontext() if slot in FREE else suppress(RmqError):
                put(broker, slot, f"first {slot}")
        send(broker, OTHER, [f"other {i}" for i in range(50)])
        free = {f"first {slot}" for slot in FREE} | {f"other {i}" for i in range(50)}
        eventually(bodies_heard(heard, free), "the others going on")
        assert worker.thread.is_alive()
        threading.Event().wait(1.0)
        for slot, each in ATTACKS.items():
            each.take_away(broker, slot)
        for slot in range(TOPIC.slots):
            put(broker, slot, f"second {slot}")
        eventually(bodies_heard(heard, {f"second {slot}" for slot in range(TOPIC.slots)}), "all going on", 60)


def test_what_a_dead_process_held_is_settled_beside_foreign_values(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("django_rmq.core.worker_processes.crash_recovery.SETTLE_SECONDS", 60.0)
    notes, topic = SharedNotes(1), replace(TOPIC, timeout=60)
    notes.owner = "me"
    for slot in range(topic.slots):
        put(broker, slot, f"first {slot}")
        assert broker.prepare(topic, slot, "me", None, 1).status == "ok"
    for slot, each in ATTACKS.items():
        each.put(broker, slot)
    settled = settle(broker, [topic], notes)
    assert settled.count("released") >= len(FREE)
    assert all(broker.audit_ledger(topic, slot)["released"] == 1 for slot in FREE)


def test_a_value_that_cannot_be_read_is_named(broker: Broker) -> None:
    broker.client.hset(slot_keys(broker.prefix, TOPIC.name, 3).stats, "stored", "x")
    said = r"^field 'stored' of the hash 'stats_.*attacked_3}' in Redis is not a whole number$"
    with pytest.raises(WrongType, match=said):
        broker.audit_ledger(TOPIC, 3)
    pipeline = broker.pipeline()
    for slot in (2, 3):
        pipeline.audit_ledger(TOPIC, slot)
    fine, broken = pipeline.execute()
    assert fine.balanced and isinstance(broken, WrongType)


def test_an_answer_that_means_nothing_names_its_script_and_key() -> None:
    call = Call("adopt", AtSlot(TOPIC, 3), (), int)
    assert call.read(b"5", "") == 5
    said = r"^adopt of stats_{attacked_3}: .* that RMQ did not write \(.*b'x'\)$"
    with pytest.raises(Unreadable, match=said):
        call.read(b"x", "")
