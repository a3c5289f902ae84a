"""The slots of a worker: ``SlotTable`` has the record of each, with its state, and ``SlotSchedule`` when it is asked next.

This module sends no commands. ``slot_acquisition`` acquires slots, and decides what becomes of one that another worker has
acquired. ``fetch_planner`` fetches from the slots that are due.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from django_rmq.core.clock import ServerClock
from django_rmq.core.model.bounds import NEVER
from django_rmq.core.model.topic import Topic


class SlotState(Enum):
    """What this worker may do with a slot that has a record. The owner of the state is ``SlotAcquirer``."""

    ASSIGNED = "assigned"
    """The slot is assigned to this worker, which has to acquire it before it fetches."""
    ACQUIRED = "acquired"
    """The epoch of the slot is this worker's. Only in this state is anything fetched."""
    FENCED = "fenced"
    """Another worker has acquired the slot since, although it is assigned to this one."""
    UNCERTAIN = "uncertain"
    """The reply of a fetch was lost. Redis is asked what it delivered, and the slot is acquired again."""
    DISOWNED = "disowned"
    """The slot is assigned to this worker no more. The record stays until nothing of the slot is in flight."""
    DISOWNED_UNCERTAIN = "disowned, uncertain"
    """The same, and Redis is still asked what a lost reply delivered, so that it can be given back."""


class FetchState(Enum):
    """Where the fetch of a slot is. It is independent of ``SlotState``: a slot may be disowned during a fetch."""

    IDLE = "idle"
    UNDER_WAY = "under way"
    """A prepare was sent and is not answered. A slot has at most one; the owner of this step is ``RoundTrips``."""
    RECALLED = "recalled"
    """The messages that it returns are given back, because the slot was disowned, paused or blocked meanwhile."""


SLOT_TRANSITIONS = {
    SlotState.ASSIGNED: {SlotState.ACQUIRED, SlotState.UNCERTAIN, SlotState.DISOWNED},
    SlotState.ACQUIRED: {SlotState.FENCED, SlotState.UNCERTAIN, SlotState.DISOWNED},
    SlotState.FENCED: {SlotState.ASSIGNED, SlotState.DISOWNED},
    SlotState.UNCERTAIN: {SlotState.ACQUIRED, SlotState.DISOWNED_UNCERTAIN},
    SlotState.DISOWNED: {SlotState.ASSIGNED, SlotState.DISOWNED_UNCERTAIN},
    SlotState.DISOWNED_UNCERTAIN: {SlotState.UNCERTAIN, SlotState.DISOWNED},
}
"""The legal transitions. A record begins as ASSIGNED, or as ACQUIRED if its slot was asleep."""

FETCH_TRANSITIONS = {
    FetchState.IDLE: {FetchState.UNDER_WAY},
    FetchState.UNDER_WAY: {FetchState.RECALLED, FetchState.IDLE},
    FetchState.RECALLED: {FetchState.IDLE},
}


