"""The heartbeat: extends what is in hand while it makes progress, and reports listeners that run too long.

It runs in a separate thread, so that a listener that never returns cannot stop it. It measures the listener's
time: after MAX_RUNTIME a batch is abandoned and left to its time-out, and after HARD_TIMEOUT its call is ended.
Redis answers each extension with what was cancelled meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from django_rmq.core.commands import ack
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.consumer.batch import Batch
from django_rmq.core.consumer.server_clock import uptime
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.log.throttle import LogThrottle
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")

GRACE_SECONDS = 5.0
"""Seconds that an async listener has to end, once it was cancelled because of HARD_TIMEOUT."""

NEWS_SECONDS = 60.0
"""Seconds for which news is kept. A batch that was taken before it came may get into hand only after it."""


class Heartbeat(threading.Thread):
    """Extends every batch in hand when a third of its time-out has passed.

    ``in_hand`` returns the batches of this process; ``overrun`` is called once for a batch whose listener has
    run longer than MAX_RUNTIME, ``unending`` for one that only the end of the process can end.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        in_hand: Callable[[], Iterable[Batch]],
        overrun: Callable[[Batch], None],
        unending: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        super().__init__(name="rmq-heartbeat", daemon=True)
        self._broker = broker
        self._in_hand = in_hand
        self._overrun = overrun
        self._unending = unending
        # A batch may arrive right after a check, so the interval of the checks follows the shortest time-out; later on,
        # also those of single messages.
        ends = (min(topic.timeout, topic.hard_timeout or topic.timeout) for topic in topics)
        self._pause = min([1.0, *(end / 12 for end in ends)])
        self._stopped = False
        self._woken = threading.Event()
        self._news: dict[tuple[str, int], float] = {}
        """Slots of which something in flight was cancelled, and the ``uptime`` of the latest news of it."""
        self._doubted_at = float("-inf")
        """The ``uptime`` at which such news may have been lost."""
        self._complain = LogThrottle(logger)

    def stop(self) -> None:
        """End after the current beat."""
        self._stopped = True
        self._woken.set()

    def look_again(self, topic: str, slot: int) -> None:
        """Extend what is in hand of a slot at once: the answer says what was cancelled."""
        self._news[topic, slot] = uptime()
        self._woken.set()

    def look_everywhere(self) -> None:
        """Extend everything in hand at once, because the news that something was cancelled may be lost."""
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
        """Extend what needs it, and abandon what has run too long."""
        now = uptime()
        for told, at in list(self._news.items()):
            if now - at > NEWS_SECONDS:  # rule: forgets_news_of_what_is_not_in_hand_yet
                del self._news[told]
        due: list[Batch] = []
        for batch in self._in_hand():
            thread, topic = batch.thread, batch.topic
            if thread is not None and not thread.is_alive():  # rule: extends_for_dead_threads
                continue
            self._pause = min(self._pause, batch.timeout / 12)
            since = batch.running_since
            if topic.hard_timeout is not None and (seconds := batch.ran(now)) > topic.hard_timeout:
                self._end(batch, seconds)
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
        """Return whether something of the batch may be cancelled that Redis did not know when it confirmed the batch."""
        # rule: asks_nothing_when_something_is_cancelled
        told_at = self._news.get((batch.topic.name, batch.place.slot), 0.0)
        # rule: misses_what_was_cancelled_while_it_was_deaf
        return batch.confirmed <= max(told_at, self._doubted_at)

    def _extend(self, due: list[Batch]) -> None:
        at = uptime()
        sent = [(batch, members) for batch in due if (members := batch.in_flight())]
        calls = [ack.extend(batch.topic, batch.place.slot, batch.receipt, members) for batch, members in sent]
        for (batch, members), words in zip(sent, run_all(self._broker, calls), strict=True):
            if isinstance(words, RmqError):
                self._complain(
                    batch.topic.name,
                    f"Cannot extend the time-out in topic {batch.topic.name} slot {batch.place.slot}: %s",
                    words,
                )
                continue
            # What was settled meanwhile is stale as well; that does no harm, because it does not begin again.
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
            if batch.steps is None:
                self._unending(batch)  # rule: logs_before_it_ends_a_call
            else:
                for message in batch.running():
                    message.stopped = message.stopped or "overran"
                batch.steps.stop("overran")
            logger.error(
                "A listener of topic %s has run for %.0f s, longer than HARD_TIMEOUT; %s. Its stack:\n%s",
                batch.topic.name,
                seconds,
                "its process is replaced" if batch.steps is None else "it is cancelled",
                stack,
                extra={
                    "rmq_event": "hard_timeout",
                    "rmq_topic": batch.topic.name,
                    "rmq_slot": batch.place.slot,
                },
            )
        # rule: waits_for_coroutines_that_do_not_end
        elif batch.steps is not None and uptime() - batch.overran_at > GRACE_SECONDS:
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
            extra={"rmq_event": "overrun", "rmq_topic": batch.topic.name, "rmq_slot": batch.place.slot},
        )
