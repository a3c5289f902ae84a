"""Changes the slot count of a topic while it is in use: what moves where, and in which order.

The reasons are in ``docs/decisions/0009-reslotting.md``. Every step may be repeated, by the same process or another one: Redis
holds the re-slotting that was begun, and each slot records which re-slotting reached it and which messages are on their way.
Several processes may move families of slots at the same time. This module knows no Django.

A re-slotting is a part of the topic's definition, so senders that a slot refuses find the new slot count there. Each family of
slots is shut, waits for its messages in flight, is drained, and is opened again. Each round reads the state of the slots from
Redis and continues from there, so a process that died is replaced by the next one.

A slot that is drained hands messages that belong to other slots over, a few at a time: they leave in one script and arrive in
another, because no script may use two slots. In between, the source keeps the messages in ``leaving``, so a process that dies
in between loses nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from django_rmq.core.cluster.cluster_broker import ClusterBroker
from django_rmq.core.commands import ack, inspect, reslot
from django_rmq.core.commands.broker_interface import Broker, walk
from django_rmq.core.model.envelope import stored_basis
from django_rmq.core.model.keys import check_slots
from django_rmq.core.model.replies import Death, Entry, Handover, ReslotProgress, read_record
from django_rmq.core.model.topic import Definition, Topic, former_slot_counts, slot_counts
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.topic_registration import messages_held
from django_rmq.exceptions import ConfigurationError, LostRace


@dataclass(frozen=True, slots=True)
class Reslotting:
    """One change of the slot count of one topic, as registered."""

    topic: Topic
    """The topic with the new slot count."""
    before: int
    """The old slot count."""
    number: int
    """The number of the re-slotting; it rises with every re-slotting of the topic."""

    @property
    def grows(self) -> bool:
        return self.topic.slots > self.before

    @property
    def families(self) -> range:
        """The families, named by their lowest slots: messages move only between the slots of one family."""
        return range(min(self.before, self.topic.slots))

    def slots(self, family: int) -> range:
        return range(family, max(self.before, self.topic.slots), len(self.families))

    def sources(self, family: int) -> range:
        """Return the slots that messages leave."""
        return self.slots(family)[:1] if self.grows else self.slots(family)[1:]

    def targets(self, family: int) -> range:
        """Return the slots to which messages go."""
        return self.slots(family)[1:] if self.grows else self.slots(family)[:1]

    def target(self, source: int, state: str, entry: Entry) -> int | None:
        """Return the new slot of a message of slot ``source``, or None if it is unknown, so that the message stays.

        With fewer slots, the old slot modulo the new count is the new one, whatever the basis was.
        """
        if not self.grows:
            return source % self.topic.slots
        envelope = entry.envelope
        if state == "dead":
            death = read_record(Death.parse, entry.record)
            envelope = death.envelope if death else None
        basis = stored_basis(self.topic, entry.member, envelope)
        # The basis is not stored, or another program has put the message into a slot that does not follow from it.
        if basis is None or slot_of(basis, self.before) != source:
            return None
        return slot_of(basis, self.topic.slots)


def under_way(broker: Broker, topic: Topic) -> Reslotting | None:
    """Return the re-slotting of ``topic`` that was begun and has not ended, or None if there is none."""
    registered = broker.definitions().of(topic.name)
    if registered is None or len(slot_counts(registered)) == 1:
        return None
    return _registered(topic, registered)


def _registered(topic: Topic, registered: Definition) -> Reslotting:
    noted = registered["reslot"]
    return Reslotting(replace(topic, slots=noted["to"]), registered["slots"], noted["number"])


def obstacle(broker: Broker, topic: Topic, slots: int) -> str:
    """Return why ``topic`` may not be given ``slots`` slots now, or an empty text.

    Raises ``ConfigurationError`` for a number that is not a valid slot count.
    """
    check_slots(slots)
    registered = broker.definitions().of(topic.name)
    if registered is None:
        return ""
    counts = slot_counts(registered)
    if len(counts) > 1:
        if counts[1] == slots:
            return ""
        return f"the topic is being re-slotted from {counts[0]} to {counts[1]} slots: that must finish first"
    if topic.is_strict and slots != counts[0] and isinstance(broker, ClusterBroker):
        return (
            "its ORDER is strict, and each node of a Redis Cluster has a clock of its own, so what is sent to a new "
            "slot could come before what is still on its way there. Declare a topic with another name"
        )
    if slots > counts[0] and hides_bases(broker, topic):
        messages = messages_held(broker, replace(topic, slots=counts[0]))
        if messages:
            return (
                f"messages were sent with slot_basis=, which is not stored, so the new slots of its {messages} "
                "messages are unknown. Use fewer slots, or wait until the topic is empty"
            )
    return ""


def hides_bases(broker: Broker, topic: Topic) -> bool:
    return not topic.keyed and topic.slot_basis is None and broker.has_slot_bases(topic)


def begin(broker: Broker, topic: Topic, slots: int) -> Reslotting | None:
    """Register that ``topic`` gets ``slots`` slots, or find this re-slotting begun; return None if the topic has them already.

    Raises ``ConfigurationError`` if there is an obstacle.
    """
    reason = obstacle(broker, topic, slots)
    if reason:
        raise ConfigurationError(f'topic "{topic.name}" cannot be re-slotted: {reason}')
    broker.define(topic)

    def change(known: Definition) -> Definition:
        counts = slot_counts(known)
        # Another process may have begun or finished a re-slotting since the obstacle was looked for.
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
    # Another process has begun a re-slotting to another count since the obstacle was looked for.
    if coming != slots:
        raise ConfigurationError(
            f'topic "{topic.name}" is being re-slotted to {coming} slots by another process'
        )
    if len(counts) == 1:
        return None
    return _registered(topic, registered)


def finish(broker: Broker, reslotting: Reslotting) -> None:
    """Register that all families have been moved."""

    def change(known: Definition) -> Definition:
        noted = known.get("reslot", {})
        # Another process has finished the re-slotting, or has even begun the next one.
        if noted.get("number") != reslotting.number or "to" not in noted:
            return known
        former = sorted({*noted["former"], known["slots"]} - {noted["to"]})
        return {**known, "slots": noted["to"], "reslot": {"number": noted["number"], "former": former}}

    broker.redefine(reslotting.topic.name, change)


PAGE = 1_000
"""The number of messages read in one round trip."""

HANDOVER = 250
"""The number of messages that move from slot to slot in one step."""

STATES = ("retry", "store", "dead")
"""The states in the order in which messages pass through them by themselves, so that none is missed on its way."""


@dataclass(slots=True)
class DrainProgress:
    """The progress of a re-slotting; it changes while the re-slotting runs."""

    families: int
    done: int = 0
    moved: int = 0
    """The number of messages that arrived in another slot, moved by this process or completed by it."""
    strays: int = 0
    """The number of messages that stay where they are, because their new slot is unknown."""
    waiting: int = 0
    """The number of messages in flight for which slots wait, at the last check."""


Report = Callable[[str, DrainProgress], None]
"""Called for every step: shut, moved_out, moved_in, settled, reopened, waiting."""


def check(topic: Topic, answer: str) -> None:
    """Raise ``LostRace`` if a slot answers that a later re-slotting reached it."""
    if answer == "stale":
        raise LostRace(f"topic {topic.name} has been re-slotted by another process: nothing is left to do")


class SlotDrain:
    """Moves messages out of shut slots in which nothing is in flight."""

    def __init__(
        self, broker: Broker, reslotting: Reslotting, progress: DrainProgress, report: Report
    ) -> None:
        self._broker = broker
        self._reslotting = reslotting
        self._topic = reslotting.topic
        self._progress = progress
        self._report = report
        self._arrived: dict[int, int] = {}
        """Source -> the ticket of its last hand-over that is known to have arrived."""

    def drain(self, source: int) -> bool:
        """Move messages that belong elsewhere out of a slot; return whether all of them have moved."""
        while True:
            before = self._broker.run(reslot.reslot_progress(self._topic, source))
            # A delivery from before the slot was shut may still run; its message can go back to any state.
            if before.in_flight or before.claims or not self._settle(source):
                return False
            strays = sum(self._move_state(source, state) for state in STATES)
            after = self._broker.run(reslot.reslot_progress(self._topic, source))
            # A person may have rescheduled or replayed a message meanwhile. It is then in a state that was already read, so all
            # states are read again.
            if (before.rescheduled, before.revived) == (after.rescheduled, after.revived):
                self._progress.strays += strays
                return self._settle(source)

    def _move_state(self, source: int, state: str) -> int:
        """Move the messages of one state; return how many have no known slot."""
        strays = 0
        for page in self._pages(source, state):
            groups: defaultdict[int, list[bytes]] = defaultdict(list)
            for entry in page:
                target = self._reslotting.target(source, state, entry)
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
            page = self._broker.run(
                inspect.list_messages(self._topic, source, state, after=after, limit=PAGE)
            )
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
            # If the answer is `staged`, an earlier hand-over had to arrive first, and these members have not moved yet.
            if answer.status == "moved":
                handed_over = {(row.state, row.member) for row in answer.rows}
                members = [each for each in members if each not in handed_over]

    def _settle(self, source: int) -> bool:
        """Complete all hand-overs that have left, and forget them; return False if something is in flight."""
        while (answer := self._move_out(source, source)).ticket:
            self._arrive(source, answer)
        self._report("settled", self._progress)
        return answer.status != "busy"

    def _move_out(self, source: int, target: int, members: Sequence[tuple[str, bytes]] = ()) -> Handover:
        answer = self._broker.run(
            reslot.move_out(
                self._topic,
                source,
                self._reslotting.number,
                target,
                members,
                arrived=self._arrived.get(source, 0),
            )
        )
        check(self._topic, answer.status)
        if answer.status == "moved":
            self._report("moved_out", self._progress)
        return answer

    def _arrive(self, source: int, handover: Handover) -> None:
        """Complete a hand-over in its target."""
        number = self._reslotting.number
        check(
            self._topic,
            self._broker.run(
                reslot.move_in(self._topic, handover.target, number, source, handover.ticket, handover.rows)
            ),
        )
        self._arrived[source] = handover.ticket
        self._progress.moved += len(handover.rows)
        self._report("moved_in", self._progress)


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
    to_move = reslotting.families if families is None else list(families)
    mover = _Mover(broker, reslotting, DrainProgress(len(to_move)), report)
    rest = iter(to_move)
    in_hand = list(islice(rest, at_once))
    while in_hand:
        moved = mover.advance(in_hand)
        mover.progress.done += len(moved)
        in_hand = [family for family in in_hand if family not in moved]
        in_hand += islice(rest, at_once - len(in_hand))
        if not moved:
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
        of_slots = self._read_progress(families)
        moved = {family for family in families if self._is_done(of_slots, family)}
        untouched = [
            family
            for family in families
            if any(of_slots[slot].reslot != number for slot in plan.slots(family))
        ]
        if untouched:
            # A target takes the new count before a source refuses the old one, so every send finds a slot.
            self._shut([slot for family in untouched for slot in plan.targets(family)])
            self._shut([slot for family in untouched for slot in plan.sources(family)])
            self._report("shut", self.progress)
            of_slots |= self._read_progress(untouched)
        self.progress.waiting = 0
        overdue: list[int] = []
        for family in families:
            if family in moved or any(of_slots[slot].reslot != number for slot in plan.sources(family)):
                continue  # the family has moved, or a source is not shut because it is not empty, as is normal at this point
            # If a process died while it opened a family, the slots that are open again were drained before.
            sources = [slot for slot in plan.sources(family) if of_slots[slot].is_shut]
            running = sum(of_slots[slot].in_flight + of_slots[slot].claims for slot in sources)
            self.progress.waiting += running
            if running:
                overdue += sources
            elif self._is_moved(family, sources, of_slots):
                moved.add(family)
        # There may be no consumer left that would time out the messages in flight here.
        list(walk(self._broker, [ack.time_out(self._topic, slot) for slot in overdue]))
        return moved

    def _is_moved(self, family: int, sources: Sequence[int], of_slots: dict[int, ReslotProgress]) -> bool:
        """Move the messages in the sources of a family, and open it again; return whether that is done."""
        try:
            if not all(self._emptying.drain(slot) for slot in sources):
                return False
            self._reopen(family, of_slots)
        except LostRace:
            # Another process does the same, and was first; or the slots belong to a later re-slotting.
            if any(one.reslot > self._reslotting.number for one in self._read_progress([family]).values()):
                raise
            return False
        return True

    def _read_progress(self, families: Iterable[int]) -> dict[int, ReslotProgress]:
        slots = [slot for family in families for slot in self._reslotting.slots(family)]
        calls = (reslot.reslot_progress(self._topic, slot) for slot in slots)
        return dict(zip(slots, walk(self._broker, calls, len(slots)), strict=True))

    def _is_done(self, of_slots: dict[int, ReslotProgress], family: int) -> bool:
        """Return whether a family was moved; its sources are opened last."""
        sources = [of_slots[slot] for slot in self._reslotting.sources(family)]
        return all(one.reslot == self._reslotting.number and not one.is_shut for one in sources)

    def _shut(self, slots: Sequence[int]) -> None:
        plan = self._reslotting
        # This is read each time, because a sender may begin to use explicit slot bases even now.
        only_empty = plan.grows and hides_bases(self._broker, self._topic)
        fresh = {slot: slot >= plan.before for slot in slots}
        calls = [
            reslot.shut(
                self._topic, slot, plan.number, fresh=is_fresh, only_empty=only_empty and not is_fresh
            )
            for slot, is_fresh in fresh.items()
        ]
        for answer in walk(self._broker, calls, len(calls)):
            check(self._topic, answer)

    def _reopen(self, family: int, of_slots: dict[int, ReslotProgress]) -> None:
        plan = self._reslotting
        slots = plan.slots(family)
        # Read after nothing was in flight any more, so that receipts which listeners stored elsewhere stay
        # below future ones.
        deliveries = max(of_slots[slot].deliveries for slot in slots)
        paused = any(of_slots[slot].is_paused for slot in slots)
        for part in (plan.targets(family), plan.sources(family)):
            calls = [
                reslot.reopen(self._topic, slot, plan.number, deliveries=deliveries, paused=paused)
                for slot in part
            ]
            for answer in walk(self._broker, calls, len(calls)):
                check(self._topic, answer)
            self._report("reopened", self.progress)
