"""Acquisition: a worker registers in Redis as the owner of its slots, which fences their earlier owners, before it fetches.

If the reply of a fetch was lost, Redis is first asked which messages this worker holds in the slot, and these are processed
instead of waiting for their time-out. Which slots a worker owns is decided by the coordinator, not here. The states of a slot are
explained by ``slots``.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from django_rmq.core.clock import uptime
from django_rmq.core.commands import ack, fetch
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.fetch import all_held
from django_rmq.core.commands.script_call import Answer
from django_rmq.core.consumer.acks import NODE_REST_SECONDS, AckQueue, SlotErrors
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.executor_pool import BatchRouter
from django_rmq.core.consumer.slots import ConsumedSlot, SlotSchedule, SlotState, SlotTable
from django_rmq.core.log import safe_logger
from django_rmq.core.model.replies import Acquired, HeldReply
from django_rmq.exceptions import LostRace, NodeUnavailable, RmqError, ServerTrouble, Unreadable

logger = safe_logger("django_rmq.consumer")


LOOK_SECONDS = 0.25
"""Seconds between two checks whether the coordinator has confirmed that a fenced slot belongs to this worker."""


@dataclass(eq=False)
class FencedSlots:
    """The slots of the worker ``owner`` that another worker has acquired, although they are assigned to this one.

    Usually the coordinator soon takes such a slot away. If it does not, the slot belongs to this worker again, and no other
    worker will ask for its messages.

    ``confirmed`` returns the ``uptime`` at which the coordinator last asked for the assignment whose result
    this worker has received; minus infinity if unknown. The worker that fenced this one acted on an earlier
    assignment. So a slot that the answer to a later question still assigns to this worker belongs to it
    again.
    """

    broker: Broker
    owner: str
    confirmed: Callable[[], float]
    _slots: set[ConsumedSlot] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self._slots)

    def add(self, slot: ConsumedSlot) -> None:
        """Record that a prepare of a slot was just answered ``fenced``."""
        slot.change_state(SlotState.FENCED)
        slot.fenced_at, slot.untaken_since = uptime(), None
        self._slots.add(slot)

    def remove(self, slot: ConsumedSlot) -> None:
        """Record that a slot is no longer this worker's, or is to be acquired again."""
        self._slots.discard(slot)

    def ours_at(self, confirmed: float) -> list[ConsumedSlot]:
        """Return the slots that are still this worker's by an answer to a question asked at ``confirmed``."""
        # rule: stays_away_from_its_own
        return [slot for slot in self._slots if slot.fenced_at < confirmed]

    def left_alone(self, untaken: Sequence[ConsumedSlot]) -> Iterator[ConsumedSlot]:
        """Yield the slots of ``untaken``, in which messages are due, from which nobody has taken for the
        length of a time-out.

        This is used while the coordinator cannot say which worker owns a slot.
        """
        calls = [fetch.list_held(slot.topic, slot.number, self.owner, limit=1) for slot in untaken]
        now = time.monotonic()
        for slot, held in zip(untaken, run_all(self.broker, calls), strict=True):
            # Someone has messages of the slot in flight, or Redis could not say whether anyone has.
            if held != []:
                slot.untaken_since = None
            elif slot.untaken_since is None:
                slot.untaken_since = now
            elif now - slot.untaken_since > slot.topic.timeout:
                yield slot


class LostFetch(NamedTuple):
    """The messages that one prepare delivered from one slot in a reply that was lost."""

    slot: ConsumedSlot
    receipt: int
    things: list[HeldReply]