@dataclass(slots=True, eq=False)
class ConsumedSlot:
    """The record of one slot: assigned to this worker, or disowned while something of it is still in flight.

    ``SlotTable`` makes and drops records, and sets ``blocked_by`` and ``home``. ``SlotAcquirer`` and ``FencedSlots`` set the
    state, ``InFlight`` ``batches``, and ``Capacity`` ``thread`` and ``expected``. ``SlotSchedule`` sets the times. The fetch sets
    ``cursor``, ``has_asked`` and ``sole_receipt``. Two values have several writers. ``SlotSchedule`` sets ``again``, and the
    answer that it waits for clears it. An answer sets ``sleeping_until``; what makes something available clears it:
    ``SlotSchedule`` and ``AckQueue``.
    """

    topic: Topic
    number: int
    thread: int
    """Serial topics: the index of the one thread that works on this slot while anything of it is in flight."""
    state: SlotState = SlotState.ASSIGNED
    home: int = field(init=False)
    """Serial topics: the index of the thread that works on this slot unless it is taken."""
    fetch: FetchState = FetchState.IDLE
    epoch: int | None = None
    again: bool = False
    """Whether the slot became ready during a fetch. Then it is fetched again after the answer."""
    expected: int | None = None
    """How many messages the next prepare is expected to return; None before the first one."""
    fenced_at: float = 0.0
    """The ``uptime`` at which this worker learned that another one has acquired the slot, while it is FENCED."""
    untaken_since: float | None = None
    """The monotonic time since which messages are due in a fenced slot and no worker takes them; else None."""
    due: float = 0.0
    """Server time in ms at which to prepare; infinity if nothing is known to wait."""
    entry: int = 0
    """The number of its valid entry in the heap; 0 if it has none."""
    not_before: float = 0.0
    """Monotonic time before which a busy or paused slot is not fetched, unless it is woken."""
    sleeping_until: int | None = None
    """The ms until which Redis wakes this worker if anything can be taken, although it has messages in flight here."""
    sole_receipt: int = 0
    """The receipt of a delivery that `commit_delivery` may end, because nothing else can be in flight; 0 if there is none."""
    left_alone_until: float = 0.0
    """Monotonic time until which a failing slot is left alone."""
    is_node_away: bool = False
    """Whether it is left alone because its node does not answer."""
    batches: int = 0
    blocked_by: object | None = None
    """The batch whose listener exceeded MAX_RUNTIME and has not returned."""
    has_asked: bool = False
    """Whether Redis was asked what is in flight beside what a prepare returned, since the last messages began."""
    cursor: tuple[str, bytes] | None = None
    """Where prepare continues after members that are in flight."""

    def __post_init__(self) -> None:
        self.home = self.thread

    @property
    def key(self) -> tuple[str, int]:
        return self.topic.name, self.number

    @property
    def is_owned(self) -> bool:
        """Whether the slot is assigned to this worker."""
        return self.state not in (SlotState.DISOWNED, SlotState.DISOWNED_UNCERTAIN)

    @property
    def is_uncertain(self) -> bool:
        """Whether Redis has to be asked what a lost reply delivered."""
        return self.state in (SlotState.UNCERTAIN, SlotState.DISOWNED_UNCERTAIN)

    @property
    def is_at_rest(self) -> bool:
        """Whether its epoch is all that is known about it."""
        return (
            self.due == float("inf")
            and self.state is SlotState.ACQUIRED
            and self.fetch is FetchState.IDLE
            and not (self.again or self.batches or self.blocked_by or self.left_alone_until)
        )

    def change_state(self, state: SlotState) -> None:
        """Make a transition that ``SLOT_TRANSITIONS`` has. The tests check each one; production does not."""
        self.state = state

    def change_fetch(self, fetch: FetchState) -> None:
        """Make a transition that ``FETCH_TRANSITIONS`` has. The tests check each one; production does not."""
        self.fetch = fetch


_AWAKE, _ASSIGNED, _ASLEEP = 0, 1, 2
"""What the table stores of a slot. AWAKE: it has a record, is just being acquired for the first time, or is not assigned to this
worker. ASSIGNED: it is to be acquired. ASLEEP: it was acquired and is empty, so only its epoch is kept."""


