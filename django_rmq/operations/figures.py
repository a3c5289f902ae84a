"""What is going on: figures of topics, slots and workers, as one round trip can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple

from django_rmq.core.coordination import Holding, Member, Worker
from django_rmq.core.coordination.redis import describe_roster, members_of_roster
from django_rmq.core.redis.broker import Broker
from django_rmq.core.telling import history
from django_rmq.core.telling.history import Depth, Latest, Totals
from django_rmq.core.words.messages import Counts, Roster, Times, Topic, former_slot_counts
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable, WrongType
from django_rmq.project import connections


@dataclass(slots=True)
class Serving:
    """What live workers do for one topic."""

    workers: int = 0
    threads: int = 0
    owned_slots: list[Holding] = field(default_factory=list)
    """Of serial topics, by slot; also those of workers that are gone."""


class Crew:
    """The workers there are, and what is assigned to them, by topic."""

    def __init__(
        self, members: Sequence[Member] = (), holdings: Sequence[Holding] = (), problem: str = ""
    ) -> None:
        self.members = members
        self.holdings = holdings
        self.problem = problem
        """Why nobody can tell; empty: all is known."""
        self._present = {member.worker.id for member in members}
        self._serving: defaultdict[str, Serving] = defaultdict(Serving)
        # Most workers say the same, which is read once.
        groups: defaultdict[int, list[Worker]] = defaultdict(list)
        for member in members:
            groups[id(member.worker.topics)].append(member.worker)
        for workers in groups.values():
            threads = sum(worker.threads for worker in workers)
            for name in {topic.name for topic in workers[0].topics}:
                serving = self._serving[name]
                serving.workers += len(workers)
                serving.threads += threads
        for one in holdings:
            self._serving[one.topic].owned_slots.append(one)

    def serving(self, topic: Topic) -> Serving:
        """Return who serves a topic."""
        return self._serving.get(topic.name) or Serving()

    def owned(self, topic: Topic) -> int:
        """Return how many slots of a topic live workers own."""
        return sum(
            max(0, min(one.stop, topic.slots) - one.start)
            for one in self.serving(topic).owned_slots
            if one.worker in self._present
        )


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
    definition_problem: str = ""
    """Why what Redis has registered of the topic cannot be read; empty: it can."""
    looked_at: int = 0
    """Slots that were looked at."""
    now_ms: int = 0
    """When, by Redis' clock."""
    problems: tuple[str, ...] = ()
    """Slots that cannot be read, and why."""

    @property
    def troubles(self) -> list[str]:
        """All that cannot be read of the topic: its definition, slots, who serves it."""
        return [text for text in (self.definition_problem, *self.problems, self.workers_problem) if text]

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
    """None: large, and no worker has sampled it of late; or they cannot be read."""
    times: Times | None
    """None: they cannot be read."""
    sampled_ms: int
    """When, by Redis' clock, depth and totals were read."""
    is_scaled: bool = False
    """Not all slots were read; sums are scaled."""
    problems: tuple[str, ...] = ()
    """Why totals or times cannot be read."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What has passed through topics until an instant; two of them tell rates."""

    RATES: ClassVar[tuple[str, ...]] = ("sent", "done", "failed")
    """sent: taken from senders, merged ones too; done: committed and acknowledged; failed: failed or timed out."""

    now_ms: int
    counted: dict[str, dict[str, int]]
    """Topic → name of ``RATES`` → how many ever."""
    problems: tuple[str, ...] = ()
    """Slots whose counters cannot be read, and why: they are not in the sums."""

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


class Overview(NamedTuple):
    """All topics and workers at one instant."""

    topics: list[TopicFigures]
    workers: int | None
    """How many are alive; None: nobody can tell, see ``problem``."""
    problem: str
    now_ms: int


def overview(broker: Broker, topics: Sequence[Topic]) -> list[TopicFigures]:
    """Return the figures of ``topics``, in one round trip whatever their backlog. Raises ``ServerTrouble``."""
    return survey(broker, topics).topics


def survey(broker: Broker, topics: Sequence[Topic]) -> Overview:
    """Return the figures of ``topics`` and the number of workers, as ``overview`` does."""
    looked_at = _slots_to_look_at(topics)
    pipeline = broker.pipeline()
    pipeline.roster()
    for topic in topics:
        for slot in looked_at[topic.name]:
            pipeline.count(topic, slot)
    roster, *answers = pipeline.execute()
    crew = _crew(roster)
    now_ms = broker.now_ms() if isinstance(roster, RmqError) else roster.now_ms
    found, at = [], 0
    for topic in topics:
        slots = looked_at[topic.name]
        part, at = answers[at : at + len(slots)], at + len(slots)
        found.append(_summed(topic, slots, part, crew, now_ms))
    return Overview(found, None if crew.problem else len(crew.members), crew.problem, now_ms)


