"""How many bytes of messages a worker process has in hand, and how many more it may request.

A prepare hands out no more bytes than it was granted, except for its first message, whose size is not known
before. So grants follow the recent sizes of the messages of a topic, and nothing is granted beyond the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic

MOST = 67_108_864
"""The maximum number of bytes in hand of one process."""

MOST_AT_ONCE = 4_194_304
"""The maximum number of bytes that one prepare hands out, unless its first message alone is larger."""

LEAST_AT_ONCE = 65_536
"""The minimum number of bytes granted to one prepare, so that messages which grow do not come one by one."""

_MEMBER, _ENVELOPE = itemgetter(0), itemgetter(3)


class MemoryBudget:
    """The bytes of one worker's messages. A grant counts until its prepare is answered."""

    def __init__(self, topics: Iterable[Topic]) -> None:
        self.held = 0
        self._granted = 0
        self._sizes = {topic.name: float(topic.max_body) for topic in topics}
        """Topic -> bytes per message: MAX_BODY at first, then the largest seen recently."""

    def grant(self, topic: Topic, limit: int) -> int:
        """Return how many bytes a prepare of ``limit`` messages may return. 0: there is no room now."""
        wanted = max(LEAST_AT_ONCE, min(int(2 * limit * self._sizes[topic.name]), MOST_AT_ONCE))
        if self.held + self._granted + wanted > MOST:  # rule: takes_all_bytes
            return 0
        self._granted += wanted
        return wanted

    def answered(self, granted: int) -> None:
        """Release a grant, because its prepare was answered."""
        self._granted -= granted

    def weigh(self, topic: Topic, deliveries: Sequence[Delivery]) -> int:
        """Return the size of these messages in bytes, and use it for the next grants."""
        size = sum(map(len, map(_MEMBER, deliveries)))
        if topic.keyed:
            size += sum(map(len, filter(None, map(_ENVELOPE, deliveries))))
        each, known = size / max(1, len(deliveries)), self._sizes[topic.name]
        self._sizes[topic.name] = max(each, known + (each - known) * 0.2)
        return size


__all__ = ["LEAST_AT_ONCE", "MOST", "MOST_AT_ONCE", "MemoryBudget"]
