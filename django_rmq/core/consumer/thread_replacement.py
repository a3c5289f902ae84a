"""Relief: replaces threads that died or hang, and removes their batches from what is in hand."""

from __future__ import annotations

from functools import partial

from django_rmq.core.consumer.batch import Batch, BatchReport
from django_rmq.core.consumer.batch_router import BatchRouter
from django_rmq.core.consumer.executor_pool import ExecutorPool
from django_rmq.core.consumer.in_flight import InFlight
from django_rmq.core.consumer.mailbox import Mailbox, Overrun
from django_rmq.core.consumer.slot_schedule import SlotSchedule
from django_rmq.core.consumer.slots import SlotState, SlotTable
from django_rmq.core.consumer.watchdog import Watchdog


class ThreadReplacer:
    """Watches the threads of ``crew`` with ``lookout``. Their reports are in ``inbox``."""

    def __init__(
        self,
        crew: ExecutorPool,
        hand: InFlight,
        feeding: BatchRouter,
        places: SlotTable,
        schedule: SlotSchedule,
        lookout: Watchdog,
        inbox: Mailbox,
    ) -> None:
        self._crew = crew
        self._hand = hand
        self._feeding = feeding
        self._places = places
        self._schedule = schedule
        self._lookout = lookout
        self._inbox = inbox
        inbox.on(Overrun, self.overran)
        for i, thread in enumerate(crew.threads):
            name = thread.name.removeprefix("rmq-").replace("-", " ")
            lookout.add(name, partial(crew.is_manned, i), partial(self._relieve, i))

    def clear_dead(self) -> None:
        """Forget batches whose thread is dead: what has not begun is given back, the rest times out."""
        dead = [batch for batch in self._hand.batches.values() if batch.thread and batch.thread.is_dead]
        dead += self._crew.returned()
        if dead:
            # Everything that they reported before they died has arrived by now.
            self._inbox.hear()
        for batch in dead:
            if batch in self._hand:
                self._feeding.give_back(batch)  # rule: keeps_what_a_dead_thread_had
                # rule: keeps_what_a_dead_thread_had
                self._feeding.finished(BatchReport(batch, [], [], [], 0.0, True))

    def overran(self, item: Overrun) -> None:
        """Give the other slots of a hung thread to another one. Its own slot stays shut in this process."""
        batch = item.batch
        self._feeding.give_back(batch)
        self._feeding.cleared(batch)
        thread = batch.thread
        if thread is None or batch not in thread.batches():
            return
        if not thread.overran(batch):
            self._shut(batch)
            return
        # In an event loop that is blocked, nothing of what runs goes on.
        for running in thread.batches():  # rule: leaves_slots_of_a_blocked_loop_open
            self._shut(running)
        batch.thread = None
        self._lookout.due = 0.0

    def _shut(self, batch: Batch) -> None:
        """Take nothing from the slot of a batch until it ends."""
        place: SlotState = batch.place
        if place.topic.serial:
            self._places.block(place, batch)
            self._schedule.waiting.pop(place, None)
            self._feeding.give_back_slot(place)

    def _relieve(self, index: int) -> None:
        """Give back what a dead or hung thread has, and start another one. Raises the errors of ``ExecutorPool.succeed``."""
        thread = self._crew.threads[index]
        self.clear_dead()
        for batch in [batch for batch in self._hand.batches.values() if batch.thread is thread]:
            self._feeding.give_back(batch)
            batch.thread = None
        self._hand.load[index] = 0.0
        self._crew.succeed(index)


__all__ = ["ThreadReplacer"]
