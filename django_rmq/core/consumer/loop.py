"""The loop: one thread that moves messages between Redis and the threads that run listeners.

Each turn is one round trip: one pipeline commits or rolls back what listeners finished, and prepares slots
that are due. When nothing is due the loop sleeps until the next due time, a wake-up, a report of a thread, or
the slow poll. The slow poll is one ``heads`` per 1,024 slots and second, and at most four.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from uuid import uuid4

from django_rmq.core.calls.broker import Broker
from django_rmq.core.consumer.acquiring import Acquiring
from django_rmq.core.consumer.answering import Answering
from django_rmq.core.consumer.asking import Asking
from django_rmq.core.consumer.batches import ListenerLike
from django_rmq.core.consumer.companions import Companions
from django_rmq.core.consumer.crew import Crew
from django_rmq.core.consumer.doubts import Recovery
from django_rmq.core.consumer.ending import Ending
from django_rmq.core.consumer.feeding import Feeding
from django_rmq.core.consumer.fences import Fences
from django_rmq.core.consumer.hand import Hand
from django_rmq.core.consumer.inbox import Disown, Inbox, Own, Stop
from django_rmq.core.consumer.lookout import Lookout
from django_rmq.core.consumer.news import News
from django_rmq.core.consumer.notes import Notes
from django_rmq.core.consumer.overlap import Overlap
from django_rmq.core.consumer.polling import Polling
from django_rmq.core.consumer.relief import Relief
from django_rmq.core.consumer.rest import Rest
from django_rmq.core.consumer.room import Room
from django_rmq.core.consumer.schedule import Schedule
from django_rmq.core.consumer.settling import Settling
from django_rmq.core.consumer.slots import Places
from django_rmq.core.consumer.sweeping import Sweeping
from django_rmq.core.consumer.terms import ALONE, PLAIN, UNWATCHED, Ownership, Terms, Watching
from django_rmq.core.consumer.threads import NO_HOOKS, Hooks
from django_rmq.core.consumer.trips import Trips
from django_rmq.core.consumer.troubles import Troubles
from django_rmq.core.consumer.unending import UnendingCalls
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError, ServerTrouble

logger = safe_logger("django_rmq.consumer")

UNCERTAIN_SECONDS = 5.0
"""Seconds for which a stopping worker waits for Redis only to give back what a lost reply may have handed out."""


class Dispatcher:
    """One worker: owned slots, executor threads, an event loop for async listeners, a heartbeat, and the loop that feeds
    them.

    ``listeners`` maps topic names to listeners. ``own`` and ``disown`` set which slots this worker owns; they
    may be called before ``run`` or from another thread. ``run`` returns when ``stop`` was called and
    everything is settled, or, in a burst, when nothing can be taken any more. Threads record in ``notes``
    what they run, for the process that settles it after a sudden death. ``lookout`` watches these threads,
    and those that are added to it.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        listeners: Mapping[str, ListenerLike],
        terms: Terms = PLAIN,
        *,
        hooks: Hooks = NO_HOOKS,
        notes: Notes | None = None,
        ownership: Ownership = ALONE,
        watching: Watching = UNWATCHED,
    ) -> None:
        self.owner = owner = uuid4().hex
        self.topics = {topic.name: topic for topic in topics}
        self._terms, self._ownership, self._watching = terms, ownership, watching
        self.lookout, self._complain = Lookout(), Complaints(logger)
        self._ending, self._inbox = ending, inbox = Ending(), Inbox()
        self._unending = UnendingCalls(inbox, ending, notes)
        count, overlap = max(1, terms.threads), Overlap(self.topics.values(), listeners)
        self._hand = hand = Hand(count + bool(overlap))
        self._places = places = Places(self.topics, count, overlap)
        self._companions = Companions(broker, self.topics.values(), hand, inbox, self.lookout)
        self._crew = crew = Crew(count, inbox.queue, hooks, notes, overlap.concurrency)
        self._room = room = Room(broker, owner, places, listeners, count, overlap, hand)
        self._schedule = schedule = Schedule(places, room.depth, terms.poll_seconds)
        troubles = Troubles(schedule, ending, self._complain, self._companions.renew)
        self._settling = settling = Settling(troubles, ending, watching.watcher)
        self._feeding = feeding = Feeding(broker, crew, hand, room, schedule, settling, ending, watching.took)
        self._relief = Relief(crew, hand, feeding, places, schedule, self.lookout, inbox)
        recovery = Recovery(broker, owner, hand, room, settling, feeding, troubles)
        fences = Fences(broker, owner, ownership.confirmed)
        self._acquiring = acquiring = Acquiring(broker, owner, places, schedule, troubles, recovery, fences)
        self._polling = polling = Polling(broker, places, schedule, troubles, acquiring, terms.poll_seconds)
        self._sweeping = Sweeping(broker, terms.swept, self._complain)
        asking = Asking(owner, crew, hand, room, schedule, settling, self._complain)
        handed_out, moved = watching.handed_out, ownership.on_moved
        answering = Answering(room, schedule, settling, feeding, acquiring, ending, handed_out, moved)
        self._trips = Trips(broker, settling, asking, answering, room.bytes)
        self._rest = Rest(terms, hand, settling, places, schedule, ownership.settled, inbox)
        self._news = News(inbox, places, schedule, feeding, acquiring, polling, ending, moved)

    @property
    def processed(self) -> int:
        """The number of deliveries committed or rolled back so far."""
        return self._settling.processed

    @property
    def forced(self) -> bool:
        """Whether the shutdown time-out cut a listener short, or something could not be settled."""
        return self._ending.forced

    @property
    def overran(self) -> bool:
        """Whether a listener exceeded HARD_TIMEOUT, and only the end of the process can end it."""
        return bool(self._ending.overran)

    def full_topics(self, seconds: float) -> frozenset[str]:
        """Return the topics for which all threads, or all that may overlap of their calls, have been taken for so long."""
        return self._feeding.full_topics(seconds)

    def own(self, slots: Iterable[tuple[str, int]]) -> None:
        """Add slots to those that this worker owns."""
        by_topic: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
        for topic, slot in slots:
            by_topic[topic].append(slot)
        self._inbox.queue.put(Own(by_topic))

    def disown(self, slots: Iterable[tuple[str, int]]) -> None:
        """Take no more from these slots; messages that have not begun are given back."""
        self._inbox.queue.put(Disown(list(slots)))

    def stop(self) -> None:
        """Take nothing more, let listeners finish, give the rest back. Safe in signal handlers."""
        self._inbox.queue.put(Stop())

    # --- the loop

    def run(self) -> None:
        """Work until stopped."""
        self._crew.start()
        self._companions.start()
        trouble: Exception | None = None
        try:
            self._companions.wait_subscribed(5.0)
            try:
                self._work()
            except Exception as error:
                logger.exception("The dispatcher failed; the worker gives back its messages and ends")
                trouble = error
            self._shut_down()
        finally:
            self._end_threads()
        if trouble is not None:
            raise trouble
        if self._ending.moved is not None:
            raise self._ending.moved

    def _work(self) -> None:
        trouble, most = 0, self._terms.max_messages
        self._inbox.hear()
        while not self._ending.begun and (most is None or self.processed < most):
            self._look()
            self._watching.beat()
            try:
                busy = self._turn()
                if trouble:
                    logger.info("Redis is available again")
                trouble = 0
            except ServerTrouble as error:
                trouble += 1
                self._complain("redis", "Redis is unavailable (%s); trying again", error)
                # What broke this connection may also have broken the subscription without an error.
                self._companions.renew()
                self._pause(min(1.0, 0.02 * 2 ** min(trouble, 6)))
                continue
            if busy:
                self._inbox.hear()
                continue
            if self._rest.is_over():
                return
            self._inbox.read(self._sleep_seconds())

    def _turn(self) -> bool:
        """Do one round trip if there is anything to do; return whether there was."""
        self._schedule.collect_due()
        self._acquiring.return_to_fenced(self._inbox.hear)
        acquires = self._acquire()
        now = time.monotonic()
        if now >= self._polling.due:
            self._polling.poll()
        self._sweeping.sweep(now)
        self._feeding.refresh(now)
        return self._trips.make() or acquires

    def _acquire(self) -> bool:
        """Acquire owned slots that are not acquired; return whether there are more."""
        more = False
        if self._acquiring.unacquired:
            # What is on its way is recorded before Redis is asked what this worker holds.
            self._trips.receive_rest()
            more = self._acquiring.acquire_again()
        if self._places.is_told_more:
            self._acquiring.acquire_told()
        return more or self._places.is_told_more

    def _sleep_seconds(self) -> float:
        now = time.monotonic()
        wake = min(
            self._polling.due,
            self.lookout.due,
            self._schedule.due(now),
            self._room.limits.due(),
            self._feeding.due,
            self._acquiring.due(now),
            self._rest.due(now),
        )
        return max(0.0, wake - now)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._ending.begun:
            self._inbox.read(left)

    def _look(self) -> None:
        """Replace threads that have died, about once a second."""
        if time.monotonic() >= self.lookout.due:
            self._relief.clear_dead()
            self.lookout.look()

    # --- the end

    def _shut_down(self) -> None:
        """Let running listeners end, give back what has not begun, settle everything."""
        self._ending.begun = True
        begun = time.monotonic()
        self._ownership.leaving()
        for place in self._places.lose_all():
            self._news.disown(place)
        while True:
            self._watching.beat()
            self._relief.clear_dead()
            is_refused = self._settle_rest()
            spent = time.monotonic() - begun
            if self._ending.is_over(self._hand.batches.values()):
                is_done = not self._acquiring.unacquired or spent > UNCERTAIN_SECONDS
                if is_done and not self._settling.pending:
                    with contextlib.suppress(RmqError):
                        self._room.limits.leave()
                    return
                if is_refused:
                    break
            if spent >= self._terms.shutdown_timeout:
                break
            self._inbox.read(min(0.1, self._terms.shutdown_timeout - spent))
        batches, unsettled = len(self._hand.batches), len(self._settling.pending)
        if batches or unsettled:
            self._ending.forced = True
            logger.error(
                "Shutdown: %d batches are still running and %d are not settled; their messages will time out",
                batches,
                unsettled,
            )

    def _settle_rest(self) -> bool:
        """Settle what is left; return whether Redis has refused some of it."""
        try:
            self._trips.receive_rest()
            self._acquire()
            trip = self._trips.send(takes=False)
            if trip is None:
                return False
            self._trips.receive(trip)
            return bool(self._settling.pending)
        except ServerTrouble as error:
            self._complain("redis", "Redis is unavailable (%s) during shutdown; trying again", error)
            self._inbox.read(0.1)
            return False

    def _end_threads(self) -> None:
        # rule: leaves_to_others_what_still_runs
        companions = self._companions.stop(keeps_beating=self.overran)
        for batch in self._hand.batches.values():
            batch.halted = batch.dropped = True
        for thread in (*companions, *self._crew.stop()):
            thread.join(2.0)


__all__ = ["Dispatcher"]
