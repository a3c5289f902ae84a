"""Consumption by programs that are not workers, over REST: they take messages by long polls, and settle each by its receipt.

Between two requests such a program has neither a process nor a connection here. So a receipt is sealed, and Redis keeps
the messages that a consumer holds. ``LongPoll`` decides which messages a program gets, how long it waits, and within which
limits. HTTP is the part of ``api``.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple
from uuid import UUID, uuid4

from django.core.signing import BadSignature, Signer

from django_rmq.core.commands import ack, fetch, inspect, limits
from django_rmq.core.commands.broker_interface import Broker, batched, run_all, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.failures import own_backoff_ms
from django_rmq.core.model.bounds import BATCH, MAX_DURATION_MS, abbreviated, is_number, is_whole
from django_rmq.core.model.changed_limits import limited
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.replies import Delivery, Failure, Prepared
from django_rmq.core.model.scores import retries_left
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError, ServerTrouble
from django_rmq.message_ids import ALL_ROUNDS, LOOKED_AT_ONCE, find_messages, id_of, identify
from django_rmq.operations.authorization import Actor, OperationContext, Permission
from django_rmq.operations.shared_reads import shared_limits

_SIGNER_SALT = "django_rmq.operations.consumption"


def sealed(topic: str, slot: int, receipt: int) -> str:
    """Return the text of a receipt, which nobody can change or make for another slot."""
    return f"{receipt}.{Signer(salt=_SIGNER_SALT).signature(_signed(topic, slot, receipt))}"


def unsealed(topic: str, slot: int, text: str) -> int | None:
    """Return the number in a receipt, or None if it is not one of this slot.

    Raises ``InvalidRequest`` for text that is not a receipt.

    A receipt that was signed with a key of SECRET_KEY_FALLBACKS is valid.
    """
    number, dot, mark = text.partition(".")
    # ``isdecimal`` accepts the digits of all scripts. Microseconds have 16 digits until the year 2286.
    if not (dot and number.isdecimal() and number.isascii() and len(number) <= 16):
        raise InvalidRequest(f"{text[:60]!r} is not a receipt")
    try:
        Signer(salt=_SIGNER_SALT).unsign(f"{_signed(topic, slot, int(number))}:{mark}")
    except BadSignature:
        return None
    return int(number)


def _signed(topic: str, slot: int, receipt: int) -> str:
    return f"{topic} {slot} {receipt}"


class SettledDelivery(NamedTuple):
    """One delivered message, as its consumer names it when it settles it."""

    id: str
    receipt: str


@dataclass(frozen=True, slots=True)
class SettlementOutcome:
    """How a delivery failed."""

    error: str = ""
    delay_ms: int | None = None
    """The rest until the next delivery in ms, or None for the topic's back-off."""
    is_rejected: bool = False
    """Whether the message can never succeed, so it goes to Dead at once."""


_CALLS = {"commit": ack.commit, "release": ack.release, "extend": ack.extend}
"""The calls that end or extend deliveries that have not failed."""