@dataclass(eq=False)
class LostReplyRecovery:
    """Finds deliveries to the worker ``owner`` that it has never received, and continues with them."""

    broker: Broker
    owner: str
    in_flight: InFlight
    capacity: Capacity
    acks: AckQueue
    router: BatchRouter
    slot_errors: SlotErrors

    def unknown(self, slot: ConsumedSlot, held: list[HeldReply]) -> list[LostFetch]:
        """Return the deliveries of lost replies. ``held`` is the first page of what Redis holds for this worker.

        Raises ``RmqError``.
        """
        held = all_held(self.broker, slot.topic, slot.number, self.owner, held)
        if not held:
            return []
        known = {batch.receipt for batch in self.in_flight.batches.values() if batch.slot.key == slot.key}
        # A batch that has ended here is in flight in Redis until its acknowledgement arrives. It must not run again.
        known |= {receipt for other, receipt in self.acks.pending if other.key == slot.key}
        lost: defaultdict[int, list[HeldReply]] = defaultdict(list)
        for thing in held:
            if (
                thing.receipt
                and thing.receipt not in known
                and self.in_flight.is_new(*slot.key, thing.receipt)
            ):
                lost[thing.receipt].append(thing)
        return [LostFetch(slot, receipt, things) for receipt, things in lost.items()]

    def adopt(self, lost: list[LostFetch], at: float) -> tuple[set[ConsumedSlot], ServerTrouble | None]:
        """Continue with deliveries whose reply was lost; give them back if they may not begin.

        Return the slots in which nothing is uncertain any more, and an error that concerns more than one slot.
        """
        # It is unknown when their time-out began, so it is extended before anything starts.
        calls = [
            ack.extend(slot.topic, slot.number, receipt, [thing.delivery.member for thing in things])
            for slot, receipt, things in lost
        ]
        trouble: ServerTrouble | None = None
        refused: set[ConsumedSlot] = set()
        for one, words in zip(lost, run_all(self.broker, calls), strict=True):
            if isinstance(words, RmqError):
                # The slot stays uncertain, and Redis is asked again.
                refused.add(one.slot)
                trouble = self.slot_errors.of(one.slot, words) or trouble
                continue
            # The message timed out or was cancelled since Redis delivered it, so it must not begin.
            # rule: forgets_what_was_cancelled_with_a_lost_answer
            ours = [thing for thing, word in zip(one.things, words, strict=True) if word != "stale"]
            self._go_on(LostFetch(one.slot, one.receipt, ours), at)
        return {one.slot for one in lost} - refused, trouble

    def _go_on(self, ours: LostFetch, at: float) -> None:
        slot, receipt, things = ours
        # The slot may have been lost since. A marked delivery was buried or removed by a person: it is given back, which ends
        # it.
        begin = [thing.delivery for thing in things if slot.is_owned and not thing.marked]
        back = [thing.delivery.member for thing in things if not slot.is_owned or thing.marked]
        # Prepare does not hold them in the order in which they were delivered.
        sign = -1 if slot.topic.is_priority else 1
        begin.sort(key=lambda delivery: sign * delivery.score)  # rule: goes_on_out_of_line
        logger.info(
            "The answer that delivered %d messages was lost; they are processed all the same", len(things)
        )
        if begin:
            # Whether they were suspects is not recorded; a message that has failed alone may have timed out.
            is_suspect = len(begin) == 1 and begin[0].retries_left < slot.topic.max_retries
            size = self.capacity.bytes.weigh(slot.topic, begin)
            own = [thing.timeout for thing in things if thing.timeout is not None]
            timeout = min(slot.topic.timeout, *own) if own else None
            self.router.start(slot, receipt, begin, at, size, is_suspect=is_suspect, timeout=timeout)
        if back:
            self.acks.release(slot, receipt, back)


ACQUIRED = 2048
"""The maximum number of slots acquired before the loop attends to everything else."""

AT_ONCE = 512
"""The maximum number of slots acquired in one round trip."""


