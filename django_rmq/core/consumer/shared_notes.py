"""The notes of a worker process in shared memory, which outlives it: its id, its beats, its end, and which messages run.

Each thread records when it begins a message and when it has done it. The parent reads this after a sudden death, and
``worker_processes.crash_recovery`` settles the messages.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections import deque
from collections.abc import Sequence
from uuid import uuid4

_OWNER = 32
_BEAT, _PROCESSED, _READY, _USED, _END, _CHARGED, _STOP, _HEAD = 0, 1, 2, 3, 4, 5, 6, 7
"""Words of eight bytes before the marks of the threads."""

MARKS = 32_768
"""The number of messages of a thread whose beginning is remembered: more than the unsettled messages of a process."""


CHARGES = 2_048
"""The maximum number of messages that are charged because their listener exceeded HARD_TIMEOUT."""

SPARE = 64
"""The number of threads, beyond the worker's own, that can record what they run: successors of those that
hang. Unused parts take no memory."""


def mark_of(topic: str, slot: int, receipt: int, member: bytes) -> int:
    """Return the 64 bits that identify a delivery, by a secret that a process shares with those that it forks."""
    return hash(member) ^ hash((topic, slot, receipt))


BEGUN, DONE = 1, 2
"""The states of a message that a thread records. BEGUN: it is about to run. DONE: its listener has returned
and it is to be committed."""


class ThreadNotes:
    """The memory in which one thread records messages as begun and done; the oldest entry is overwritten."""

    __slots__ = ("_at", "_marks", "states")

    def __init__(self, marks: memoryview, states: memoryview) -> None:
        self._marks = marks
        self.states = states
        self._at = 0

    def put(self, place: int, topic: str, slot: int, receipt: int, member: bytes) -> None:
        """Record at ``place`` which message is next there, as not begun."""
        # The state is cleared first: if the process is killed in between, the new message does not have the state of the old
        # one.
        self.states[place] = 0
        self._marks[place] = mark_of(topic, slot, receipt, member)

    def take(self, topic: str, slot: int, receipt: int, members: Sequence[bytes]) -> memoryview:
        """Record which messages are next; return a byte for each, in which to put ``BEGUN`` and ``DONE``."""
        at, count, delivery = self._at, len(members), hash((topic, slot, receipt))
        if at + count > MARKS:
            at = 0
        self._at = at + count
        states = self.states[at : at + count]
        # The states are cleared before the marks change, because the process may be killed in between.
        states[:] = bytes(count)
        self._marks[at : at + count] = memoryview(array("q", [hash(member) ^ delivery for member in members]))
        return states


class SharedNotes:
    """Shared memory that a child writes and its parent reads. Create it before the fork."""

    def __init__(self, threads: int) -> None:
        self.token = uuid4().hex
        """A token known to parent and child, with which the parent can end the child's session."""
        threads += SPARE
        words, marks = _OWNER + 8 * _HEAD, MARKS * threads
        head = words + 8 * CHARGES
        self._memory = mmap.mmap(-1, head + 9 * marks)
        whole = memoryview(self._memory)
        self._words = whole[_OWNER:words].cast("Q")
        self._charged = whole[words:head].cast("q")
        self._marks = whole[head : head + 8 * marks].cast("q")
        self._states = whole[head + 8 * marks :]
        parts = [slice(i * MARKS, (i + 1) * MARKS) for i in range(threads)]
        self._threads = [ThreadNotes(self._marks[part], self._states[part]) for part in parts]

    # --- the process

    @property
    def owner(self) -> str:
        """The owner id of the child's dispatcher; empty before it has one."""
        return self._memory[:_OWNER].rstrip(b"\0").decode()

    @owner.setter
    def owner(self, owner: str) -> None:
        self._memory[:_OWNER] = owner.encode().ljust(_OWNER, b"\0")

    def unready(self) -> None:
        """Record that the process is not ready, without a beat."""
        self._words[_READY] = False

    def beat(self, processed: int, is_ready: bool) -> None:
        """Record that the process makes progress, and how much it has processed."""
        self._words[_PROCESSED] = processed
        self._words[_READY] = is_ready
        self._words[_BEAT] = time.monotonic_ns()

    @property
    def beaten(self) -> int:
        """A number that changes with each beat; 0 before the first."""
        return self._words[_BEAT]

    @property
    def processed(self) -> int:
        """The number of deliveries settled up to the last beat."""
        return self._words[_PROCESSED]

    @property
    def is_ready(self) -> bool:
        """Whether the child had its slots at the last beat."""
        return bool(self._words[_READY])

    # --- its threads

    def thread(self, index: int) -> ThreadNotes:
        """Return the marks of a thread. No two threads that may still write share one."""
        self._words[_USED] = max(self._words[_USED], index + 1)
        return self._threads[index]

    def begun(self) -> dict[int, bool]:
        """Return the mark of each message that was begun, and whether it is done. Settled messages are no longer held."""
        is_done: dict[int, bool] = {}
        used = MARKS * self._words[_USED]
        for mark, state in zip(self._marks[:used].tolist(), self._states[:used].tolist(), strict=True):
            if state:
                is_done[mark] = state == DONE
        return is_done

    # --- its end

    def charge(self, marks: Sequence[int]) -> None:
        """Record the marks of messages whose listener exceeded HARD_TIMEOUT."""
        at = self._words[_CHARGED]
        some = marks[: CHARGES - at]
        self._charged[at : at + len(some)] = memoryview(array("q", some))
        # The count is written last, because the process may be killed at any time.
        self._words[_CHARGED] = at + len(some)

    @property
    def charged(self) -> set[int]:
        """The marks of messages whose listener exceeded HARD_TIMEOUT."""
        return set(self._charged[: self._words[_CHARGED]])

    def announce(self, end: int) -> None:
        """Record that the process ends on purpose, and with which meaning: user code could have chosen the same exit code."""
        self._words[_END] = end + 1

    @property
    def end(self) -> int | None:
        """The end that the process has announced. A process that ends without one has died, whatever its exit code."""
        return self._words[_END] - 1 if self._words[_END] else None

    def ask_for_stop(self) -> None:
        """Ask the parent to stop all its processes, as after SIGTERM."""
        self._words[_STOP] = True

    @property
    def asks_for_stop(self) -> bool:
        """Whether the child has asked the parent to stop."""
        return bool(self._words[_STOP])

    def clear(self) -> None:
        """Clear everything for a new child."""
        self.token = uuid4().hex
        # The states alone decide which marks count, so unused memory stays untouched.
        used = MARKS * self._words[_USED]
        self._states[:used] = bytes(used)
        self._memory[: _OWNER + 8 * _HEAD] = bytes(_OWNER + 8 * _HEAD)


