"""Consuming in two phases for programs that are no workers: what a consumer takes, and how each delivery ends.

A consumer is a UUID that a program draws once; its user's name goes before it, so that nobody can pass for another
consumer or for a worker. It has the gate, the retries and the time-outs of a worker, and counts against MAX_RATE and
MAX_IN_FLIGHT as one. It owns no slots: it tries those in which something is due, in turn, and leaves alone those that
others hold.

A **receipt** stands for one delivery of one slot. Whoever has it may settle what came with it; nobody can guess one.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple
from uuid import UUID, uuid4

from django.core.signing import BadSignature, Signer

from django_rmq.core.consumer.executor import chosen_delay
from django_rmq.core.redis.broker import Broker
from django_rmq.core.words.bounds import MAX_DURATION_MS, is_number, is_whole, shown
from django_rmq.core.words.messages import BATCH, Delivery, Failure, Message, Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError, ServerTrouble
from django_rmq.operations.actors import Actor
from django_rmq.operations.ids import ALL_ROUNDS, Identity, find_members, id_of, identify

logger = logging.getLogger("django_rmq.operations")

LONGEST_WAIT = 20.0
"""Seconds that a consumer may wait for a message."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.25
"""Seconds between two looks of a consumer that waits, unless something that it has seen is due before: how late it gets
what is sent meanwhile. No connection is kept."""

SHORTEST_PAUSE = 0.05
"""Seconds between two looks where something is due all the time, in slots that others hold."""

SLOTS_PER_SECOND = 16_384
"""Slots that a consumer that waits looks at in a second: on a topic of many more its looks are rarer."""

ROUND_SECONDS = 1.5
"""How long one round over the slots of a topic may take."""

HEADS = 1_024
"""Slots asked for in one look."""

TRIED_AT_ONCE = 16
"""Slots tried in one round trip, where those before them were held by others."""

HELD_AT_ONCE = 512
"""Slots asked in one round trip for what a consumer holds there."""

MOST_BYTES = 4_194_304
"""What one take hands out, about, unless its first message alone is larger."""

REDIRECTS = 4
"""How often one take asks a slot again that has another slot count, or more behind what is in flight."""

WISH_MS = 2_000
"""How long it is remembered that a consumer waits for what its topic's MAX_IN_FLIGHT does not leave."""


class Settled(NamedTuple):
    """One delivered message, as its consumer names it when it settles it."""

    id: str
    receipt: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a delivery has failed."""

    error: str = ""
    delay_ms: int | None = None
    """Rest until the next delivery; None: the topic's back-off."""
    is_rejected: bool = False
    """It can never succeed: to Dead at once."""


class Held(NamedTuple):
    """A part of what a consumer holds."""

    messages: list[Message]
    next_slot: int | None
    """Where to go on; None: that was all."""


class _Try(NamedTuple):
    topic: Topic
    """With the slot count that the slot has."""
    slot: int
    after: tuple[str, bytes] | None = None
    asked: int = 0


