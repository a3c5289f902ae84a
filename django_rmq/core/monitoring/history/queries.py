"""Queries of the history: minutes with depths and rates, totals, durations, and the latest record.

They only read; the sampler writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, dropwhile, islice
from operator import sub
from typing import NamedTuple, TypeVar

from django_rmq.core.commands import activity
from django_rmq.core.commands.broker_interface import Broker, run_all
from django_rmq.core.commands.inspect import walk
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.limits import BATCH
from django_rmq.core.model.replies import Sample, Times
from django_rmq.core.model.topic import Topic
from django_rmq.core.monitoring.history.minute_record import (
    COUNTED,
    EDGES_MS,
    SLOTS_AT_ONCE,
    Depth,
    MinuteRecord,
    counted,
)
from django_rmq.exceptions import RmqError, ServerTrouble

LONGEST_GAP_MINUTES = 5
"""The longest gap in minutes over which a rate is computed; over a longer one it says nothing about any minute."""


class Rates(NamedTuple):
    """Rates of events, per minute."""

    sent: float
    merged: float
    """The part of ``sent`` that met a waiting copy (merged or replaced)."""
    handed_out: float
    committed: float
    failed: float
    """Failed, timed out or rejected deliveries."""
    died: float

    @property
    def merge_ratio(self) -> float | None:
        """The fraction of sent messages that met a waiting copy, or None if nothing was sent."""
        return self.merged / self.sent if self.sent else None


@dataclass(frozen=True, slots=True)
class Lateness:
    """The number of delivered messages by their lateness, in the classes of ``EDGES_MS``.

    It counts messages of topics with due times that had not failed, and were taken by a worker.
    """

    counts: tuple[int, ...]

    @property
    def messages(self) -> int:
        return sum(self.counts)

    def percentile(self, part: float) -> float:
        """Return the lateness in ms that this fraction (0 … 1) of the messages did not exceed, interpolated in its class."""
        wanted = part * self.messages
        for bucket, reached in enumerate(accumulate(self.counts)):
            if reached >= wanted and self.counts[bucket]:
                low = EDGES_MS[bucket - 1] if bucket else 0
                high = EDGES_MS[bucket] if bucket < len(EDGES_MS) else EDGES_MS[-1]
                return low + (high - low) * (1 - (reached - wanted) / self.counts[bucket])
        return 0.0


class Minute(NamedTuple):
    """One minute of a topic, or several combined. A field that was not sampled is None."""

    at_ms: int
    """When it begins, in ms since the epoch."""
    sampled_ms: int | None = None
    depth: Depth | None = None
    """The depths at ``sampled_ms``."""
    rates: Rates | None = None
    """The rates from the previous record to this one."""
    lateness: Lateness | None = None
    """The lateness from the previous record to this one. None also if nothing was delivered."""
    is_scaled: bool = False
    """Whether not all slots were read."""


def read(broker: Broker, topic: Topic, hours: float = 48, *, step: int = 1) -> list[Minute]:
    """Return the last ``hours`` of ``topic``, oldest first, ``step`` minutes per item; gaps are included, and empty.

    The present minute is the last one. If several minutes are combined, depths are the last sampled, rates
    the average, lateness the sum.
    """
    now = broker.now_ms() // 60_000
    count = max(1, round(hours * 60 / step)) * step
    # Steps begin at the same times, whenever they are requested.
    first = (now // step + 1) * step - count
    begin = first - LONGEST_GAP_MINUTES
    calls = (
        activity.minutes(topic, start, min(start + BATCH - 1, now)) for start in range(begin, now + 1, BATCH)
    )
    records = [record for some in walk(broker, calls) for record in some]
    return _read(records, first, count, now, step)


def read_last(broker: Broker, topics: Mapping[Topic, int]) -> dict[Topic, list[Minute] | RmqError]:
    """Return the last minutes of each topic (up to an hour), in two round trips; or the error that prevents reading them."""
    now = broker.now_ms() // 60_000
    calls = [
        activity.minutes(topic, now + 1 - count - LONGEST_GAP_MINUTES, now) for topic, count in topics.items()
    ]
    return {
        topic: records if isinstance(records, RmqError) else _read(records, now + 1 - count, count, now, 1)
        for (topic, count), records in zip(topics.items(), _answers(broker, calls), strict=True)
    }


def last_rates(broker: Broker, topics: Sequence[Topic], minutes: int) -> dict[Topic, Rates | RmqError | None]:
    """Return the latest rates of each topic within the last minutes, or None, in two round trips; or the error."""
    now = broker.now_ms() // 60_000
    calls = [activity.minutes(topic, now + 1 - minutes - LONGEST_GAP_MINUTES, now) for topic in topics]
    return {
        topic: records if isinstance(records, RmqError) else _last_rates(records, minutes)
        for topic, records in zip(topics, _answers(broker, calls), strict=True)
    }


HOUR_MINUTES = 60

HELD_MINUTES = 5
"""Minutes for which a sample is taken for those that are missing after it, where topics are added up."""


class SummedMinute(NamedTuple):
    """One minute of several topics together. None: none of them was sampled."""

    at_ms: int
    depths: Sequence[float] | None
    """Due and dead messages."""
    rates: Sequence[float] | None
    """Sent, committed and failed, per minute."""


def summed(hours: Iterable[Sequence[Minute]]) -> list[SummedMinute]:
    """Return the sums of the same minutes of several topics, from the first sample on.

    Topics are sampled one after the other. So the present minute is left out, and depths hold until the next sample.
    """
    whole = [minutes[:-1] for minutes in hours if minutes]
    depths = [_sums(column) for column in zip(*map(_held_depths, whole), strict=True)]
    first = next((at for at, sums in enumerate(depths) if sums), len(depths))
    if first == len(depths):
        return []
    rates = (
        _sums(
            (one.rates.sent, one.rates.committed, one.rates.failed) if one.rates else None for one in column
        )
        for column in zip(*whole, strict=True)
    )
    found = zip(whole[0], depths, rates, strict=True)
    return [SummedMinute(minute.at_ms, *sums) for minute, *sums in islice(found, first, None)]


class SummedHour:
    """The last hour of several topics together. Of very many topics an hour is much, so each minute is read once."""

    def __init__(self, topics: Iterable[Topic]) -> None:
        self._topics = tuple(topics)
        self._minutes: list[SummedMinute] = []

    def read(self, broker: Broker) -> list[SummedMinute]:
        """Return ``summed`` of the last hour. A topic that cannot be read is left out."""
        now = broker.now_ms() // 60_000
        newest = self._minutes[-1].at_ms // 60_000 if self._minutes else now
        if newest >= now:
            # Nothing was read before, or the clock was set back.
            self._minutes, newest = [], now - HOUR_MINUTES
        # The depths of a minute without a sample are those of the minutes before it.
        count = min(HOUR_MINUTES, now - newest) + HELD_MINUTES
        hours = read_last(broker, dict.fromkeys(self._topics, count)).values()
        sums = summed(minutes for minutes in hours if not isinstance(minutes, RmqError))
        found = {one.at_ms // 60_000: one for one in sums}
        self._minutes += [
            found.get(minute, SummedMinute(minute * 60_000, None, None)) for minute in range(newest + 1, now)
        ]
        del self._minutes[: 1 - HOUR_MINUTES]
        return list(dropwhile(lambda one: one.depths is None, self._minutes))


def _held_depths(minutes: Sequence[Minute]) -> list[Sequence[float] | None]:
    """Return what was due and dead, the last sample in place of one that is missing, for some minutes at most."""
    found, last, missing = list[Sequence[float] | None](), None, 0
    for minute in minutes:
        if minute.depth:
            last, missing = (minute.depth.due, minute.depth.dead), 0
        else:
            missing += 1
        found.append(last if missing <= HELD_MINUTES else None)
    return found


def _sums(column: Iterable[Sequence[float] | None]) -> list[float] | None:
    known = [values for values in column if values is not None]
    return [sum(values) for values in zip(*known, strict=True)] if known else None


def _last_rates(records: Sequence[bytes | None], minutes: int) -> Rates | None:
    later: MinuteRecord | None = None
    for at in range(len(records) - 1, -1, -1):
        record = MinuteRecord.parse(records[at])
        if record is None:
            continue
        rates = _rates(later, record) if later else None
        if rates or at < len(records) - minutes:
            return rates
        later = record
    return None


T = TypeVar("T")


def _answers(broker: Broker, calls: Iterable[Call[T]]) -> list[T | RmqError]:
    """Run calls; return their answers, with errors of single topics in their places. Raises ``ServerTrouble``."""
    found = run_all(broker, calls)
    for one in found:
        if isinstance(one, ServerTrouble):
            raise one
    return found


def _read(records: Sequence[bytes | None], first: int, count: int, now: int, step: int) -> list[Minute]:
    before: MinuteRecord | None = None
    found: list[Minute] = []
    for minute, raw in enumerate(records, first - LONGEST_GAP_MINUTES):
        record = MinuteRecord.parse(raw)
        if minute >= first:
            found.append(_minute(minute, record, before))
        before = record or before
    found += [Minute(minute * 60_000) for minute in range(now + 1, first + count)]
    if step == 1:
        return found
    return [_together(found[at : at + step]) for at in range(0, count, step)]


@dataclass(frozen=True, slots=True)
class HistoryTotals:
    """The counters of a topic since its first message."""

    sent: int
    merged: int
    """The part of ``sent`` that met a waiting copy (merged or replaced)."""
    handed_out: int
    committed: int
    failed: int
    """Failed, timed out or rejected deliveries."""
    died: int
    expired: int | None = None
    """The part of ``failed`` that timed out. This field and the following ones are None in records of earlier versions."""
    rejected: int | None = None
    """The part of ``failed`` that was rejected."""
    released: int | None = None
    """Deliveries that a worker gave back before their listener had begun."""
    stale: int | None = None
    """Ends of deliveries that came too late, because the delivery had already ended."""
    fenced: int | None = None
    """Prepares by a worker after another one had acquired the slot."""
    replayed: int | None = None
    cancelled: int | None = None
    """Deliveries that a person cancelled, and that did not succeed."""
    overran: int | None = None
    """The part of ``failed`` whose listener exceeded HARD_TIMEOUT."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest record of a topic."""

    sampled_ms: int
    depth: Depth
    totals: HistoryTotals
    is_scaled: bool
    """Whether not all slots were read."""