@dataclass(eq=False)
class SlotAcquirer:
    """Acquires the slots that this worker owns, and those that return to it."""

    broker: Broker
    owner: str
    table: SlotTable
    schedule: SlotSchedule
    slot_errors: SlotErrors
    recovery: LostReplyRecovery
    fenced_slots: FencedSlots
    unacquired: dict[ConsumedSlot, None] = field(default_factory=dict)
    """Slots to acquire again, or to ask for the deliveries of a lost reply."""
    _next_look: float = 0.0
    """When to check again the slots that another worker has acquired."""

    def due(self, now: float) -> float:
        """Return the monotonic time at which there is something to acquire."""
        rest = now + NODE_REST_SECONDS if self.unacquired else float("inf")
        return min(rest, self._next_look) if self.fenced_slots else rest

    # --- changes of the assignment

    def own(self, topic: str, slots: array[int]) -> None:
        """Record slots that this worker owns from now on."""
        for slot in self.table.assign(topic, slots):
            if not slot.is_owned:
                # The slot returns while something of it is in flight here. Meanwhile its epoch may have become another
                # worker's.
                slot.change_state(SlotState.UNCERTAIN if slot.is_uncertain else SlotState.ASSIGNED)
                self.schedule.reset(slot)
                self.unacquired[slot] = None

    def disown(self, slot: ConsumedSlot) -> None:
        """Stop taking from a slot. Redis is still asked for the deliveries of a lost reply, so that they can be given back."""
        if slot.is_owned:
            slot.change_state(SlotState.DISOWNED_UNCERTAIN if slot.is_uncertain else SlotState.DISOWNED)
        self.fenced_slots.remove(slot)
        self.schedule.remove(slot)
        if not slot.is_uncertain:
            self.unacquired.pop(slot, None)

    def mark_uncertain(self, slot: ConsumedSlot) -> None:
        """Record that the reply of a prepare was lost: Redis is asked for its deliveries before anything more is taken."""
        if slot.topic.serial:
            slot.change_state(SlotState.UNCERTAIN if slot.is_owned else SlotState.DISOWNED_UNCERTAIN)
            self.unacquired[slot] = None
            self.schedule.count_as_due(slot)
        else:
            # Redis does not record who holds a message of a topic without a gate, so lost deliveries are left to their time-
            # out.
            self.schedule.make_ready(slot)

    def failed(self, slot: ConsumedSlot, error: RmqError) -> ServerTrouble | None:
        """Record a failed prepare, which may have delivered messages; return an error that concerns the whole server."""
        trouble = self.slot_errors.of(slot, error)
        # After these errors the script may have run, and its answer was lost or cannot be read.
        if trouble is not None or isinstance(error, (NodeUnavailable, Unreadable)):
            self.mark_uncertain(slot)
        return trouble

    def fenced(self, slot: ConsumedSlot) -> None:
        """Stop working on a slot that another owner has acquired."""
        self.slot_errors.complain(
            f"{slot.topic.name}/fenced",
            f"Topic {slot.topic.name} slot {slot.number}: %s",
            LostRace("another worker has acquired it"),
        )
        # The worker that fenced this one may have acted on an old assignment, so the slot may still belong to this worker. A
        # slot that has left and returned during the fetch is about to be acquired again anyway.
        if slot.state is SlotState.ACQUIRED:
            self.fenced_slots.add(slot)
            slot.epoch = None
            self.schedule.set_due(slot, None)

    def return_to_fenced(self, hear: Callable[[], None]) -> None:
        """Acquire slots again that another worker has acquired and that the coordinator has since confirmed as this worker's.

        ``hear`` processes the items that the mailbox has received until then.
        """
        now = time.monotonic()
        if not self.fenced_slots or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        confirmed = self.fenced_slots.confirmed()
        # The coordinator confirms the assignments that it has put into the mailbox. One of them may take such a slot away.
        hear()
        for slot in self.fenced_slots.ours_at(confirmed):
            self.acquire_fenced(slot)

    def acquire_fenced(self, slot: ConsumedSlot) -> None:
        """Acquire a slot that another worker has acquired."""
        self.fenced_slots.remove(slot)
        slot.change_state(SlotState.ASSIGNED)
        self.schedule.count_as_due(slot)
        self.unacquired[slot] = None

    # --- the first time

    def acquire_assigned(self) -> None:
        """Acquire slots for the first time. Most of many slots are empty and fall asleep at once."""
        taken = self.table.take(ACQUIRED)
        topics = self.table.topics
        asked = [
            (name, slots[start : start + AT_ONCE])
            for name, slots in taken
            for start in range(0, len(slots) if topics[name].serial else 0, AT_ONCE)
        ]
        try:
            answers = run_all(self.broker, (fetch.acquire_slots(topics[name], part) for name, part in asked))
        except ServerTrouble:
            # It is unknown which of them Redis has acquired, so all of them are acquired again.
            self.table.put_back(taken)
            raise
        for name, slots in taken:
            for number in () if topics[name].serial else slots:
                self._acquired(self.table.add(name, number))
        trouble: ServerTrouble | None = None
        for (name, slots), answer in zip(asked, answers, strict=True):
            trouble = self._record_acquired(name, slots, answer) or trouble
        if trouble is not None:
            raise trouble

    def _record_acquired(
        self, name: str, slots: list[int], answer: list[Acquired] | RmqError
    ) -> ServerTrouble | None:
        """Record the results for slots of a topic that were acquired in one call."""
        trouble: ServerTrouble | None = None
        answers: Sequence[Acquired | RmqError] = (
            [answer] * len(slots) if isinstance(answer, RmqError) else answer
        )
        for number, one in zip(slots, answers, strict=True):
            if not isinstance(one, RmqError) and one.is_asleep:
                self.table.sleep(name, number, one.epoch)
                continue
            slot = self.table.add(name, number)
            self.unacquired[slot] = None
            if isinstance(one, RmqError):
                trouble = self.slot_errors.of(slot, one) or trouble
            # Without an epoch the slot has a foreign key, so it is not prepared and is tried again.
            elif one.epoch is not None:
                slot.epoch = one.epoch
                self._acquired(slot)
        return trouble

    # --- again

    def acquire_again(self) -> bool:
        """Acquire slots again, and continue with the deliveries of lost replies in them.

        Return whether there is more to do. Slots are acquired in parts, so that other slots are served meanwhile.
        """
        local = time.monotonic()
        rested = list(
            islice((slot for slot in self.unacquired if slot.left_alone_until <= local), ACQUIRED + 1)
        )
        for start in range(0, min(len(rested), ACQUIRED), AT_ONCE):
            self._acquire_some(rested[start : start + AT_ONCE])
        return len(rested) > ACQUIRED

    def _acquire_some(self, slots: list[ConsumedSlot]) -> None:
        pipeline = self.broker.pipeline()
        epochs: dict[ConsumedSlot, Answer[int]] = {}
        helds: dict[ConsumedSlot, Answer[list[HeldReply] | None]] = {}
        for slot in slots:
            if slot.is_owned and slot.topic.serial:
                epochs[slot] = pipeline.add(fetch.acquire(slot.topic, slot.number))
            if slot.is_uncertain:
                helds[slot] = pipeline.add(fetch.list_held(slot.topic, slot.number, self.owner))
        # The clock is read before the call, so that a time-out never seems to begin later than it does in Redis.
        at = uptime()
        pipeline.execute()
        trouble: ServerTrouble | None = None
        lost: list[LostFetch] = []
        for slot in slots:
            try:
                epoch = epochs[slot].get() if slot in epochs else None
                held = helds[slot].get() if slot in helds else None
                unknown = self.recovery.unknown(slot, held or [])
            except RmqError as error:
                # The slot is neither acquired nor certain, so it stays in ``unacquired`` for the next attempt.
                trouble = self.slot_errors.of(slot, error) or trouble
                continue
            slot.epoch = epoch
            lost += unknown
            if not unknown:
                self._acquired(slot)
        if lost:
            adopted, other = self.recovery.adopt(lost, at)
            trouble = other or trouble
            for slot in adopted:
                self._acquired(slot)
        if trouble is not None:
            raise trouble

    def _acquired(self, slot: ConsumedSlot) -> None:
        self.unacquired.pop(slot, None)
        slot.change_state(SlotState.ACQUIRED if slot.is_owned else SlotState.DISOWNED)
        self.schedule.make_ready(slot)
        self.table.forget(slot)
