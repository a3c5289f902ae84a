"""The background threads of a worker: the heartbeat, which notices hung listeners in threads, and the subscriber to wake-ups.

The heartbeat extends deliveries in flight while their listeners run, and reports listeners that run too long. It runs in a
separate thread, so that a listener that never returns cannot stop it. It measures the listener's time: after MAX_RUNTIME a
batch is abandoned and left to its time-out, and after HARD_TIMEOUT its call is ended. In its answer
to an extension, Redis reports which messages were cancelled meanwhile.

Threads that have died are replaced (``thread_watch``). Only the parent's watchdog (``supervisor``) ends a process that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from django_rmq.core.commands import ack
from django_rmq.core.commands.broker_interface import Broker, Subscription, run_all
from django_rmq.core.consumer.batch import Batch, InFlight
from django_rmq.core.consumer.mailbox import (
    HardTimeoutExceeded,
    Mailbox,
    MaxRuntimeExceeded,
    Resubscribed,
    SubscriptionLost,
    Wake,
)
from django_rmq.core.consumer.slot_schedule import uptime
from django_rmq.core.consumer.thread_watch import ThreadWatch, Watched
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")

GRACE_SECONDS = 5.0
"""Seconds that an async listener has to end, once it was cancelled because of HARD_TIMEOUT."""

NEWS_SECONDS = 60.0
"""Seconds for which a notice that something of a slot was cancelled is remembered. A batch that contains the message may be
registered only after the notice arrived."""


class Heartbeat(threading.Thread):
    """Extends every batch in flight when a third of its time-out has passed.

    ``batches`` returns the batches of this process; ``overrun`` is called once for a batch whose listener has
    run longer than MAX_RUNTIME, ``unending`` for one that only the end of the process can end.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        batches: Callable[[], Iterable[Batch]],
        overrun: Callable[[Batch], None],
        unending: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        super().__init__(name="rmq-heartbeat", daemon=True)
        self._broker = broker
        self._batches = batches
        self._overrun = overrun
        self._unending = unending
        # A batch may arrive right after a check, so the interval of the checks follows the shortest time-out; later on,
        # also those of single messages.
        ends = (min(topic.timeout, topic.hard_timeout or topic.timeout) for topic in topics)
        self._pause = min([1.0, *(end / 12 for end in ends)])
        self._stopped = False
        self._woken = threading.Event()
        self._news: dict[tuple[str, int], float] = {}
        """Slots of which a message in flight was cancelled -> the ``uptime`` of the latest notice."""
        self._doubted_at = float("-inf")
        """The latest ``uptime`` at which such a notice may have been lost."""
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End after the current beat."""
        self._stopped = True
        self._woken.set()

    def look_again(self, topic: str, slot: int) -> None:
        """Extend the deliveries of a slot at once: the answer says which messages were cancelled."""
        self._news[topic, slot] = uptime()
        self._woken.set()

    def look_everywhere(self) -> None:
        """Extend all deliveries at once, because a notice that something was cancelled may be lost."""
        self._doubted_at = uptime()
        self._woken.set()

    def run(self) -> None:
        while True:
            self._woken.wait(self._pause)
            self._woken.clear()
            if self._stopped:
                return
            try:
                self.beat()
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain("beat", "A heartbeat failed; the worker tries again: %s", error, exc_info=True)

    def beat(self) -> None:
        """Extend the batches whose time-out or notice asks for it, and abandon those whose listener runs too long."""
        now = uptime()
        # The subscriber's thread adds notices at the same time, so a copy is read.
        for news, at in list(self._news.items()):
            if now - at > NEWS_SECONDS:  # rule: forgets_news_of_what_is_not_in_hand_yet
                del self._news[news]
        due: list[Batch] = []
        for batch in self._batches():
            thread, topic = batch.thread, batch.topic
            # The batch of a dead thread makes no progress. Its begun messages time out, and the dispatcher gives back the others.
            if thread is not None and not thread.is_alive():  # rule: extends_for_dead_threads
                continue
            # A message may have a shorter time-out than its topic.
            self._pause = min(self._pause, batch.timeout / 12)
            since = batch.call_began_at
            if topic.hard_timeout is not None and (seconds := batch.ran(now)) > topic.hard_timeout:
                self._end(batch, seconds)
            # A listener that never returns would keep its message in flight without end.
            # rule: never_gives_up
            if since is not None and now - since > topic.max_runtime and not batch.abandoned:
                self._abandon(batch, now - since)
            # rule: extends_what_is_abandoned
            if not batch.abandoned and (self._is_asked(batch) or now - batch.confirmed >= batch.timeout / 3):
                due.append(batch)
        if due:
            try:
                self._extend(due)
            except RmqError as error:
                self._complain("redis", f"Cannot extend the time-outs of {len(due)} batches: %s", error)

    def _is_asked(self, batch: Batch) -> bool:
        """Return whether a message of the batch may have been cancelled since Redis confirmed the batch."""
        # rule: asks_nothing_when_something_is_cancelled
        told_at = self._news.get((batch.topic.name, batch.slot.number), 0.0)
        # A call that was sent before the notice arrived may have been executed before the cancellation.
        # rule: misses_what_was_cancelled_while_it_was_deaf
        return batch.confirmed <= max(told_at, self._doubted_at)

    def _extend(self, due: list[Batch]) -> None:
        # The clock is read before the calls, because a time-out starts again when Redis executes them, not when it answers.
        at = uptime()
        sent = [(batch, members) for batch in due if (members := batch.in_flight())]
        calls = [
            ack.extend(batch.topic, batch.slot.number, batch.receipt, members) for batch, members in sent
        ]
        for (batch, members), words in zip(sent, run_all(self._broker, calls), strict=True):
            # ``confirmed`` stays as it is, so the next beat tries again, and nothing begins once half of the time-out is over.
            if isinstance(words, RmqError):
                self._complain(
                    batch.topic.name,
                    f"Cannot extend the time-out in topic {batch.topic.name} slot {batch.slot.number}: %s",
                    words,
                )
                continue
            # A message that was settled meanwhile is stale as well. That does no harm, because it does not begin again.
            batch.stale.update(member for member, word in zip(members, words, strict=True) if word == "stale")
            if "cancelled" in words:
                batch.cancel(
                    {member for member, word in zip(members, words, strict=True) if word == "cancelled"}
                )
            batch.confirmed = at

    def _end(self, batch: Batch, seconds: float) -> None:
        """End a call that has exceeded HARD_TIMEOUT: a coroutine by cancelling it, another one with its process."""
        if batch.overran_at is None:
            batch.overran_at = uptime()
            stack = batch.thread.stack_of(batch) if batch.thread else "(its thread was replaced)"
            # The call ends before the log line: a handler of the project may wait for a lock that the listener holds.
            if batch.async_run is None:
                self._unending(batch)  # rule: logs_before_it_ends_a_call
            else:
                for message in batch.messages_of_call():
                    message.stopped = message.stopped or "overran"
                batch.async_run.stop("overran")
            logger.error(
                "A listener of topic %s has run for %.0f s, longer than HARD_TIMEOUT; %s. Its stack:\n%s",
                batch.topic.name,
                seconds,
                "its process is replaced" if batch.async_run is None else "it is cancelled",
                stack,
                extra={
                    "rmq_event": "hard_timeout",
                    "rmq_topic": batch.topic.name,
                    "rmq_slot": batch.slot.number,
                },
            )
        # A coroutine may suppress its cancellation. Like a thread, it then ends only with the process.
        # rule: waits_for_coroutines_that_do_not_end
        elif batch.async_run is not None and uptime() - batch.overran_at > GRACE_SECONDS:
            batch.overran_at = float("inf")
            self._unending(batch)
            logger.error(
                "A listener of topic %s does not end though it was cancelled; its process is replaced",
                batch.topic.name,
                extra={"rmq_event": "hard_timeout", "rmq_topic": batch.topic.name},
            )

    def _abandon(self, batch: Batch, seconds: float) -> None:
        batch.abandoned = batch.halted = True
        thread = batch.thread
        # This comes before anything that may fail: the slot has to be shut, and its thread replaced.
        self._overrun(batch)
        stack = thread.stack_of(batch) if thread else "(its thread was replaced)"
        logger.error(
            "A listener of topic %s has run for %.0f s, longer than MAX_RUNTIME; its message will time "
            "out. Its stack:\n%s",
            batch.topic.name,
            seconds,
            stack,
            extra={"rmq_event": "overrun", "rmq_topic": batch.topic.name, "rmq_slot": batch.slot.number},
        )


PAUSE_SECONDS = 0.2
"""Seconds between the end of a subscription and the next one."""


class WakeupSubscriber(threading.Thread):
    """Subscribes to wake-ups, because that may take long, and puts each new subscription into ``mailbox``.

    It reads only a subscription without a socket by itself: that of a broker in memory. ``subscribed`` is called after each
    new subscription.
    """

    def __init__(
        self, broker: Broker, topics: list[Topic], mailbox: Mailbox, subscribed: Callable[[], None]
    ) -> None:
        super().__init__(name="rmq-wakeups", daemon=True)
        self.subscribed = threading.Event()
        self._broker = broker
        self._topics = topics
        self._mailbox = mailbox
        self._on_subscribed = subscribed
        self._is_stopped = False
        self._renewed = threading.Event()
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End soon. The dispatcher reads wake-ups no more."""
        self._is_stopped = True
        self._renewed.set()

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._renewed.set()

    def run(self) -> None:
        wakeups = None
        while True:
            # The flag is cleared before anything is done, so that what is requested meanwhile is not overlooked.
            self._renewed.clear()
            if self._is_stopped:
                break
            try:
                wakeups = self._broker.wakeups(self._topics)
                self.subscribed.set()
                self._on_subscribed()
                self._attend(wakeups)
            except RmqError:
                # Redis is unavailable, and it is tried again.
                pass
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain(
                    "wake-ups",
                    "The wake-up subscription failed; polling continues: %s",
                    error,
                    exc_info=True,
                )
            if not self._is_stopped:
                time.sleep(PAUSE_SECONDS)
        if wakeups is not None:
            # The dispatcher has ended, and perhaps did not see this one.
            wakeups.close()

    def _attend(self, wakeups: Subscription[tuple[str, int]]) -> None:
        """Give a subscription to the dispatcher, and wait until there has to be another one."""
        try:
            wakeups.fileno()
        except OSError:
            self._read(wakeups)
            return
        # The dispatcher closes it, because it may read it at any time.
        self._mailbox.put(Resubscribed(wakeups))
        self._renewed.wait()

    def _read(self, wakeups: Subscription[tuple[str, int]]) -> None:
        self._mailbox.put(Resubscribed(None))
        try:
            while not self._renewed.is_set():
                for wakeup in wakeups.get(timeout=0.1):
                    self._mailbox.put(Wake(*wakeup))
        finally:
            wakeups.close()


