"""DEAD_RETENTION: how long dead messages are kept. A duty for each topic deletes older ones, oldest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain

from django_rmq.core.commands import operate
from django_rmq.core.commands.broker_interface import Broker, batched, run_all
from django_rmq.core.duties import Duty
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError

logger = safe_logger("django_rmq.consumer")

SlotsOf = Callable[[Topic], Sequence[range]]
"""Returns the slots of a topic that this worker looks after, and no other worker does."""

SLOTS_AT_ONCE = 32
"""The number of slots whose Dead is trimmed in one round trip."""

MEMBERS_AT_ONCE = 100
"""The maximum number of messages trimmed from each of these slots. Other clients then wait for the whole trip
no longer than for one script."""


def trim_dead(broker: Broker, topics: Iterable[Topic], slots_of: SlotsOf) -> list[Duty]:
    """Return a duty for each topic with DEAD_RETENTION that deletes older messages from Dead, oldest first.

    It visits all slots of a topic in turn. A round takes a twentieth of the retention, at least 1 s and at
    most an hour; messages are deleted at most this much too late.
    """
    return [_Retention(broker, topic, slots_of) for topic in topics if topic.dead_retention]


class _Retention:
    """Trims the Dead sets of one topic."""

    def __init__(self, broker: Broker, topic: Topic, slots_of: SlotsOf) -> None:
        assert topic.dead_retention is not None
        self._broker = broker
        self._topic = topic
        self._slots_of = slots_of
        self._retention_ms = topic.dead_retention * 1000
        self._round_seconds = min(3600.0, max(1.0, topic.dead_retention / 20))
        self._log_throttled = LogThrottle(logger)

    def __call__(self) -> Generator[float, None, None]:
        """Delete older messages from all slots, round after round; yield the seconds until the next step."""
        while True:
            begun, trimmed = time.monotonic(), 0
            slots = self._slots_of(self._topic)
            round_trips = max(1, -(-sum(map(len, slots)) // SLOTS_AT_ONCE))
            for number, part in enumerate(batched(chain.from_iterable(slots), SLOTS_AT_ONCE), 1):
                counts = self._trim_some(part)
                trimmed += sum(counts)
                for slot, gone in zip(part, counts, strict=True):
                    # One script deletes a bounded number of messages, so a slot that reached the bound may have more.
                    while gone >= MEMBERS_AT_ONCE:
                        yield 0.01
                        gone = self._broker.run(
                            operate.purge(self._topic, slot, "dead", self._up_to(), BATCH)
                        )
                        trimmed += gone
                ahead = begun + self._round_seconds * number / round_trips - time.monotonic()
                if number < round_trips:
                    yield max(0.01, ahead)
            if trimmed:
                logger.info(
                    "Discarded %d dead messages of topic %s that were older than DEAD_RETENTION",
                    trimmed,
                    self._topic.name,
                    extra={
                        "rmq_event": "dead_trimmed",
                        "rmq_topic": self._topic.name,
                        "rmq_messages": trimmed,
                    },
                )
            yield max(0.01, begun + self._round_seconds - time.monotonic())

    def _up_to(self) -> float:
        return self._broker.now_ms() - self._retention_ms

    def _trim_some(self, slots: list[int]) -> list[int]:
        """Delete from some slots in one round trip; return how many messages are gone from each."""
        up_to = self._up_to()
        calls = [operate.purge(self._topic, slot, "dead", up_to, MEMBERS_AT_ONCE) for slot in slots]
        answers = run_all(self._broker, calls)
        slot_errors = [gone for gone in answers if isinstance(gone, RmqError)]
        if slot_errors:
            self._log_throttled(
                "trim",
                f"Cannot discard old dead messages in {len(slot_errors)} slots of topic {self._topic.name}: %s",
                slot_errors[0],
            )
        # A slot that failed has its turn again in the next round.
        return [0 if isinstance(gone, RmqError) else gone for gone in answers]
