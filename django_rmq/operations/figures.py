"""What is going on: figures of topics, slots and workers, as one round trip can tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from django_rmq import connections, history
from django_rmq.broker import Broker
from django_rmq.coordination import Holding, Member
from django_rmq.coordination.redis import describe_roster, members_of_roster
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable
from django_rmq.history import Depth, Totals
from django_rmq.messages import Counts, Roster, Times, Topic, former_slot_counts


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers there are, and what is assigned to them."""

    members: list[Member]
    holdings: list[Holding]
    problem: str = ""
    """Why nobody can tell; empty: all is known."""


LIVE_SLOTS = 4_096
"""Slots that an overview looks at; of topics with more, an evenly spread part."""

PARTIAL_SLOTS = 256
"""How many slots of a topic are looked at where all would be too many."""


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic at one instant. With ``is_partial`` the depths are those of ``looked_at`` slots only."""

    topic: Topic
    store: int = 0
    due: int = 0
    """Of ``store``: takeable now."""
    prepare: int = 0
    retry: int = 0
    dead: int = 0
    claimed: int = 0
    oldest_due_ms: int | None = None
    """The earliest due time in Store that has passed; None: nothing is overdue, or the topic orders by priority."""
    age_ms: int | None = None
    """How long that one has been due."""
    undrained_since_ms: int | None = None
    """Priority topics: since when the slot has not been empty that was so for the longest; None: nothing waits."""
    undrained_ms: int | None = None
    """For how long: what was sent since and still waits has waited no longer."""
    paused_slots: int = 0
    consumers: int = 0
    """Live workers that serve the topic."""
    threads: int = 0
    """Their threads."""
    owned_slots: int = 0
    """Serial topics: slots that are assigned to live workers."""
    workers_problem: str = ""
    """Why nobody knows how many workers there are; empty: it is known."""
    looked_at: int = 0
    """Slots that were looked at."""
    now_ms: int = 0
    """When, by Redis' clock."""
    problems: tuple[str, ...] = ()
    """Slots that cannot be read, and why."""

    @property
    def not_due(self) -> int:
        """Of ``store``: waiting for its time."""
        return self.store - self.due

    @property
    def is_partial(self) -> bool:
        """Whether only a part of the slots was looked at."""
        return self.looked_at < self.topic.slots

    @property
    def is_paused(self) -> bool:
        """Whether every slot that was looked at is paused."""
        return 0 < self.looked_at == self.paused_slots

    @property
    def is_partly_paused(self) -> bool:
        """Whether some slots are paused and some are not: a pause was interrupted."""
        return 0 < self.paused_slots < self.looked_at


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """One slot: what it holds, who owns it since when, who took from it last."""

    slot: int
    counts: Counts
    worker: str = ""
    """The id of the worker it is assigned to; empty: none, or the topic is not serial."""
    since_ms: int | None = None
    problem: str = ""

    @property
    def depth(self) -> int:
        """Everything alive in it."""
        return self.counts.store + self.counts.prepare + self.counts.retry + self.counts.claimed


@dataclass(frozen=True, slots=True)
class SlotsFigures:
    """Some slots of a topic, and how evenly they are filled."""

    topic: Topic
    rows: list[SlotFigures]
    now_ms: int

    @property
    def mean_depth(self) -> float:
        """The mean depth of these slots."""
        return sum(row.depth for row in self.rows) / len(self.rows) if self.rows else 0.0

    @property
    def skew(self) -> float:
        """How many times deeper than the mean the deepest slot is; 1: even, 0: all are empty."""
        mean = self.mean_depth
        return max(row.depth for row in self.rows) / mean if mean else 0.0


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One live worker and what is assigned to it."""

    member: Member
    slots: dict[str, int] = field(default_factory=dict)
    """Serial topic -> how many of its slots."""
    shared: tuple[str, ...] = ()
    """Topics that all their workers share."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One topic as a monitoring system wants to know it: depths now, and what has been counted since its first message.

    Of topics that are too large for an overview both are the sums of the last record of the history.
    """

    figures: TopicFigures
    """Depths: ``depth`` where it is given."""
    depth: Depth | None
    """Of large topics: what all slots together held at ``sampled_ms``."""
    totals: Totals | None
    """None: large, and no worker has sampled it of late."""
    times: Times
    sampled_ms: int
    """When, by Redis' clock, depth and totals were read."""
    is_scaled: bool = False
    """Not all slots were read; sums are scaled."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What has passed through topics until an instant; two of them tell rates."""

    RATES: ClassVar[tuple[str, ...]] = ("sent", "done", "failed")
    """sent: taken from senders, merged ones too; done: committed and acknowledged; failed: failed or timed out."""

    now_ms: int
    counted: dict[str, dict[str, int]]
    """Topic → name of ``RATES`` → how many ever."""

    def since(self, before: Flow) -> dict[str, dict[str, float]]:
        """Return topic → name → how many per second since then."""
        seconds = max(self.now_ms - before.now_ms, 1) / 1000
        return {
            topic: {
                name: max(0, count - before.counted[topic][name]) / seconds for name, count in now.items()
            }
            for topic, now in self.counted.items()
            if topic in before.counted
        }


