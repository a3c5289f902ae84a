"""The data of the history: samples of a topic, and the lateness and duration of its deliveries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Sample(NamedTuple):
    """Sums of the depths and counters of some slots of a topic."""

    slots: int
    """How many of the requested slots could be read."""
    store: int
    due: int
    """How many can be taken now: in Store, rested in Retry, or timed out in Prepare."""
    prepare: int
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Time topics: since when the first of these can be taken."""
    counters: dict[str, int]
    """The counters in ``SAMPLED``."""
    undrained_since_ms: int | None = None
    """Priority topics: the earliest time since which a slot has had something to take."""

    def plus(self, other: Sample) -> Sample:
        """Return the sums of both."""
        oldest = [one.oldest_due_ms for one in (self, other) if one.oldest_due_ms is not None]
        undrained = [one.undrained_since_ms for one in (self, other) if one.undrained_since_ms is not None]
        return Sample(
            self.slots + other.slots,
            self.store + other.store,
            self.due + other.due,
            self.prepare + other.prepare,
            self.retry + other.retry,
            self.dead + other.dead,
            min(oldest, default=None),
            {name: value + other.counters[name] for name, value in self.counters.items()},
            min(undrained, default=None),
        )


SAMPLED = (
    "sent", "merged", "replaced", "prepared", "committed", "acked", "failed", "expired", "rejected", "died", "lapsed",
    "claimed", "claim_returned", "released", "stale", "fenced", "revived", "replay_merged", "cancelled", "overran",
)  # fmt: skip
"""The counters of the ledger that the history and the metrics use."""


LATENESS_BUCKETS = 24
"""The number of classes in which lateness, and time in listeners, are counted."""


class Times(NamedTuple):
    """Durations, counted by the classes of ``history.EDGES_MS``. Never reset."""

    late: tuple[int, ...]
    """How late messages were handed out."""
    late_ms: int
    """The sum of the lateness, in ms."""
    took: tuple[int, ...]
    """How long calls of the listener took."""
    took_us: int
    """The sum of the durations, in microseconds."""

    @classmethod
    def of(cls, counted: Mapping[str, int]) -> Times:
        """Return what the fields ``TIMES`` count."""
        late, took = (
            tuple(counted[f"{name}{bucket}"] for bucket in range(LATENESS_BUCKETS))
            for name in ("late", "took")
        )
        return cls(late, counted["late"], took, counted["took"])


TIMES = tuple(
    name.encode()
    for kind in ("late", "took")
    for name in (kind, *(f"{kind}{bucket}" for bucket in range(LATENESS_BUCKETS)))
)
"""The fields that count durations."""