class Settlements:
    """Ends deliveries of one topic."""

    def __init__(self, broker: Broker, topic: Topic, permits: Permits) -> None:
        self._broker = broker
        self._topic = topic
        self._permits = permits

    def settle(
        self,
        verb: str,
        settled: Sequence[SettledDelivery],
        outcomes: Sequence[SettlementOutcome] | None = None,
    ) -> list[str]:
        """End or extend deliveries, in one round trip for all slots; return the answer of Redis to each.

        ``verb``: one of ``_CALLS``, or ``rollback`` with the ``outcomes`` of the deliveries. A delivery whose receipt is not
        one of its slot, or that was not found among the messages in flight, is stale. Raises ``InvalidRequest`` and, after
        the other slots have been settled, the error of the first slot that failed.
        """
        if len(settled) > BATCH:
            raise InvalidRequest(f"at most {BATCH} deliveries can be settled at once, got {len(settled)}")
        topic, words = self._topic, ["stale"] * len(settled)
        groups = self._grouped(settled)
        calls: list[Call[list[str]]] = []
        for (slot, receipt), members in groups.items():
            if outcomes is None:
                calls.append(_CALLS[verb](topic, slot, receipt, list(members)))
            else:
                failed = {member: outcomes[index] for member, index in members.items()}
                calls.append(ack.rollback(topic, slot, receipt, self._failures(slot, failed)))
        error = None
        for ((slot, receipt), members), answer in zip(
            groups.items(), run_all(self._broker, calls), strict=True
        ):
            if isinstance(answer, RmqError):
                error = error or answer
                continue
            for index, word in zip(members.values(), answer, strict=True):
                words[index] = word
            if topic.max_in_flight and (valid := len(answer) - answer.count("stale")):
                self._permits.report_end(slot, receipt, 0 if verb == "extend" else valid)
        if error is not None:
            raise error
        return words

    def _grouped(self, settled: Sequence[SettledDelivery]) -> dict[tuple[int, int], dict[bytes, int]]:
        """Return the deliveries that are in flight by slot and receipt: member → place among ``settled``."""
        topic = self._topic
        groups: defaultdict[tuple[int, int], dict[bytes, int]] = defaultdict(dict)
        # The place in an id of a list was that of a waiting message, and the message is in flight now.
        identities = [replace(identify(topic, one.id, self._broker), place=None) for one in settled]
        receipts = [
            unsealed(topic.name, identity.slot, one.receipt)
            for identity, one in zip(identities, settled, strict=True)
        ]
        # Ids of long messages are searched among the messages in flight. A re-slotting waits until these have ended.
        sought = find_messages(
            self._broker,
            topic,
            [one for one, receipt in zip(identities, receipts, strict=True) if receipt is not None],
            rounds=ALL_ROUNDS,
            queues=("prepare",),
        ).messages
        for index, (identity, receipt) in enumerate(zip(identities, receipts, strict=True)):
            at = sought.get(identity)
            if receipt is not None and at is not None:
                # A delivery that is named twice is settled once, and its second name is stale.
                groups[identity.slot, receipt].setdefault(at.member, index)
        return groups

    def _failures(self, slot: int, failed: dict[bytes, SettlementOutcome]) -> list[Failure]:
        topic, failures = self._topic, []
        left: dict[bytes, int] = {}
        # A back-off function is called with the number of failures, which Redis knows by the retries left.
        if topic.backoff.function is not None:
            left = self._retries_left(
                slot, [member for member, how in failed.items() if how.delay_ms is None]
            )
        for member, how in failed.items():
            delay_ms = how.delay_ms
            if delay_ms is None and member in left and not how.is_rejected:
                delivery = Delivery(member, 0.0, left[member])
                delay_ms = own_backoff_ms(Message(topic, slot, 0, delivery))
            kind = "rejected" if how.is_rejected else "failed"
            failures.append(Failure(member, kind, None if how.is_rejected else delay_ms, how.error))
        return failures

    def _retries_left(self, slot: int, members: Sequence[bytes]) -> dict[bytes, int]:
        retries = {}
        for part in batched(members, LOOKED_AT_ONCE):
            answers = self._broker.run(inspect.describe_messages(self._topic, slot, part))
            for member, reply in zip(part, answers, strict=True):
                if reply.prepare is not None:
                    retries[member] = retries_left(self._topic, "prepare", reply.prepare, 0, None) or 0
        return retries


HELD_AT_ONCE = 512
"""The number of slots asked in one round trip for what a consumer holds there."""


class HeldDelivery(NamedTuple):
    """A part of the messages that a consumer holds."""

    messages: list[Message]
    next_slot: int | None
    """The slot at which to continue, or None if that was all."""