_COUNTERS = {
    "sent": ("sent",),
    "done": ("committed", "acked"),
    "failed": ("failed", "expired", "rejected"),
}

NOTHING = Counts(0, 0, 0, 0, 0, 0, None)


def overview(broker: Broker, topics: Sequence[Topic]) -> list[TopicFigures]:
    """Return the figures of ``topics``, in one round trip whatever their backlog. Raises ``ServerTrouble``."""
    looked_at = _slots_to_look_at(topics)
    pipeline = broker.pipeline()
    pipeline.roster()
    for topic in topics:
        for slot in looked_at[topic.name]:
            pipeline.count(topic, slot)
    roster, *answers = pipeline.execute()
    if isinstance(roster, RmqError):
        raise roster
    crew = _crew(roster)
    found, at = [], 0
    for topic in topics:
        slots = looked_at[topic.name]
        part, at = answers[at : at + len(slots)], at + len(slots)
        found.append(_summed(topic, slots, part, crew, roster.now_ms))
    return found


def slots(broker: Broker, topic: Topic, wanted: Sequence[int]) -> SlotsFigures:
    """Return the figures of some slots, with who owns them. Raises ``ServerTrouble``."""
    pipeline = broker.pipeline()
    pipeline.roster()
    for slot in wanted:
        pipeline.count(topic, slot)
    roster, *answers = pipeline.execute()
    if isinstance(roster, RmqError):
        raise roster
    crew = _crew(roster)
    owners = [holding for holding in crew.holdings if holding.topic == topic.name]
    rows = []
    for slot, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        row = SlotFigures(slot, NOTHING if isinstance(answer, RmqError) else answer)
        if isinstance(answer, RmqError):
            row = replace(row, problem=str(answer))
        holding = _holding_of(owners, slot)
        if holding is not None:
            row = replace(row, worker=holding.worker, since_ms=round(holding.since * 1000))
        rows.append(row)
    return SlotsFigures(topic, rows, roster.now_ms)


def measured(broker: Broker, topics: Sequence[Topic]) -> list[Measured]:
    """Return what there is to measure of ``topics``: of up to 8,192 slots as it is, of more as workers sampled it.

    Costs two looks at each of these slots, and one at the times of each topic. Raises ``ServerTrouble``.
    """
    definitions = broker.definitions()
    found = []
    for one in overview(broker, topics):
        topic, times = one.topic, broker.times(one.topic)
        if one.looked_at + len(one.problems) < topic.slots:
            latest = history.latest(broker, topic)
            if latest is None:
                found.append(Measured(one, None, None, times, one.now_ms))
            else:
                found.append(
                    Measured(one, latest.depth, latest.totals, times, latest.sampled_ms, latest.is_scaled)
                )
            continue
        # Slots that the topic had before have counted, too.
        former = former_slot_counts(definitions.get(topic.name, {}))
        everywhere = replace(topic, slots=min(max(topic.slots, *former), LIVE_SLOTS)) if former else topic
        found.append(Measured(one, None, history.totals(broker, everywhere), times, one.now_ms))
    return found


def flow(broker: Broker, topics: Sequence[Topic]) -> Flow:
    """Return what has passed through ``topics`` so far; those with very many slots are left out."""
    looked_at = _slots_to_look_at(topics)
    counted = {}
    now_ms = broker.now_ms()
    for topic in topics:
        slots = looked_at[topic.name]
        if len(slots) < topic.slots:
            continue
        totals = dict.fromkeys(Flow.RATES, 0)
        pipeline = broker.pipeline()
        for slot in slots:
            pipeline.audit(topic, slot)
        for answer in pipeline.execute():
            if isinstance(answer, ServerTrouble):
                raise answer
            if not isinstance(answer, RmqError):
                for name, counters in _COUNTERS.items():
                    totals[name] += sum(answer[counter] for counter in counters)
        counted[topic.name] = totals
    return Flow(now_ms, counted)


