"""Upkeep of topics that this worker does not serve, and perhaps none does: what times out there is ended.

In the slots of a worker each ``prepare`` does that. Where it is decided that a delivery has timed out, and what then becomes of
its message: ``lua/slot/_time_outs.lua``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace

from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker, batched, concerns_all, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.topic import Topic, slot_counts
from django_rmq.exceptions import RmqError, WrongType

SWEEP_SECONDS = 10.0
"""Seconds between two checks for time-outs."""

STEPS = 8
"""The number of slots in which one round trip ends deliveries: Redis serves no other client between its calls."""

LOOKS = 16
"""The number of scripts in one round trip that ask when deliveries time out, each of up to ``inspect.HEADS`` slots."""

logger = safe_logger("django_rmq.consumer")


class UnservedTopics:
    """The duty that ends deliveries and claims which have timed out in ``topics``."""

    def __init__(self, broker: Broker, topics: Iterable[Topic]) -> None:
        self._broker = broker
        self._topics = list(topics)
        self._complain = LogThrottle(logger)

    def __call__(self) -> Generator[float, None, None]:
        while self._topics:
            late = self._find_late()
            while late:
                self._end_some(late)
                yield 0.0
            yield SWEEP_SECONDS

    def _find_late(self) -> deque[Call[int]]:
        """Return a call for each slot in which something has timed out."""
        server = self._broker.now_ms()
        late: deque[Call[int]] = deque()
        for topic, slots in time_outs(self._broker, self._present()):
            if isinstance(slots, RmqError):
                self._complain("sweep", "Cannot look for timed-out deliveries: %s", slots)
            else:
                late += [ack.time_out(topic, slot) for slot, due in slots if due <= server]
        return late

    def _present(self) -> list[Topic]:
        """Return the topics with the slots that they have now: a re-slotting may have added some."""
        try:
            definitions = self._broker.definitions()
        except WrongType as error:
            self._complain("definitions", "Cannot look for slots that were added to topics: %s", error)
            return self._topics
        present = ((topic, definitions.get(topic.name)) for topic in self._topics)
        return [replace(topic, slots=max(slot_counts(known))) if known else topic for topic, known in present]

    def _end_some(self, late: deque[Call[int]]) -> None:
        """End what has timed out in a few slots; a slot that may have more comes last."""
        steps = [late.popleft() for _ in range(min(STEPS, len(late)))]
        for call, answer in zip(steps, run_all(self._broker, steps), strict=True):
            if isinstance(answer, RmqError):
                self._complain("sweep", "Cannot end timed-out deliveries: %s", answer)
            elif answer:
                # One script ends a bounded number of deliveries: the claim of a dead Spark query comes back in many steps.
                late.append(call)


def time_outs(
    broker: Broker, topics: Sequence[Topic]
) -> Iterator[tuple[Topic, list[tuple[int, int]] | RmqError]]:
    """Yield a topic with some of its slots in which anything is in flight or claimed, and the ms at which it times out.

    Instead of slots that cannot be read it yields the error, so that the callers go on with those that other nodes hold. It
    raises an error that concerns the whole server.
    """
    parts = (
        (topic, range(topic.slots)[first : first + inspect.HEADS])
        for topic in topics
        for first in range(0, topic.slots, inspect.HEADS)
    )
    for some in batched(parts, LOOKS):
        looks = [inspect.heads(topic, slots, upkeep=True) for topic, slots in some]
        for (topic, slots), heads in zip(some, run_all(broker, looks), strict=True):
            if isinstance(heads, RmqError):
                if concerns_all(heads):
                    raise heads
                yield topic, heads
            else:
                yield topic, [(slot, due) for slot, due in zip(slots, heads, strict=True) if due is not None]