class BatchCells:
    """The cells of one batch, in the order of its members."""

    __slots__ = ("_cells", "_places")

    def __init__(self, cells: ProgressCells, places: list[int]) -> None:
        self._cells = cells
        self._places = places

    def __setitem__(self, at: int, state: int) -> None:
        """Record the state of one member."""
        if self._places:
            self._cells.states[self._places[at]] = state

    def end(self) -> None:
        """Free the cells. Their contents stay until all other cells were used, because the messages may not be settled yet."""
        self._cells.free(self._places)


class ProgressCells:
    """The cells of one event loop, in its part of the notes.

    In a ring, as that of a thread, others would overwrite the record of a batch that runs for long: batches end in any order.
    """

    def __init__(self, marks: ThreadNotes) -> None:
        self._marks = marks
        self.states = marks.states
        # The one that was freed first is used first: it is the likeliest to be settled.
        self._free = deque(range(MARKS))

    def take(self, topic: str, slot: int, receipt: int, members: Sequence[bytes]) -> BatchCells:
        """Record which messages are next, and return their cells; if too few are free, nothing is recorded."""
        if len(self._free) < len(members):
            return BatchCells(self, [])
        places = [self._free.popleft() for _ in members]  # rule: shares_cells
        for place, member in zip(places, members, strict=True):
            self._marks.put(place, topic, slot, receipt, member)
        return BatchCells(self, places)

    def free(self, places: list[int]) -> None:
        """Let other batches use these cells."""
        self._free.extend(places)
