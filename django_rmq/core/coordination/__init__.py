"""Coordination: decides which worker owns which slots, and informs each worker of the slots that it gains and loses.

A coordinator only balances. Redis ensures that the messages of a serial slot are consumed one after the other (the gate in
``prepare``), so two workers that both believe for a while that they own a slot do no harm. The worker that loses a slot is
informed. The worker that gains it may begin at once, and is answered busy until the messages of the other one are no longer in
flight.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from django_rmq.core.coordination.assignment import TopicSlots, WorkerCapacity
from django_rmq.core.model.topic import Topic

Slots = Iterable[tuple[str, int]]
"""Pairs of a topic's name and a slot, as the dispatcher takes them."""

Owned = dict[str, tuple[range, ...]]
"""Topic -> its owned slots, as ranges in order, so that 2**20 slots are not 2**20 pairs."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One process that takes slots. ``id`` is a new UUID for every start of a process, never configured."""

    id: str
    host: str
    pid: int
    started: float
    """Seconds since the epoch, by the worker's clock."""
    threads: int
    topics: tuple[TopicSlots, ...]
    full: frozenset[str] = frozenset()
    """Topics for which this worker has had no free thread for long."""

    @property
    def capacity(self) -> WorkerCapacity:
        """The values that matter when slots are assigned."""
        return WorkerCapacity(
            self.id, self.threads, frozenset(topic.name for topic in self.topics), self.full
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the other workers see it."""

    worker: Worker
    session_left: float
    """Seconds until the worker counts as gone if it stays silent; infinity if sessions do not end."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Slots ``start`` to ``stop - 1`` of a topic and their owner."""

    topic: str
    start: int
    stop: int
    worker: str
    since: float
    """When they were assigned to this worker, in seconds since the epoch, by the clock of Redis or of the
    worker that assigned them."""


class Coordinator(ABC):
    """Informs one worker which slots are its own.

    ``own`` and ``disown`` are called with slots gained and lost, from one thread of the coordinator, never
    both at once, never for a slot that is (or is not) owned already. They may take their time and may be
    called with many slots in several parts. Topics that are not serial are owned as a whole from ``start`` to
    ``stop``, even if other workers serve them too. Make a coordinator after the last fork.
    """

    @abstractmethod
    def start(self) -> None:
        """Join.

        Raises ``ConfigurationError`` if another worker has this id, ``ServerTrouble`` if the server does not
        answer.
        """

    @abstractmethod
    def stop(self, timeout: float = 2.0) -> None:
        """Disown everything and leave, so that other workers take over at once. Returns within ``timeout`` seconds."""

    @abstractmethod
    def announce(self, topics: Iterable[Topic]) -> None:
        """Inform the other workers that this worker now serves these topics."""

    def note_full(self, topics: frozenset[str]) -> None:  # noqa: B027 - a coordinator may keep slots where they are
        """Let workers with free threads own the slots of these topics, for which this worker has none. Call it repeatedly.

        By default nothing happens.
        """

    @abstractmethod
    def wait_settled(self, timeout: float) -> bool:
        """Return whether, within ``timeout`` seconds, everything was assigned to the known members and passed to the worker."""

    @abstractmethod
    def owned(self) -> Owned:
        """Return the slots passed to ``own`` and not yet to ``disown``."""

    def is_alive(self) -> bool:
        """Return whether the required threads are running. By default there are none."""
        return True

    def revive(self) -> None:  # noqa: B027 - a coordinator without threads has none to replace
        """Replace threads that have died. Raises ``RuntimeError`` or ``MemoryError`` if none can be started."""

    def confirmed(self) -> float:
        """Return the ``uptime`` of the last request for the assignment whose answer was passed on in full.

        Minus infinity if it is unknown, or if a part of the answer is not passed on yet.
        """
        return float("-inf")

    @abstractmethod
    def members(self) -> list[Member]:
        """Return all workers, by id. Raises ``ServerTrouble`` if they are unknown."""


def topic_slots(topics: Iterable[Topic]) -> tuple[TopicSlots, ...]:
    """Return the part of ``topics`` that matters when slots are assigned."""
    return tuple(sorted(TopicSlots(topic.name, topic.slots, topic.serial) for topic in topics))


def pairs(owned: Owned) -> Iterator[tuple[str, int]]:
    """Yield every (topic, slot)."""
    return ((topic, slot) for topic, ranges in owned.items() for part in ranges for slot in part)


@dataclass(slots=True)
class StaticCoordinator(Coordinator):
    """Gives every slot to the only worker: for a single process, and for tests."""

    worker: Worker
    own: Callable[[Slots], None]
    disown: Callable[[Slots], None]
    _is_started: bool = field(default=False, init=False)
    _owned: Owned = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def start(self) -> None:
        with self._lock:
            self._is_started = True
            self._move(_whole(self.worker.topics))

    def stop(self, timeout: float = 2.0) -> None:
        with self._lock:
            self._is_started = False
            self._move({})

    def announce(self, topics: Iterable[Topic]) -> None:
        with self._lock:
            self.worker = replace(self.worker, topics=topic_slots(topics))
            # A worker that served nothing for a while owns nothing, and is started all the same.
            if self._is_started:
                self._move(_whole(self.worker.topics))

    def wait_settled(self, timeout: float) -> bool:
        return self._is_started or not self.worker.topics

    def owned(self) -> Owned:
        return dict(self._owned)

    def members(self) -> list[Member]:
        return [Member(self.worker, float("inf"))]

    def _move(self, wanted: Owned) -> None:
        lost, gained = less(self._owned, wanted), less(wanted, self._owned)
        self._owned = wanted
        if lost:
            self.disown(pairs(lost))
        if gained:
            self.own(pairs(gained))


def _whole(topics: Iterable[TopicSlots]) -> Owned:
    return {topic.name: (range(topic.slots),) for topic in topics}


def less(these: Owned, those: Owned) -> Owned:
    """Return the slots in ``these`` that are not in ``those``."""
    rest: Owned = {}
    for topic, ranges in these.items():
        difference = tuple(_less(ranges, those.get(topic, ())))
        if difference:
            rest[topic] = difference
    return rest


def _less(ranges: Sequence[range], others: Sequence[range]) -> Iterator[range]:
    i = 0
    for part in ranges:
        at = part.start
        while i < len(others) and others[i].stop <= at:
            i += 1
        j = i
        while j < len(others) and others[j].start < part.stop:
            if at < others[j].start:
                yield range(at, others[j].start)
            at = max(at, others[j].stop)
            j += 1
        if at < part.stop:
            yield range(at, part.stop)
