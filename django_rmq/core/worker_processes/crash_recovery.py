"""Recovery after a crash: the parent settles the messages of a worker process that has died, as ``supervisor`` has decided.

It reads the notes of the process (``consumer.shared_notes``). It commits the messages that were done, ends those that were
running as timed out, and gives back those that had not begun. Without the notes all of them would wait for their time-out, as
those of a lost host do (``core/lua/slot/_time_outs.lua``). So do those of topics that are not serial, because Redis does not
record who has them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from django_rmq.core.commands import ack, fetch
from django_rmq.core.commands.broker_interface import Broker, concerns_all, run_all
from django_rmq.core.commands.fetch import all_held
from django_rmq.core.consumer.failures import ran_too_long
from django_rmq.core.consumer.shared_notes import SharedNotes, mark_of
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.core.unserved_topics import time_outs
from django_rmq.core.worker_processes.child_process import HARD_TIMEOUT_EXCEEDED
from django_rmq.exceptions import RmqError

SETTLE_SECONDS = 3.0
"""Maximum seconds for settling. The remaining messages become available again after their time-out."""

_AT_ONCE = 64
"""The number of slots asked in one round trip for the deliveries of the dead worker."""

DIED = "the process that ran it died"
"""The error of a delivery that ends as failed because its process died."""

Ending = Literal["committed", "released", "charged", "overran"]
"""How a message of a dead worker ends. ``overran``: charged because its listener exceeded HARD_TIMEOUT."""

MOST_NAMED = 10
"""The number of messages of one topic and one ending that are named."""


class RecoveryResult:
    """The messages of a dead worker that were settled: how many of which topic, and which they were."""

    def __init__(self) -> None:
        self.trouble: RmqError | None = None
        """The error that has ended the settling; what is left then times out."""
        self._counts: Counter[tuple[Ending, str]] = Counter()
        self._named: defaultdict[tuple[Ending, str], list[tuple[int, bytes]]] = defaultdict(list)

    def add(self, ending: Ending, topic: str, slot: int, members: Sequence[bytes]) -> None:
        """Record messages of one slot."""
        self._counts[ending, topic] += len(members)
        named = self._named[ending, topic]
        named += [(slot, member) for member in members[: MOST_NAMED - len(named)]]

    def count(self, ending: Ending) -> int:
        """Return how many messages have ended so."""
        return sum(self.by_topic(ending).values())

    def by_topic(self, ending: Ending) -> dict[str, int]:
        """Return the topics of which messages have ended so, and how many of each."""
        return {topic: count for (one, topic), count in self._counts.items() if one == ending and count}

    def named(self, ending: Ending, topic: str) -> list[tuple[int, bytes]]:
        """Return the slot and the member of up to ``MOST_NAMED`` messages of a topic that have ended so."""
        return self._named[ending, topic]


def settle(broker: Broker, topics: Sequence[Topic], notes: SharedNotes) -> RecoveryResult:
    """Commit the messages that a dead worker had done, end those it was running as timed out, and release the others.

    If the worker has ended itself because of HARD_TIMEOUT, only the messages that exceeded it are charged, and the
    others are released. Otherwise a message that was begun and is not done, or has failed, may have killed the process.
    It ends as timed out at once, because it no longer runs. Redis does not record who holds a message of a topic without
    a gate, so these messages are left to the time-out. An error of the whole server ends the settling; it is the ``trouble``
    of the result.
    """
    owner, begun, overran = notes.owner, notes.begun(), notes.charged
    is_replaced = notes.end == HARD_TIMEOUT_EXCEEDED

    def ending_of(mark: int) -> Ending:
        is_done = begun.get(mark)
        if is_done:
            return "committed"
        if mark in overran:
            return "overran"
        # A process that ended itself was not killed by the messages beside the one that ran too long, so they use no retry.
        # rule: charges_the_neighbours_of_what_ran_too_long
        return "released" if is_done is None or is_replaced else "charged"

    settled = RecoveryResult()
    end = time.monotonic() + SETTLE_SECONDS
    # A process that died before it had an owner id has taken no messages.
    for topic in topics if owner else ():
        if not topic.serial:
            continue
        try:
            for slots in _in_flight(broker, topic, end):
                _settle_some(broker, topic, slots, owner, ending_of, settled)
        except RmqError as error:
            settled.trouble = error
            break
    return settled


def _in_flight(broker: Broker, topic: Topic, end: float) -> Iterator[list[int]]:
    """Yield the slots in which anything is in flight, in groups, until ``end`` by the monotonic clock."""
    occupied: list[int] = []
    for _, part in time_outs(broker, [topic]):
        if isinstance(part, RmqError):
            continue  # What a node holds that does not answer is left to its time-outs, so that the rest is settled.
        occupied += [slot for slot, _ in part]
        while len(occupied) >= _AT_ONCE:
            if time.monotonic() > end:
                return
            yield occupied[:_AT_ONCE]
            occupied = occupied[_AT_ONCE:]
    if occupied:
        yield occupied


def _settle_some(
    broker: Broker,
    topic: Topic,
    slots: Sequence[int],
    owner: str,
    ending_of: Callable[[int], Ending],
    settled: RecoveryResult,
) -> None:
    """Settle the messages that a dead worker has in flight in some slots, and record them in ``settled``."""
    telling = broker.pipeline()
    asked: list[tuple[Ending, int, Sequence[bytes]]] = []
    calls = [fetch.list_held(topic, slot, owner) for slot in slots]
    for slot, first in zip(slots, run_all(broker, calls), strict=True):
        to_tell: defaultdict[tuple[int, Ending], list[bytes]] = defaultdict(list)
        try:
            if isinstance(first, RmqError):
                raise first
            held = all_held(broker, topic, slot, owner, first) if first else []
        except RmqError as error:
            # A slot that cannot be read is left to its time-outs, so that the others are settled.
            if concerns_all(error):
                raise
            continue
        for thing in held:
            member = thing.delivery.member
            end = ending_of(mark_of(topic.name, slot, thing.receipt, member))
            to_tell[thing.receipt, end].append(member)
        for (receipt, end), members in to_tell.items():
            for start in range(0, len(members), BATCH):
                part = members[start : start + BATCH]
                if end in ("charged", "overran"):
                    kind = ("timed_out", DIED) if end == "charged" else ("overran", ran_too_long(topic))
                    failures = [Failure(member, kind[0], error=kind[1]) for member in part]
                    telling.add(ack.rollback(topic, slot, receipt, failures))  # rule: left_to_its_time_out
                elif end == "committed":
                    telling.add(ack.commit(topic, slot, receipt, part))
                else:
                    telling.add(ack.release(topic, slot, receipt, part))
                asked.append((end, slot, part))
    for (end, slot, sent), words in zip(asked, telling.execute(), strict=True):
        if not isinstance(words, RmqError):
            # A message may have timed out between the question and this call; then another delivery of it may run already.
            ended = [member for member, word in zip(sent, words, strict=True) if word != "stale"]
            settled.add(end, topic.name, slot, ended)
