"""News: handles items of the inbox about slots, wake-ups, results and the end of the worker."""

from __future__ import annotations

from collections.abc import Callable

from django_rmq.core.consumer.acquisition import SlotAcquirer
from django_rmq.core.consumer.batch import BatchReport
from django_rmq.core.consumer.batch_router import BatchRouter
from django_rmq.core.consumer.due_poll import DuePoll
from django_rmq.core.consumer.mailbox import (
    Disown,
    Mailbox,
    Own,
    Resubscribed,
    Stop,
    Wake,
)
from django_rmq.core.consumer.shutdown import ShutdownState
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState, SlotTable
from django_rmq.core.log.safe_logger import safe_logger

logger = safe_logger("django_rmq.consumer")


class MailboxHandlers:
    """Passes items of ``inbox`` to the parts that handle them. ``on_moved`` is called for topics that may have moved."""

    def __init__(
        self,
        inbox: Mailbox,
        places: SlotTable,
        schedule: SlotSchedule,
        feeding: BatchRouter,
        acquiring: SlotAcquirer,
        polling: DuePoll,
        ending: ShutdownState,
        on_moved: Callable[[str], None] | None,
    ) -> None:
        self._places = places
        self._schedule = schedule
        self._feeding = feeding
        self._acquiring = acquiring
        self._polling = polling
        self._ending = ending
        self._on_moved = on_moved
        inbox.on(BatchReport, feeding.finished)
        inbox.on(Wake, self._woken)
        inbox.on(Own, self._gained)
        inbox.on(Disown, self._lost)
        inbox.on(Resubscribed, self._resubscribed)
        inbox.on(Stop, self._stop)

    def disown(self, place: SlotState) -> None:
        """Take no more from a slot, and give back what has not begun."""
        self._acquiring.disown(place)
        self._feeding.give_back_slot(place)
        self._places.forget(place)

    def _woken(self, item: Wake) -> None:
        if item.slot < 0:
            # The slot was paused: nothing more of what is in hand begins.
            paused = self._places.awake.get((item.topic, -1 - item.slot))
            if paused is not None:
                self._feeding.give_back_slot(paused)
        elif (place := self._places.get(item.topic, item.slot)) is not None:
            place.not_before = 0.0
            self._schedule.ready(place)

    def _gained(self, item: Own) -> None:
        # A worker that is about to leave takes over nothing, because it would fence the worker that does.
        for topic, slots in () if self._ending.begun else item.slots.items():
            self._acquiring.own(topic, slots)

    def _lost(self, item: Disown) -> None:
        for topic, slot in item.slots:
            if (place := self._places.lose(topic, slot)) is not None:
                self.disown(place)

    def _resubscribed(self, item: Resubscribed) -> None:
        # Wake-ups were missed until now, so every slot that rests until one is asked at once.
        self._polling.hurry()
        for place in self._places.awake.values():
            place.not_before = 0.0
        if self._on_moved is not None:
            for name in self._places.topics:
                self._on_moved(name)

    def _stop(self, item: Stop) -> None:
        if not self._ending.begun:
            logger.info("Stopping: running listeners may finish, messages that have not begun are given back")
        self._ending.begun = True


__all__ = ["MailboxHandlers"]
