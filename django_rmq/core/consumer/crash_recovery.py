"""Recovery after a crash: the notes of a worker process in shared memory, which outlives it, and what its parent makes of them.

The notes have the process's id, its beats, and which messages run. After a sudden death the parent reads them. It commits the
messages that were done, ends those that were running as timed out, and gives back those that had not begun (``settle``).
Without the notes all of them would wait for their time-out.
"""

from __future__ import annotations

import mmap
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal
from uuid import uuid4

from django_rmq.core.commands import ack, fetch, inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.inspect import all_held
from django_rmq.core.consumer.failures import ran_too_long
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

SETTLE_SECONDS = 3.0
"""Maximum seconds for settling. The remaining messages become available again after their time-out."""

_AT_ONCE = 64
"""The number of slots asked in one round trip for the deliveries of the dead worker."""

_LOOKED_AT = 1024
"""The number of slots asked in one round trip whether anything is in flight there."""

DONE_FOR_GOOD, FORCED, USAGE, SERVER, WATCHDOG, HARD_TIMEOUT_EXCEEDED, RECYCLE = 0, 1, 2, 3, 4, 5, 75
"""The meanings of an end that a process announces, which are also its exit code. DONE_FOR_GOOD: it needs no successor.
FORCED: something was not settled in time. USAGE: a successor would fail too. SERVER: Redis or the coordinator was
unavailable. WATCHDOG: only of the whole command, the last process that could work hung. HARD_TIMEOUT_EXCEEDED: only the end
of the process could end a listener that exceeded HARD_TIMEOUT. RECYCLE: it was asked to end, or has reached its limit of
messages or memory, and needs a successor."""

_OWNER = 32
_BEAT, _PROCESSED, _READY, _USED, _END, _CHARGED, _STOP, _HEAD = 0, 1, 2, 3, 4, 5, 6, 7
"""Words of eight bytes before the marks of the threads."""

DIED = "the process that ran it died"
"""The error of a delivery that ends as failed because its process died."""

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
        self._marks[place] = hash(member) ^ hash((topic, slot, receipt))

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


Ending = Literal["committed", "released", "charged", "overran"]
"""How a message of a dead worker ends. ``overran``: charged because its listener exceeded HARD_TIMEOUT."""

MOST_NAMED = 10
"""The number of messages of one topic and one ending that are named."""


class RecoveryResult:
    """The messages of a dead worker that were settled: how many of which topic, and which they were."""

    def __init__(self) -> None:
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
    a gate, so these messages are left to the time-out. Raises ``ServerTrouble``.
    """
    owner, verdict = notes.owner, _CrashVerdict(notes)
    settled = RecoveryResult()
    end = time.monotonic() + SETTLE_SECONDS
    # A process that died before it had an owner id has taken no messages.
    for topic in topics if owner else ():
        if not topic.serial:
            continue
        for slots in _in_flight(broker, topic, end):
            _settle_some(broker, topic, slots, owner, verdict, settled)
    return settled


def _in_flight(broker: Broker, topic: Topic, end: float) -> Iterator[list[int]]:
    """Yield the slots in which anything is in flight, in groups, until ``end`` by the monotonic clock."""
    occupied: list[int] = []
    for first in range(0, topic.slots, _LOOKED_AT):
        if time.monotonic() > end:
            return
        slots = range(first, min(first + _LOOKED_AT, topic.slots))
        heads = broker.run(inspect.heads(topic, slots, upkeep=True))
        occupied += [slot for slot, due in zip(slots, heads, strict=True) if due is not None]
        while len(occupied) >= _AT_ONCE:
            if time.monotonic() > end:
                return
            yield occupied[:_AT_ONCE]
            occupied = occupied[_AT_ONCE:]
    if occupied:
        yield occupied


class _CrashVerdict:
    """Decides how the messages of a dead worker end, by the progress that it has recorded."""

    def __init__(self, notes: SharedNotes) -> None:
        self._begun = notes.begun()
        self._overran = notes.charged
        self._is_replaced = notes.end == HARD_TIMEOUT_EXCEEDED

    def of(self, mark: int) -> Ending:
        """Return how a message ends."""
        is_done = self._begun.get(mark)
        if is_done:
            return "committed"
        if mark in self._overran:
            return "overran"
        # A process that ended itself was not killed by the messages beside the one that ran too long, so they use no retry.
        # rule: charges_the_neighbours_of_what_ran_too_long
        return "released" if is_done is None or self._is_replaced else "charged"


def _settle_some(
    broker: Broker,
    topic: Topic,
    slots: Sequence[int],
    owner: str,
    verdict: _CrashVerdict,
    settled: RecoveryResult,
) -> None:
    """Settle the messages that a dead worker has in flight in some slots, and record them in ``settled``."""
    telling = broker.pipeline()
    asked: list[tuple[Ending, int, Sequence[bytes]]] = []
    calls = [fetch.list_held(topic, slot, owner, 0, BATCH) for slot in slots]
    for slot, first in zip(slots, run_all(broker, calls), strict=True):
        # A slot that cannot be read is left to its time-outs, so that the others are settled.
        if isinstance(first, RmqError) or not first:
            continue
        to_tell: defaultdict[tuple[int, Ending], list[bytes]] = defaultdict(list)
        for thing in all_held(broker, topic, slot, owner, first):
            member = thing.delivery.member
            end = verdict.of(mark_of(topic.name, slot, thing.receipt, member))
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
