"""What a worker process notes in memory that outlives it: who it is, that it lives, and what its threads run.

After a sudden death its parent reads what ran, and gives back all else the process held (``give_back``).
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4
from zlib import crc32

from django_rmq.broker import Broker
from django_rmq.exceptions import RmqError
from django_rmq.messages import BATCH, Topic

GIVE_BACK_SECONDS = 3.0
"""How long giving back may take; what is not reached by then is left to its time-out."""

_AT_ONCE = 64
"""Slots asked in one round trip."""

_OWNER = 32
_BEAT, _PROCESSED, _READY, _HEAD = 0, 1, 2, 4
"""Words before those of the threads; then, per thread: topic + 1, slot, receipt, how many messages run, and
CRC-32 + 1 of each of their members."""
_WORDS = 4 + BATCH


class Running(NamedTuple):
    """A message that a thread had begun."""

    topic: str
    slot: int
    receipt: int
    crc: int


class Notes:
    """Memory that a child writes and its parent reads. Make it before the fork."""

    def __init__(self, threads: int, topics: Sequence[Topic]) -> None:
        self.token = uuid4().hex
        """Known to parent and child: with it the parent can end the child's session."""
        self._topics = [topic.name for topic in topics]
        self._numbers = {name: number for number, name in enumerate(self._topics, 1)}
        self._memory = mmap.mmap(-1, _OWNER + 8 * (_HEAD + _WORDS * threads))
        self._words = memoryview(self._memory)[_OWNER:].cast("Q")

    # --- the process

    @property
    def owner(self) -> str:
        """The owner id of the child's dispatcher; empty before it has one."""
        return self._memory[:_OWNER].rstrip(b"\0").decode()

    @owner.setter
    def owner(self, owner: str) -> None:
        self._memory[:_OWNER] = owner.encode().ljust(_OWNER, b"\0")

    def beat(self, processed: int, is_ready: bool) -> None:
        """Note that the process makes progress, and how far it is."""
        self._words[_PROCESSED] = processed
        self._words[_READY] = is_ready
        self._words[_BEAT] = time.monotonic_ns()

    @property
    def beaten(self) -> int:
        """Another number after each beat; 0 before the first."""
        return self._words[_BEAT]

    @property
    def processed(self) -> int:
        """Deliveries settled up to the last beat."""
        return self._words[_PROCESSED]

    @property
    def is_ready(self) -> bool:
        """Whether the child had its slots at the last beat."""
        return bool(self._words[_READY])

    # --- its threads

    def begin(self, thread: int, topic: str, slot: int, receipt: int) -> None:
        """Note with which delivery ``thread`` begins; none of its messages runs yet."""
        at = _HEAD + thread * _WORDS
        self._words[at + 3] = 0
        self._words[at] = self._numbers[topic]
        self._words[at + 1] = slot
        self._words[at + 2] = receipt
        self._words[at + 4] = 0
        self._words[at + 3] = 1

    def running_of(self, thread: int) -> memoryview:
        """Return one word: CRC-32 + 1 of the message that ``thread`` is about to run is to be put there."""
        at = _HEAD + thread * _WORDS + 4
        return self._words[at : at + 1]

    def run(self, thread: int, members: list[bytes]) -> None:
        """Note the messages that are about to run in one call."""
        at = _HEAD + thread * _WORDS + 3
        self._words[at] = 0
        self._words[at + 1 : at + 1 + len(members)] = memoryview(
            array("Q", [crc32(member) + 1 for member in members])
        )
        self._words[at] = len(members)

    def end(self, thread: int) -> None:
        """Note that ``thread`` runs nothing."""
        self._words[_HEAD + thread * _WORDS + 3] = 0

    def running(self) -> set[Running]:
        """Return what was running when the last note was made."""
        found = set()
        for at in range(_HEAD, len(self._words), _WORDS):
            topic, slot, receipt, count = self._words[at : at + 4]
            for crc in self._words[at + 4 : at + 4 + count]:
                if crc:
                    found.add(Running(self._topics[topic - 1], slot, receipt, crc - 1))
        return found

    def clear(self) -> None:
        """Forget everything: a new child begins."""
        self.token = uuid4().hex
        self._memory[:] = bytes(len(self._memory))


def give_back(broker: Broker, topics: Sequence[Topic], notes: Notes) -> int:
    """Release what a dead worker held but had not begun; return how many messages.

    What ran is left to its time-out, for it may be what killed the process. Topics without a gate keep no
    record of who holds what: there the time-out does it. Raises ``ServerTrouble``.
    """
    owner, running = notes.owner, notes.running()
    released = 0
    end = time.monotonic() + GIVE_BACK_SECONDS
    for topic in topics if owner else ():
        if not topic.serial:
            continue
        for start in range(0, topic.slots, _AT_ONCE):
            if time.monotonic() > end:
                return released
            released += _give_back_of(
                broker, topic, range(start, min(start + _AT_ONCE, topic.slots)), owner, running
            )
    return released


def _give_back_of(broker: Broker, topic: Topic, slots: range, owner: str, running: set[Running]) -> int:
    asking, releasing = broker.pipeline(), broker.pipeline()
    for slot in slots:
        asking.held(topic, slot, owner, 0, BATCH)
    for slot, first in zip(slots, asking.execute(), strict=True):
        if isinstance(first, RmqError) or not first:
            continue
        held = page = first
        while len(page) == BATCH:
            page = broker.held(topic, slot, owner, len(held), BATCH) or []
            held = [*held, *page]
        by_receipt: dict[int, list[bytes]] = {}
        for thing in held:
            member = thing.delivery.member
            if Running(topic.name, slot, thing.receipt, crc32(member)) not in running:
                by_receipt.setdefault(thing.receipt, []).append(member)
        for receipt, members in by_receipt.items():
            for start in range(0, len(members), BATCH):
                releasing.release(topic, slot, receipt, members[start : start + BATCH])
    if not len(releasing):
        return 0
    return sum(words.count("ok") for words in releasing.execute() if not isinstance(words, RmqError))