class BackgroundThreads:
    """The heartbeat and the subscriber of one worker, which report to ``mailbox``. ``thread_watch`` replaces them if they die."""

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        in_flight: InFlight,
        mailbox: Mailbox,
        thread_watch: ThreadWatch,
    ) -> None:
        self._broker = broker
        self._topics = list(topics)
        self._in_flight = in_flight
        self._mailbox = mailbox
        self._subscriber = Watched(self._new_listening)
        self._heartbeat = Watched(self._new_heartbeat)
        thread_watch.add("heartbeat", self._heartbeat.is_alive, self._heartbeat.replace)
        mailbox.on(SubscriptionLost, lambda _: self.renew())
        thread_watch.add("wake-up", self._subscriber.is_alive, self._subscriber.replace)

    def start(self) -> None:
        """Start both."""
        self._heartbeat.thread.start()
        self._subscriber.thread.start()

    def wait_subscribed(self, seconds: float) -> None:
        """Wait until the subscription to wake-ups is active, for at most ``seconds``."""
        self._subscriber.thread.subscribed.wait(seconds)

    def renew(self) -> None:
        """Subscribe again, because the connection may be dead without an error."""
        self._subscriber.thread.renew()

    def look_again(self, topic: str, slot: int) -> None:
        """Extend the deliveries of a slot at once, because one of them was cancelled."""
        # The heartbeat may have been replaced since, so its present thread is looked up for each notice.
        self._heartbeat.thread.look_again(topic, slot)

    def stop(self, *, keeps_beating: bool) -> list[threading.Thread]:
        """End both, and return them. ``keeps_beating``: the heartbeat ends with the process."""
        self._subscriber.thread.stop()
        if keeps_beating:
            return [self._subscriber.thread]
        self._heartbeat.thread.stop()
        return [self._heartbeat.thread, self._subscriber.thread]

    def _new_heartbeat(self) -> Heartbeat:
        def overrun(batch: Batch) -> None:
            self._mailbox.put(MaxRuntimeExceeded(batch))

        def unending(batch: Batch) -> None:
            self._mailbox.put(HardTimeoutExceeded(batch))

        # The heartbeat iterates over a copy, because the dispatcher's thread changes the dictionary at the same time.
        batches = self._in_flight.batches
        return Heartbeat(self._broker, self._topics, lambda: batches.copy().values(), overrun, unending)

    def _new_listening(self) -> WakeupSubscriber:
        def subscribed() -> None:
            # Redis keeps no notices for a client without a subscription, so those of cancellations may have been lost.
            self._heartbeat.thread.look_everywhere()

        return WakeupSubscriber(self._broker, self._topics, self._mailbox, subscribed)
