"""The heartbeat: extends deliveries in flight while their listeners run.

It runs in a separate thread, so that a listener that never returns cannot stop it. On each beat ``watchdog`` looks for calls
that run too long, and their batches are not extended. An extension restarts the time-out; where a time-out ends is in
``lua/slot/_time_outs.lua``. After the death of a process nothing is extended: ``worker_processes.crash_recovery`` ends the
deliveries of serial topics at once, and the others time out. ``BackgroundThreads`` starts and ends this thread and the
subscriber to wake-ups (``mailbox``).

Cancelling goes through here. The script ``remove`` (``lua/slot/operate.lua``) marks the delivery and publishes its slot. The
heartbeat then extends the deliveries of that slot at once (``look_again``), and ``extend`` answers which are cancelled.
``Batch.cancel`` notifies the listener, and stops its coroutine (``AsyncBatch.stop``). If the listener fails then, ``rollback``
ends the message as cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from django_rmq.core.clock import uptime
from django_rmq.core.commands import ack
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.consumer.batch import Batch, InFlight
from django_rmq.core.consumer.mailbox import (
    HardTimeoutExceeded,
    Mailbox,
    MaxRuntimeExceeded,
    WakeupSubscriber,
)
from django_rmq.core.consumer.watchdog import CallWatch, ThreadWatch, Watched
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")

NEWS_SECONDS = 60.0
"""Seconds for which a notice that something of a slot was cancelled is remembered. A batch that contains the message may be
registered only after the notice arrived."""


class Heartbeat(threading.Thread):
    """Extends every batch in flight when a third of its time-out has passed.

    ``batches`` returns the batches of this process; ``call_watch`` looks at the call that each runs.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        batches: Callable[[], Iterable[Batch]],
        call_watch: CallWatch,
    ) -> None:
        super().__init__(name="rmq-heartbeat", daemon=True)
        self._broker = broker
        self._batches = batches
        self._call_watch = call_watch
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
            thread = batch.thread
            # The batch of a dead thread makes no progress. Its begun messages time out, and the dispatcher gives back the others.
            if thread is not None and not thread.is_alive():  # rule: extends_for_dead_threads
                continue
            # A message may have a shorter time-out than its topic.
            self._pause = min(self._pause, batch.timeout / 12)
            self._call_watch.look(batch, now)
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


class BackgroundThreads:
    """The heartbeat and the subscriber of one worker, which report to ``mailbox``. ``watchdog`` replaces them if they die."""

    def __init__(
        self,
        broker: Broker,
        topics: Sequence[Topic],
        in_flight: InFlight,
        mailbox: Mailbox,
        thread_watch: ThreadWatch,
        inbox: bytes,
    ) -> None:
        call_watch = CallWatch(
            lambda batch: mailbox.put(MaxRuntimeExceeded(batch)),
            lambda batch, began: mailbox.put(HardTimeoutExceeded(batch, began)),
        )
        # The heartbeat iterates over a copy, because the dispatcher's thread changes the dictionary at the same time.
        self._heartbeat = Watched(
            lambda: Heartbeat(broker, topics, lambda: in_flight.batches.copy().values(), call_watch)
        )
        self._subscriber = Watched(
            lambda: WakeupSubscriber(broker, topics, mailbox, self._look_everywhere, inbox)
        )
        thread_watch.add("heartbeat", self._heartbeat.is_alive, self._heartbeat.replace)
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

    def _look_everywhere(self) -> None:
        # Redis keeps no notices for a client without a subscription, so those of cancellations may have been lost.
        self._heartbeat.thread.look_everywhere()
