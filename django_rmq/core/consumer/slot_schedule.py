"""The slots of a worker: the state of each, when it is due next, and which of them another worker has acquired.

Usually the coordinator soon takes a slot away that another worker has acquired. If it does not, the slot belongs to this
worker again, and no other worker will ask for its messages. This module sends no commands that change a slot; acquiring
and fetching are the parts of ``slot_acquisition`` and ``fetch``.
"""

from __future__ import annotations

import heapq
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from django_rmq.core.commands import fetch
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.limits import NEVER
from django_rmq.core.model.topic import Topic

uptime = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Return seconds on a clock that also counts while the machine is suspended."""


class ServerClock:
    """An estimate of the clock of Redis. Each reading bounds the difference, and readings that agree narrow it."""

    def __init__(self) -> None:
        self._low = self._high = 0.0

    def note(self, before: float, server_ms: int, after: float) -> None:
        """Add an answer of TIME (truncated to ms), read between two instants of ``time.monotonic``."""
        low, high = server_ms - after * 1000, server_ms + 1 - before * 1000
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:
            # This is the first reading, or one of the clocks was set or has drifted since.
            self._low, self._high = low, high

    def ms(self) -> float:
        return time.monotonic() * 1000 + (self._low + self._high) / 2


_AWAKE, _ASSIGNED, _ASLEEP = 0, 1, 2
"""States of a slot. AWAKE: it has an object, or belongs to another worker. TOLD: owned and to be acquired.
ASLEEP: acquired and empty."""


class SlotState:
    """One slot as the dispatcher sees it: owned by this worker, or given up while something of it is still in flight."""

    __slots__ = (
        "acquired",
        "again",
        "asked",
        "away",
        "batches",
        "blocked_by",
        "cursor",
        "due",
        "entry",
        "epoch",
        "expected",
        "fenced_at",
        "home",
        "not_before",
        "owned",
        "recalled",
        "shut_until",
        "sleeping_until",
        "slot",
        "thread",
        "topic",
        "uncertain",
        "untaken_since",
    )

    def __init__(self, topic: Topic, slot: int, thread: int) -> None:
        self.topic = topic
        self.slot = slot
        self.home = thread
        """Serial topics: the index of the thread that works on this slot unless it is taken."""
        self.thread = thread
        """Serial topics: the index of the one thread that works on this slot while anything of it is in flight."""
        self.owned = True
        self.acquired = False
        """Whether its epoch belongs to this worker. Nothing is prepared otherwise."""
        self.epoch: int | None = None
        self.uncertain = False
        """Whether a prepare of this worker may have run without its answer having arrived."""
        self.expected: int | None = None
        """How many messages the next prepare is expected to return; None before the first one."""
        self.asked = False
        """Whether a prepare of the slot is under way."""
        self.again = False
        """Whether the slot became ready meanwhile; then it is asked again when that prepare is answered."""
        self.recalled = False
        """Whether the messages of that prepare are given back, because the slot was lost or paused meanwhile."""
        self.fenced_at = 0.0
        """The ``uptime`` at which this worker learned that another owner has acquired it; 0 if the slot is not fenced."""
        self.untaken_since: float | None = None
        """The monotonic time since which messages are due in a fenced slot and no worker takes them; else None."""
        self.due = 0.0
        """Server time in ms at which to prepare; infinity if nothing is known to wait."""
        self.entry = 0
        """The number of its valid entry in the heap; 0 if it has none."""
        self.not_before = 0.0
        """Monotonic time before which a busy or paused slot is not asked again, unless it is woken."""
        self.sleeping_until: int | None = None
        """The ms until which Redis wakes this worker if anything can be taken, although it has messages in flight here."""
        self.shut_until = 0.0
        """Monotonic time until which a failing slot is left alone."""
        self.away = False
        """Whether it is left alone because its node does not answer."""
        self.batches = 0
        self.blocked_by: Any = None
        """The batch whose listener exceeded MAX_RUNTIME and has not returned."""
        self.cursor: tuple[str, bytes] | None = None
        """Where prepare continues after members that are in flight."""

    @property
    def key(self) -> tuple[str, int]:
        return self.topic.name, self.slot

    @property
    def is_at_rest(self) -> bool:
        """Whether its epoch is all that is known about it."""
        return (
            self.due == float("inf")
            and self.owned
            and self.acquired
            and not (self.asked or self.again)
            and not (self.batches or self.uncertain or self.fenced_at or self.blocked_by or self.shut_until)
        )


class SlotTable:
    """All slots that this worker owns, by (topic, slot), and those given up of which something is still in flight."""

    def __init__(self, topics: Mapping[str, Topic], threads: int, overlapping: Container[str] = ()) -> None:
        self.awake: dict[tuple[str, int], SlotState] = {}
        self.slots_of_thread = [0] * (threads + 1)
        """How many awake slots each thread works on, and the event loop behind them."""
        self._threads = range(threads)
        self._overlapping = overlapping
        """Topics whose slots belong to the event loop."""
        self.topics = topics
        self.blocked: set[SlotState] = set()
        """Slots that are shut because a listener that exceeded MAX_RUNTIME has not returned in them."""
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

    def get(self, topic: str, slot: int) -> SlotState | None:
        """Return a slot, and make it awake; None if it is not owned, or is still to be acquired."""
        state = self.awake.get((topic, slot))
        if state is None and 0 <= slot < len(self._states[topic]) and self._states[topic][slot] == _ASLEEP:
            self._sleeping -= 1
            state = self.add(topic, slot)
            state.acquired, state.due = True, float("inf")
            epoch = self._epochs[topic][slot]
            state.epoch = epoch if epoch >= 0 else None
        return state

    def add(self, topic: str, slot: int) -> SlotState:
        """Return a new object for an owned slot."""
        self._states[topic][slot] = _AWAKE
        is_in_loop = topic in self._overlapping
        thread = (
            len(self._threads) if is_in_loop else min(self._threads, key=self.slots_of_thread.__getitem__)
        )
        self.slots_of_thread[thread] += 1
        state = self.awake[topic, slot] = SlotState(self.topics[topic], slot, thread)
        return state

    def lull(self, state: SlotState) -> None:
        """Let a slot at rest fall asleep."""
        # Only this object knows the new slot count of a re-slotted topic, so such a slot stays awake.
        if state.topic is self.topics[state.topic.name] and self.awake.get(state.key) is state:
            self.drop(state)
            self.sleep(state.topic.name, state.slot, state.epoch)

    def drop(self, state: SlotState) -> None:
        """Forget the object of a slot."""
        if self.awake.pop(state.key, None) is not None:
            self.slots_of_thread[state.home] -= 1

    def forget(self, state: SlotState) -> None:
        """Drop a slot that is no longer owned once nothing of it is in flight; until then its thread must not change."""
        if not (state.owned or state.batches or state.uncertain or state.asked):
            self.drop(state)

    def move(self, state: SlotState, thread: int) -> None:
        """Give a slot to another thread for good."""
        self.slots_of_thread[state.home] -= 1
        self.slots_of_thread[thread] += 1
        state.home = state.thread = thread

    def block(self, state: SlotState, batch: object) -> None:
        """Shut a slot until the listener of ``batch`` returns."""
        state.blocked_by = batch
        self.blocked.add(state)

    def unblock(self, state: SlotState) -> None:
        """Open a slot again."""
        state.blocked_by = None
        self.blocked.discard(state)

    def sleep(self, topic: str, slot: int, epoch: int | None) -> None:
        """Record a slot that was acquired and is empty."""
        self._states[topic][slot] = _ASLEEP
        self._epochs[topic][slot] = -1 if epoch is None else epoch
        self._sleeping += 1

    # --- many slots

    def assign(self, topic: str, slots: array[int]) -> list[SlotState]:
        """Record slots as owned, to be acquired in this order; return the slots that have an object already."""
        states = self._states[topic]
        if (beyond := max(slots, default=0) + 1 - len(states)) > 0:
            # The topic was re-slotted, and has more slots than when this table was made.
            states.extend(bytes(beyond))
            self._epochs[topic].extend([0] * beyond)
        known: list[SlotState] = []
        fresh = array("q")
        for slot in slots:
            state = self.awake.get((topic, slot)) if self.awake else None
            if state is not None:
                known.append(state)
            elif states[slot] == _AWAKE:
                states[slot] = _ASSIGNED
                fresh.append(slot)
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
            # Each slot only once: it may have been lost and assigned again meanwhile.
            wanted = [slot for slot in dict.fromkeys(slots[:count]) if states[slot] == _ASSIGNED]
            count -= len(wanted)
            if wanted:
                taken.append((topic, wanted))
        return taken

    def put_back(self, taken: Iterable[tuple[str, list[int]]]) -> None:
        """Record that slots which were taken are still to be acquired."""
        self._unacquired.extendleft((topic, array("q", slots)) for topic, slots in taken)

    def lose(self, topic: str, slot: int) -> SlotState | None:
        """Record that a slot is no longer owned; return its object, if it has one, because that must be ended first."""
        state = self.awake.get((topic, slot))
        states = self._states[topic]
        if state is None and slot < len(states):
            self._sleeping -= states[slot] == _ASLEEP
            states[slot] = _AWAKE
        return state

    def lose_all(self) -> list[SlotState]:
        """Record that no slot is owned any more; return the slots that have an object."""
        for name, states in self._states.items():
            self._states[name] = bytearray(len(states))
        self._unacquired.clear()
        self._sleeping = 0
        return list(self.awake.values())

    def round(self) -> Iterator[tuple[str, int, SlotState | None]]:
        """Yield every slot once, with its object if it has one at that moment."""
        for topic, slot in list(self.awake):
            # A round takes several polls, and slots come and go in between.
            state = self.awake.get((topic, slot))
            if state is not None:
                yield topic, slot, state
        for topic in self.topics:
            slot = self._states[topic].find(_ASLEEP)
            while slot >= 0:
                yield topic, slot, None
                slot = self._states[topic].find(_ASLEEP, slot + 1)


ENDING_MS = 100
"""A slot whose busy time ended up to this many ms ago is asked again at once, because clocks are read in
milliseconds."""


class SlotSchedule:
    """The schedule of one worker: when to prepare which slot. ``depth`` returns how many batches of one may be in flight."""

    def __init__(
        self,
        table: SlotTable,
        depth: Callable[[SlotState], int],
        poll_seconds: float,
        *,
        asks_always: bool = False,
    ) -> None:
        self.clock = ServerClock()
        self.asks_always = asks_always
        """Whether a slot is prepared after each batch: a burst ends when nothing can be taken, and waits for no wake-up."""
        self.waiting: dict[SlotState, None] = {}
        """Due slots, to be prepared as soon as their thread has room."""
        self.parked: defaultdict[str, dict[SlotState, None]] = defaultdict(dict)
        """Topic -> its due slots that wait until the topic's limits leave room."""
        self._table = table
        self._depth = depth
        self._poll_seconds = poll_seconds
        self._heap: list[tuple[float, int, SlotState]] = []
        self._entries = count(1)

    def ready(self, state: SlotState) -> None:
        """Prepare ``state`` as soon as possible.

        A slot that will become ready by itself is left out: when it is acquired, or when one of its batches
        ends.
        """
        state.due = 0.0
        state.entry = 0
        state.sleeping_until = None
        if state.asked:
            # The prepare under way may have run before the message arrived, so the slot is asked once more after it.
            state.again = True
            return
        if not (state.owned and state.acquired) or state.blocked_by or state.batches >= self._depth(state):
            return
        rest = max(state.not_before, state.shut_until)
        if rest and rest > (now := time.monotonic()):
            self.waiting.pop(state, None)
            self.look_at(state, self.clock.ms() + (rest - now) * 1000)
        else:
            self.waiting[state] = None

    def wake(self, state: SlotState) -> None:
        """Prepare ``state`` as soon as possible, or when the batch ends whose prepare has left nothing."""
        if state.sleeping_until is not None and state.batches and state.topic.serial:
            # Asked now, Redis would return one message. Until the batch ends there may be many.
            state.sleeping_until = None
        else:
            self.ready(state)

    def batch_ended(self, state: SlotState) -> None:
        """Prepare ``state`` in the round trip that settles its batch, unless Redis wakes this worker if anything can be taken."""
        until = state.sleeping_until
        if until is None or self.asks_always:
            self.ready(state)
        elif not state.batches:
            self.look_at(state, until if until < NEVER else None)

    def look_at(self, state: SlotState, due: float | None) -> None:
        """Check ``state`` when the server's clock shows ``due``, which is None if nothing is waiting."""
        if due is None or not state.owned:
            state.due, state.entry = float("inf"), 0
            return
        state.due, state.entry = due, next(self._entries)
        heapq.heappush(self._heap, (due, state.entry, state))
        # Earlier entries of a slot stay in the heap and no longer count. They are removed when there are too many.
        if len(self._heap) > 2 * len(self._table.awake) + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def collect_due(self) -> None:
        """Make those slots ready whose time has come."""
        now = self.clock.ms()
        while self._heap and self._heap[0][0] <= now:
            _, entry, state = heapq.heappop(self._heap)
            # Otherwise the slot has got another due time since.
            if entry == state.entry:
                self.ready(state)

    def due(self, now: float) -> float:
        """Return the monotonic time at which the first slot of the heap is due."""
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        return now + (self._heap[0][0] - self.clock.ms()) / 1000 if self._heap else float("inf")

    # --- slots that must not be asked now

    def pause(self, state: SlotState, due: float | None, *, is_paused: bool) -> None:
        """Ask a busy or paused slot later.

        A wake-up or a time-out ends the wait; if they are lost, the slow poll asks again.
        """
        if is_paused:
            state.not_before = time.monotonic() + 10 * self._poll_seconds
        elif due is None or due <= (now := self.clock.ms()):
            # A time that ends just now has ended by the local clock, but not yet by the server's.
            is_ending = due is not None and due > now - ENDING_MS
            state.not_before = time.monotonic() + (0.01 if is_ending else self._poll_seconds)
        self.look_at(state, due)

    def shut(self, state: SlotState, seconds: float) -> None:
        """Leave a slot alone for a while."""
        state.shut_until = time.monotonic() + seconds
        self.waiting.pop(state, None)
        self.look_at(state, self.clock.ms() + seconds * 1000)

    def park(self, state: SlotState) -> None:
        """Set a waiting slot aside until its topic's limits leave room."""
        del self.waiting[state]
        self.parked[state.topic.name][state] = None

    def drop(self, state: SlotState) -> None:
        """Stop asking a slot."""
        state.entry = 0
        self.waiting.pop(state, None)
        self.parked[state.topic.name].pop(state, None)


