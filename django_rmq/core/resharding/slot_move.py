"""Move families of slots: each family is shut, waits for its messages in flight, is drained, and is opened again.

Each round reads the state of the slots from Redis and continues from there, so a process that died is replaced by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from django_rmq.core.commands import ack, reshard
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.inspect import walk
from django_rmq.core.model.replies import ReshardSurvey
from django_rmq.core.resharding.reshard_state import Reslotting, hides_bases
from django_rmq.core.resharding.slot_drain import (
    DrainProgress,
    Report,
    SlotDrain,
    check,
)
from django_rmq.exceptions import LostRace

AT_ONCE = 8
"""The number of families that are shut at the same time; each waits for its messages in flight."""

LOOK_SECONDS = 0.02
"""Seconds between two checks of slots in which something is still in flight."""


def move(
    broker: Broker,
    reslotting: Reslotting,
    families: Iterable[int] | None = None,
    *,
    at_once: int = AT_ONCE,
    report: Report = lambda step, progress: None,
    pause: Callable[[float], None] = time.sleep,
) -> DrainProgress:
    """Move ``families`` (default: all) to where they belong; return when that is done.

    ``report`` is called for every step: shut, moved_out, moved_in, settled, reopened, waiting. Raises
    ``LostRace`` if a later re-slotting was begun, and ``ServerTrouble``, after which it may be called again.
    """
    chosen = reslotting.families if families is None else list(families)
    mover = _Mover(broker, reslotting, DrainProgress(len(chosen)), report)
    rest = iter(chosen)
    in_hand = list(islice(rest, at_once))
    while in_hand:
        done = mover.advance(in_hand)
        mover.progress.done += len(done)
        in_hand = [family for family in in_hand if family not in done]
        in_hand += islice(rest, at_once - len(in_hand))
        if not done:
            report("waiting", mover.progress)
            pause(LOOK_SECONDS)
    return mover.progress


class _Mover:
    def __init__(
        self, broker: Broker, reslotting: Reslotting, progress: DrainProgress, report: Report
    ) -> None:
        self.progress = progress
        self._broker = broker
        self._reslotting = reslotting
        self._topic = reslotting.topic
        self._report = report
        self._emptying = SlotDrain(broker, reslotting, progress, report)

    def advance(self, families: Sequence[int]) -> set[int]:
        """Continue with families that are in progress; return those that are done."""
        plan, number = self._reslotting, self._reslotting.number
        surveys = self._survey(families)
        moved = {family for family in families if self._is_done(surveys, family)}
        untouched = [
            family
            for family in families
            if any(surveys[slot].reslot != number for slot in plan.slots(family))
        ]
        if untouched:
            # A target takes the new count before a source refuses the old one, so every send finds a slot.
            self._shut([slot for family in untouched for slot in plan.targets(family)])
            self._shut([slot for family in untouched for slot in plan.sources(family)])
            self._report("shut", self.progress)
            surveys |= self._survey(untouched)
        self.progress.waiting = 0
        overdue: list[int] = []
        for family in families:
            if family in moved or any(surveys[slot].reslot != number for slot in plan.sources(family)):
                continue  # the family has moved, or a source is not shut because it is not empty, as is normal at this point
            # If a process died while it opened a family, the slots that are open again were drained before.
            sources = [slot for slot in plan.sources(family) if surveys[slot].is_shut]
            running = sum(surveys[slot].in_flight + surveys[slot].claims for slot in sources)
            self.progress.waiting += running
            if running:
                overdue += sources
            elif self._is_moved(family, sources, surveys):
                moved.add(family)
        # There may be no consumer left that would time out the messages in flight here.
        list(walk(self._broker, [ack.expire(self._topic, slot) for slot in overdue]))
        return moved

    def _is_moved(self, family: int, sources: Sequence[int], surveys: dict[int, ReshardSurvey]) -> bool:
        """Move the messages in the sources of a family, and open it again; return whether that is done."""
        try:
            if not all(self._emptying.drain(slot) for slot in sources):
                return False
            self._reopen(family, surveys)
        except LostRace:
            # Another process does the same, and was first; or the slots belong to a later re-slotting.
            if any(one.reslot > self._reslotting.number for one in self._survey([family]).values()):
                raise
            return False
        return True

    def _survey(self, families: Iterable[int]) -> dict[int, ReshardSurvey]:
        slots = [slot for family in families for slot in self._reslotting.slots(family)]
        calls = (reshard.survey(self._topic, slot) for slot in slots)
        return dict(zip(slots, walk(self._broker, calls, len(slots)), strict=True))

    def _is_done(self, surveys: dict[int, ReshardSurvey], family: int) -> bool:
        """Return whether a family was moved; its sources are opened last."""
        found = [surveys[slot] for slot in self._reslotting.sources(family)]
        return all(one.reslot == self._reslotting.number and not one.is_shut for one in found)

    def _shut(self, slots: Sequence[int]) -> None:
        plan = self._reslotting
        # This is read each time, because a sender may begin to use explicit slot bases even now.
        only_empty = plan.grows and hides_bases(self._broker, self._topic)
        fresh = {slot: slot >= plan.before for slot in slots}
        calls = [
            reshard.shut(
                self._topic, slot, plan.number, fresh=is_fresh, only_empty=only_empty and not is_fresh
            )
            for slot, is_fresh in fresh.items()
        ]
        for answer in walk(self._broker, calls, len(calls)):
            check(self._topic, answer)

    def _reopen(self, family: int, surveys: dict[int, ReshardSurvey]) -> None:
        plan = self._reslotting
        slots = plan.slots(family)
        # Read after nothing was in flight any more, so that receipts which listeners stored elsewhere stay
        # below future ones.
        deliveries = max(surveys[slot].deliveries for slot in slots)
        paused = any(surveys[slot].is_paused for slot in slots)
        for part in (plan.targets(family), plan.sources(family)):
            calls = [
                reshard.reopen(self._topic, slot, plan.number, deliveries=deliveries, paused=paused)
                for slot in part
            ]
            for answer in walk(self._broker, calls, len(calls)):
                check(self._topic, answer)
            self._report("reopened", self.progress)
