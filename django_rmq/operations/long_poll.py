"""The first phase of consumption by requests: tries the slots in which something is due, until something is taken."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple
from uuid import uuid4

from django_rmq.core.commands import fetch, inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.model.limits import (
    BATCH,
    is_number,
    is_whole,
    shown,
)
from django_rmq.core.model.message import Message
from django_rmq.core.model.replies import Prepared
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, RmqError
from django_rmq.operations.permits import Permits

LONGEST_WAIT = 20.0
"""Maximum seconds for which a consumer may wait for a message."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.25
"""Seconds between two checks of a waiting consumer, unless something that it has seen is due earlier. They
determine how late it gets what is sent meanwhile. No connection is kept."""

SHORTEST_PAUSE = 0.05
"""Seconds between two checks if something is due all the time, in slots that others hold."""

SLOTS_PER_SECOND = 16_384
"""The number of slots that a waiting consumer checks per second; on a topic of many more its checks are rarer."""

ROUND_SECONDS = 1.5
"""Maximum seconds for one round over the slots of a topic."""

HEADS = 1_024
"""The number of slots in one check."""

TRIED_AT_ONCE = 16
"""The number of slots tried in one round trip, if those before them were held by others."""

MOST_BYTES = 4_194_304
"""The approximate number of bytes that one take hands out, unless its first message alone is larger."""

REDIRECTS = 4
"""How often one take asks a slot again that has another slot count, or more messages after those in flight."""


class _Try(NamedTuple):
    topic: Topic
    """The topic with the slot count that the slot has."""
    slot: int
    after: tuple[str, bytes] | None = None
    asked: int = 0


class LongPoll:
    """Takes messages of one topic within its limits."""

    def __init__(self, broker: Broker, topic: Topic, permits: Permits) -> None:
        self._broker = broker
        self._topic = topic
        self._permits = permits

    def take(self, owner: str, most: int, wait: float) -> list[Message]:
        """Return up to ``most`` messages that are due now, or the first ones within ``wait`` seconds.

        Messages of one slot are returned in the order in which to process them, one after the other.
        """
        if not (is_whole(most) and 1 <= most <= BATCH):
            raise InvalidRequest(f"the number of messages must be from 1 to {BATCH}, got {shown(most)}")
        if not (is_number(wait) and 0 <= wait <= LONGEST_WAIT):
            raise InvalidRequest(f"the wait must be from 0 to {LONGEST_WAIT:g} seconds, got {shown(wait)}")
        end = time.monotonic() + wait
        rest = self._topic.slots / SLOTS_PER_SECOND
        pause = max(FIRST_PAUSE, rest)
        # Requests of one consumer may run at the same time; each has its own permits.
        request = f"{owner}:{uuid4().hex}"
        is_short = False
        try:
            while True:
                later: list[float] = []
                taken, is_short = self._round(owner, request, most, most if wait else 0, later)
                left = end - time.monotonic()
                if taken or left <= 0:
                    return taken
                until_due = [max(SHORTEST_PAUSE, rest, at - time.monotonic()) for at in later]
                time.sleep(min(pause, left, *until_due))
                pause = max(rest, min(pause * 1.5, LONGEST_PAUSE))
        finally:
            if is_short and wait:
                self._permits.tell(request, 0, 0, ())

    def _round(
        self, owner: str, request: str, most: int, wish: int, later: list[float]
    ) -> tuple[list[Message], bool]:
        """Try each slot with something due once; return what was taken, and whether limits left no room.

        ``wish``: if they leave none, it is remembered that this many are wanted. ``later`` receives the
        monotonic times at which other messages will be due.
        """
        due = self._due(later)
        first = next(due, None)
        if first is None:
            return [], False
        room, tokens = self._permits.ask(request, most)
        taken: list[Message] = []
        try:
            if room > 0:
                self._prepare(owner, chain([first], due), room, taken)
        finally:
            self._permits.tell(request, 0 if room > 0 else wish, tokens, taken)
        return taken, room <= 0

    def _due(self, later: list[float]) -> Iterator[int]:
        """Yield the slots in which something is due, from a random start; add the next known due time to ``later``."""
        topic, now_ms = self._topic, self._broker.now_ms()
        now = time.monotonic()
        blocks = -(-topic.slots // HEADS)
        begin = random.randrange(blocks)
        for block in (*range(begin, blocks), *range(begin)):
            slots = range(block * HEADS, min((block + 1) * HEADS, topic.slots))
            heads = self._broker.run(inspect.heads(topic, slots))
            due = [slot for slot, at in zip(slots, heads, strict=True) if at is not None and at <= now_ms]
            following = min((at for at in heads if at is not None and at > now_ms), default=None)
            if following is not None:
                later.append(now + (following - now_ms) / 1000)
            random.shuffle(due)
            yield from due

    def _prepare(self, owner: str, due: Iterator[int], most: int, taken: list[Message]) -> None:
        """Take from one slot after the other; if they are held by others, from several at once."""
        end, at_once, error = time.monotonic() + ROUND_SECONDS, 1, None
        tries = deque([_Try(self._topic, next(due))])
        size = 0
        while tries and len(taken) < most and size < MOST_BYTES:
            room = most - len(taken)
            now = [tries.popleft() for _ in range(min(len(tries), at_once, room))]
            try:
                replies = self._ask(owner, now, room, MOST_BYTES - size)
            except RmqError as trouble:
                # What was taken before is handed out; for what may have been taken now, the consumer calls
                # `held`.
                error = error or trouble
                break
            for one, reply in zip(now, replies, strict=True):
                if isinstance(reply, RmqError):
                    error = error or reply
                elif reply.status == "ok":
                    messages = [
                        Message(one.topic, one.slot, reply.receipt, each) for each in reply.deliveries
                    ]
                    taken += messages
                    size += sum(len(each.member) + len(each.envelope or b"") for each in reply.deliveries)
                elif one.asked < REDIRECTS and reply.status == "moved" and reply.slots:
                    tries.append(_Try(replace(one.topic, slots=reply.slots), one.slot, None, one.asked + 1))
                elif one.asked < REDIRECTS and reply.status == "more":
                    tries.append(one._replace(after=reply.cursor, asked=one.asked + 1))
            at_once = min(2 * at_once, TRIED_AT_ONCE)
            try:
                wanted = at_once - len(tries) if time.monotonic() < end else 0
                tries += [_Try(self._topic, slot) for slot in islice(due, max(0, wanted))]
            except RmqError as trouble:
                error = error or trouble
        if error is not None and not taken:
            raise error

    def _ask(
        self, owner: str, tries: Sequence[_Try], room: int, most_bytes: int
    ) -> list[Prepared | RmqError]:
        """Prepare in several slots, which share the room. A strict fifo slot hands out one message at a time."""
        each, bytes_each = room // len(tries), most_bytes // len(tries)
        if self._topic.is_strict:  # rule: rest_hands_out_many_of_a_strict_slot
            each = 1
        calls = [
            fetch.prepare(one.topic, one.slot, owner, None, each, bytes_each, after=one.after)
            for one in tries
        ]
        return run_all(self._broker, calls)


__all__ = ["LONGEST_WAIT", "ROUND_SECONDS", "LongPoll"]
