"""The second phase of consumption by requests: ending or extending deliveries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from django_rmq.core.commands import ack, inspect
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.script_call import Call
from django_rmq.core.consumer.failures import chosen_delay
from django_rmq.core.model.failure_records import Failure
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.message import Message
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import InvalidRequest, RmqError
from django_rmq.message_ids import ALL_ROUNDS, find_messages, identify
from django_rmq.operations.permits import Permits
from django_rmq.operations.receipts import unsealed


class SettledDelivery(NamedTuple):
    """One delivered message, as its consumer names it when it settles it."""

    id: str
    receipt: str


@dataclass(frozen=True, slots=True)
class SettlementOutcome:
    """How a delivery failed."""

    error: str = ""
    delay_ms: int | None = None
    """The rest until the next delivery in ms. None: the topic's back-off."""
    is_rejected: bool = False
    """Whether it can never succeed, so that it goes to Dead at once."""


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
        if len(settled) > BATCH:
            raise InvalidRequest(f"at most {BATCH} deliveries can be settled at once, got {len(settled)}")
        topic, words = self._topic, ["stale"] * len(settled)
        groups: defaultdict[tuple[int, int], dict[bytes, int]] = defaultdict(dict)
        identities = [replace(identify(topic, one.id, self._broker), place=None) for one in settled]
        receipts = [
            unsealed(topic.name, identity.slot, one.receipt)
            for identity, one in zip(identities, settled, strict=True)
        ]
        # Ids of long messages are searched among what is in flight. A re-slotting waits until that has ended.
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
                groups[identity.slot, receipt].setdefault(at.member, index)
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
                self._permits.note_end(slot, receipt, 0 if verb == "extend" else valid)
        if error is not None:
            raise error
        return words

    def _failures(self, slot: int, failed: dict[bytes, SettlementOutcome]) -> list[Failure]:
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
            answers = self._broker.run(inspect.look(self._topic, slot, part))
            for member, looked in zip(part, answers, strict=True):
                if looked.prepare is not None:
                    found[member] = int(looked.prepare) % 1000
        return found


__all__ = ["SettledDelivery", "SettlementOutcome", "Settlements"]
