"""Answering: processes the answers of prepares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from django_rmq.core.consumer.acks import AckQueue
from django_rmq.core.consumer.acquisition import SlotAcquirer
from django_rmq.core.consumer.batch_router import BatchRouter
from django_rmq.core.consumer.capacity import Capacity
from django_rmq.core.consumer.shutdown import ShutdownState
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState
from django_rmq.core.model.replies import Delivery, Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, SlotMoved


class FetchReplies:
    """Continues with slots whose prepare was answered.

    ``handed_out`` is called for every prepare that returned messages, with the server's time in ms.
    ``on_moved`` is called if a slot was given another slot count; without it the worker ends.
    """

    def __init__(
        self,
        room: Capacity,
        schedule: SlotSchedule,
        settling: AckQueue,
        feeding: BatchRouter,
        acquiring: SlotAcquirer,
        ending: ShutdownState,
        handed_out: Callable[[Topic, Sequence[Delivery], float], None],
        on_moved: Callable[[str], None] | None,
    ) -> None:
        self._room = room
        self._places = room.places
        self._schedule = schedule
        self._settling = settling
        self._feeding = feeding
        self._acquiring = acquiring
        self._ending = ending
        self._handed_out = handed_out
        self._on_moved = on_moved

    def lost(self, place: SlotState) -> None:
        """Record that the answer for a slot was lost."""
        place.asked = place.again = place.recalled = False
        self._acquiring.doubt(place)
        self._places.forget(place)

    def prepared(self, place: SlotState, reply: Prepared | RmqError, at: float) -> ServerTrouble | None:
        """Process the answer of a prepare; return trouble that concerns more than this slot."""
        recalled = place.recalled or not place.owned
        place.asked = place.recalled = False
        trouble = None
        if isinstance(reply, RmqError):
            trouble = self._acquiring.failed(place, reply)
        else:
            place.shut_until, place.away = 0.0, False
            has_more = reply.next_due is not None and reply.next_due <= self._schedule.clock.ms()
            self._room.answered(place, len(reply.deliveries), has_more=has_more)
            if reply.status != "ok":
                self._nothing(place, reply)
            elif recalled:
                members = [delivery.member for delivery in reply.deliveries]
                self._settling.release(place, reply.receipt, members)
                self._schedule.ready(place)
            else:
                self._take(place, reply, at)
        if place.again:
            place.again = False
            self._schedule.ready(place)
        self._places.forget(place)
        return trouble

    def _take(self, place: SlotState, reply: Prepared, at: float) -> None:
        """Process messages that were handed out."""
        topic, receipt, deliveries = place.topic, reply.receipt, reply.deliveries
        # rule: takes_the_time_out_of_the_topic
        start = partial(
            self._feeding.start, is_suspect=reply.is_suspect, is_plain=reply.is_plain, timeout=reply.timeout
        )
        self._handed_out(topic, deliveries, self._schedule.clock.ms())
        total = self._room.bytes.weigh(topic, deliveries)
        if topic.serial:
            start(place, receipt, deliveries, at, total)
            self._schedule.look_at(place, reply.next_due)
            return
        size = self._room.batch_size(topic)
        # In the event loop each call is a batch, so that all of them overlap.
        parts = (
            len(deliveries) if topic.name in self._room.overlap else 1 if topic.flow else self._room.threads
        )
        share = -(-len(deliveries) // (size * parts)) * size
        for first in range(0, len(deliveries), share):
            part = deliveries[first : first + share]
            start(place, receipt, part, at, total * len(part) // len(deliveries))
        # Senders wake this worker only after a prepare that finds nothing, and other threads are free.
        self._schedule.ready(place)

    def _nothing(self, place: SlotState, reply: Prepared) -> None:
        """Continue with a slot that handed out nothing."""
        if reply.status == "more":
            place.cursor = reply.cursor
            self._schedule.ready(place)
        elif reply.status in ("busy", "paused"):
            self._schedule.pause(place, reply.next_due, is_paused=reply.status == "paused")
        elif reply.status == "fenced":
            self._acquiring.fenced(place)
            self._feeding.give_back_slot(place)  # rule: keeps_what_it_was_fenced_from
        elif reply.status == "moved":
            self._moved(place, reply.slots)
        else:
            self._schedule.look_at(place, reply.next_due)
            # Keep as little as possible in memory for an empty slot.
            if place.is_at_rest and not self._settling.concerns(place):
                self._places.lull(place)

    def _moved(self, place: SlotState, slots: int | None) -> None:
        if self._on_moved is not None and slots:
            # Its messages may be moving. It answers busy until they have moved.
            place.topic = replace(place.topic, slots=slots)
            self._on_moved(place.topic.name)
            self._schedule.ready(place)
            return
        self._ending.moved = SlotMoved(
            f"topic {place.topic.name} no longer has {place.topic.slots} slots; restart the worker to "
            "load the current definition"
        )
        self._ending.begun = True


__all__ = ["FetchReplies"]
