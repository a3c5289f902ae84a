"""Drain a slot that is shut: messages that belong to other slots move out, and arrive there, a few at a time.

A hand-over leaves its slot in one script and arrives in another, because no script may use two slots. In between, the source
keeps the messages in ``leaving``, so a process that dies in between loses nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from django_rmq.core.commands import inspect, reshard
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.replies import Entry, Handover
from django_rmq.core.model.topic import Topic
from django_rmq.core.resharding.reshard_state import Reslotting
from django_rmq.exceptions import LostRace

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
    """The number of messages that arrived in another slot, moved by this process."""
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
            before = self._broker.run(reshard.survey(self._topic, source))
            # A delivery from before the slot was shut may still run; its message can go back to any state.
            if before.in_flight or before.claims or not self._settle(source):
                return False
            strays = sum(self._move_state(source, state) for state in STATES)
            after = self._broker.run(reshard.survey(self._topic, source))
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
            page = self._broker.run(inspect.peek(self._topic, source, state, after=after, limit=PAGE))
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
                gone = {(row.state, row.member) for row in answer.rows}
                members = [each for each in members if each not in gone]

    def _settle(self, source: int) -> bool:
        """Complete all hand-overs that have left, and forget them; return False if something is in flight."""
        while (answer := self._move_out(source, source)).ticket:
            self._arrive(source, answer)
        self._report("settled", self._progress)
        return answer.status != "busy"

    def _move_out(self, source: int, target: int, members: Sequence[tuple[str, bytes]] = ()) -> Handover:
        answer = self._broker.run(
            reshard.move_out(
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
                reshard.move_in(self._topic, handover.target, number, source, handover.ticket, handover.rows)
            ),
        )
        self._arrived[source] = handover.ticket
        self._progress.moved += len(handover.rows)
        self._report("moved_in", self._progress)
