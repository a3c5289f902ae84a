"""Random histories of a topic that is re-slotted while it is in use, on the broker in memory.

Before and after every single call that a mover makes, anything else may happen: sends of clients that know old counts,
prepares and ends of deliveries, processes that die, what persons do, time, the death of the mover, and another mover that
goes on where this one stands, so that this one is late with all that it still does.

What must hold: messages of one entity never run at the same time; every message runs after its last send, or is dead; none
runs to its end more often than it was sent; nothing is left behind; every slot's ledger balances.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from django_rmq.core import reslotting
from django_rmq.core.model.body_codec import decode_body
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.replies import Death, Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import LostRace, SlotMoved
from django_rmq.testing import Clock
from tests.oracle.broker import Pipeline
from tests.support.brokers import OracleBroker

COUNTS = (1, 2, 4, 8)
ENTITIES = 5


class MoverDied(Exception):
    """The process that moves was killed, before or after a call of its."""


class Door:
    """A broker between whose calls other things happen."""

    def __init__(self, broker: OracleBroker, happen: Callable[[], None]) -> None:
        self._broker, self._happen = broker, happen

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._broker, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._happen()
            try:
                return method(*args, **kwargs)
            finally:
                self._happen()

        return call

    def pipeline(self) -> Any:
        return Pipeline(self.run)


@dataclass
class Running:
    """A delivery whose listener runs."""

    slot: int
    receipt: int
    member: bytes
    entity: str
    began: int


class History:
    """One topic, its clients, and what became of its messages."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        # Producers compare fixed times with the time of the machine, too.
        self.clock = Clock(4_000_000_000_000)
        self.broker = OracleBroker("", self.clock)
        keyed, basis = chance.random() < 0.4, chance.random() < 0.5
        self.topic = Topic(
            "t",
            chance.choice([TopicType.RANGE_MERGE, TopicType.PRIORITY, TopicType.FIXED_TIME]),
            slots=chance.choice(COUNTS),
            time_range_ms=1,
            identity="key" if keyed else "body",
            slot_basis="e" if basis else None,
            serial=chance.random() < 0.8,
            timeout=5,
            max_retries=chance.choice([0, 2, 16]),
            backoff=chance.choice([BackOff(0, 0), BackOff(500, 500)]),
        )
        self.broker.define(self.topic)
        self.producers = [Producer(self.broker) for _ in range(3)]
        self.running: list[Running] = []
        self.sent: Counter[bytes] = Counter()
        self.ended: Counter[bytes] = Counter()
        self.owed: dict[bytes, int] = {}
        """Member -> when it was sent last, until it has run since."""
        self.steps = 0
        self.depth = 0

    # --- who does what

    def happen(self) -> None:
        """Let some things happen, and perhaps the mover die."""
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 4])):
            self.random.choices(
                [self.send, self.take, self.end, self.person, self.wait, self.another_mover],
                [6, 8, 7, 1, 2, 0.15],
            )[0]()
        if self.depth and self.random.random() < 0.01:
            raise MoverDied

    def send(self) -> None:
        """Send by a client that may know an old slot count."""
        self.steps += 1
        producer, topic = self.random.choice(self.producers), self.topic
        entity, version = self.random.randrange(ENTITIES), self.random.randrange(2)
        options: dict[str, Any] = {}
        if topic.is_priority:
            options["priority"] = self.random.randint(20, 24)
        elif topic.type is TopicType.FIXED_TIME:
            options["fixed_time"] = self.broker.now_ms() + self.random.choice([1, 2_000])
        body = {"e": f"e{entity}", "v": version}
        key: dict[str, Any] = {"key": f"e{entity}-{version}"} if topic.keyed else {}
        try:
            if not topic.keyed and self.random.random() < 0.3:
                (result,) = producer.send_bodies(topic, [body], **options)
            else:
                built = producer.build(topic, body, **key, **options)
                (result,) = producer.send([built], ensure=self.random.random() < 0.2)
        except SlotMoved as error:
            raise AssertionError(f"no slot takes it: {error}") from error
        self.sent[result.member] += 1
        if result.status != "present":
            self.owed[result.member] = self.steps

    def entity(self, member: bytes, envelope: bytes | None) -> str:
        body = member if envelope is None else decode_envelope(envelope).body
        found = decode_body(self.topic, body)
        return str(found["e"]) if self.topic.slot_basis else member.decode()

    def take(self) -> None:
        """Prepare in any slot, as a worker that may know an old slot count."""
        self.steps += 1
        slot, count = self.random.randrange(max(COUNTS)), self.random.choice(COUNTS)
        owner = self.random.choice("AB")
        if b"slots" not in self.control(slot):
            return  # nobody was told of this slot yet
        topic = replace(self.topic, slots=count)
        answer = self.broker.prepare(topic, slot, owner, None, self.random.randint(1, 3))
        if answer.status == "moved":
            assert answer.slots
            topic = replace(self.topic, slots=answer.slots)
            answer = self.broker.prepare(topic, slot, owner, None, self.random.randint(1, 3))
        for delivery in answer.deliveries:
            entity = self.entity(delivery.member, delivery.envelope)
            for other in self.running:
                together = other.entity == entity and (other.slot != slot if self.topic.serial else False)
                assert not together, f"{entity} runs in slots {other.slot} and {slot}"
                assert other.member != delivery.member, f"{delivery.member!r} runs twice"
            self.running.append(Running(slot, answer.receipt, delivery.member, entity, self.steps))

    def control(self, slot: int) -> dict[bytes, bytes]:
        found: Any = self.broker.keyspace.get(b"control_{t_%d}" % slot, {})
        return found

    def end(self) -> None:
        """End a delivery, in any way."""
        self.steps += 1
        if not self.running:
            return
        one = self.running.pop(self.random.randrange(len(self.running)))
        how = self.random.choices(["commit", "fail", "reject", "release", "die"], [10, 2, 0.5, 2, 1])[0]
        if how == "commit":
            self.commit_one(one)
        elif how == "release":
            self.broker.release(self.topic, one.slot, one.receipt, [one.member])
        elif how in ("fail", "reject"):
            kind = "failed" if how == "fail" else "rejected"
            delay = self.random.choice([None, 0, 800])
            self.broker.rollback(self.topic, one.slot, one.receipt, [Failure(one.member, kind, delay)])

    def commit_one(self, one: Running) -> None:
        if self.broker.commit(self.topic, one.slot, one.receipt, [one.member]) == ["ok"]:
            self.ended[one.member] += 1
            if self.owed.get(one.member, self.steps) < one.began:
                del self.owed[one.member]

    def topic_at(self, slot: int) -> Topic:
        """Return the topic with the count of slots that this one knows."""
        return replace(self.topic, slots=int(self.control(slot).get(b"slots", self.topic.slots)))

    def person(self) -> None:
        """Replay, reschedule or bury something."""
        self.steps += 1
        slot = self.random.randrange(max(COUNTS))
        state = self.random.choice(["store", "dead"])
        entries = self.broker.list_messages(self.topic, slot, state).entries
        if not entries:
            return
        member = self.random.choice(list(entries)).member
        if state == "store":
            if self.random.random() < 0.5:
                self.broker.bury(self.topic, slot, [member])
            else:
                score = 25 if self.topic.is_priority else self.broker.now_ms() + 500
                self.broker.reschedule(self.topic, slot, [score], [member])
            return
        words = self.broker.replay(self.topic_at(slot), slot, [member])
        if words[0] == "not_found":
            return
        self.sent[member] += 1
        # A copy that runs may have taken it up, for its body is newer: then nothing runs later.
        if self.waits(slot, member):
            self.owed[member] = self.steps

    def waits(self, slot: int, member: bytes) -> bool:
        zsets: list[Any] = [self.broker.keyspace.get(key % slot, {}) for key in (b"t_%d", b"retry_{t_%d}")]
        return any(member in zset for zset in zsets)

    def wait(self) -> None:
        """Let time pass; what has run too long has timed out."""
        self.steps += 1
        if self.random.random() < 0.2:
            # Workers extend what runs: only what died, and is not in the list any more, times out.
            self.clock.advance(3)
            for one in self.running:
                self.broker.extend(self.topic, one.slot, one.receipt, [one.member])
        else:
            self.clock.advance("300ms")

    # --- moving

    def another_mover(self) -> None:
        """Let another process go on with the re-slotting, while the first one stands still."""
        if self.depth != 1:
            return
        self.depth = 2
        try:
            found = reslotting.under_way(self.door(), self.topic)
            if found is not None:
                self.move(found)
        except (MoverDied, LostRace):
            pass
        finally:
            self.depth = 1

    def door(self) -> Any:
        """Return the broker as a mover sees it."""
        return Door(self.broker, self.happen)

    def move(self, found: reslotting.Reslotting) -> None:
        door = self.door()
        reslotting.move(door, found, at_once=self.random.choice([1, 8]), pause=lambda seconds: self.wait())
        reslotting.finish(door, found)

    def reslot(self, slots: int) -> None:
        """Re-slot, however often the mover dies."""
        while True:
            self.depth = 1
            try:
                found = reslotting.begin(self.door(), self.topic, slots)
                if found is not None:
                    self.move(found)
                return
            except (MoverDied, LostRace):
                pass
            finally:
                self.depth = 0

    def run(self) -> None:
        """Re-slot several times, let all end, and look."""
        for _ in range(20):
            self.happen()
        for _ in range(3):
            self.reslot(self.random.choice(COUNTS))
            for _ in range(10):
                self.happen()
        self.look(self.drain())

    # --- the end

    def drain(self) -> int:
        """Run all there is; return the slot count."""
        slots = int(self.broker.definitions()["t"]["slots"])
        topic = replace(self.topic, slots=slots)
        for one in self.running:
            self.broker.release(topic, one.slot, one.receipt, [one.member])
        self.running.clear()
        for _ in range(400):
            self.clock.advance(2)
            for slot in range(slots):
                answer = self.broker.prepare(topic, slot, "A", None, 100)
                for delivery in answer.deliveries:
                    entity = self.entity(delivery.member, delivery.envelope)
                    assert slot_of(entity.encode(), slots) == slot, f"{delivery.member!r} is in slot {slot}"
                    assert self.broker.commit(topic, slot, answer.receipt, [delivery.member]) == ["ok"]
                    self.ended[delivery.member] += 1
                    self.owed.pop(delivery.member, None)
            if not any(self.counts(topic, slot)[0] for slot in range(slots)):
                return slots
        raise AssertionError("something is left")

    def counts(self, topic: Topic, slot: int) -> tuple[int, int]:
        found = self.broker.count(topic, slot)
        return found.store + found.prepare + found.retry, found.dead

    def look(self, slots: int) -> None:
        dead: set[bytes] = set()
        ledgers = [self.broker.audit_ledger(self.topic, slot) for slot in range(max(COUNTS))]
        for slot, ledger in enumerate(ledgers):
            assert ledger.balanced, ledger
            assert b"moving" not in self.control(slot)
            if slot >= slots:
                assert self.counts(self.topic, slot) == (0, 0)
            for entry in self.broker.list_messages(self.topic, slot, "dead", limit=1000).entries:
                assert entry.member not in dead, "dead in two slots"
                assert entry.record
                entity = self.entity(entry.member, Death.parse(entry.record).envelope)
                assert slot_of(entity.encode(), slots) == slot
                dead.add(entry.member)
        for kind in ("moved", "moved_dead"):
            assert sum(ledger[f"{kind}_in"] for ledger in ledgers) == sum(
                ledger[f"{kind}_out"] for ledger in ledgers
            )
        assert not any(b"leaving" in key or b"arrived" in key for key in self.broker.keyspace)
        assert set(self.owed) <= dead, f"lost: {set(self.owed) - dead}"
        for member, times in self.ended.items():
            assert times <= self.sent[member], (
                f"{member!r} was sent {self.sent[member]} and ran {times} times"
            )


def run(seed: int) -> None:
    """Run one history; an assertion fails where anything is wrong."""
    try:
        History(seed).run()
    except AssertionError as error:
        raise AssertionError(f"history {seed}: {error}") from error


__all__ = ["History", "run"]