class Deliveries:
    """Operations of one actor's consumers on one topic. Every method raises ``ServerTrouble``."""

    def __init__(self, actor: Actor, topic: Topic, broker: Broker) -> None:
        self._topic = topic
        self._broker = broker
        self._account = account_of(actor)
        permits = Permits(broker, topic)
        self._taking = LongPoll(broker, topic, permits)
        self._settling = Settlements(broker, topic, permits)

    def owner(self, consumer: UUID) -> str:
        """Return the name under which this actor's ``consumer`` holds the gate of a slot."""
        return f"{self._account}:{consumer.hex}"

    def take(self, consumer: UUID, most: int, wait: float = 0.0) -> list[Message]:
        """Return up to ``most`` messages that are due now, or the first ones within ``wait`` seconds.

        Messages of one slot are returned in the order in which to process them, one after the other.
        """
        return self._taking.take(self.owner(consumer), most, wait)

    def held(self, consumer: UUID, first: int = 0) -> HeldDelivery:
        """Return the messages that ``consumer`` holds, from slot ``first`` on; used to continue after a lost answer.

        Raises ``OperationRefused`` for a topic without a gate, for which it is unknown who holds what.
        """
        topic = self._topic
        if not topic.serial:
            raise OperationRefused(
                f"topic {topic.name} is not SERIAL, so the messages that a consumer holds are unknown. "
                "They are delivered again after their time-out"
            )
        owner, messages = self.owner(consumer), list[Message]()
        end = time.monotonic() + ROUND_SECONDS
        for start in range(first, topic.slots, HELD_AT_ONCE):
            slots = range(start, min(start + HELD_AT_ONCE, topic.slots))
            calls = [fetch.list_held(topic, slot, owner, 0, BATCH) for slot in slots]
            for slot, page in zip(slots, walk(self._broker, calls), strict=True):
                messages += [Message(topic, slot, one.receipt, one.delivery) for one in page or ()]
            if slots.stop < topic.slots and (len(messages) >= BATCH or time.monotonic() > end):
                return HeldDelivery(messages, slots.stop)
        return HeldDelivery(messages, None)

    def receipt(self, message: Message) -> str:
        """Return the receipt of a message that was taken."""
        return sealed(message.topic.name, message.slot, message.receipt)

    def id(self, message: Message) -> str:
        """Return the id with which a taken message is settled; a consumer may know what it holds."""
        return id_of(message.topic, message.slot, message.delivery.member, sealed=False)

    def commit(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """End deliveries successfully. Answers ok or stale (the delivery has ended already) for each."""
        return self._settling.settle("commit", settled)

    def release(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """Give deliveries back; no retry is used. Answers ok or stale for each."""
        return self._settling.settle("release", settled)

    def extend(self, settled: Sequence[SettledDelivery]) -> list[str]:
        """Restart the time-out of deliveries. Answers ok or stale for each."""
        return self._settling.settle("extend", settled)

    def rollback(
        self, settled: Sequence[SettledDelivery], outcomes: Sequence[SettlementOutcome]
    ) -> list[str]:
        """End deliveries as failed. Answers ok, stale or cancelled (the delivery was cancelled, and ended so) for each."""
        for how in outcomes:
            if how.delay_ms is not None and not (
                is_whole(how.delay_ms) and 0 <= how.delay_ms <= MAX_DURATION_MS
            ):
                raise InvalidRequest(
                    f"the delay must be from 0 to {MAX_DURATION_MS} ms, got {abbreviated(how.delay_ms)}"
                )
        return self._settling.settle("rollback", settled, outcomes)


def deliveries_of(context: OperationContext, name: str) -> Deliveries:
    """Return the deliveries of a topic. Raises ``TopicMismatch`` under the same conditions as a worker."""
    topic = limited(context.agreed(name, Permission.CONSUME), shared_limits(context).get(name))
    return Deliveries(context.actor, topic, context.broker)


def account_of(actor: Actor) -> str:
    """Return the name by which the consumers and the waiting requests of an actor are those of one user."""
    return f"{actor.via}:{actor.user or actor.name}"


class LongPollLimiter:
    """Counts waiting requests. One for each process; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def seat(self, actor: Actor, most: int, each: int) -> Iterator[bool]:
        """Yield whether ``actor`` may wait, while up to ``most`` wait in all and up to ``each`` of one user."""
        who = account_of(actor)
        with self._lock:
            is_free = self._taken.total() < most and self._taken[who] < each
            if is_free:
                self._taken[who] += 1
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._taken[who] -= 1
                    if not self._taken[who]:
                        del self._taken[who]


seats = LongPollLimiter()

logger = logging.getLogger("django_rmq.operations")

WISH_MS = 2_000
"""Milliseconds for which a consumer's unmet request under its topic's MAX_IN_FLIGHT is remembered."""


class Permits:
    """The limits of one topic. Without limits nothing is requested."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self._broker = broker
        self._topic = topic

    def request(self, request: str, most: int) -> tuple[int, int]:
        """Return how many messages may be taken now, and how many deliveries of MAX_RATE were used for that."""
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return most, 0
        tokens = most if topic.max_rate else 0
        wanted = most if topic.max_in_flight else 0
        allowed = self._broker.run(
            limits.allow(topic, request, tokens=tokens, in_use=0, wanted=wanted, lease_ms=_lease_ms(topic))
        )
        by_rate = allowed.tokens if topic.max_rate else most
        by_flight = allowed.permits if topic.max_in_flight else most
        return min(most, by_rate, by_flight), by_rate if topic.max_rate else 0

    def report_taken(self, request: str, wish: int, tokens: int, taken: Sequence[Message]) -> None:
        """Report the messages in flight, and give back the deliveries of MAX_RATE that were not used.

        ``wish``: it is remembered for a moment that N messages are wanted, so that others leave a share.
        """
        topic = self._topic
        if not (topic.max_rate or topic.max_in_flight):
            return
        try:
            for (slot, receipt), count in _counted(taken if topic.max_in_flight else ()).items():
                name, lease_ms = _holding(slot, receipt), _lease_ms(topic)
                self._broker.run(
                    limits.allow(topic, name, tokens=0, in_use=count, wanted=0, lease_ms=lease_ms)
                )
            # Below zero: the permits that were not used go back.
            unused = len(taken) - tokens if topic.max_rate else 0
            wanted = wish if topic.max_in_flight else 0
            self._broker.run(
                limits.allow(topic, request, tokens=unused, in_use=0, wanted=wanted, lease_ms=WISH_MS)
            )
        except ServerTrouble:
            # The permits stay counted for as long as the taken messages may be in flight.
            logger.warning("Cannot count the taken messages in the limits of topic %s", topic.name)

    def report_end(self, slot: int, receipt: int, ended: int) -> None:
        """Stop counting this many messages of a delivery as in flight; with none, its permits last longer."""
        topic = self._topic
        lease_ms = 0 if ended else _lease_ms(topic)
        try:
            self._broker.run(limits.end_permits(topic, _holding(slot, receipt), ended, lease_ms))
        except ServerTrouble:
            # The permits of the delivery end with their lease.
            logger.warning("Cannot count the ended messages in the limits of topic %s", topic.name)


def _counted(messages: Iterable[Message]) -> dict[tuple[int, int], int]:
    counted: defaultdict[tuple[int, int], int] = defaultdict(int)
    for message in messages:
        counted[message.slot, message.receipt] += 1
    return counted


def _holding(slot: int, receipt: int) -> str:
    """Return the name under which one delivery of one slot has its permits."""
    return f"delivery:{slot}:{receipt}"


def _lease_ms(topic: Topic) -> int:
    """Return how long a silent delivery counts as in flight: until it has timed out."""
    # Prepare has only the second of a delivery, which times out up to a second later: see ``lua/slot/_time_outs.lua``.
    return topic.timeout * 1000 + 1000


LONGEST_POLL = 20.0
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

TRIED_AT_ONCE = 16
"""The number of slots tried in one round trip, if those before them were held by others."""

MOST_BYTES = 4_194_304
"""The approximate number of bytes that one take returns, unless its first message alone is larger."""

REDIRECTS = 4
"""The number of times that one take asks a slot again that has another slot count, or more messages after those in flight."""


class _Try(NamedTuple):
    topic: Topic
    """The topic with the slot count that the slot has."""
    slot: int
    after: tuple[str, bytes] | None = None
    redirects: int = 0


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
            raise InvalidRequest(f"the number of messages must be from 1 to {BATCH}, got {abbreviated(most)}")
        if not (is_number(wait) and 0 <= wait <= LONGEST_POLL):
            raise InvalidRequest(
                f"the wait must be from 0 to {LONGEST_POLL:g} seconds, got {abbreviated(wait)}"
            )
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
            # The wish of a request that has ended must not keep others back.
            if is_short and wait:
                self._permits.report_taken(request, 0, 0, ())

    def _round(
        self, owner: str, request: str, most: int, wish: int, later: list[float]
    ) -> tuple[list[Message], bool]:
        """Try each slot with something due once; return the messages taken, and whether limits left no room.

        ``wish``: if they leave none, it is remembered that this many are wanted. ``later`` receives the
        monotonic times at which other messages will be due.
        """
        due = self._due(later)
        first = next(due, None)
        # Nothing is due, so the request takes no permits from others.
        if first is None:
            return [], False
        room, tokens = self._permits.request(request, most)
        taken: list[Message] = []
        try:
            if room > 0:
                self._prepare(owner, chain([first], due), room, taken)
        finally:
            self._permits.report_taken(request, 0 if room > 0 else wish, tokens, taken)
        return taken, room <= 0

    def _due(self, later: list[float]) -> Iterator[int]:
        """Yield the slots in which something is due, from a random start; add the next known due time to ``later``."""
        topic, now_ms = self._topic, self._broker.now_ms()
        now = time.monotonic()
        blocks = -(-topic.slots // inspect.HEADS)
        begin = random.randrange(blocks)
        for block in (*range(begin, blocks), *range(begin)):
            slots = range(block * inspect.HEADS, min((block + 1) * inspect.HEADS, topic.slots))
            heads = self._broker.run(inspect.heads(topic, slots))
            due = [slot for slot, at in zip(slots, heads, strict=True) if at is not None and at <= now_ms]
            following = min((at for at in heads if at is not None and at > now_ms), default=None)
            if following is not None:
                later.append(now + (following - now_ms) / 1000)
            # Consumers that poll at the same time begin with different slots.
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
                replies = self._prepare_each(owner, now, room, MOST_BYTES - size)
            except RmqError as trouble:
                # The messages that were taken before are returned. Redis may have prepared others whose reply was lost: the
                # consumer gets these by ``held``.
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
                elif one.redirects < REDIRECTS and reply.status == "moved" and reply.slots:
                    # The topic is being re-slotted, and this slot has another slot count already.
                    tries.append(
                        _Try(replace(one.topic, slots=reply.slots), one.slot, None, one.redirects + 1)
                    )
                elif one.redirects < REDIRECTS and reply.status == "more":
                    # The script has read a bounded number of entries, of which none was free, and continues behind them.
                    tries.append(one._replace(after=reply.cursor, redirects=one.redirects + 1))
            at_once = min(2 * at_once, TRIED_AT_ONCE)
            try:
                wanted = at_once - len(tries) if time.monotonic() < end else 0
                tries += [_Try(self._topic, slot) for slot in islice(due, max(0, wanted))]
            except RmqError as trouble:
                # The messages that were taken are returned all the same.
                error = error or trouble
        if error is not None and not taken:
            raise error

    def _prepare_each(
        self, owner: str, tries: Sequence[_Try], room: int, most_bytes: int
    ) -> list[Prepared | RmqError]:
        """Prepare in several slots, which share the room. A strict fifo slot delivers one message at a time."""
        each, bytes_each = room // len(tries), most_bytes // len(tries)
        # The order of a strict slot needs one message in flight at a time: a failed one comes before the next one.
        if self._topic.is_strict:  # rule: rest_hands_out_many_of_a_strict_slot
            each = 1
        calls = [
            fetch.prepare(one.topic, one.slot, owner, None, each, bytes_each, after=one.after)
            for one in tries
        ]
        return run_all(self._broker, calls)