class SlotTable:
    """All slots that this worker owns, by (topic, slot), and those given up of which something is still in flight."""

    def __init__(self, topics: Mapping[str, Topic], threads: int, overlapping: Container[str]) -> None:
        self.awake: dict[tuple[str, int], ConsumedSlot] = {}
        self.slots_of_thread = [0] * (threads + 1)
        """How many awake slots each thread works on, and the event loop behind them."""
        self._threads = range(threads)
        self._overlapping = overlapping
        """Topics whose slots belong to the event loop."""
        self.topics = topics
        self.blocked: set[ConsumedSlot] = set()
        """Slots from which nothing is fetched because a listener that exceeded MAX_RUNTIME has not returned in them."""
        self._states = {name: bytearray(topic.slots) for name, topic in topics.items()}
        self._epochs = {name: array("q", bytes(8 * topic.slots)) for name, topic in topics.items()}
        self._sleeping = 0
        self._unacquired: deque[tuple[str, array[int]]] = deque()
        """The slots assigned to this worker, in order; the assignment may have changed since."""

    def __len__(self) -> int:
        """Return the number of slots, without those that are still to be acquired."""
        return len(self.awake) + self._sleeping

    @property
    def has_unacquired(self) -> bool:
        """Whether slots are to be acquired for the first time."""
        return bool(self._unacquired)

    # --- one slot

    def get(self, topic: str, number: int) -> ConsumedSlot | None:
        """Return a slot, and make it awake; None if it is not owned, or is still to be acquired."""
        slot = self.awake.get((topic, number))
        if slot is None and 0 <= number < len(self._states[topic]) and self._states[topic][number] == _ASLEEP:
            self._sleeping -= 1
            slot = self.add(topic, number, SlotState.ACQUIRED)
            slot.due = float("inf")
            epoch = self._epochs[topic][number]
            slot.epoch = epoch if epoch >= 0 else None
        return slot

    def add(self, topic: str, number: int, state: SlotState = SlotState.ASSIGNED) -> ConsumedSlot:
        """Return a new record for an owned slot."""
        self._states[topic][number] = _AWAKE
        is_in_loop = topic in self._overlapping
        thread = (
            len(self._threads) if is_in_loop else min(self._threads, key=self.slots_of_thread.__getitem__)
        )
        self.slots_of_thread[thread] += 1
        slot = self.awake[topic, number] = ConsumedSlot(self.topics[topic], number, thread, state)
        return slot

    def put_to_sleep(self, slot: ConsumedSlot) -> None:
        """Let a slot at rest fall asleep."""
        # Only this object knows the new slot count of a re-slotted topic, so such a slot stays awake.
        if slot.topic is self.topics[slot.topic.name] and self.awake.get(slot.key) is slot:
            self.drop(slot)
            self.sleep(slot.topic.name, slot.number, slot.epoch)

    def drop(self, slot: ConsumedSlot) -> None:
        """Forget the object of a slot."""
        if self.awake.pop(slot.key, None) is not None:
            self.slots_of_thread[slot.home] -= 1

    def forget(self, slot: ConsumedSlot) -> None:
        """Drop a slot that is no longer owned once nothing of it is in flight; until then its thread must not change."""
        if slot.state is SlotState.DISOWNED and not slot.batches and slot.fetch is FetchState.IDLE:
            self.drop(slot)

    def move(self, slot: ConsumedSlot, thread: int) -> None:
        """Give a slot to another thread for good."""
        self.slots_of_thread[slot.home] -= 1
        self.slots_of_thread[thread] += 1
        slot.home = slot.thread = thread

    def block(self, slot: ConsumedSlot, batch: object) -> None:
        """Fetch nothing from a slot until the listener of ``batch`` returns."""
        slot.blocked_by = batch
        self.blocked.add(slot)

    def unblock(self, slot: ConsumedSlot) -> None:
        """Fetch from a slot again, because that listener has returned."""
        slot.blocked_by = None
        self.blocked.discard(slot)

    def sleep(self, topic: str, number: int, epoch: int | None) -> None:
        """Record a slot that was acquired and is empty."""
        self._states[topic][number] = _ASLEEP
        self._epochs[topic][number] = -1 if epoch is None else epoch
        self._sleeping += 1

    # --- many slots

    def assign(self, topic: str, slots: array[int]) -> list[ConsumedSlot]:
        """Record slots as owned, to be acquired in this order; return the slots that have an object already."""
        states = self._states[topic]
        if (beyond := max(slots, default=0) + 1 - len(states)) > 0:
            # The topic was re-slotted, and has more slots than when this table was made.
            states.extend(bytes(beyond))
            self._epochs[topic].extend([0] * beyond)
        known: list[ConsumedSlot] = []
        fresh = array("q")
        for number in slots:
            slot = self.awake.get((topic, number)) if self.awake else None
            if slot is not None:
                known.append(slot)
            elif states[number] == _AWAKE:
                states[number] = _ASSIGNED
                fresh.append(number)
        if fresh:
            self._unacquired.append((topic, fresh))
        return known

    def take(self, count: int) -> list[tuple[str, list[int]]]:
        """Return up to ``count`` slots to acquire, by topic."""
        taken: list[tuple[str, list[int]]] = []
        while self._unacquired and count > 0:
            topic, slots = self._unacquired.popleft()
            if len(slots) > count:
                self._unacquired.appendleft((topic, slots[count:]))
            states = self._states[topic]
            numbers = [number for number in slots[:count] if states[number] == _ASSIGNED]
            for number in numbers:
                # A slot that was lost and assigned again is in the queue twice. With two records it would overlap with itself.
                states[number] = _AWAKE  # rule: takes_a_slot_twice
            count -= len(numbers)
            if numbers:
                taken.append((topic, numbers))
        return taken

    def put_back(self, taken: Iterable[tuple[str, list[int]]]) -> None:
        """Record that slots which were taken are still to be acquired."""
        for topic, slots in taken:
            for number in slots:
                self._states[topic][number] = _ASSIGNED
            self._unacquired.appendleft((topic, array("q", slots)))

    def lose(self, topic: str, number: int) -> ConsumedSlot | None:
        """Record that a slot is no longer owned; return its object, if it has one, because that must be ended first."""
        slot = self.awake.get((topic, number))
        states = self._states[topic]
        if slot is None and number < len(states):
            self._sleeping -= states[number] == _ASLEEP
            states[number] = _AWAKE
        return slot

    def lose_all(self) -> list[ConsumedSlot]:
        """Record that no slot is owned any more; return the slots that have an object."""
        for name, states in self._states.items():
            self._states[name] = bytearray(len(states))
        self._unacquired.clear()
        self._sleeping = 0
        return list(self.awake.values())

    def round(self) -> Iterator[tuple[str, int, ConsumedSlot | None]]:
        """Yield every slot once, with its object if it has one at that moment."""
        for topic, number in list(self.awake):
            # A round takes several polls, and slots come and go in between.
            slot = self.awake.get((topic, number))
            if slot is not None:
                yield topic, number, slot
        for topic in self.topics:
            number = self._states[topic].find(_ASLEEP)
            while number >= 0:
                yield topic, number, None
                number = self._states[topic].find(_ASLEEP, number + 1)


