"""Acquires slots: a worker registers as the owner of a slot in Redis, before it prepares anything there.

In a slot where the reply of a prepare was lost, what Redis handed out is found first, and continued.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from django_rmq.core.commands import ack, fetch
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.inspect import all_held
from django_rmq.core.commands.script_call import Answer
from django_rmq.core.consumer.acks import NODE_REST_SECONDS, AckQueue, SlotErrors
from django_rmq.core.consumer.batch import InFlight
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.executor_pool import BatchRouter
from django_rmq.core.consumer.slots import (
    LOOK_SECONDS,
    FencedSlots,
    SlotSchedule,
    SlotState,
    SlotTable,
    uptime,
)
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import Acquired, HeldReply
from django_rmq.exceptions import LostRace, NodeUnavailable, RmqError, ServerTrouble, Unreadable

logger = safe_logger("django_rmq.consumer")


class LostFetch(NamedTuple):
    """The messages that one prepare handed out of one slot in a reply that was lost."""

    place: SlotState
    receipt: int
    things: list[HeldReply]


class LostReplyRecovery:
    """Finds what was handed out to ``owner``."""

    def __init__(
        self,
        broker: Broker,
        owner: str,
        hand: InFlight,
        room: Capacity,
        settling: AckQueue,
        feeding: BatchRouter,
        troubles: SlotErrors,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._hand = hand
        self._room = room
        self._settling = settling
        self._feeding = feeding
        self._troubles = troubles

    def unknown(self, place: SlotState, held: list[HeldReply]) -> list[LostFetch]:
        """Return what Redis handed out in lost replies; ``held`` is the first page of what this worker holds.

        Raises ``RmqError``.
        """
        held = all_held(self._broker, place.topic, place.slot, self._owner, held)
        if not held:
            return []
        known = {batch.receipt for batch in self._hand.batches.values() if batch.place.key == place.key}
        known |= {receipt for other, receipt in self._settling.pending if other.key == place.key}
        lost: defaultdict[int, list[HeldReply]] = defaultdict(list)
        for thing in held:
            if thing.receipt and thing.receipt not in known:
                lost[thing.receipt].append(thing)
        return [LostFetch(place, receipt, things) for receipt, things in lost.items()]

    def adopt(self, lost: list[LostFetch], at: float) -> tuple[set[SlotState], ServerTrouble | None]:
        """Continue with deliveries of a prepare whose reply was lost; give them back if nothing may begin.

        Return the slots of which nothing is lost any more, and trouble that concerns more than one slot.
        """
        # It is unknown when their time-out began, so it is extended before anything starts.
        calls = [
            ack.extend(place.topic, place.slot, receipt, [thing.delivery.member for thing in things])
            for place, receipt, things in lost
        ]
        trouble: ServerTrouble | None = None
        refused: set[SlotState] = set()
        for one, words in zip(lost, run_all(self._broker, calls), strict=True):
            if isinstance(words, RmqError):
                refused.add(one.place)
                trouble = self._troubles.of(one.place, words) or trouble
                continue
            # rule: forgets_what_was_cancelled_with_a_lost_answer
            ours = [thing for thing, word in zip(one.things, words, strict=True) if word != "stale"]
            self._go_on(LostFetch(one.place, one.receipt, ours), at)
        return {one.place for one in lost} - refused, trouble

    def _go_on(self, ours: LostFetch, at: float) -> None:
        place, receipt, things = ours
        begin = [thing.delivery for thing in things if place.owned and not thing.marked]
        back = [thing.delivery.member for thing in things if not place.owned or thing.marked]
        if place.topic.is_priority:
            begin.sort(key=lambda delivery: -delivery.score)
        logger.info(
            "The answer that delivered %d messages was lost; they are processed all the same", len(things)
        )
        if begin:
            # Whether they were suspects is not recorded; a message that has failed alone may have timed out.
            is_suspect = len(begin) == 1 and begin[0].retries_left < place.topic.max_retries
            size = self._room.bytes.weigh(place.topic, begin)
            own = [thing.timeout for thing in things if thing.timeout is not None]
            timeout = min(place.topic.timeout, *own) if own else None
            self._feeding.start(place, receipt, begin, at, size, is_suspect=is_suspect, timeout=timeout)
        if back:
            self._settling.release(place, receipt, back)


ACQUIRED = 2048
"""The maximum number of slots acquired before the loop attends to everything else."""

AT_ONCE = 512
"""The maximum number of slots acquired in one round trip."""


class SlotAcquirer:
    """Acquires the slots that this worker owns, and those that return to it."""

    def __init__(
        self,
        broker: Broker,
        owner: str,
        places: SlotTable,
        schedule: SlotSchedule,
        troubles: SlotErrors,
        recovery: LostReplyRecovery,
        fences: FencedSlots,
    ) -> None:
        self.unacquired: dict[SlotState, None] = {}
        """Slots to acquire again, or to ask what a lost reply handed out."""
        self._next_look = 0.0
        """When to check again the slots that another worker has acquired."""
        self._broker = broker
        self._owner = owner
        self._places = places
        self._schedule = schedule
        self._troubles = troubles
        self._recovery = recovery
        self.fences = fences

    def due(self, now: float) -> float:
        """Return the monotonic time at which there is something to acquire."""
        rest = now + NODE_REST_SECONDS if self.unacquired else float("inf")
        return min(rest, self._next_look) if self.fences else rest

    # --- what changes hands

    def own(self, topic: str, slots: array[int]) -> None:
        """Record slots that this worker owns from now on."""
        for place in self._places.tell(topic, slots):
            if not place.owned:
                place.owned, place.acquired = True, False
                place.due = place.not_before = place.shut_until = 0.0
                place.away = False
                self.unacquired[place] = None

    def disown(self, place: SlotState) -> None:
        """Stop taking from a slot. What is uncertain there is still asked for."""
        place.owned = place.acquired = False
        self.fences.remove(place)
        self._schedule.drop(place)
        if not place.uncertain:
            self.unacquired.pop(place, None)

    def doubt(self, place: SlotState) -> None:
        """Ask what Redis handed out before anything more is taken, because a reply was lost."""
        if place.topic.serial:
            place.uncertain, place.acquired = True, False
            self.unacquired[place] = None
            place.due, place.entry = 0.0, 0
        else:
            self._schedule.ready(place)

    def failed(self, place: SlotState, error: RmqError) -> ServerTrouble | None:
        """Record a failed prepare, which may have handed out messages; return trouble that concerns the whole server."""
        trouble = self._troubles.of(place, error)
        if trouble is not None or isinstance(error, (NodeUnavailable, Unreadable)):
            self.doubt(place)
        return trouble

    def fenced(self, place: SlotState) -> None:
        """Stop working on a slot that another owner has acquired."""
        self._troubles.complain(
            f"{place.topic.name}/fenced",
            f"Topic {place.topic.name} slot {place.slot}: %s",
            LostRace("another worker has acquired it"),
        )
        if place.owned:
            self.fences.add(place)
        place.acquired, place.epoch = False, None
        place.due, place.entry = float("inf"), 0

    def return_to_fenced(self, hear: Callable[[], None]) -> None:
        """Acquire slots again that another worker has acquired and that the coordinator has since confirmed as this worker's.

        ``hear`` processes what was received until then.
        """
        now = time.monotonic()
        if not self.fences or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        confirmed = self.fences.confirmed()
        hear()
        for place in self.fences.ours_at(confirmed):
            self.acquire_fenced(place)

    def acquire_fenced(self, place: SlotState) -> None:
        """Acquire a slot that another worker has acquired."""
        self.fences.remove(place)
        place.due = 0.0
        self.unacquired[place] = None

    # --- the first time

    def acquire_told(self) -> None:
        """Acquire slots for the first time. Most of many slots are empty and fall asleep at once."""
        taken = self._places.take(ACQUIRED)
        topics = self._places.topics
        asked = [
            (name, slots[start : start + AT_ONCE])
            for name, slots in taken
            for start in range(0, len(slots) if topics[name].serial else 0, AT_ONCE)
        ]
        try:
            answers = run_all(self._broker, (fetch.acquire_all(topics[name], part) for name, part in asked))
        except ServerTrouble:
            self._places.put_back(taken)
            raise
        for name, slots in taken:
            for slot in () if topics[name].serial else slots:
                self._acquired(self._places.add(name, slot))
        trouble: ServerTrouble | None = None
        for (name, slots), answer in zip(asked, answers, strict=True):
            trouble = self._told(name, slots, answer) or trouble
        if trouble is not None:
            raise trouble

    def _told(self, name: str, slots: list[int], answer: list[Acquired] | RmqError) -> ServerTrouble | None:
        """Record the results for slots of a topic that were acquired in one call."""
        trouble: ServerTrouble | None = None
        found: Sequence[Acquired | RmqError] = (
            [answer] * len(slots) if isinstance(answer, RmqError) else answer
        )
        for slot, one in zip(slots, found, strict=True):
            if not isinstance(one, RmqError) and one.is_asleep:
                self._places.sleep(name, slot, one.epoch)
                continue
            place = self._places.add(name, slot)
            self.unacquired[place] = None
            if isinstance(one, RmqError):
                trouble = self._troubles.of(place, one) or trouble
            elif one.epoch is not None:
                place.epoch = one.epoch
                self._acquired(place)
        return trouble

    # --- again

    def acquire_again(self) -> bool:
        """Acquire what is not acquired, and continue with what a prepare handed out whose reply was lost.

        Return whether there is more to do. It is done in parts, so that work goes on meanwhile.
        """
        local = time.monotonic()
        rested = list(islice((place for place in self.unacquired if place.shut_until <= local), ACQUIRED + 1))
        for start in range(0, min(len(rested), ACQUIRED), AT_ONCE):
            self._acquire_some(rested[start : start + AT_ONCE])
        return len(rested) > ACQUIRED

    def _acquire_some(self, places: list[SlotState]) -> None:
        pipeline = self._broker.pipeline()
        epochs: dict[SlotState, Answer[int]] = {}
        helds: dict[SlotState, Answer[list[HeldReply] | None]] = {}
        for place in places:
            if place.owned and place.topic.serial:
                epochs[place] = pipeline.add(fetch.acquire(place.topic, place.slot))
            if place.uncertain:
                helds[place] = pipeline.add(fetch.held(place.topic, place.slot, self._owner, 0, BATCH))
        at = uptime()
        pipeline.execute()
        trouble: ServerTrouble | None = None
        lost: list[LostFetch] = []
        for place in places:
            try:
                epoch = epochs[place].get() if place in epochs else None
                held = helds[place].get() if place in helds else None
                found = self._recovery.unknown(place, held or [])
            except RmqError as error:
                trouble = self._troubles.of(place, error) or trouble
                continue
            place.epoch = epoch
            lost += found
            if not found:
                self._acquired(place)
        if lost:
            adopted, other = self._recovery.adopt(lost, at)
            trouble = other or trouble
            for place in adopted:
                self._acquired(place)
        if trouble is not None:
            raise trouble

    def _acquired(self, place: SlotState) -> None:
        self.unacquired.pop(place, None)
        place.uncertain = False
        place.acquired = place.owned
        self._schedule.ready(place)
        self._places.forget(place)