LOOK_SECONDS = 0.25
"""Seconds between two checks whether the coordinator has confirmed that a fenced slot belongs to this worker."""


class FencedSlots:
    """The fenced slots of the worker ``owner``.

    ``confirmed`` returns the ``uptime`` at which the coordinator last asked for the assignment whose result
    this worker has received; minus infinity if unknown. The worker that fenced this one acted on an earlier
    assignment. So a slot that the answer to a later question still assigns to this worker belongs to it
    again.
    """

    def __init__(self, broker: Broker, owner: str, confirmed: Callable[[], float]) -> None:
        self.confirmed = confirmed
        self._broker = broker
        self._owner = owner
        self._slots: set[SlotState] = set()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, state: SlotState) -> None:
        """Record that a prepare of a slot was just answered ``fenced``."""
        state.fenced_at, state.untaken_since = uptime(), None
        self._slots.add(state)

    def remove(self, state: SlotState) -> None:
        """Record that a slot is no longer this worker's, or is to be acquired again."""
        state.fenced_at = 0.0
        self._slots.discard(state)

    def ours_at(self, confirmed: float) -> list[SlotState]:
        """Return the slots that are still this worker's by an answer to a question asked at ``confirmed``."""
        # rule: stays_away_from_its_own
        return [state for state in self._slots if state.fenced_at < confirmed]

    def left_alone(self, untaken: Sequence[SlotState]) -> Iterator[SlotState]:
        """Yield the slots of ``untaken``, in which messages are due, from which nobody has taken for the
        length of a time-out.

        This is used while the coordinator cannot say which worker owns a slot.
        """
        calls = [fetch.held(state.topic, state.slot, self._owner, 0, 1) for state in untaken]
        now = time.monotonic()
        for state, held in zip(untaken, run_all(self._broker, calls), strict=True):
            # Someone has messages of the slot in flight, or Redis could not say whether anyone has.
            if held != []:
                state.untaken_since = None
            elif state.untaken_since is None:
                state.untaken_since = now
            elif now - state.untaken_since > state.topic.timeout:
                yield state
