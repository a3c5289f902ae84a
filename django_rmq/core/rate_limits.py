"""MAX_RATE and MAX_IN_FLIGHT: the share of one worker of the limits that hold over all workers.

Redis holds what is left of each limit (``core/lua/limits.lua``): a bucket of deliveries, and permits for
messages in flight. A worker requests as much as it can use now, gives back what it does not use, and reports
its share about once a second, so that the sums are right whichever worker owns which slots.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from django_rmq.core.commands import fetch, limits
from django_rmq.core.commands.broker_interface import Broker, concerns_all, run_all
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import NodeUnavailable, RmqError

SHORTEST_WAIT = 0.02
"""Minimum seconds between two requests for deliveries of one topic; deliveries that have accumulated meanwhile come at once."""

CONTENDED_SECONDS = 0.1
"""Seconds between two requests for permits while several workers want more than there is."""

RENEW_SECONDS = 1.0
"""Seconds between two reports of the permits in use while no worker waits for one."""

REST_SECONDS = 5.0
"""Seconds for which a topic is left alone if Redis refuses to change its limits."""

RETURN_SECONDS = 1.0
"""Maximum seconds for finding out which messages a dead worker still has in flight."""

HELD_AT_ONCE = 64
"""The number of slots asked for that in one round trip."""

UNLIMITED = 1 << 30


class RateLimitShare:
    """This worker's share of one topic's limits."""

    __slots__ = (
        "in_use",
        "permits",
        "permits_at",
        "renew_at",
        "tokens",
        "tokens_at",
        "told",
        "topic",
        "wanting",
    )

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.tokens = 0 if topic.max_rate else UNLIMITED
        self.permits = 0 if topic.max_in_flight else UNLIMITED
        self.in_use = 0
        self.told = 0
        """The number of messages in flight that Redis counts for this worker."""
        self.wanting = False
        """Whether messages are due that the limits do not allow yet."""
        self.permits_at = self.tokens_at = 0.0
        """Monotonic times before which it is useless to ask for more permits, or deliveries."""
        self.renew_at = float("inf")
        """Monotonic time at which to report the share of this worker, even if it asks for nothing."""

    def change(self, topic: Topic) -> None:
        """Use the limits of ``topic``. What another rate has granted is used up; a new limit grants nothing yet."""
        if bool(topic.max_rate) != bool(self.topic.max_rate):
            self.tokens = 0 if topic.max_rate else UNLIMITED
        if not topic.max_in_flight:
            self.permits, self.told = UNLIMITED, 0
        elif not self.topic.max_in_flight:
            self.permits = 0
        else:
            self.permits = min(self.permits, topic.max_in_flight)
        self.topic = topic

    def delay(self, until: float) -> None:
        """Ask for nothing before ``until``, a monotonic time."""
        self.permits_at = self.tokens_at = self.renew_at = until

    @property
    def room(self) -> int:
        """How many messages may be taken now."""
        return min(self.tokens, self.permits - self.in_use)

    @property
    def due(self) -> float:
        """When to ask."""
        if not self.wanting or self.room > 0:
            return self.renew_at
        # Permits that have become free serve for nothing as long as the worker has no deliveries.
        is_full = self.permits <= self.in_use
        return min(self.permits_at if is_full else self.tokens_at, self.renew_at)


class RateLimits:
    """The shares of all limited topics of one worker.

    ``capacity`` returns how many messages of a topic this worker could have in flight at once.
    """

    def __init__(
        self, broker: Broker, owner: str, topics: Iterable[Topic], capacity: Callable[[Topic], int]
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._capacity = capacity
        self.shares = {
            topic.name: RateLimitShare(topic) for topic in topics if topic.max_rate or topic.max_in_flight
        }

    def __bool__(self) -> bool:
        return bool(self.shares)

    def change(self, topic: Topic, in_flight: int, now: float) -> None:
        """Apply the limits of ``topic`` from now on. ``in_flight``: how many of its messages this worker has."""
        share = self.shares.get(topic.name)
        if share is None:
            if not (topic.max_rate or topic.max_in_flight):
                return
            share = self.shares[topic.name] = RateLimitShare(topic)
            share.in_use = in_flight
        else:
            share.change(topic)
        # The other workers must know what is in flight here. A share without limits asks for nothing.
        share.delay(now if topic.max_rate or topic.max_in_flight else float("inf"))

    def has_permits(self, topic: str) -> bool:
        """Return whether the number of messages of ``topic`` in flight is limited."""
        share = self.shares.get(topic)
        return share is not None and bool(share.topic.max_in_flight)

    def room(self, topic: str) -> int:
        """Return how many messages of ``topic`` may be taken now."""
        share = self.shares.get(topic)
        return UNLIMITED if share is None else share.room

    def started(self, topic: str, messages: int) -> None:
        """Record messages that were delivered to this worker."""
        share = self.shares.get(topic)
        if share is not None:
            share.in_use += messages
            if share.topic.max_rate:
                share.tokens -= messages

    def ended(self, topic: str, messages: int, now: float) -> None:
        """Record messages that are no longer in flight here."""
        share = self.shares.get(topic)
        if share is not None:
            share.in_use -= messages
            if share.told > max(share.in_use, share.permits):
                share.renew_at = now  # others wait for the permits that have just become free

    def due(self) -> float:
        """Return the monotonic time at which ``ask`` has something to do."""
        return min((share.due for share in self.shares.values()), default=float("inf"))

    def ask(
        self,
        now: float,
        waiting: Callable[[str], int],
        complain: Callable[[str, RmqError], None],
        unsettled: Callable[[str], int],
    ) -> None:
        """Ask Redis if it is time to.

        ``waiting`` returns how many slots of a topic wait for room; ``unsettled`` returns how many of its
        messages have ended here and are still in flight in Redis. Raises ``ServerTrouble``.
        """
        for name, share in self.shares.items():
            slots = waiting(name)
            share.wanting = slots > 0
            if share.due > now:
                continue
            try:
                self._ask(share, slots, unsettled(name), now)
            except RmqError as error:
                # A refusal, or a node that does not answer, concerns this topic alone.
                if concerns_all(error):
                    raise
                complain(name, error)
                rest = RENEW_SECONDS if isinstance(error, NodeUnavailable) else REST_SECONDS
                share.delay(now + rest)

    def _ask(self, share: RateLimitShare, slots: int, unsettled: int, now: float) -> None:
        topic, capacity = share.topic, self._capacity(share.topic)
        # A message that has ended here is in flight in Redis, and uses its permit, until its acknowledgement arrives.
        in_use = share.in_use + unsettled
        more = min(capacity, slots * capacity)
        wanted = max(in_use, min(in_use + more, capacity))
        tokens = 0
        if topic.max_rate:
            # Both are without the unsettled messages.
            has_permits = share.permits > share.in_use  # rule: counts_unsettled_messages_twice
            tokens = (more if has_permits else 0) - max(0, share.tokens)
            if tokens > 0 and (now < share.tokens_at or share.tokens > 0):
                tokens = 0
        allowed = self._broker.run(
            limits.allow(
                topic,
                self._owner,
                tokens=tokens,
                in_use=in_use if topic.max_in_flight else 0,
                wanted=wanted if topic.max_in_flight else 0,
                lease_ms=_lease_ms(topic),
            )
        )
        share.permits_at, share.renew_at = now, float("inf")
        if topic.max_rate:
            share.tokens += allowed.tokens
            if allowed.tokens < tokens:
                # Workers that wait for the same bucket ask at different moments.
                share.tokens_at = now + max(SHORTEST_WAIT, allowed.wait_us / 1e6) * random.uniform(1.0, 1.1)
            if share.tokens > 0:
                # Tokens that will not be used soon are given back.
                share.renew_at = now + CONTENDED_SECONDS
        if topic.max_in_flight:
            share.permits = allowed.permits - unsettled
            share.told = max(in_use, allowed.permits)
            is_short = allowed.permits < wanted
            pause = CONTENDED_SECONDS if allowed.others_wait or is_short else RENEW_SECONDS
            # A worker for which no slot waited has all the permits that it wanted, and asks as soon as it wants more.
            if slots and share.permits <= share.in_use:
                share.permits_at = now + pause
            if share.told:
                share.renew_at = min(share.renew_at, now + pause)

    def leave(self) -> None:
        """Give everything back. Raises ``ServerTrouble``."""
        for share in self.shares.values():
            if share.told or (share.topic.max_rate and share.tokens > 0):
                self._broker.run(
                    limits.allow(
                        share.topic,
                        self._owner,
                        tokens=-max(0, share.tokens) if share.topic.max_rate else 0,
                        in_use=share.in_use if share.topic.max_in_flight else 0,
                        wanted=0,
                        lease_ms=_lease_ms(share.topic),
                    )
                )
                share.told = share.tokens = 0


def return_permits(broker: Broker, topics: Iterable[Topic], owner: str) -> None:
    """Give back the permits of a dead worker, except for those of messages that it still has in flight.

    Call this when everything that could be settled was settled. For topics without a gate it is unknown who
    holds what: the permits end with their lease, as they do if there are too many slots to check, or some cannot be read.
    Raises ``RmqError``.
    """
    end = time.monotonic() + RETURN_SECONDS
    for topic in topics:
        if not (topic.max_in_flight and topic.serial):
            continue
        in_use = _count_held(broker, topic, owner, end)
        if in_use is not None:
            broker.run(
                limits.allow(topic, owner, tokens=0, in_use=in_use, wanted=0, lease_ms=_lease_ms(topic))
            )


def _count_held(broker: Broker, topic: Topic, owner: str, end: float) -> int | None:
    """Return how many messages of a topic a worker has in flight; None if that is unknown at the monotonic time ``end``."""
    in_use = 0
    for start in range(0, topic.slots, HELD_AT_ONCE):
        if time.monotonic() > end:
            return None
        slots = range(topic.slots)[start : start + HELD_AT_ONCE]
        calls = [fetch.list_held(topic, slot, owner) for slot in slots]
        for slot, first in zip(slots, run_all(broker, calls), strict=True):
            if isinstance(first, RmqError):
                return None
            in_use += len(fetch.all_held(broker, topic, slot, owner, first)) if first else 0
    return in_use


def _lease_ms(topic: Topic) -> int:
    """Return how long a silent worker keeps its permits: its messages are in flight until they time out."""
    return topic.timeout * 1000 + 1000
