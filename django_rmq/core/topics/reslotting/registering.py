"""Changing the slot count of a topic while it is in use: what goes where, and in which order.

The reasons are in ``docs/decisions/0009-reslotting.md``. Every step may be repeated, by the same process or another
one: what was begun is registered in Redis, and each slot knows which re-slotting was there and what is on its way.
Knows no Django: families of slots may be moved by several processes at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from django_rmq.core.calls import ending, looking, moving
from django_rmq.core.calls.broker import Broker, run_all
from django_rmq.core.calls.walk import walk
from django_rmq.core.topics.definitions import messages_held
from django_rmq.core.words.answers import Entry, Handover, Survey
from django_rmq.core.words.envelopes import stored_basis
from django_rmq.core.words.failures import Death
from django_rmq.core.words.keys import check_slots, slot_of
from django_rmq.core.words.topics import Topic, former_slot_counts, slot_counts
from django_rmq.exceptions import ConfigurationError, LostRace, RmqError

PAGE = 1_000
"""Messages looked at in one round trip."""

HANDOVER = 250
"""Messages that go from slot to slot in one step."""

AT_ONCE = 8
"""Families that are shut at once: each waits for what runs in it."""

LOOK_SECONDS = 0.02
"""Between two looks at slots in which something is still in flight."""

SLOTS_PER_TRIP = 1_000
"""Slots that are counted in one round trip."""

STATES = ("retry", "store", "dead")
"""In the order in which messages pass through them by themselves, so that none is missed on its way."""


@dataclass(frozen=True, slots=True)
class Reslotting:
    """One change of the slot count of one topic, as it is registered."""

    topic: Topic
    """With the new slot count."""
    before: int
    """The old slot count."""
    number: int
    """Rises with every re-slotting of the topic."""

    @property
    def grows(self) -> bool:
        return self.topic.slots > self.before

    @property
    def families(self) -> range:
        """Sets of slots between which messages move, by their lowest slot."""
        return range(min(self.before, self.topic.slots))

    def slots(self, family: int) -> range:
        """Return the slots of a family."""
        return range(family, max(self.before, self.topic.slots), len(self.families))

    def sources(self, family: int) -> range:
        """Return the slots that messages have to leave."""
        return self.slots(family)[:1] if self.grows else self.slots(family)[1:]

    def targets(self, family: int) -> range:
        """Return the slots that messages go to."""
        return self.slots(family)[1:] if self.grows else self.slots(family)[:1]

    def target(self, source: int, state: str, entry: Entry) -> int | None:
        """Return the slot of a message of slot ``source`` from now on; None: nobody can tell, so it stays.

        With fewer slots the old slot tells: its rest is the new one, whatever the basis was.
        """
        if not self.grows:
            return source % self.topic.slots
        envelope = entry.envelope
        if state == "dead":
            envelope = Death.parse(entry.record).envelope if entry.record else None
        basis = stored_basis(self.topic, entry.member, envelope)
        if basis is None or slot_of(basis, self.before) != source:
            return None
        return slot_of(basis, self.topic.slots)


@dataclass(slots=True)
class Progress:
    """How far a re-slotting is; changes under way."""

    families: int
    done: int = 0
    moved: int = 0
    """Messages that have arrived in another slot, by this process."""
    strays: int = 0
    """Messages that stay where they are, for nobody can tell where they belong."""
    waiting: int = 0
    """Messages in flight that slots wait for, at the last look."""


# --- beginning and ending ---------------------------------------------------------------------------


def under_way(broker: Broker, topic: Topic) -> Reslotting | None:
    """Return the re-slotting of ``topic`` that was begun and has not ended."""
    registered = broker.definitions().of(topic.name)
    if registered is None or len(slot_counts(registered)) == 1:
        return None
    return _registered(topic, registered)


def _registered(topic: Topic, registered: dict[str, Any]) -> Reslotting:
    noted = registered["reslot"]
    return Reslotting(replace(topic, slots=noted["to"]), registered["slots"], noted["number"])


def obstacle(broker: Broker, topic: Topic, slots: int) -> str:
    """Return why ``topic`` may not be given ``slots`` slots now, or an empty text.

    Raises ``ConfigurationError`` for a number that is no slot count.
    """
    check_slots(slots)
    registered = broker.definitions().of(topic.name)
    if registered is None:
        return ""
    counts = slot_counts(registered)
    if len(counts) > 1:
        if counts[1] == slots:
            return ""
        return f"the topic is being re-slotted from {counts[0]} to {counts[1]} slots: that has to end before"
    if slots > counts[0] and _hides_bases(broker, topic):
        held = messages_held(broker, replace(topic, slots=counts[0]))
        if held:
            return (
                "messages of it were sent with a slot_basis= of their own, which is not stored: nobody can tell the "
                f"new slots of the {held} messages that it holds. It can be given fewer slots, or more when it is empty"
            )
    return ""


def _hides_bases(broker: Broker, topic: Topic) -> bool:
    return not topic.keyed and topic.slot_basis is None and broker.has_slot_bases(topic)


def begin(broker: Broker, topic: Topic, slots: int) -> Reslotting | None:
    """Register that ``topic`` is given ``slots`` slots, or find it begun; None: it has them already.

    Raises ``ConfigurationError`` where there is an obstacle.
    """
    reason = obstacle(broker, topic, slots)
    if reason:
        raise ConfigurationError(f'topic "{topic.name}" keeps its slots: {reason}')
    broker.define(topic)

    def change(known: dict[str, Any]) -> dict[str, Any]:
        counts = slot_counts(known)
        if len(counts) > 1 or counts[0] == slots:
            return known
        noted = {
            "number": known.get("reslot", {}).get("number", 0) + 1,
            "former": list(former_slot_counts(known)),
            "to": slots,
        }
        return {**known, "reslot": noted}

    registered = broker.redefine(topic.name, change)
    *_, coming = counts = slot_counts(registered)
    if coming != slots:
        raise ConfigurationError(
            f'topic "{topic.name}" is being re-slotted to {coming} slots by somebody else'
        )
    if len(counts) == 1:
        return None
    return _registered(topic, registered)


def finish(broker: Broker, reslotting: Reslotting) -> None:
    """Register that all families have been moved."""

    def change(known: dict[str, Any]) -> dict[str, Any]:
        noted = known.get("reslot", {})
        if noted.get("number") != reslotting.number or "to" not in noted:
            return known
        former = sorted({*noted["former"], known["slots"]} - {noted["to"]})
        return {**known, "slots": noted["to"], "reslot": {"number": noted["number"], "former": former}}

    broker.redefine(reslotting.topic.name, change)


# --- moving -----------------------------------------------------------------------------------------


def move(
    broker: Broker,
    reslotting: Reslotting,
    families: Iterable[int] | None = None,
    *,
    at_once: int = AT_ONCE,
    report: Callable[[str, Progress], None] = lambda step, progress: None,
    pause: Callable[[float], None] = time.sleep,
) -> Progress:
    """Move ``families`` (default: all) to where they belong; return when that is done.

    ``report`` hears of every step: shut, moved_out, moved_in, settled, reopened, waiting. Raises ``LostRace``
    where a later re-slotting was begun, and ``ServerTrouble``: to be called again then.
    """
    chosen = reslotting.families if families is None else list(families)
    mover = _Mover(broker, reslotting, Progress(len(chosen)), report)
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
        self,
        broker: Broker,
        reslotting: Reslotting,
        progress: Progress,
        report: Callable[[str, Progress], None],
    ) -> None:
        self.broker = broker
        self.reslotting = reslotting
        self.topic = reslotting.topic
        self.progress = progress
        self._report = report
        self._arrived: dict[int, int] = {}
        """Source -> the ticket of its last hand-over that is known to have arrived."""

    def advance(self, families: Sequence[int]) -> set[int]:
        """Go on with families that are in hand; return those that are done."""
        plan, number = self.reslotting, self.reslotting.number
        surveys = self._survey(families)
        moved = {family for family in families if self._is_done(surveys, family)}
        open_ = [
            family
            for family in families
            if any(surveys[slot].reslot != number for slot in plan.slots(family))
        ]
        if open_:
            # A target takes the new count before a source refuses the old one: no send is without a slot.
            self._shut([slot for family in open_ for slot in plan.targets(family)])
            self._shut([slot for family in open_ for slot in plan.sources(family)])
            self._report("shut", self.progress)
            surveys |= self._survey(open_)
        self.progress.waiting = 0
        overdue: list[int] = []
        for family in families:
            if family in moved:
                continue
            if any(surveys[slot].reslot != number for slot in plan.sources(family)):
                continue  # it is not empty yet, as it has to be
            # Those that are open again have been drained before somebody died.
            sources = [slot for slot in plan.sources(family) if surveys[slot].is_shut]
            running = sum(surveys[slot].in_flight + surveys[slot].claims for slot in sources)
            self.progress.waiting += running
            if running:
                overdue += sources
                continue
            try:
                if all(self._drain(slot) for slot in sources):
                    self._reopen(family, surveys)
                    moved.add(family)
            except LostRace:
                # Another process does the same, and was first; or the slots belong to a later re-slotting.
                if any(one.reslot > number for one in self._survey([family]).values()):
                    raise
        if overdue:
            # Nobody may be left to time out what runs here.
            list(walk(self.broker, [ending.expire(self.topic, slot) for slot in overdue]))
        return moved

    def _survey(self, families: Iterable[int]) -> dict[int, Survey]:
        slots = [slot for family in families for slot in self.reslotting.slots(family)]
        calls = (moving.survey(self.topic, slot) for slot in slots)
        return dict(zip(slots, walk(self.broker, calls, len(slots)), strict=True))

    def _is_done(self, surveys: dict[int, Survey], family: int) -> bool:
        """Return whether a family was moved: its sources are opened last of all."""
        found = [surveys[slot] for slot in self.reslotting.sources(family)]
        return all(one.reslot == self.reslotting.number and not one.is_shut for one in found)

    def _shut(self, slots: Sequence[int]) -> None:
        plan = self.reslotting
        # Asked each time: somebody may begin to send with bases of his own even now.
        only_empty = plan.grows and _hides_bases(self.broker, self.topic)
        fresh = {slot: slot >= plan.before for slot in slots}
        calls = [
            moving.shut(self.topic, slot, plan.number, fresh=is_fresh, only_empty=only_empty and not is_fresh)
            for slot, is_fresh in fresh.items()
        ]
        for answer in run_all(self.broker, calls):
            self._check(answer)

    def _reopen(self, family: int, surveys: dict[int, Survey]) -> None:
        plan = self.reslotting
        slots = plan.slots(family)
        # Read when nothing was in flight any more: a receipt that a listener wrote somewhere stays below those to come.
        deliveries = max(surveys[slot].deliveries for slot in slots)
        paused = any(surveys[slot].is_paused for slot in slots)
        for part in (plan.targets(family), plan.sources(family)):
            calls = [
                moving.reopen(self.topic, slot, plan.number, deliveries=deliveries, paused=paused)
                for slot in part
            ]
            for answer in run_all(self.broker, calls):
                self._check(answer)
            self._report("reopened", self.progress)

    def _check(self, answer: Any) -> None:
        if isinstance(answer, RmqError):
            raise answer
        if answer == "stale":
            raise LostRace(
                f"topic {self.topic.name} has been re-slotted by somebody else since: nothing is left to do"
            )

    def _drain(self, source: int) -> bool:
        """Move out of a slot what belongs elsewhere; return whether that is all done."""
        while True:
            before = self.broker.run(moving.survey(self.topic, source))
            if before.in_flight or before.claims or not self._settle(source):
                return False
            strays = sum(self._move_state(source, state) for state in STATES)
            after = self.broker.run(moving.survey(self.topic, source))
            # What a person sent back to an earlier state meanwhile may have been passed by.
            if (before.rescheduled, before.revived) == (after.rescheduled, after.revived):
                self.progress.strays += strays
                return self._settle(source)

    def _move_state(self, source: int, state: str) -> int:
        """Move what is in one state; return how many belong nowhere."""
        strays = 0
        for page in self._pages(source, state):
            groups: defaultdict[int, list[bytes]] = defaultdict(list)
            for entry in page:
                target = self.reslotting.target(source, state, entry)
                if target is None:
                    strays += 1
                elif target != source:
                    groups[target].append(entry.member)
            for target, members in sorted(groups.items()):
                for start in range(0, len(members), HANDOVER):
                    self._hand_over(
                        source, target, [(state, member) for member in members[start : start + HANDOVER]]
                    )
        return strays

    def _pages(self, source: int, state: str) -> Iterator[Sequence[Entry]]:
        after: tuple[str, bytes] | None = None
        while True:
            page = self.broker.run(looking.peek(self.topic, source, state, after=after, limit=PAGE))
            yield page.entries
            after = page.cursor
            if after is None:
                return

    def _hand_over(self, source: int, target: int, members: list[tuple[str, bytes]]) -> None:
        while members:
            answer = self._move_out(source, target, members)
            if not answer.ticket:
                return
            self._arrive(source, answer)
            if answer.status == "moved":
                gone = {(row.state, row.member) for row in answer.rows}
                members = [each for each in members if each not in gone]

    def _settle(self, source: int) -> bool:
        """Let all that has left arrive, and forget that it was on its way; False: something is in flight."""
        while (answer := self._move_out(source, source)).ticket:
            self._arrive(source, answer)
        self._report("settled", self.progress)
        return answer.status != "busy"

    def _move_out(self, source: int, target: int, members: Sequence[tuple[str, bytes]] = ()) -> Handover:
        answer = self.broker.run(
            moving.move_out(
                self.topic,
                source,
                self.reslotting.number,
                target,
                members,
                arrived=self._arrived.get(source, 0),
            )
        )
        self._check(answer.status)
        if answer.status == "moved":
            self._report("moved_out", self.progress)
        return answer

    def _arrive(self, source: int, handover: Handover) -> None:
        """Let what left arrive."""
        number = self.reslotting.number
        self._check(
            self.broker.run(
                moving.move_in(self.topic, handover.target, number, source, handover.ticket, handover.rows)
            )
        )
        self._arrived[source] = handover.ticket
        self.progress.moved += len(handover.rows)
        self._report("moved_in", self.progress)


__all__ = ["Progress", "Reslotting", "begin", "finish", "move", "obstacle", "under_way"]