def slots(broker: Broker, topic: Topic, wanted: Sequence[int]) -> SlotsFigures:
    """Return the figures of some slots, with who owns them. Raises ``ServerTrouble``."""
    pipeline = broker.pipeline()
    pipeline.roster()
    for slot in wanted:
        pipeline.count(topic, slot)
    roster, *answers = pipeline.execute()
    owners = _crew(roster).serving(topic).owned_slots
    now_ms = broker.now_ms() if isinstance(roster, RmqError) else roster.now_ms
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
    return SlotsFigures(topic, rows, now_ms)


class Measurement(NamedTuple):
    """All topics as a monitoring system wants to know them."""

    topics: list[Measured]
    workers: int | None
    problem: str


def measured(broker: Broker, topics: Sequence[Topic]) -> Measurement:
    """Return what there is to measure of ``topics``: of up to 8,192 slots as it is, of more as workers sampled it.

    Costs two looks at each of these slots, and one at the times of each topic, all in a few round trips. What
    cannot be read is missing of its own topic. Raises ``ServerTrouble``.
    """
    try:
        definitions: Mapping[str, dict[str, Any]] = broker.definitions()
    except WrongType:
        definitions = {}
    seen = survey(broker, topics)
    large = [one.topic for one in seen.topics if one.looked_at + len(one.problems) < one.topic.slots]
    latest = dict(zip(large, history.latest(broker, large), strict=True))
    counted = {topic: _everywhere(topic, definitions) for topic in topics if topic not in latest}
    totals = dict(zip(counted, history.totals(broker, list(counted.values())), strict=True))
    found = []
    for one, times in zip(seen.topics, history.times(broker, topics), strict=True):
        record, sums = latest.get(one.topic), totals.get(one.topic)
        problems = tuple(str(each) for each in (record, sums, times) if isinstance(each, RmqError))
        known = None if isinstance(times, RmqError) else times
        if isinstance(record, Latest):
            found.append(
                Measured(
                    one, record.depth, record.totals, known, record.sampled_ms, record.is_scaled, problems
                )
            )
        else:
            sums = None if isinstance(sums, RmqError) else sums
            found.append(Measured(one, None, sums, known, one.now_ms, problems=problems))
    return Measurement(found, seen.workers, seen.problem)


def _everywhere(topic: Topic, definitions: Mapping[str, dict[str, Any]]) -> Topic:
    """Return ``topic`` with the slots that it had before, too: they have counted."""
    former = former_slot_counts(definitions.get(topic.name, {}))
    return replace(topic, slots=min(max(topic.slots, *former), LIVE_SLOTS)) if former else topic


def flow(broker: Broker, topics: Sequence[Topic]) -> Flow:
    """Return what has passed through ``topics`` so far; those with very many slots are left out."""
    looked_at = _slots_to_look_at(topics)
    small = [topic for topic in topics if len(looked_at[topic.name]) == topic.slots]
    now_ms = broker.now_ms()
    pipeline = broker.pipeline()
    for topic in small:
        for slot in looked_at[topic.name]:
            pipeline.audit(topic, slot)
    answers = iter(pipeline.execute())
    counted, problems = {}, []
    for topic in small:
        totals = counted[topic.name] = dict.fromkeys(Flow.RATES, 0)
        for slot, answer in enumerate(islice(answers, topic.slots)):
            if isinstance(answer, ServerTrouble):
                raise answer
            if isinstance(answer, RmqError):
                problems.append(f"topic {topic.name}, slot {slot}: {answer}")
            else:
                for name, counters in _COUNTERS.items():
                    totals[name] += sum(answer[counter] for counter in counters)
    return Flow(now_ms, counted, tuple(problems))


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
    serving = crew.serving(topic)
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
        consumers=serving.workers,
        threads=serving.threads,
        owned_slots=crew.owned(topic),
        workers_problem=crew.problem,
        definition_problem=connections.unreadable(topic),
        looked_at=len(counted),
        now_ms=now_ms,
        problems=tuple(problems),
    )


def _crew(roster: Roster | RmqError) -> Crew:
    """Return who is there: in ZooKeeper where workers come together there, else by the roster.

    While ZooKeeper is away, or the roster cannot be read, what is in Redis can be shown all the same.
    """
    if isinstance(roster, ServerTrouble):
        raise roster
    if isinstance(roster, RmqError):
        return _crew_in_zookeeper() or Crew(problem=str(roster))
    return _crew_in_zookeeper() or Crew(members_of_roster(roster), describe_roster(roster))


def _crew_in_zookeeper() -> Crew | None:
    """Return who is there where workers come together in ZooKeeper; None: they do not."""
    try:
        found = connections.survey_zookeeper()
    except ServerTrouble as error:
        return Crew(problem=str(error))
    return None if found is None else Crew(found.members, found.holdings)


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
    "Measurement",
    "Overview",
    "SlotFigures",
    "SlotsFigures",
    "TopicFigures",
    "WorkerFigures",
    "flow",
    "measured",
    "overview",
    "slots",
    "survey",
    "workers",
]
