"""The audit of a topic's ledgers: whether, in every slot, what came in equals what went out plus what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django_rmq.core.commands import inspect, operate
from django_rmq.core.commands.batching import walk
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.model.ledger import Ledger
from django_rmq.core.model.topic import Topic, former_slot_counts, slot_counts
from django_rmq.core.topic_registration import as_registered
from django_rmq.exceptions import ConfigurationError

DRIFTS = ("live", "dead", "delivery", "claim", "send")
DEPTHS = ("store", "prepare", "retry", "dead", "claimed")


@dataclass(frozen=True, slots=True)
class Audit:
    """The sums of the ledgers of all slots of a topic."""

    topic: Topic
    """The topic with its registered slots."""
    counters: Mapping[str, int]
    depths: Mapping[str, int]
    drifting: list[dict[str, int]]
    """Slots that do not balance: the slot, and the difference in each of ``DRIFTS``."""
    adopted: int
    """The number of messages that were recorded as foreign."""

    @property
    def moving(self) -> int:
        """The number of messages that have left one slot and not reached another."""
        return sum(
            self.counters.get(f"{kind}_out", 0) - self.counters.get(f"{kind}_in", 0)
            for kind in ("moved", "moved_dead")
        )


def audit(broker: Broker, topic: Topic, registered: dict[str, Any], *, adopt: bool) -> Audit:
    """Read the ledgers of a topic. ``adopt``: record messages beyond the account as foreign."""
    topic = as_registered(topic, registered)
    # Slots from before a re-slotting are empty, and their counters describe what happened then.
    counted = replace(topic, slots=max((topic.slots, *former_slot_counts(registered))))
    counters: Counter[str] = Counter()
    depths = dict.fromkeys(DEPTHS, 0)
    drifting, adopted = [], 0
    for slot, ledger in _ledgers(broker, counted):
        if adopt and ledger.live_drift > 0:
            booked = _adopt(broker, topic, slot, ledger)
            adopted += booked
            ledger = broker.run(inspect.audit(topic, slot)) if booked else ledger
        for name, value in ledger:
            counters[name] += value
        for name in DEPTHS:
            depths[name] += getattr(ledger, name)
        if not ledger.balanced:
            drifting.append({"slot": slot, **{name: getattr(ledger, f"{name}_drift") for name in DRIFTS}})
    return Audit(topic, dict(sorted(counters.items())), depths, drifting, adopted)


def check_is_settled(topic: Topic, registered: dict[str, Any]) -> None:
    """Raise ``ConfigurationError`` if a topic is being re-slotted, because its messages are between slots."""
    if registered and len(slot_counts(registered)) > 1:
        raise ConfigurationError(
            f'topic "{topic.name}" is being re-slotted: look for strays after that has finished'
        )


def _ledgers(broker: Broker, topic: Topic) -> Iterator[tuple[int, Ledger]]:
    yield from enumerate(walk(broker, (inspect.audit(topic, slot) for slot in range(topic.slots))))


def _adopt(broker: Broker, topic: Topic, slot: int, ledger: Ledger) -> int:
    """Record the drift in ``ledger`` as foreign, unless another adoption came first; return how much was recorded."""
    drift = ledger.live_drift
    return drift if broker.run(operate.adopt(topic, slot, drift, ledger["foreign"])) == "ok" else 0


__all__ = ["DRIFTS", "Audit", "audit", "check_is_settled"]