class Deliveries:
    """What consumers of one actor do with one topic. Every method raises ``ServerTrouble``."""

    def __init__(self, actor: Actor, topic: Topic, broker: Broker) -> None:
        self._topic = topic
        self._broker = broker
        self._who = f"{actor.via}:{getattr(actor.user, 'pk', None) or actor.name}"

    def owner(self, consumer: UUID) -> str:
        """Return who holds the gate of a slot that this actor's ``consumer`` has taken from."""
        return f"{self._who}:{consumer.hex}"

    # --- phase one

    def take(self, consumer: UUID, most: int, wait: float = 0.0) -> list[Message]:
        """Return up to ``most`` messages that are due now, or the first ones within ``wait`` seconds.

        Messages of one slot come in the order in which they are to be worked, one after the other.
        """
        if not (is_whole(most) and 1 <= most <= BATCH):
            raise InvalidRequest(f"a consumer takes 1 to {BATCH} messages at once, got {shown(most)}")
        if not (is_number(wait) and 0 <= wait <= LONGEST_WAIT):
            raise InvalidRequest(f"a consumer waits 0 to {LONGEST_WAIT:g} seconds, got {shown(wait)}")
        end, owner = time.monotonic() + wait, self.owner(consumer)
        rest = self._topic.slots / SLOTS_PER_SECOND
        pause = max(FIRST_PAUSE, rest)
        # Requests of one consumer may run side by side: what each has been allowed is its own.
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
                self._tell_limits(request, 0, 0, ())

    def _round(
        self, owner: str, request: str, most: int, wish: int, later: list[float]
    ) -> tuple[list[Message], bool]:
        """Try each slot once in which something is due; return what was taken, and whether limits left no room.

        ``wish``: where they leave none, it is remembered that so many are wanted. ``later`` gets when, by the monotonic
        clock, what is not due yet will be.
        """
        due = self._due(later)
        first = next(due, None)
        if first is None:
            return [], False
        room, tokens = self._ask_limits(request, most)
        taken: list[Message] = []
        try:
            if room > 0:
                self._prepare(owner, chain([first], due), room, taken)
        finally:
            self._tell_limits(request, 0 if room > 0 else wish, tokens, taken)
        return taken, room <= 0

    def _due(self, later: list[float]) -> Iterator[int]:
        """Yield the slots in which something is due, beginning anywhere; add to ``later`` the next moment that is known."""
        topic, now_ms = self._topic, self._broker.now_ms()
        now = time.monotonic()
        blocks = -(-topic.slots // HEADS)
        begin = random.randrange(blocks)
        for block in (*range(begin, blocks), *range(begin)):
            slots = range(block * HEADS, min((block + 1) * HEADS, topic.slots))
            heads = self._broker.heads(topic, slots)
            due = [slot for slot, at in zip(slots, heads, strict=True) if at is not None and at <= now_ms]
            following = min((at for at in heads if at is not None and at > now_ms), default=None)
            if following is not None:
                later.append(now + (following - now_ms) / 1000)
            random.shuffle(due)
            yield from due

    def _prepare(self, owner: str, due: Iterator[int], most: int, taken: list[Message]) -> None:
        """Take from one slot after the other; where they are held by others, from several at once."""
        end, at_once, error = time.monotonic() + ROUND_SECONDS, 1, None
        tries = deque([_Try(self._topic, next(due))])
        size = 0
        while tries and len(taken) < most and size < MOST_BYTES:
            room = most - len(taken)
            now = [tries.popleft() for _ in range(min(len(tries), at_once, room))]
            pipeline = self._broker.pipeline()
            for one in now:
                pipeline.prepare(
                    one.topic,
                    one.slot,
                    owner,
                    None,
                    room // len(now),
                    (MOST_BYTES - size) // len(now),
                    after=one.after,
                )
            try:
                replies = pipeline.execute()
            except RmqError as trouble:
                # What was taken before is handed out; for what may have been taken now the consumer asks `held`.
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

    # --- limits: each delivery of a slot has permits under a name of its own, so that they end with it

    def _ask_limits(self, request: str, most: int) -> tuple[int, int]:
        """Return how many messages may be taken now, and how many deliveries of MAX_RATE were drawn for that."""
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return most, 0
        tokens = most if topic.max_rate else 0
        wanted = most if topic.max_in_flight else 0
        allowed = self._broker.allow(
            topic, request, tokens=tokens, in_use=0, wanted=wanted, lease_ms=_lease_ms(topic)
        )
        by_rate = allowed.tokens if topic.max_rate else most
        by_flight = allowed.permits if topic.max_in_flight else most
        return min(most, by_rate, by_flight), by_rate if topic.max_rate else 0

    def _tell_limits(self, request: str, wish: int, tokens: int, taken: Sequence[Message]) -> None:
        """Say what is in flight now, and give back what was not needed.

        ``wish``: for a moment it is remembered that so many are wanted, and others leave a share.
        """
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return
        try:
            for (slot, receipt), count in _counted(taken if topic.max_in_flight else ()).items():
                name, lease_ms = _holding(slot, receipt), _lease_ms(topic)
                self._broker.allow(topic, name, tokens=0, in_use=count, wanted=0, lease_ms=lease_ms)
            unused = len(taken) - tokens if topic.max_rate else 0
            wanted = wish if topic.max_in_flight else 0
            self._broker.allow(topic, request, tokens=unused, in_use=0, wanted=wanted, lease_ms=WISH_MS)
        except ServerTrouble:
            # What was allowed stays counted for as long as what was taken may be in flight.
            logger.warning("The limits of topic %s could not be told what was taken", topic.name)

    # --- what is held

    def held(self, consumer: UUID, first: int = 0) -> Held:
        """Return what ``consumer`` holds, from slot ``first`` on: how one goes on after a lost answer.

        Raises ``OperationRefused`` for a topic without a gate: there nobody knows who holds what.
        """
        topic = self._topic
        if not topic.serial:
            raise OperationRefused(
                f"topic {topic.name} is not SERIAL: nobody knows who holds what, and it comes back when it times out"
            )
        owner, found = self.owner(consumer), list[Message]()
        end = time.monotonic() + ROUND_SECONDS
        for start in range(first, topic.slots, HELD_AT_ONCE):
            slots = range(start, min(start + HELD_AT_ONCE, topic.slots))
            pipeline = self._broker.pipeline()
            for slot in slots:
                pipeline.held(topic, slot, owner, 0, BATCH)
            for slot, page in zip(slots, pipeline.execute(), strict=True):
                if isinstance(page, RmqError):
                    raise page
                found += [Message(topic, slot, one.receipt, one.delivery) for one in page or ()]
            if slots.stop < topic.slots and (len(found) >= BATCH or time.monotonic() > end):
                return Held(found, slots.stop)
        return Held(found, None)

    # --- phase two

    def receipt(self, message: Message) -> str:
        """Return the receipt of a message that was taken."""
        return _sealed(message.topic.name, message.slot, message.receipt)

    def id(self, message: Message) -> str:
        """Return the id by which a message that was taken is settled; a consumer may know what it holds."""
        return id_of(message.topic, message.slot, message.delivery.member, sealed=False)

    def commit(self, settled: Sequence[Settled]) -> list[str]:
        """End deliveries with success. Answers ok or stale (the delivery has ended already) for each."""
        return self._settle("commit", settled)

    def release(self, settled: Sequence[Settled]) -> list[str]:
        """Give deliveries back with nothing spent. Answers ok or stale for each."""
        return self._settle("release", settled)

    def extend(self, settled: Sequence[Settled]) -> list[str]:
        """Begin the time-out of deliveries anew. Answers ok or stale for each."""
        return self._settle("extend", settled)

    def rollback(self, settled: Sequence[Settled], outcomes: Sequence[Outcome]) -> list[str]:
        """End deliveries with failure. Answers ok or stale for each."""
        for how in outcomes:
            if how.delay_ms is not None and not (
                is_whole(how.delay_ms) and 0 <= how.delay_ms <= MAX_DURATION_MS
            ):
                raise InvalidRequest(f"a delay is 0 to {MAX_DURATION_MS} ms, got {shown(how.delay_ms)}")
        return self._settle("rollback", settled, outcomes)

    def _settle(
        self, verb: str, settled: Sequence[Settled], outcomes: Sequence[Outcome] | None = None
    ) -> list[str]:
        if len(settled) > BATCH:
            raise InvalidRequest(f"at most {BATCH} deliveries can be settled at once, got {len(settled)}")
        topic, words = self._topic, ["stale"] * len(settled)
        groups: defaultdict[tuple[int, int], dict[bytes, int]] = defaultdict(dict)
        identities = [replace(identify(topic, one.id), place=None) for one in settled]
        receipts = [
            _unsealed(topic.name, identity.slot, one.receipt)
            for identity, one in zip(identities, settled, strict=True)
        ]
        named = self._members(
            identity for identity, receipt in zip(identities, receipts, strict=True) if receipt is not None
        )
        for index, (identity, receipt) in enumerate(zip(identities, receipts, strict=True)):
            member = named.get(identity)
            if receipt is not None and member is not None:
                groups[identity.slot, receipt].setdefault(member, index)
        pipeline = self._broker.pipeline()
        for (slot, receipt), members in groups.items():
            if outcomes is None:
                getattr(pipeline, verb)(topic, slot, receipt, list(members))
            else:
                failed = {member: outcomes[index] for member, index in members.items()}
                pipeline.rollback(topic, slot, receipt, self._failures(slot, failed))
        error = None
        for ((slot, receipt), members), answer in zip(groups.items(), pipeline.execute(), strict=True):
            if isinstance(answer, RmqError):
                error = error or answer
                continue
            for index, word in zip(members.values(), answer, strict=True):
                words[index] = word
            if topic.max_in_flight and "ok" in answer:
                self._note_end(slot, receipt, 0 if verb == "extend" else answer.count("ok"))
        if error is not None:
            raise error
        return words

    def _note_end(self, slot: int, receipt: int, ended: int) -> None:
        """Count so many messages of a delivery no longer as in flight; none: it lasts longer."""
        topic = self._topic
        lease_ms = 0 if ended else _lease_ms(topic)
        try:
            self._broker.end_permits(topic, _holding(slot, receipt), ended, lease_ms)
        except ServerTrouble:
            logger.warning("The limits of topic %s could not be told what has ended", topic.name)

    def _members(self, identities: Iterable[Identity]) -> dict[Identity, bytes]:
        """Return the members that ids mean; long ones are looked for among what is in flight."""
        found = find_members(self._broker, self._topic, identities, rounds=ALL_ROUNDS, states=("prepare",))
        return found.members

    def _failures(self, slot: int, failed: dict[bytes, Outcome]) -> list[Failure]:
        topic, found = self._topic, []
        left: dict[bytes, int] = {}
        if topic.backoff.function is not None:
            left = self._retries_left(
                slot, [member for member, how in failed.items() if how.delay_ms is None]
            )
        for member, how in failed.items():
            delay_ms = how.delay_ms
            if delay_ms is None and member in left and not how.is_rejected:
                delivery = Delivery(member, 0.0, left[member])
                delay_ms = chosen_delay(Message(topic, slot, 0, delivery))
            kind = "rejected" if how.is_rejected else "failed"
            found.append(Failure(member, kind, None if how.is_rejected else delay_ms, how.error))
        return found

    def _retries_left(self, slot: int, members: Sequence[bytes]) -> dict[bytes, int]:
        found = {}
        for start in range(0, len(members), 100):
            part = members[start : start + 100]
            for member, looked in zip(part, self._broker.look(self._topic, slot, part), strict=True):
                if looked.prepare is not None:
                    found[member] = int(looked.prepare) % 1000
        return found


def _counted(messages: Iterable[Message]) -> dict[tuple[int, int], int]:
    counted: defaultdict[tuple[int, int], int] = defaultdict(int)
    for message in messages:
        counted[message.slot, message.receipt] += 1
    return counted


def _holding(slot: int, receipt: int) -> str:
    """Return the name under which one delivery of one slot has its permits."""
    return f"delivery:{slot}:{receipt}"


def _lease_ms(topic: Topic) -> int:
    """Return how long a delivery that is not heard of counts as in flight: until it has timed out."""
    return topic.timeout * 1000 + 1000


_SIGNER_SALT = "django_rmq.operations.deliveries"


def _sealed(topic: str, slot: int, receipt: int) -> str:
    return f"{receipt}.{Signer(salt=_SIGNER_SALT).signature(_signed(topic, slot, receipt))}"


def _unsealed(topic: str, slot: int, text: str) -> int | None:
    """Return the number in a receipt; None: it is none of this slot. Raises ``InvalidRequest`` for what is no receipt.

    A receipt that was signed with a key of SECRET_KEY_FALLBACKS is good.
    """
    number, dot, mark = text.partition(".")
    if not (dot and number.isdecimal() and number.isascii() and len(number) <= 16):
        raise InvalidRequest(f"{text[:60]!r} is no receipt")
    try:
        Signer(salt=_SIGNER_SALT).unsign(f"{_signed(topic, slot, int(number))}:{mark}")
    except BadSignature:
        return None
    return int(number)


def _signed(topic: str, slot: int, receipt: int) -> str:
    return f"{topic} {slot} {receipt}"


__all__ = ["LONGEST_WAIT", "Deliveries", "Held", "Outcome", "Settled"]
