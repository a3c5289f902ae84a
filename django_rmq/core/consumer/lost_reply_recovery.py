"""Doubts: finds what Redis handed out in a prepare whose reply was lost, and continues with it."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from django_rmq.core.commands import ack
from django_rmq.core.commands.batching import all_held
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.batch_router import BatchRouter
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.slot_errors import SlotErrors
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.replies import HeldReply
from django_rmq.exceptions import RmqError, ServerTrouble

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


__all__ = ["LostFetch", "LostReplyRecovery"]