ENDING_MS = 100
"""A slot whose busy time ended up to this many ms ago is asked again at once, because clocks are read in
milliseconds."""


class SlotSchedule:
    """The schedule of one worker: when to prepare which slot. ``depth`` returns how many batches of one may be in flight."""

    def __init__(
        self,
        table: SlotTable,
        depth: Callable[[ConsumedSlot], int],
        poll_seconds: float,
        *,
        asks_always: bool,
    ) -> None:
        self.clock = ServerClock()
        self.asks_always = asks_always
        """Whether a slot is prepared after each batch: a burst ends when nothing can be taken, and waits for no wake-up."""
        self.waiting: dict[ConsumedSlot, None] = {}
        """Due slots, to be prepared as soon as their thread has room."""
        self.parked: defaultdict[str, dict[ConsumedSlot, None]] = defaultdict(dict)
        """Topic -> its due slots that wait until the topic's limits leave room."""
        self._table = table
        self._depth = depth
        self._poll_seconds = poll_seconds
        self._heap: list[tuple[float, int, ConsumedSlot]] = []
        self._entries = count(1)

    def make_ready(self, slot: ConsumedSlot) -> None:
        """Prepare ``slot`` as soon as possible.

        A slot that will become ready by itself is left out: when it is acquired, or when one of its batches
        ends.
        """
        slot.due = 0.0
        slot.entry = 0
        slot.sleeping_until = None
        if slot.fetch is not FetchState.IDLE:
            # The prepare under way may have run before the message arrived, so the slot is fetched once more after it.
            slot.again = True
            return
        if slot.state is not SlotState.ACQUIRED or slot.blocked_by or slot.batches >= self._depth(slot):
            return
        rest = max(slot.not_before, slot.left_alone_until)
        if rest and rest > (now := time.monotonic()):
            self.waiting.pop(slot, None)
            self.set_due(slot, self.clock.ms() + (rest - now) * 1000)
        else:
            self.waiting[slot] = None

    def wake(self, slot: ConsumedSlot) -> None:
        """Prepare ``slot`` as soon as possible, or when the batch ends whose prepare has left nothing."""
        slot.not_before = 0.0
        if slot.sleeping_until is not None and slot.batches and slot.topic.serial:
            # Asked now, Redis would return one message. Until the batch ends there may be many.
            slot.sleeping_until = None
        else:
            self.make_ready(slot)

    def batch_ended(self, slot: ConsumedSlot) -> None:
        """Prepare ``slot`` in the round trip that settles its batch, unless Redis wakes this worker if anything can be taken."""
        until = slot.sleeping_until
        if until is None or self.asks_always:
            self.make_ready(slot)
        elif not slot.batches:
            self.set_due(slot, until if until < NEVER else None)

    def set_due(self, slot: ConsumedSlot, due: float | None) -> None:
        """Check ``slot`` when the server's clock shows ``due``, which is None if nothing is waiting."""
        if due is None or not slot.is_owned:
            slot.due, slot.entry = float("inf"), 0
            return
        slot.due, slot.entry = due, next(self._entries)
        heapq.heappush(self._heap, (due, slot.entry, slot))
        # Earlier entries of a slot stay in the heap and no longer count. They are removed when there are too many.
        if len(self._heap) > 2 * len(self._table.awake) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def collect_due(self) -> None:
        """Make those slots ready whose time has come."""
        now = self.clock.ms()
        while self._heap and self._heap[0][0] <= now:
            _, entry, slot = heapq.heappop(self._heap)
            # Otherwise the slot has got another due time since.
            if entry == slot.entry:
                self.make_ready(slot)

    def due(self, now: float) -> float:
        """Return the monotonic time at which the first slot of the heap is due."""
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        return now + (self._heap[0][0] - self.clock.ms()) / 1000 if self._heap else float("inf")

    # --- slots that must not be asked now

    def pause(self, slot: ConsumedSlot, due: float | None, *, is_paused: bool) -> None:
        """Ask a busy or paused slot later.

        A wake-up or a time-out ends the wait; if they are lost, the slow poll asks again.
        """
        if is_paused:
            slot.not_before = time.monotonic() + 10 * self._poll_seconds
        elif due is None or due <= (now := self.clock.ms()):
            # A time that ends just now has ended by the local clock, but not yet by the server's.
            is_ending = due is not None and due > now - ENDING_MS
            slot.not_before = time.monotonic() + (0.01 if is_ending else self._poll_seconds)
        self.set_due(slot, due)

    def rest_until(self, slot: ConsumedSlot, seconds: float) -> None:
        """Leave a slot alone until this monotonic time, unless it is woken."""
        slot.not_before = seconds

    def end_rests(self) -> None:
        """Let the slots be fetched that wait until they are woken, because wake-ups may have been lost."""
        for slot in self._table.awake.values():
            slot.not_before = 0.0

    def reset(self, slot: ConsumedSlot) -> None:
        """Forget when a slot was to be fetched, because it returns to this worker."""
        slot.due = slot.not_before = 0.0
        self.use_again(slot)

    def count_as_due(self, slot: ConsumedSlot) -> None:
        """Count a slot as due that cannot be fetched before it is acquired."""
        slot.due, slot.entry = 0.0, 0

    def leave_alone(self, slot: ConsumedSlot, seconds: float, *, is_node_away: bool = False) -> None:
        """Leave a failing slot alone for a while. ``is_node_away``: because its node does not answer."""
        slot.left_alone_until, slot.is_node_away = time.monotonic() + seconds, is_node_away
        self.waiting.pop(slot, None)
        self.set_due(slot, self.clock.ms() + seconds * 1000)

    def use_again(self, slot: ConsumedSlot) -> None:
        """Fetch from a slot again that was left alone, because Redis has answered for it."""
        slot.left_alone_until, slot.is_node_away = 0.0, False

    def is_queued(self, slot: ConsumedSlot) -> bool:
        """Return whether ``slot`` waits for its fetch, or for the limits of its topic. It may do both at once."""
        return slot in self.waiting or slot in self.parked[slot.topic.name]

    def park(self, slot: ConsumedSlot) -> None:
        """Set a waiting slot aside until its topic's limits leave room."""
        del self.waiting[slot]
        self.parked[slot.topic.name][slot] = None

    def remove(self, slot: ConsumedSlot) -> None:
        """Stop asking a slot."""
        slot.entry = 0
        self.waiting.pop(slot, None)
        self.parked[slot.topic.name].pop(slot, None)