def totals(broker: Broker, topics: Sequence[Topic]) -> list[HistoryTotals | RmqError]:
    """Return the current counters of each topic over all its slots, or the error.

    It takes 1 to 2 ms per 256 slots in Redis.
    """
    calls = [
        activity.sample(topic, range(start, min(start + SLOTS_AT_ONCE, topic.slots)))
        for topic in topics
        for start in range(0, topic.slots, SLOTS_AT_ONCE)
    ]
    answers = iter(_answers(broker, calls))
    found: list[HistoryTotals | RmqError] = []
    for topic in topics:
        samples: list[Sample] = []
        error: RmqError | None = None
        for part in islice(answers, -(-topic.slots // SLOTS_AT_ONCE)):
            if isinstance(part, RmqError):
                error = error or part
            else:
                samples.append(part)
        found.append(error or HistoryTotals(*counted(reduce(Sample.plus, samples).counters)[1]))
    return found


def times(broker: Broker, topics: Sequence[Topic]) -> list[Times | RmqError]:
    """Return all durations ever counted of each topic, or the error that prevents reading them."""
    return _answers(broker, [activity.times(topic) for topic in topics])


def latest(broker: Broker, topics: Sequence[Topic]) -> list[Latest | RmqError | None]:
    """Return the latest record of each topic within the last ``LONGEST_GAP_MINUTES``, or None if there is none."""
    if not topics:
        return []
    now = broker.now_ms() // 60_000
    calls = [activity.minutes(topic, now - LONGEST_GAP_MINUTES, now) for topic in topics]
    return [
        records if isinstance(records, RmqError) else _youngest(records)
        for records in _answers(broker, calls)
    ]


def _youngest(records: Sequence[bytes | None]) -> Latest | None:
    for raw in reversed(records):
        record = MinuteRecord.parse(raw)
        if record is not None:
            return Latest(
                record.sampled_ms, record.depth, HistoryTotals(*record.counters), record.slots < record.asked
            )
    return None


def _together(minutes: list[Minute]) -> Minute:
    sampled = [minute for minute in minutes if minute.depth]
    rates = [minute.rates for minute in minutes if minute.rates]
    late = [minute.lateness.counts for minute in minutes if minute.lateness]
    return Minute(
        minutes[0].at_ms,
        sampled[-1].sampled_ms if sampled else None,
        sampled[-1].depth if sampled else None,
        Rates(*(sum(column) / len(rates) for column in zip(*rates, strict=True))) if rates else None,
        Lateness(tuple(map(sum, zip(*late, strict=True)))) if late else None,
        any(minute.is_scaled for minute in sampled),
    )


def _minute(minute: int, record: MinuteRecord | None, before: MinuteRecord | None) -> Minute:
    if record is None:
        return Minute(minute * 60_000)
    return Minute(
        minute * 60_000,
        record.sampled_ms,
        record.depth,
        _rates(record, before),
        Lateness(record.late) if any(record.late) else None,
        record.slots < record.asked,
    )


def _rates(record: MinuteRecord, before: MinuteRecord | None) -> Rates | None:
    # After a re-slotting, or if a slot could not be read, the two records have the sums of different slots.
    if before is None or before.asked != record.asked or before.slots != record.slots:
        return None
    minutes = (record.sampled_ms - before.sampled_ms) / 60_000
    raised = [*map(sub, record.counters[: len(COUNTED)], before.counters)]
    # If a counter is lower than before, keys were deleted, or the server lost its data or failed over.
    if not 0 < minutes <= LONGEST_GAP_MINUTES + 1 or min(raised) < 0:
        return None
    return Rates(*[number / minutes for number in raised])
