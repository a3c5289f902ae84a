"""The sampler: a duty of workers by which one of them samples a topic once a minute, and stores the record of the minute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from zlib import crc32

from django_rmq.core.commands import activity
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.log.safe_logger import safe_logger
from django_rmq.core.model.replies import Sample
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring.history.minute_record import SLOTS_AT_ONCE, MinuteRecord

logger = safe_logger("django_rmq.history")

SPREAD_SLOTS = 4_096
"""With more slots than this, the reading is spread over ``SPREAD_SECONDS``."""

SPREAD_SECONDS = 45.0
MOST_SLOTS = 65_536
"""With more slots than this, only every second, fourth, … slot is read."""


Steps = Callable[[], Generator[float, None, None]]
"""A duty of a worker: does a small step and yields the seconds until the next one."""


def sampling(
    broker: Broker,
    topics: Iterable[Topic],
    minutes: int,
    is_ours: Callable[[Topic], bool],
    present: Callable[[Topic], Topic] = lambda topic: topic,
) -> list[Steps]:
    """Return a duty for each topic that samples it once a minute, unless another worker does; no duties if ``minutes`` is 0.

    ``is_ours`` returns whether this worker should try; Redis ensures that only one samples. ``present``
    returns a topic with its current slots.
    """
    return [_Sampling(broker, topic, minutes, is_ours, present) for topic in topics] if minutes else []


class _Sampling:
    """The duty that samples one topic."""

    def __init__(
        self,
        broker: Broker,
        topic: Topic,
        keep: int,
        is_ours: Callable[[Topic], bool],
        present: Callable[[Topic], Topic],
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._keep = keep
        self._is_ours = is_ours
        self._present = present
        # Each topic has an instant of its own, so that Redis does not get the reads of all topics at once.
        self._offset_ms = crc32(topic.name.encode()) % 5_000

    def __call__(self) -> Generator[float, None, None]:
        while True:
            self._topic = self._present(self._topic)
            minute, passed = divmod(self._broker.now_ms(), 60_000)
            if passed < self._offset_ms:
                yield (self._offset_ms - passed) / 1000
            # A reading that is spread over most of a minute and begins late would end in the next minute.
            elif passed > 12_000 and self._topic.slots > SPREAD_SLOTS:
                yield (60_000 - passed) / 1000
            # Several workers may try: while slots move two may own slot 0, and topics without owners are sampled by any worker.
            elif self._is_ours(self._topic) and self._broker.run(activity.claim_minute(self._topic, minute)):
                yield from self._sample(minute)
                yield self._until_next()
            else:
                yield self._until_next()

    def _until_next(self) -> float:
        return (60_000 + self._offset_ms - self._broker.now_ms() % 60_000) / 1000

    def _sample(self, minute: int) -> Generator[float, None, None]:
        stride = -(-self._topic.slots // MOST_SLOTS)
        slots = range(0, self._topic.slots, stride)
        parts = [slots[at : at + SLOTS_AT_ONCE] for at in range(0, len(slots), SLOTS_AT_ONCE)]
        pause = SPREAD_SECONDS / len(parts) if self._topic.slots > SPREAD_SLOTS else 0.02
        whole: Sample | None = None
        for number, part in enumerate(parts):
            if number:
                yield pause
            found = self._broker.run(activity.sample(self._topic, part))
            whole = found if whole is None else whole.plus(found)
        assert whole is not None
        record = MinuteRecord.of(whole, self._topic, self._broker.now_ms())
        self._broker.run(activity.keep_minute(self._topic, minute, record.encode(), self._keep))