def workers(broker: Broker) -> list[WorkerFigures]:
    """Return all live workers, by host and start. Raises ``ServerTrouble``."""
    crew = _crew(broker.roster())
    if crew.problem:
        raise ServerUnavailable(crew.problem)
    owned: dict[str, dict[str, int]] = {}
    for one in crew.holdings:
        topics = owned.setdefault(one.worker, {})
        topics[one.topic] = topics.get(one.topic, 0) + one.stop - one.start
    found = [
        WorkerFigures(
            member,
            owned.get(member.worker.id, {}),
            tuple(topic.name for topic in member.worker.topics if not topic.serial),
        )
        for member in crew.members
    ]
    return sorted(found, key=lambda one: (one.member.worker.host, one.member.worker.started))


def serving(broker: Broker, topic: str) -> list[str]:
    """Return the live workers that serve ``topic``, each in words. Raises ``ServerTrouble``."""
    found = [one.member.worker for one in workers(broker)]
    return [f"process {one.pid} on {one.host}" for one in found if topic in one.capacity.topics]


def _slots_to_look_at(topics: Iterable[Topic]) -> dict[str, Sequence[int]]:
    """Choose the slots to look at: all where there are few, the smallest topics first."""
    chosen: dict[str, Sequence[int]] = {}
    left = 2 * LIVE_SLOTS
    for topic in sorted(topics, key=lambda one: one.slots):
        if topic.slots <= min(left, LIVE_SLOTS):
            left -= topic.slots
            chosen[topic.name] = range(topic.slots)
        else:
            chosen[topic.name] = range(0, topic.slots, max(1, topic.slots // PARTIAL_SLOTS))
    return chosen


def _summed(
    topic: Topic,
    slots: Sequence[int],
    answers: Sequence[Counts | RmqError],
    crew: Crew,
    now_ms: int,
) -> TopicFigures:
    counted: list[Counts] = []
    problems = []
    for slot, answer in zip(slots, answers, strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        if isinstance(answer, RmqError):
            problems.append(f"slot {slot}: {answer}")
        else:
            counted.append(answer)
    oldest = min((one.oldest_due_ms for one in counted if one.oldest_due_ms is not None), default=None)
    undrained = min(
        (one.undrained_since_ms for one in counted if one.undrained_since_ms is not None), default=None
    )
    serving = [
        member.worker
        for member in crew.members
        if any(one.name == topic.name for one in member.worker.topics)
    ]
    return TopicFigures(
        topic,
        store=sum(one.store for one in counted),
        due=sum(one.due for one in counted),
        prepare=sum(one.prepare for one in counted),
        retry=sum(one.retry for one in counted),
        dead=sum(one.dead for one in counted),
        claimed=sum(one.claimed for one in counted),
        oldest_due_ms=oldest,
        age_ms=None if oldest is None else max(0, now_ms - oldest),
        undrained_since_ms=undrained,
        undrained_ms=None if undrained is None else max(0, now_ms - undrained),
        paused_slots=sum(one.paused for one in counted),
        consumers=len(serving),
        threads=sum(worker.threads for worker in serving),
        owned_slots=_owned(topic, crew),
        workers_problem=crew.problem,
        looked_at=len(counted),
        now_ms=now_ms,
        problems=tuple(problems),
    )


def _owned(topic: Topic, crew: Crew) -> int:
    present = {member.worker.id for member in crew.members}
    return sum(
        max(0, min(one.stop, topic.slots) - one.start)
        for one in crew.holdings
        if one.topic == topic.name and one.worker in present
    )


def _crew(roster: Roster) -> Crew:
    """Return who is there: in ZooKeeper where workers come together there, else by the roster.

    While ZooKeeper is away, what is in Redis can be shown all the same.
    """
    try:
        found = connections.survey_zookeeper()
    except ServerTrouble as error:
        return Crew([], [], str(error))
    if found is None:
        return Crew(members_of_roster(roster), describe_roster(roster))
    return Crew(found.members, found.holdings)


def _holding_of(holdings: Sequence[Holding], slot: int) -> Holding | None:
    """Return the holding that ``slot`` lies in; they are in order and do not overlap."""
    low, high = 0, len(holdings)
    while low < high:
        middle = (low + high) // 2
        if holdings[middle].stop <= slot:
            low = middle + 1
        else:
            high = middle
    if low < len(holdings) and holdings[low].start <= slot:
        return holdings[low]
    return None


__all__ = [
    "Flow",
    "Measured",
    "SlotFigures",
    "SlotsFigures",
    "TopicFigures",
    "WorkerFigures",
    "flow",
    "measured",
    "overview",
    "slots",
    "workers",
]
