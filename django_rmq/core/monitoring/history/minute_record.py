"""The record of one minute of a topic: its fields, and its stored form, also that of earlier versions.

A record that cannot be read is a gap in the history, and never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django_rmq.core.model.replies import LATENESS_BUCKETS, Sample
from django_rmq.core.model.topic import Topic

SLOTS_AT_ONCE = 256
"""The number of slots that one script reads."""

LARGEST = 1 << 53
"""The largest number in a record; beyond it, division would lose digits."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many messages a topic held at one instant, by state."""

    store: int
    due: int
    """How many messages could be taken; see ``Counts``."""
    prepare: int
    claimed: int
    """How many messages Spark consumers held."""
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Since when (ms) the most overdue message is due (topics of time)."""
    undrained_since_ms: int | None = None
    """The earliest time (ms) since which a slot has had something to take (priority topics)."""


COUNTED = ("sent", "merged", "handed_out", "committed", "failed", "died")
ALSO_COUNTED = ("expired", "rejected", "released", "stale", "fenced", "replayed", "cancelled", "overran")

_LATELY = 2
"""The number of the last entries of ``ALSO_COUNTED`` that records of earlier versions lack."""


@dataclass(frozen=True, slots=True)
class MinuteRecord:
    """The record of one minute: ``ms slots asked store due prepare claimed retry dead oldest sent … overran
    undrained|bucket:n …``.

    Records of earlier versions end with ``died`` or ``replayed``, or have ``undrained`` behind ``replayed``.
    """

    sampled_ms: int
    slots: int
    asked: int
    """The number of slots to be read; larger than ``slots`` if sums are scaled, or a slot could not be read."""
    depth: Depth
    counters: tuple[int, ...]
    """The counters in ``COUNTED``, and those in ``ALSO_COUNTED`` if they were recorded."""
    late: tuple[int, ...] = ()

    @classmethod
    def of(cls, sample: Sample, topic: Topic, now_ms: int) -> MinuteRecord:
        scale = topic.slots / sample.slots if sample.slots else 0
        claimed, counters = counted(sample.counters)
        depths = (sample.store, sample.due, sample.prepare, sample.retry, sample.dead)
        store, due, prepare, retry, dead = (round(value * scale) for value in depths)
        return cls(
            now_ms,
            sample.slots,
            topic.slots,
            Depth(
                *(store, due, prepare, round(claimed * scale), retry, dead),
                sample.oldest_due_ms,
                sample.undrained_since_ms,
            ),
            tuple(round(value * scale) for value in counters),
        )

    def encode(self) -> str:
        depth = self.depth
        numbers = (
            *(self.sampled_ms, self.slots, self.asked, depth.store, depth.due, depth.prepare, depth.claimed),
            *(
                depth.retry,
                depth.dead,
                depth.oldest_due_ms or 0,
                *self.counters,
                depth.undrained_since_ms or 0,
            ),
        )
        return " ".join(map(str, numbers))

    @classmethod
    def parse(cls, raw: bytes | None) -> MinuteRecord | None:
        """Return the record of a stored text, or None for any other text, which is a gap."""
        try:
            head, _, tail = (raw or b"").decode().partition("|")
            numbers = list(map(int, head.split(" ")))
            ms, slots, asked, store, due, prepare, claimed, retry, dead, oldest, *counters = numbers
            late = [0] * LATENESS_BUCKETS
            for pair in tail.split():
                bucket, _, count = pair.partition(":")
                late[int(bucket)] = int(count)
            if not 0 <= min(*numbers, *late) <= max(*numbers, *late) <= LARGEST:
                return None
        except (ValueError, IndexError):
            return None
        # During an update, workers of an earlier version write shorter records beside these.
        whole = len(COUNTED) + len(ALSO_COUNTED)
        undrained = counters.pop() if len(counters) in (whole + 1, whole - _LATELY + 1) else 0
        if len(counters) not in (len(COUNTED), whole - _LATELY, whole):
            return None
        depth = Depth(store, due, prepare, claimed, retry, dead, oldest or None, undrained or None)
        return cls(ms, slots, asked, depth, tuple(counters), tuple(late))


def counted(sums: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return the number held by Spark consumers, and the counters of a record, from sums of the ledger's."""
    return max(0, sums["claimed"] - sums["acked"] - sums["claim_returned"]), (
        sums["sent"],
        sums["merged"] + sums["replaced"],
        sums["prepared"] + sums["claimed"],
        sums["committed"] + sums["acked"],
        sums["failed"] + sums["expired"] + sums["rejected"],
        sums["died"] + sums["lapsed"],
        sums["expired"],
        sums["rejected"],
        sums["released"],
        sums["stale"],
        sums["fenced"],
        sums["revived"] + sums["replay_merged"],
        sums["cancelled"],
        sums["overran"],
    )
