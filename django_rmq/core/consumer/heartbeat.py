"""The heartbeat: extends what is in hand while it makes progress, and reports listeners that run too long.

It runs in a separate thread, so that a listener that never returns cannot stop it. It measures the listener's
time: after MAX_RUNTIME a batch is abandoned and left to its time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from django_rmq.core.calls import ending
from django_rmq.core.calls.broker import Broker, run_all
from django_rmq.core.consumer.batches import Batch
from django_rmq.core.consumer.clocks import uptime
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.words.topics import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")


class Heartbeat(threading.Thread):
    """Extends every batch in hand when a third of its time-out has passed.

    ``in_hand`` returns the batches of this process; ``overrun`` is called once for a batch whose listener has
    run longer than MAX_RUNTIME.
    """

    def __init__(
        self,
        broker: Broker,
        topics: Iterable[Topic],
        in_hand: Callable[[], Iterable[Batch]],
        overrun: Callable[[Batch], None],
    ) -> None:
        super().__init__(name="rmq-heartbeat", daemon=True)
        self._broker = broker
        self._in_hand = in_hand
        self._overrun = overrun
        # A batch may arrive right after a check, so the interval of the checks follows the shortest time-out; later on,
        # also those of single messages.
        self._pause = min([1.0, *(topic.timeout / 12 for topic in topics)])
        self._stopped = threading.Event()
        self._complain = Complaints(logger)

    def stop(self) -> None:
        """End after the current beat."""
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(self._pause):
            try:
                self.beat()
            except Exception as error:  # noqa: BLE001 - logged, not raised
                self._complain("beat", "A heartbeat failed; the worker tries again: %s", error, exc_info=True)

    def beat(self) -> None:
        """Extend what needs it, and abandon what has run too long."""
        now = uptime()
        due: list[Batch] = []
        for batch in self._in_hand():
            thread = batch.thread
            if batch.abandoned or (thread is not None and not thread.is_alive()):
                continue
            self._pause = min(self._pause, batch.timeout / 12)
            since = batch.running_since
            if since is not None and now - since > batch.topic.max_runtime:
                self._abandon(batch, now - since)
            elif now - batch.confirmed >= batch.timeout / 3:
                due.append(batch)
        if due:
            try:
                self._extend(due)
            except RmqError as error:
                self._complain("redis", f"Cannot extend the time-outs of {len(due)} batches: %s", error)

    def _extend(self, due: list[Batch]) -> None:
        at = uptime()
        sent = [(batch, members) for batch in due if (members := batch.in_flight())]
        calls = [
            ending.extend(batch.topic, batch.place.slot, batch.receipt, members) for batch, members in sent
        ]
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
            batch.confirmed = at

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
