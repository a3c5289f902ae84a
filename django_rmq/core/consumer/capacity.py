"""Capacity: how many more messages a worker can take now, given its threads, its event loop, its flows and its memory.

``Capacity.limit`` decides how many messages one fetch asks for. Which slots are asked is decided by ``fetch_planner``. Messages
of a serial slot run one at a time: ``Capacity.thread_for`` gives them to the thread that has such messages already. In the event
loop ``run_order.FairQueue`` sees to that, and between workers Redis does (``lua/slot/_one_at_a_time.lua``).

How many calls FLOW allows, and in which threads, is decided in ``flow``. Limits over all workers are in ``rate_limits``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.consumer.batch import Batch, InFlight, ListenerLike
from django_rmq.core.consumer.flow import UNLIMITED, AdaptiveConcurrency, FlowThreads
from django_rmq.core.consumer.mailbox import LimitsChange
from django_rmq.core.consumer.slots import ConsumedSlot, SlotTable
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic
from django_rmq.core.rate_limits import RateLimits

MESSAGES_IN_FLIGHT = 20_000
"""The maximum number of messages in flight in one process."""

MOST = 67_108_864
"""The maximum number of bytes in flight in one process."""

MOST_AT_ONCE = 4_194_304
"""The maximum number of bytes that one prepare returns, unless its first message alone is larger."""

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
        """Return how many bytes a prepare of ``limit`` messages may return, or 0 if the process has too many in flight."""
        size = max(LEAST_AT_ONCE, min(int(2 * limit * self._sizes[topic.name]), MOST_AT_ONCE))
        # Grants of prepares that are under way count in full, because it is unknown how much they return.
        if self.held + self._granted + size > MOST:  # rule: takes_all_bytes
            return 0
        self._granted += size
        return size

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


WORK_SECONDS = 0.05
"""Seconds of work that one prepare should return, unless there would be too many prepares."""

AHEAD_SECONDS = 0.05
"""Seconds of work that wait in the worker for its event loop, so that the loop need not wait for Redis."""

FIRST_SECONDS, FIRST_ASYNC_SECONDS = 0.002, 0.05
"""Seconds that a message is thought to take before a call was measured: in a thread, and in the event loop."""

MESSAGES = 16_000
"""The number of messages that all running batches of a topic may have; one prepare may return a share of them."""

PREPARES = 1_000
"""The number of prepares per second and topic above which each of them should return more work."""


class AsyncCapacity:
    """The topics of one worker with async listeners, and the batches of each that are in flight."""

    def __init__(self, topics: Iterable[Topic], listeners: Mapping[str, ListenerLike]) -> None:
        async_topics = [topic for topic in topics if listeners[topic.name].coroutine is not None]
        self.concurrency = {topic.name: topic.concurrency for topic in async_topics}
        self.flows = {
            topic.name: AdaptiveConcurrency(topic.concurrency)
            for topic in async_topics
            if topic.flow == "auto"
        }
        self._held: Counter[str] = Counter()
        """Topic -> the batches in flight that can run beside each other: of a serial slot only one counts."""
        self.slow: Counter[str] = Counter()
        """Topic -> the number of calls whose end is unknown, so that no messages are taken ahead for them."""

    def __bool__(self) -> bool:
        return bool(self.concurrency)

    def __contains__(self, topic: object) -> bool:
        return topic in self.concurrency

    def most(self, topic: str) -> int:
        """Return how many calls of a topic's listener may run at the same time."""
        flow = self.flows.get(topic)
        return self.concurrency[topic] if flow is None else flow.limit

    def capacity(self, topic: str, seconds_per_message: float) -> int:
        """Return how many more batches of a topic may be taken."""
        most = self.most(topic)
        if topic not in self.flows:
            # A flow measures its calls by the batches in flight, so none may wait beside those that run.
            soon_ended = max(0, most - self.slow[topic])
            most += int(soon_ended * AHEAD_SECONDS / max(seconds_per_message, self.seconds(topic)))
        return most - self._held[topic]  # rule: takes_more_than_it_can_run

    def seconds(self, topic: str) -> float:
        """Return how many seconds of work one prepare should return."""
        return max(WORK_SECONDS, self.most(topic) / PREPARES)

    def share(self, topic: str) -> int:
        """Return how many messages a batch may have, so that all batches that can run together stay within ``MESSAGES``."""
        return max(1, MESSAGES // self.most(topic))

    def needs_room(self, slot: ConsumedSlot) -> bool:
        """Return whether another batch of a slot could run beside those in flight."""
        return not (slot.topic.serial and slot.batches)

    def started(self, slot: ConsumedSlot) -> None:
        """Record a batch that is in flight from now on."""
        if slot.topic.name in self.concurrency and (not slot.topic.serial or slot.batches == 1):
            self._held[slot.topic.name] += 1

    def ended(self, slot: ConsumedSlot) -> None:
        """Record a batch that is no longer in flight."""
        if slot.topic.name in self.concurrency and self.needs_room(slot):
            self._held[slot.topic.name] -= 1

    def reported(self, topic: str, seconds: float, messages: int) -> None:
        """Record that ``messages`` took ``seconds``."""
        flow = self.flows.get(topic)
        if flow is not None:
            flow.note(seconds, messages, self._held[topic], time.monotonic())


QUICK_SECONDS = 0.005
"""Seconds per message above which a priority slot has only one batch in flight, without a second one behind it."""

LEAST_EXPECTED = 16
"""How many messages a slot is expected to have after it had none."""


COMMIT_DELAY_SECONDS = 0.005
"""Seconds for which commits may wait for the next fetch: then both are one round trip, and Redis and the worker do less."""

PUSHED_COMMIT_DELAY_SECONDS = 0.001
"""The same where the next message is pushed without a fetch, if nothing is in flight in its slot any more."""


class Capacity:
    """The capacity of one worker. ``owner`` is the name under which it requests its share of the limits."""

    def __init__(
        self,
        broker: Broker,
        owner: str,
        table: SlotTable,
        listeners: Mapping[str, ListenerLike],
        threads: int,
        async_capacity: AsyncCapacity,
        in_flight: InFlight,
        inbox: bytes,
    ) -> None:
        topics = table.topics.values()
        self.listeners = listeners
        self.threads = threads
        self.bytes = MemoryBudget(topics)
        self.async_capacity = async_capacity
        self._in_flight = in_flight
        in_threads = [topic for topic in topics if topic.name not in async_capacity]
        has_flow = any(topic.flow == "auto" for topic in in_threads)
        self.flow_threads = FlowThreads(in_threads, threads) if has_flow else None
        self.limits = RateLimits(broker, owner, topics, self._capacity)
        self.seconds_per_message: defaultdict[str, float] = defaultdict(lambda: FIRST_SECONDS)
        """Topic -> the time that calls of its listener take per message, smoothed. It begins with a guess."""
        self.seconds_per_message.update(dict.fromkeys(async_capacity.concurrency, FIRST_ASYNC_SECONDS))
        self.table = table
        self.inbox = inbox
        """The channel to which sends may push messages for this worker."""
        self.is_subscribed = False
        """Whether this worker hears what is pushed to it."""
        self.pushed_topics = frozenset(
            topic.name
            for topic in topics
            if inbox and topic.serial and not (topic.flow or topic.slot_each_us)
            if topic.name not in async_capacity and self.batch_size(topic) == 1
        )
        """The topics of which sends may push messages, as far as that does not change."""
        self._slow: set[ConsumedSlot] = set()
        """Slots in which a call has run for so long that nothing should wait behind it."""
        self._expected: defaultdict[str, float] = defaultdict(lambda: float(LEAST_EXPECTED))
        """Topic -> the number of messages that its next prepares are expected to return, smoothed."""

    @property
    def is_limited(self) -> bool:
        """Whether due slots may have to wait for limits or flows."""
        return bool(self.limits or self.flow_threads or self.async_capacity)

    def runners(self, topic: Topic) -> int:
        """Return how many batches of a topic may run at the same time."""
        return self.async_capacity.most(topic.name) if topic.name in self.async_capacity else self.threads

    def depth(self, slot: ConsumedSlot) -> int:
        """Return how many batches of a slot may be in flight. Usually 2: one runs, and the next one is ready behind it.

        1 where nothing should wait behind a call: it would break the order, take long, or could run elsewhere.
        """
        if slot.topic.is_strict or (slot.topic.serial and slot in self._slow):
            return 1
        if not slot.topic.serial:
            return 2 * self.runners(slot.topic)
        if slot.topic.name in self.async_capacity and len(self.table) > self.async_capacity.most(
            slot.topic.name
        ):
            return 1  # other slots have messages for these calls
        can_move = not slot.topic.flow and slot.topic.name not in self.async_capacity
        if self.flow_threads and can_move and self.flow_threads.has_flow(slot.thread, time.monotonic()):
            return 1  # so that the next batch goes to another thread
        # If permits are few, none is left unused behind a batch that runs.
        has_one = slot.topic.is_priority or slot.topic.flow or self.limits.has_permits(slot.topic.name)
        return 1 if has_one and self.seconds_per_message[slot.topic.name] > QUICK_SECONDS else 2

    def thread_for(self, slot: ConsumedSlot, load: list[float]) -> int:
        """Return the thread for the next batch of a slot. ``load``: seconds of work of each thread."""
        topic = slot.topic
        if topic.name in self.async_capacity:
            return self.threads  # behind the executor threads
        if self.flow_threads and not (topic.serial and slot.batches):
            thread = self.flow_threads.choose(topic.name, slot.thread, load, time.monotonic())
            if topic.serial and thread != slot.thread:
                self.table.move(slot, thread)
            return thread
        if not topic.serial:
            return min(range(self.threads), key=load.__getitem__)
        if not slot.batches:
            # A call that does not end must not keep the other slots of its thread waiting.
            is_taken = self._in_flight.is_taken(slot.home)  # rule: keeps_slots_with_a_thread_that_is_taken
            slot.thread = min(range(self.threads), key=load.__getitem__) if is_taken else slot.home
        return slot.thread

    def takes_pushes(self, topic: Topic) -> bool:
        """Return whether sends may push single messages of ``topic`` to this worker now.

        Nothing has to be decided for them before they begin, and their listener is quick, so that none waits for long.
        """
        return (
            self.is_subscribed
            and topic.name in self.pushed_topics
            and topic.name not in self.limits.shares
            and self.seconds_per_message[topic.name] <= QUICK_SECONDS
            and self.bytes.held < MOST
        )

    def commit_delay(self, topic: str) -> float:
        """Return for how many seconds a commit may wait for the next round trip."""
        return PUSHED_COMMIT_DELAY_SECONDS if topic in self.pushed_topics else COMMIT_DELAY_SECONDS

    def is_shared(self, topic: Topic) -> bool:
        """Return whether all threads share the messages that one prepare of a topic returns."""
        return not (topic.serial or topic.flow or topic.name in self.async_capacity)

    @property
    def messages_left(self) -> int:
        """How many more messages the worker may have in flight."""
        return MESSAGES_IN_FLIGHT - self._in_flight.messages

    def limit(self, topic: Topic, left: int, planned: int, asked_for: int) -> int:
        """Return how many messages the next prepare of a topic asks for, or 0 if the topic's limits leave no room.

        ``left``: how many more the worker may get. ``planned``: how many of the topic the next round trip asks for so far,
        and ``asked_for`` the one that is under way. Where topics have limits, none is under way that asks for messages.
        """
        # With less, threads would get so few messages that they are busy with each other.
        limit = min(self._share_of_work(topic, self.threads if self.is_shared(topic) else 1), left)
        if topic.name in self.async_capacity and not topic.serial:
            limit = min(limit, self.batches_left(topic.name) * self.batch_size(topic) - planned - asked_for)
        if self.limits:
            free = self.limits.room(topic.name) - planned
            share = -(-free // self.runners(topic))
            limit = min(limit, max(share, min(free, self.batch_size(topic))))
        return limit

    def _share_of_work(self, topic: Topic, threads: int) -> int:
        """Return how many messages of a topic keep ``threads``, or its part of the event loop, busy for a while."""
        size = self.batch_size(topic)
        overlaps = topic.name in self.async_capacity
        if overlaps and not topic.serial:
            return max(1, min(self.async_capacity.most(topic.name) * size, topic.prefetch, BATCH))
        seconds = self.async_capacity.seconds(topic.name) if overlaps else WORK_SECONDS
        in_time = threads * seconds / max(self.seconds_per_message[topic.name], 1e-7)
        if overlaps:
            in_time = min(in_time, self.async_capacity.share(topic.name))
        limit = max(size, min(int(in_time), max(topic.prefetch, size)))
        return max(1, min(limit - limit % size if limit > size else limit, BATCH))

    def batch_size(self, topic: Topic) -> int:
        """Return how many messages a topic's listener takes per call."""
        return self.listeners[topic.name].batch_size or 1

    def batches_left(self, topic: str) -> int:
        """Return how many more batches of a topic its flow, or the event loop, can take."""
        if topic in self.async_capacity:
            return self.async_capacity.capacity(topic, self.seconds_per_message[topic])
        if self.flow_threads is None:
            return UNLIMITED
        return self.flow_threads.capacity(topic, 2 if self.seconds_per_message[topic] <= QUICK_SECONDS else 1)

    def slots(self, topic: str) -> int:
        """Return how many slots of a topic that wait for limits or flows may be asked."""
        return max(0, min(self.limits.room(topic), self.batches_left(topic)))

    def _capacity(self, topic: Topic) -> int:
        """Return how many messages of a topic all executors together can have in flight."""
        flow = self.flow_threads.flows.get(topic.name) if self.flow_threads else None
        return (flow.limit if flow else self.runners(topic)) * self._share_of_work(topic, 1)

    # --- what prepares return

    def expected(self, slot: ConsumedSlot) -> int:
        """Return how many messages the next prepare of a slot may return. A slot not asked yet counts as full as the others."""
        return int(self._expected[slot.topic.name]) if slot.expected is None else slot.expected

    def answered(self, slot: ConsumedSlot, messages: int, *, has_more: bool) -> None:
        """Record how many messages a prepare has returned, and whether it left others that are due."""
        slot.expected = BATCH if messages and has_more else 2 * messages + LEAST_EXPECTED
        self._expected[slot.topic.name] += (slot.expected - self._expected[slot.topic.name]) * 0.1

    # --- what batches use

    def note_slow(self, slow: Sequence[Batch]) -> None:
        """Record the batches in flight whose present call has run for so long that its end is unknown."""
        self._slow = {batch.slot for batch in slow}
        self.async_capacity.slow = Counter(batch.topic.name for batch in slow)

    def change_limits(self, item: LimitsChange) -> None:
        """Apply limits that a person has changed."""
        for topic in item.topics:
            held = sum(
                len(batch.messages)
                for batch in self._in_flight.batches.values()
                if batch.topic.name == topic.name
            )
            self.limits.change(topic, held, time.monotonic())

    def reported(self, topic: str, seconds: float, messages: int, now: float) -> None:
        """Record that the listener of a topic took ``seconds`` for ``messages``."""
        if self.flow_threads is not None:
            self.flow_threads.reported(topic, seconds, messages, now)
        self.async_capacity.reported(topic, seconds, messages)
        sample, known = seconds / messages, self.seconds_per_message[topic]
        self.seconds_per_message[topic] += (sample - known) * (0.5 if sample > known else 0.2)

    def started(self, batch: Batch) -> None:
        """Record a batch that is in flight from now on."""
        self.bytes.held += batch.size
        self.async_capacity.started(batch.slot)
        self.limits.started(batch.slot.topic.name, len(batch.messages))

    def ended(self, batch: Batch) -> None:
        """Record a batch that is no longer in flight."""
        now = time.monotonic()
        self.bytes.held -= batch.size
        self.async_capacity.ended(batch.slot)
        self.limits.ended(batch.slot.topic.name, len(batch.messages), now)
        if self.flow_threads is not None:
            self.flow_threads.ended(id(batch), now)
