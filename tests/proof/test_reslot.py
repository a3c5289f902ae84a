"""Re-slotting holds what it promises in every history and at every point, and each of its rules is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_rmq.core import reslotting
from django_rmq.core.model.replies import Handover
from django_rmq.core.model.topic import slot_counts
from tests.oracle.broker import RULES
from tests.oracle.keyspace import Memory
from tests.oracle.slot import opened
from tests.proof import reslot_histories
from tests.proof.reslot_walks import DIRECTIONS, STATES, walk

SLICE = 100
PROOF = 4_000
MUTANT = 1_500
"""Histories in which a mutant has to be noticed."""
Patch = pytest.MonkeyPatch
WHOLE = dict(RULES)


def nothing_is_in_flight(patch: Patch) -> None:
    def reslot_progress(*at: Any) -> Any:
        return WHOLE["reslot_progress"](*at)._replace(in_flight=0)

    def move_out(memory: Memory, topic: Any, slot: int, *own: Any) -> Handover:
        with opened(memory, topic, slot, ["prepare"]) as s:
            kept = dict(s.prepare)
            s.prepare.clear()
        try:
            answer: Handover = WHOLE["move_out"](memory, topic, slot, *own)
            return answer
        finally:
            with opened(memory, topic, slot, ["prepare"]) as s:
                s.prepare.update(kept)

    patch.setitem(RULES, "reslot_progress", reslot_progress)
    patch.setitem(RULES, "move_out", move_out)


def the_gate_is_open(patch: Patch) -> None:
    def prepare(memory: Memory, topic: Any, slot: int, *own: Any) -> Any:
        with opened(memory, topic, slot, ["control"]) as s:
            moving = s.control.pop(b"moving", None)
        try:
            return WHOLE["prepare"](memory, topic, slot, *own)
        finally:
            if moving:
                with opened(memory, topic, slot, ["control"]) as s:
                    s.control[b"moving"] = moving

    patch.setitem(RULES, "prepare", prepare)


def tickets_are_not_kept(patch: Patch) -> None:
    def move_in(memory: Memory, topic: Any, slot: int, *own: Any) -> Any:
        with opened(memory, topic, slot, ["arrived"]) as s:
            s.arrived.clear()
        return WHOLE["move_in"](memory, topic, slot, *own)

    patch.setitem(RULES, "move_in", move_in)


def what_left_is_forgotten_at_once(patch: Patch) -> None:
    def move_out(memory: Memory, topic: Any, slot: int, *own: Any) -> Any:
        answer = WHOLE["move_out"](memory, topic, slot, *own)
        with opened(memory, topic, slot, ["leaving"]) as s:
            s.leaving.clear()
        return answer

    patch.setitem(RULES, "move_out", move_out)


def sources_open_first(patch: Patch) -> None:
    def reopen(self: Any, family: int, progress: Any) -> None:
        plan = self._reslotting
        for slot in (*plan.sources(family), *plan.targets(family)):
            self._broker.reopen(plan.topic, slot, plan.number, deliveries=0)

    patch.setattr(reslotting._Mover, "_reopen", reopen)


def sources_are_shut_first(patch: Patch) -> None:
    shut, kept = reslotting._Mover._shut, []

    def swapped(self: Any, slots: Any) -> None:
        # They come in two calls: the targets, then the sources.
        kept.append(slots)
        if len(kept) == 2:
            shut(self, kept.pop())
            shut(self, kept.pop())

    patch.setattr(reslotting._Mover, "_shut", swapped)


def what_a_person_sent_back_is_passed_by(patch: Patch) -> None:
    def reslot_progress(*at: Any) -> Any:
        return WHOLE["reslot_progress"](*at)._replace(rescheduled=0, revived=0)

    patch.setitem(RULES, "reslot_progress", reslot_progress)


def the_new_count_comes_first(patch: Patch) -> None:
    patch.setattr(
        "django_rmq.core.producer.placement.slot_counts", lambda found: tuple(reversed(slot_counts(found)))
    )


def an_older_re_slotting_may_still_move(patch: Patch) -> None:
    def move_in(memory: Memory, topic: Any, slot: int, _: int, *own: Any) -> Any:
        with opened(memory, topic, slot, ["control"]) as s:
            s.control.setdefault(b"moving", b"1")
            present = int(s.control.get(b"reslot", 0))
        return WHOLE["move_in"](memory, topic, slot, present, *own)

    patch.setitem(RULES, "move_in", move_in)


MUTANTS = [
    nothing_is_in_flight,
    the_gate_is_open,
    tickets_are_not_kept,
    what_left_is_forgotten_at_once,
    sources_are_shut_first,
    sources_open_first,
    what_a_person_sent_back_is_passed_by,
    the_new_count_comes_first,
    an_older_re_slotting_may_still_move,
]


@pytest.mark.parametrize("first", range(0, SLICE, 25))
def test_a_history_loses_doubles_and_overlaps_nothing(first: int) -> None:
    for seed in range(first, first + 25):
        reslot_histories.run(seed)


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("first", range(SLICE, PROOF, 500))
def test_many_histories_lose_double_and_overlap_nothing(first: int) -> None:
    for seed in range(first, first + 500):
        reslot_histories.run(seed)


@pytest.mark.proof
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_rule_that_is_switched_off_is_noticed(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(MUTANT):
        try:
            reslot_histories.run(seed)
        except (AssertionError, KeyError) as error:
            print(f"\n{mutant.__name__}: {error}", end="")
            return
    pytest.fail(f"nothing notices {mutant.__name__}")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_event_at_any_point_does_no_harm(direction: str, state: str) -> None:
    assert walk(direction, state, 1) > 200


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("state", ["W", "F", "FW", "D"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_two_events_at_any_points_do_no_harm(direction: str, state: str) -> None:
    assert walk(direction, state, 2) > 20_000
