"""The heartbeat: extends what is in hand while it makes progress, and says when a listener does not.

It runs in a thread of its own, so that a listener that never returns cannot stop it, and follows the
listener's time, not its own: past MAX_RUNTIME a batch is abandoned and left to its time-out.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable

from django_rmq.broker import BATCH, Broker
from django_rmq.consumer.executor import Batch, uptime
from django_rmq.exceptions import RmqError

logger = logging.getLogger("django_rmq.consumer")


class Heartbeat(threading.Thread):
    """Extends every batch in hand before a third of its time-out has passed.

    ``in_hand`` returns the batches of this process; ``overrun`` is called once for a batch whose
    listener has run longer than MAX_RUNTIME; ``stack_of`` gives the identifier of a batch's thread.
    """

    def __init__(
        self,
        broker: Broker,
        in_hand: Callable[[], Iterable[Batch]],
        overrun: Callable[[Batch], None],
        thread_of: Callable[[Batch], threading.Thread | None],
    ) -> None:
        super().__init__(name="rmq-heartbeat", daemon=True)
        self._broker = broker
        self._in_hand = in_hand
        self._overrun = overrun
        self._thread_of = thread_of
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End after the present beat."""
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(self.beat()):
            pass

    def beat(self) -> float:
        """Extend what needs it; return seconds until the next look."""
        now, pause = uptime(), 1.0
        due: list[Batch] = []
        for batch in list(self._in_hand()):
            if batch.abandoned:
                continue
            topic = batch.topic
            if batch.running_since is not None and now - batch.running_since > topic.max_runtime:
                self._abandon(batch, now - batch.running_since)
                continue
            third = topic.timeout / 3
            if now - batch.confirmed >= third:
                due.append(batch)
            pause = min(pause, third / 4)
        if due:
            try:
                self._extend(due)
            except RmqError as error:
                logger.warning("The heartbeat of %d batches failed: %s", len(due), error)
        return pause

    def _extend(self, due: list[Batch]) -> None:
        pipeline = self._broker.pipeline()
        sent: list[tuple[Batch, list[bytes], float]] = []
        for batch in due:
            at = uptime()
            members = [message.delivery.member for message in batch.messages]
            for start in range(0, len(members), BATCH):
                part = members[start : start + BATCH]
                pipeline.extend(batch.topic, batch.place.slot, batch.receipt, part)
                sent.append((batch, part, at))
        failed: set[int] = set()
        for (batch, part, at), words in zip(sent, pipeline.execute(), strict=True):
            if isinstance(words, RmqError):
                failed.add(id(batch))
                logger.warning("Cannot extend topic %s slot %s: %s", batch.topic.name, batch.place.slot, words)
                continue
            # Members already committed answer stale as well; they are not started again anyway.
            batch.stale.update(member for member, word in zip(part, words, strict=True) if word == "stale")
            if id(batch) not in failed:
                batch.confirmed = at

    def _abandon(self, batch: Batch, seconds: float) -> None:
        batch.abandoned = True
        thread = self._thread_of(batch)
        frame = sys._current_frames().get(thread.ident or 0) if thread else None
        stack = "".join(traceback.format_stack(frame)) if frame else "(its thread is gone)"
        logger.error(
            "A listener of topic %s has run for %.0f s, longer than MAX_RUNTIME; "
            "its message is left to time out. It is at:\n%s",
            batch.topic.name,
            seconds,
            stack,
            extra={"rmq_event": "overrun", "rmq_topic": batch.topic.name, "rmq_slot": batch.place.slot},
        )
        self._overrun(batch)
