"""Every course of a re-slotting of one message in which few things happen meanwhile, on the broker in memory.

A message stands in one of the states of the protocol when its topic is re-slotted. Before each call of the mover one of
``EVENTS`` may happen, the mover's own death among them, up to a given number of them in all: every choice of events and
of places for them is walked. Afterwards all runs to its end, and what ``History.look`` asks must hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations_with_replacement, product

from django_rmq.core import reslotting
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import LostRace
from tests.proof.reslot_histories import History, MoverDied, Running

EVENTS = ("send", "take", "commit", "fail", "lose", "bury", "replay", "reschedule", "die", "other_mover")
STATES = ("W", "F", "FW", "w", "T", "D", "WD")
DIRECTIONS = {"more": (1, 2), "fewer": (2, 1)}
MEMBER = b'"b"'
"""Its CRC is odd: with two slots it belongs into slot 1."""


class Walk(History):
    """One course: what happens before which call of the mover."""

    def __init__(self, direction: str, state: str, script: dict[int, list[str]]) -> None:
        super().__init__(0)
        self.script, self.at = script, -1
        before, self.after = DIRECTIONS[direction]
        self.broker.keyspace.clear()
        self.topic = Topic(
            "t", TopicType.PRIORITY, slots=before, timeout=5, max_retries=4, backoff=BackOff(500, 500)
        )
        self.broker.define(self.topic)
        self.producers = [Producer(self.broker)]
        self.stand(state)

    def stand(self, state: str) -> None:
        """Bring the message into a state."""
        if state.endswith("D"):
            self.send()
            self.take()
            (one,) = self.running
            self.running.clear()
            self.broker.rollback(self.topic, one.slot, one.receipt, [Failure(one.member, "rejected")])
        if state != "D":
            self.send()
        if state in ("F", "FW", "w", "T"):
            self.take()
        if state == "FW":
            self.send()
        if state in ("w", "T"):
            (one,) = self.running
            self.running.clear()
            delay = 0 if state == "w" else 800
            self.broker.rollback(self.topic, one.slot, one.receipt, [Failure(one.member, "failed", delay)])

    def happen(self) -> None:
        """Let happen what is to happen before this call."""
        if self.depth != 1:
            return
        self.at += 1
        for event in self.script.get(self.at // 2, []) if self.at % 2 == 0 else []:
            if event == "die":
                raise MoverDied
            getattr(self, event)()

    # --- events, each of which does nothing where it cannot happen

    def send(self) -> None:
        self.steps += 1
        producer = self.producers[0]
        (result,) = producer.send([producer.build(self.topic, "b", priority=50)])
        self.sent[result.member] += 1
        self.owed[result.member] = self.steps

    def take(self) -> None:
        self.steps += 1
        for slot in (0, 1):
            answer = self.broker.prepare(self.topic_at(slot), slot, f"owner{slot}", None, 1)
            for delivery in answer.deliveries:
                assert not self.running, f"runs in slots {self.running[0].slot} and {slot}"
                self.running.append(Running(slot, answer.receipt, delivery.member, "b", self.steps))

    def commit(self) -> None:
        self.steps += 1
        if self.running:
            self.commit_one(self.running.pop())

    def fail(self) -> None:
        if self.running:
            one = self.running.pop()
            self.broker.rollback(self.topic, one.slot, one.receipt, [Failure(one.member, "failed", 0)])

    def lose(self) -> None:
        """Let the process that runs the message die, and time pass."""
        self.running.clear()
        self.clock.advance(7)

    def bury(self) -> None:
        for slot in (0, 1):
            self.broker.bury(self.topic, slot, [MEMBER])

    def replay(self) -> None:
        self.steps += 1
        for slot in (0, 1):
            if self.broker.replay(self.topic_at(slot), slot, [MEMBER]) != ["not_found"]:
                self.sent[MEMBER] += 1
                self.owed[MEMBER] = self.steps

    def reschedule(self) -> None:
        for slot in (0, 1):
            self.broker.reschedule(self.topic, slot, [60], [MEMBER])

    def other_mover(self) -> None:
        """Let another mover do all there is to do, as far as nothing runs."""
        self.depth = 2
        try:
            found = reslotting.under_way(self.broker, self.topic)
            if found is not None:
                reslotting.move(self.broker, found, pause=self.end_what_runs)
                reslotting.finish(self.broker, found)
        except LostRace:
            pass
        finally:
            self.depth = 1

    def end_what_runs(self, seconds: float = 0) -> None:
        if self.running:
            self.commit()
        else:
            self.clock.advance(7)

    def move(self, found: reslotting.Reslotting) -> None:
        door = self.door()
        reslotting.move(door, found, pause=self.end_what_runs)
        reslotting.finish(door, found)

    def run(self) -> None:
        self.reslot(self.after)
        self.look(self.drain())


def scripts(events: int, places: int) -> Iterator[dict[int, list[str]]]:
    """Yield every way to let so many events happen at so many places."""
    for at in combinations_with_replacement(range(places), events):
        for chosen in product(EVENTS, repeat=events):
            script: dict[int, list[str]] = {}
            for place, event in zip(at, chosen, strict=True):
                script.setdefault(place, []).append(event)
            yield script


def walk(direction: str, state: str, events: int) -> int:
    """Walk every course with so many events; return how many there are."""
    quiet = Walk(direction, state, {})
    quiet.run()
    places, walked = quiet.at // 2 + 2, 0
    for script in scripts(events, places):
        walked += 1
        try:
            Walk(direction, state, script).run()
        except AssertionError as error:
            raise AssertionError(f"{direction} slots, from {state}, {script}: {error}") from error
    return walked


__all__ = ["DIRECTIONS", "EVENTS", "STATES", "Walk", "walk"]
