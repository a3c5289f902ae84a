"""Consumption by programs that are not workers, over REST: they take messages, and settle each delivery by its receipt.

``long_poll`` decides which messages they get, and how long they wait.

Between two requests such a program has neither a process nor a connection here. So a receipt is sealed, and Redis keeps
the messages that a consumer holds. HTTP is the part of ``api``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

from django.core.signing import BadSignature, Signer

from django_rmq.core.commands import ack, fetch, inspect
from django_rmq.core.commands.broker_interface import Broker, run_all, walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.failures import own_backoff_ms
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.limits import BATCH, MAX_DURATION_MS, abbreviated, is_whole, limited, retries_left
from django_rmq.core.model.replies import Delivery, Failure
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, OperationRefused, RmqError
from django_rmq.id_lookup import ALL_ROUNDS, find_messages, id_of, identify
from django_rmq.operations.authorization import Actor, Permission
from django_rmq.operations.context import OperationContext
from django_rmq.operations.long_poll import ROUND_SECONDS, LongPoll, Permits, account_of
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
            if receipt is not None and at is not None and at.member is not None:
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
        for start in range(0, len(members), 100):
            part = members[start : start + 100]
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
