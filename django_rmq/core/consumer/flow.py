"""FLOW "auto": how many calls of a listener run at the same time, and in which threads of the worker.

``AdaptiveConcurrency`` finds the limit of one listener by TCP Vegas. ``FlowThreads`` runs the batches of such a topic in as many
threads, but never in all of them if there are other topics. Topics without a flow use the others. So a listener that becomes slow
delays only its own topic. In the event loop, ``capacity.AsyncCapacity`` keeps to the limits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import ceil, sqrt

from django_rmq.core.model.topic import Topic

WINDOW_SECONDS = 0.1
"""The minimum length of a window in seconds."""

CALLS_AT_FIRST = 4
"""The minimum number of messages in a window while the limit doubles."""

CALLS_PER_LIMIT = 4
"""The minimum number of messages in a window for each concurrent call, later on; half of it while the limit
doubles."""

PROBE_EVERY = 20
"""The number of windows between two probes."""

TOLERANCE = 0.1
"""The fraction of the calls that may wait."""


class AdaptiveConcurrency:
    """The limit of one listener in one process, 1 to ``most`` concurrent calls that its resource can sustain.

    The algorithm is TCP Vegas (Brakmo and Peterson, 1995), applied to concurrency as in Netflix'
    concurrency-limits: a call that takes longer than calls do without a queue has waited for something, and by
    Little's law ``limit × (1 − base / latency)`` calls wait at a time. One part is new: the latency without a
    queue (``base``) is measured again by briefly halving the limit, so that neither a lucky call nor a lasting
    change distorts it.

    ``limit`` doubles from 1 until calls begin to wait. Then it rises by one while fewer than a tenth wait,
    and otherwise falls by the number of those that wait. After a change that makes all calls slower it
    falls, if necessary to 1, where the latency without a queue can be measured directly, and doubles again.
    """

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.limit = 1
        self.base: float | None = None
        """Seconds that a message takes when none waits."""
        self._spread = 0.0
        """The relative spread of these seconds. Calls that wait do not contribute."""
        self._doubling = True
        self._probed_from = 0
        """The limit to which to return after the probe."""
        self._until_probe = PROBE_EVERY
        self._grown = False
        """Whether the last window raised the limit by one."""
        self._ceiling = 0
        """A limit that proved to be one too high; valid until the next probe."""
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._since = now
        self._messages = 0
        self._seconds = self._squares = self._used = 0.0
        self._most_used = 0

    def note(self, seconds: float, messages: int, in_use: int, now: float) -> None:
        """Add a measurement: ``messages`` took ``seconds`` together while ``in_use`` calls ran at a time.

        ``now`` is monotonic. Calls that began before the limit was changed are ignored for the new one.
        """
        if messages <= 0 or now - seconds < self._since - 0.001:
            return
        each = seconds / messages
        self._messages += messages
        self._seconds += seconds
        self._squares += each * each * messages
        self._used += in_use * messages
        self._most_used = max(self._most_used, in_use)
        needed = max(CALLS_AT_FIRST, self.limit * CALLS_PER_LIMIT // (2 if self._doubling else 1))
        if self._messages >= needed and now - self._since >= WINDOW_SECONDS:
            self._close()
            self._begin(now)

    def _close(self) -> None:
        latency = max(self._seconds / self._messages, 1e-9)
        spread = sqrt(max(0.0, self._squares / self._messages - latency * latency))
        used = self._used / self._messages
        if self._probed_from:
            # The probe has halved the limit, so the queue has drained, and this window shows the latency without a queue.
            self.base, self._spread = latency, spread / latency
            self.limit, self._probed_from = min(self._probed_from, self.most), 0
            return
        if self._most_used <= 1:
            # With one call at a time, no call can have waited for another one of this listener.
            self.base, self._spread = latency, spread / latency
        elif self.base is None or latency < self.base:
            self.base = latency if self.base is None else 0.9 * self.base + 0.1 * latency
        if self._most_used < self.limit:
            return  # too few calls to learn anything about this limit
        waiting = max(0.0, used * (1 - (self.base or latency) / latency))
        if self._doubling:
            self._double(waiting, used)
        else:
            self._follow(waiting, used, self._spread / sqrt(self._messages))

    def _double(self, waiting: float, used: float) -> None:
        if waiting > max(0.5, 2 * TOLERANCE * used):
            self._doubling = False
            self._until_probe = PROBE_EVERY
            self._lower(waiting, used)
        elif self.limit >= self.most:
            self._doubling = False
        else:
            self.limit = min(self.limit * 2, self.most)

    def _follow(self, waiting: float, used: float, doubt: float) -> None:
        # Half a call that waits says nothing: that is noise at any limit. To take back the last step needs less than to lower.
        grown, self._grown = self._grown, False
        doubtful = 2 * doubt * used
        if grown and waiting > max(0.5, 0.75 * TOLERANCE * used, doubtful):
            # The last additional call only made the others wait.
            self._ceiling, self.limit = self.limit, self.limit - 1
        elif waiting > max(0.5, TOLERANCE * used) + doubtful:
            self._lower(waiting, used)
        elif self._until_probe <= 0:
            self._until_probe, self._ceiling = PROBE_EVERY, 0
            if self.limit > 1:
                self._probed_from, self.limit = self.limit, self.limit // 2
        elif self.limit < self.most and self.limit + 1 != self._ceiling:
            self.limit += 1
            self._grown = True
        self._until_probe -= 1

    def _lower(self, waiting: float, used: float) -> None:
        # All calls that wait leave, except that a quarter of a call is noise.
        before, self.limit = self.limit, max(1, self.limit - ceil(waiting - 0.25))
        if self.limit > 1:
            return
        if waiting > 0.6 * used:
            # A limit twice too high explains that half of the calls wait. More means that the calls
            # themselves have become slower.
            self._doubling, self.base, self._ceiling = True, None, 0
        else:
            self._ceiling, self._until_probe = before, PROBE_EVERY


UNLIMITED = 1 << 30
"""More batches than a worker ever has."""

FLOW_SECONDS = 1.0
"""Seconds for which a thread remains in use by a flow after its last batch."""


class FlowThreads:
    """The flows of one worker's topics, at least one, and the threads that run their batches."""

    def __init__(self, topics: Iterable[Topic], threads: int) -> None:
        names = [topic.name for topic in topics]
        flowing = [topic.name for topic in topics if topic.flow == "auto"]
        most = threads if len(names) == 1 else threads - 1
        self.flows = {name: AdaptiveConcurrency(most) for name in flowing}
        # One thread is reserved for topics without a flow.
        first = 1 if len(flowing) < len(names) and threads > 1 else 0
        self._threads = range(threads)
        self._open = range(first, threads)
        """Threads that flows may use."""
        self._held: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Topic -> thread -> number of batches in flight."""
        self._batches: dict[int, tuple[str, int]] = {}
        self._left_at = [float("-inf")] * threads

    def capacity(self, topic: str, depth: int) -> int:
        """Return how many batches of ``topic`` may be taken now, with ``depth`` per thread."""
        flow = self.flows.get(topic)
        return UNLIMITED if flow is None else flow.limit * depth - self._held[topic].total()

    def has_flow(self, thread: int, now: float) -> bool:
        """Return whether a thread runs batches of a topic with a flow."""
        return now - self._left_at[thread] < FLOW_SECONDS or any(held[thread] for held in self._held.values())

    def choose(self, topic: str, present: int, load: Sequence[float], now: float) -> int:
        """Return the thread for the next batch of ``topic``.

        ``present``: the thread of the previous one. ``load``: seconds of work of each thread.
        """
        flow = self.flows.get(topic)
        if flow is not None:
            held = +self._held[topic]
            if len(held) >= flow.limit:
                return min(held, key=held.__getitem__)
            # From the highest index down, because topics without a flow fill the threads from the lowest.
            return min((t for t in self._open if t not in held), key=lambda t: (load[t], -t), default=present)
        free = [t for t in self._threads if not self.has_flow(t, now)] or [0]
        least = min(free, key=load.__getitem__)
        return present if present in free and load[present] <= load[least] + 0.05 else least

    def started(self, batch: int, topic: str, thread: int) -> None:
        """Record a batch (by a number of its own) that goes to ``thread``."""
        if topic in self.flows:
            self._held[topic][thread] += 1
            self._batches[batch] = (topic, thread)

    def reported(self, topic: str, seconds: float, messages: int, now: float) -> None:
        """Record that ``messages`` took ``seconds``."""
        flow = self.flows.get(topic)
        if flow is not None:
            flow.note(seconds, messages, len(+self._held[topic]), now)

    def ended(self, batch: int, now: float) -> None:
        """Record that a batch is no longer in flight."""
        topic, thread = self._batches.pop(batch, ("", 0))
        if topic:
            self._held[topic][thread] -= 1
            self._left_at[thread] = now
