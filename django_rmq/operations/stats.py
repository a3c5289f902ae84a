"""Figures of topics, slots and workers, and how they are read: the survey of topics, their counters, single slots, live workers.

An operation gets the actor's context and checks the permission; what has a broker instead reads for it, and for other
operations. A survey takes up to three round trips, and its work grows with the messages that there are, not with the number of
slots. Of very large topics it reads a part. ``shared_reads`` keeps surveys for dashboards; here no figure is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from django_rmq import connections
from django_rmq.connections import coordinators
from django_rmq.core.commands import history, inspect, membership
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline, run_all
from django_rmq.core.commands.script_call import Answer, AtSlots, Call
from django_rmq.core.coordination import Member, Worker
from django_rmq.core.coordination.stored_plan import AssignmentPlan, Span, plan_of_roster
from django_rmq.core.coordination.worker_records import members_of_roster
from django_rmq.core.model.replies import Counts, Roster
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable
from django_rmq.operations.authorization import OperationContext, Permission


@dataclass(slots=True)
class TopicWorkers:
    """The live workers of one topic."""

    workers: int = 0
    threads: int = 0


class WorkerList:
    """The live workers and the assignment, by topic."""

    def __init__(
        self, members: Sequence[Member] = (), plan: AssignmentPlan | None = None, problem: str = ""
    ) -> None:
        self.members = members
        self.spans: Mapping[str, Sequence[Span]] = plan.topics if plan else {}
        """Serial topic -> its assigned slots, in order; among them are slots of workers that have ended."""
        self.problem = problem
        """Why the workers are unknown; empty if they are known."""
        self._present = {member.worker.id for member in members}
        self._serving: defaultdict[str, TopicWorkers] = defaultdict(TopicWorkers)
        # Most workers publish the same topics, which are parsed once.
        groups: defaultdict[int, list[Worker]] = defaultdict(list)
        for member in members:
            groups[id(member.worker.topics)].append(member.worker)
        for workers in groups.values():
            threads = sum(worker.threads for worker in workers)
            for name in {topic.name for topic in workers[0].topics}:
                serving = self._serving[name]
                serving.workers += len(workers)
                serving.threads += threads

    def serving(self, topic: Topic) -> TopicWorkers:
        """Return the workers that serve a topic."""
        return self._serving.get(topic.name) or TopicWorkers()

    def span_of(self, topic: Topic, slot: int) -> Span | None:
        """Return the assigned slots of a topic among which ``slot`` is, or None if no live worker has it."""
        spans = self.spans.get(topic.name, ())
        at = bisect_right(spans, slot, key=lambda span: span.stop)
        is_owned = at < len(spans) and spans[at].start <= slot and spans[at].worker in self._present
        return spans[at] if is_owned else None

    def owned(self, topic: Topic) -> int:
        """Return how many slots of a topic live workers own."""
        owned, slots = 0, topic.slots
        for one in self.spans.get(topic.name, ()):
            # An assignment may be older than a re-slotting, and have slots that the topic no longer has.
            if one.start < slots and one.worker in self._present:
                owned += min(slots, one.stop) - one.start
        return owned

    def unowned(self, topic: Topic, counted: Iterable[tuple[int, Counts | RmqError]]) -> list[Counts]:
        """Return the slots of ``counted`` that have something to take and no live worker, although the topic has workers."""
        if not (topic.serial and self.serving(topic).workers):
            return []
        held = [(slot, counts) for slot, counts in counted if isinstance(counts, Counts)]
        return [
            counts
            for slot, counts in held
            if counts.due and not counts.paused and self.span_of(topic, slot) is None
        ]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One live worker and its assignment."""

    member: Member
    slots: dict[str, int] = field(default_factory=dict)
    """Serial topic -> the number of its slots."""
    shared: tuple[str, ...] = ()
    """Topics that all their workers share."""

    def of_topics(self, names: Collection[str]) -> WorkerStats | None:
        """Return the worker with no topic but these, or None if it serves none of them."""
        worker = self.member.worker
        topics = tuple(topic for topic in worker.topics if topic.name in names)
        if not topics:
            return None
        return WorkerStats(
            replace(self.member, worker=replace(worker, topics=topics, full=worker.full.intersection(names))),
            {name: count for name, count in self.slots.items() if name in names},
            tuple(name for name in self.shared if name in names),
        )


@dataclass(frozen=True, slots=True)
class TopicStats:
    """One topic at one instant. With ``is_partial`` the depths are those of ``looked_at`` slots only."""

    topic: Topic
    store: int = 0
    due: int = 0
    """The number of messages that can be taken now: in Store, rested in Retry, or timed out in Prepare."""
    prepare: int = 0
    retry: int = 0
    dead: int = 0
    claimed: int = 0
    unleased: int = 0
    """The number of messages that are claimed under a lease that has ended."""
    oldest_due_ms: int | None = None
    """Since when the first of these can be taken; None if nothing is overdue, or the topic orders by priority."""
    age_ms: int | None = None
    """How long that message has been due, in ms."""
    undrained_since_ms: int | None = None
    """Priority topics: the earliest time since which a slot has had something to take, or None if nothing is waiting."""
    undrained_ms: int | None = None
    """The time since then in ms. No waiting message sent since then has waited longer."""
    running_since_ms: int | None = None
    """When the first running delivery began, however often it was extended; None if none runs, or all have timed out."""
    running_ms: int | None = None
    """The time since then in ms."""
    paused_slots: int = 0
    consumers: int = 0
    """The number of live workers that serve the topic."""
    threads: int = 0
    """The number of their threads."""
    owned_slots: int = 0
    """Serial topics: the number of slots that are assigned to live workers."""
    unowned_due: int = 0
    """Serial topics with workers: the number of messages that can be taken now, in slots that no live worker has."""
    unowned_ms: int | None = None
    """How long the first of these messages could have been taken, in ms; None if there is none."""
    workers_problem: str = ""
    """Why the number of workers is unknown; empty if it is known."""
    definition_problem: str = ""
    """Why the registered definition of the topic cannot be read; empty if it can."""
    looked_at: int = 0
    """The number of slots that were read."""
    now_ms: int = 0
    """When they were read, by the clock of Redis."""
    problems: tuple[str, ...] = ()
    """Slots that cannot be read, and the reasons."""

    @property
    def troubles(self) -> list[str]:
        """Everything about the topic that cannot be read: its definition, slots, and workers."""
        return [text for text in (self.definition_problem, *self.problems, self.workers_problem) if text]

    @property
    def is_partial(self) -> bool:
        """Whether only a part of the slots was read."""
        return self.looked_at < self.topic.slots

    @property
    def is_paused(self) -> bool:
        """Whether every slot that was read is paused."""
        return 0 < self.looked_at == self.paused_slots

    @property
    def is_partly_paused(self) -> bool:
        """Whether some slots are paused and some are not, because a pause was interrupted."""
        return 0 < self.paused_slots < self.looked_at


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One slot: its contents, its owner, and the consumer that took from it last."""

    slot: int
    counts: Counts
    worker: str = ""
    """The id of the live worker to which the slot is assigned; empty if there is none, or the topic is not serial."""
    since_ms: int | None = None
    problem: str = ""

    @property
    def depth(self) -> int:
        """The number of live messages in it."""
        return self.counts.store + self.counts.prepare + self.counts.retry + self.counts.claimed


@dataclass(frozen=True, slots=True)
class SlotsStats:
    """Some slots of a topic, and how evenly they are filled."""

    topic: Topic
    rows: list[SlotStats]
    now_ms: int
    workers_problem: str = ""
    """Why the owners of the slots are unknown; empty if they are known."""

    @property
    def mean_depth(self) -> float:
        """The mean depth of these slots."""
        return sum(row.depth for row in self.rows) / len(self.rows) if self.rows else 0.0

    @property
    def skew(self) -> float:
        """The depth of the deepest slot divided by the mean. 1 means even, and 0 that all slots are empty."""
        mean = self.mean_depth
        return max(row.depth for row in self.rows) / mean if mean else 0.0


class Overview(NamedTuple):
    """All topics and workers at one instant."""

    topics: list[TopicStats]
    workers: int | None
    """The number of live workers, or None if it is unknown; see ``problem``."""
    problem: str
    now_ms: int
    took_ms: int = 0
    """The ms of CPU that reading it took, if it is shared."""


@dataclass(frozen=True, slots=True)
class TopicCounters:
    """Counters of messages that have passed through topics until an instant; two of them give rates."""

    RATES: ClassVar[tuple[str, ...]] = ("sent", "done", "failed")
    """sent: taken from senders, including merged ones. done: committed and acknowledged. failed: failed or
    timed out."""

    now_ms: int
    counted: dict[str, dict[str, int]]
    """Topic → name in ``RATES`` → total number."""
    problems: tuple[str, ...] = ()
    """Slots whose counters cannot be read, and the reasons; they are not in the sums."""

    def since(self, before: TopicCounters) -> dict[str, dict[str, float]]:
        """Return topic → name → number per second since the earlier reading."""
        seconds = max(self.now_ms - before.now_ms, 1) / 1000
        return {
            topic: {
                # The counters begin again if a server loses its data.
                name: max(0, count - before.counted[topic][name]) / seconds
                for name, count in now.items()
            }
            for topic, now in self.counted.items()
            if topic in before.counted
        }


NOTHING = Counts(0, 0, 0, 0, 0, 0, None)


def workers(context: OperationContext) -> list[WorkerStats]:
    """Return all live workers, and how many slots of which topics each has."""
    context.actor.require(Permission.VIEW)
    all_stats = read_workers(context.broker)
    if not context.hides_topics:
        return all_stats
    known = context.topics()
    return [seen for one in all_stats if (seen := one.of_topics(known)) is not None]


def read_workers(broker: Broker) -> list[WorkerStats]:
    """Return all live workers, by host and start. Raises ``ServerTrouble``."""
    live_workers = worker_list(broker, broker.run(roster_call(broker)))
    if live_workers.problem:
        raise ServerUnavailable(live_workers.problem)
    return workers_of(live_workers)


def workers_of(live_workers: WorkerList) -> list[WorkerStats]:
    """Return the workers of a list, by host and start, with the number of slots that each has."""
    owned: dict[str, dict[str, int]] = {}
    for name, spans in live_workers.spans.items():
        for one in spans:
            topics = owned.setdefault(one.worker, {})
            topics[name] = topics.get(name, 0) + one.stop - one.start
    # Most workers publish the same topics, which are parsed once.
    all_topics = {id(member.worker.topics): member.worker.topics for member in live_workers.members}
    shared = {
        key: tuple(topic.name for topic in topics if not topic.serial) for key, topics in all_topics.items()
    }
    stats = [
        WorkerStats(member, owned.get(member.worker.id, {}), shared[id(member.worker.topics)])
        for member in live_workers.members
    ]
    return sorted(stats, key=lambda one: (one.member.worker.host, one.member.worker.started))


def serving(broker: Broker, topic: str) -> list[str]:
    """Return the live workers that serve ``topic``, as text. Raises ``ServerTrouble``."""
    workers = [one.member.worker for one in read_workers(broker)]
    return [f"process {one.pid} on {one.host}" for one in workers if topic in one.capacity.topics]


_rosters: WeakKeyDictionary[Broker, Roster] = WeakKeyDictionary()
"""The last roster of each broker, so that Redis need not send again what has not changed."""


def roster_call(broker: Broker) -> Call[Roster]:
    """Return the call whose answer ``worker_list`` takes."""
    known = _rosters.get(broker)
    return membership.roster(known) if known else membership.roster()


def worker_list(broker: Broker, roster: Roster | RmqError) -> WorkerList:
    """Return the live workers: from ZooKeeper if it is the coordinator, otherwise from the roster.

    While ZooKeeper is unavailable, or the roster cannot be read, the data in Redis can still be shown.
    """
    if isinstance(roster, ServerTrouble):
        raise roster
    if isinstance(roster, RmqError):
        return _worker_list_in_zookeeper() or WorkerList(problem=str(roster))
    _rosters[broker] = roster
    return _worker_list_in_zookeeper() or WorkerList(members_of_roster(roster), plan_of_roster(roster))


def _worker_list_in_zookeeper() -> WorkerList | None:
    """Return the live workers if ZooKeeper is the coordinator, or None if it is not."""
    try:
        members = coordinators.survey_zookeeper()
    except ServerTrouble as error:
        # Redis can be read without ZooKeeper, so a page shows everything but the workers.
        return WorkerList(problem=str(error))
    return None if members is None else WorkerList(members.members, members.plan)


def slots(context: OperationContext, name: str, first: int = 0, limit: int = 1_000) -> SlotsStats:
    """Return up to ``limit`` slots from ``first``: the contents of each, and its owner."""
    topic, first = context.permitted(name, Permission.VIEW), max(0, first)
    return read_slots(
        context.broker, topic, range(first, min(topic.slots, first + max(1, min(limit, 5_000))))
    )


def read_slots(broker: Broker, topic: Topic, wanted: Sequence[int]) -> SlotsStats:
    """Return the figures of some slots, with their owners. Raises ``ServerTrouble``."""
    pipeline = broker.pipeline()
    asked = pipeline.add(roster_call(broker))
    counted = [pipeline.add(inspect.count(topic, slot)) for slot in wanted]
    pipeline.execute()
    roster = asked.result()
    live_workers, rows = worker_list(broker, roster), []
    for slot, answer in zip(wanted, (each.result() for each in counted), strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        counts, problem = (NOTHING, str(answer)) if isinstance(answer, RmqError) else (answer, "")
        span = live_workers.span_of(topic, slot)
        worker, since_ms = ("", None) if span is None else (span.worker, span.since * 1000)
        rows.append(SlotStats(slot, counts, worker, since_ms, problem))
    return SlotsStats(topic, rows, server_now_ms(broker, roster), live_workers.problem)


def server_now_ms(broker: Broker, roster: Roster | RmqError) -> int:
    """Return the server's ms. The answer with the roster has them; if it is an error, they take a request of their own."""
    return broker.now_ms() if isinstance(roster, RmqError) else roster.now_ms


T = TypeVar("T")

LIVE_SLOTS = 4_096
"""The number of slots that an overview reads; of topics with more, an evenly spread part."""

PARTIAL_SLOTS = 256
"""The number of slots of a topic that are read if all would be too many."""

SLOTS_AT_ONCE = 256
"""The number of slots of a topic of which one script sums the counters."""

EMPTY_AT_ONCE = 64
"""The number of slots of which one command says whether any holds messages. If one does, a script looks at each of them."""

COUNTED_AT_ONCE = 16
"""The number of slots that one script counts in a survey. That takes a few ms if much is in flight, and usually far less."""

_held: WeakKeyDictionary[Broker, dict[str, Sequence[int]]] = WeakKeyDictionary()
"""Topic -> the slots that held messages at the last look. What is not true any more costs time only."""


def overview(context: OperationContext, names: Iterable[str] | None = None) -> list[TopicStats]:
    """Return the figures of all topics (or those named), in the order of the settings."""
    return survey(context, names).topics


def survey(context: OperationContext, names: Iterable[str] | None = None) -> Overview:
    """Return the same as ``overview``, and the number of workers."""
    context.actor.require(Permission.VIEW)
    return survey_topics(context.broker, context.present_all(names))


def topic(context: OperationContext, name: str) -> TopicStats:
    """Return the figures of one topic."""
    (stats,) = overview(context, [name])
    return stats


def survey_topics(broker: Broker, topics: Sequence[Topic]) -> Overview:
    """Return the figures of ``topics`` and the number of workers. Raises ``ServerTrouble``.

    Slots that held messages at the last look are counted at once, and one command says of many others whether any holds some
    now: the work grows with what there is, not with the number of slots.
    """
    chosen = slots_to_look_at(topics)
    held = _held.setdefault(broker, {})
    surveyed_topics = [
        _SurveyedTopic(topic, chosen[topic.name], held.get(topic.name, ())) for topic in topics
    ]
    pipeline = broker.pipeline()
    asked = pipeline.add(roster_call(broker))
    take_counts = _count_held(pipeline, surveyed_topics)
    others = [_OtherSlots(pipeline, parts) for parts in _grouped(surveyed_topics)]
    pipeline.execute()
    roster = asked.result()
    live_workers, now_ms = worker_list(broker, roster), server_now_ms(broker, roster)
    take_counts()
    for some in others:
        some.find(pipeline)
    pipeline.execute()
    for some in others:
        some.take_uncounted()
    for surveyed in surveyed_topics:
        surveyed.count_others(pipeline)
    pipeline.execute()
    sums = []
    for surveyed in surveyed_topics:
        counts = surveyed.all_counts()
        # The first six are the depths. A call of the property ``held`` for each slot would take longer.
        held[surveyed.topic.name] = [
            slot for slot, each in counts if isinstance(each, RmqError) or any(each[:6])
        ]
        sums.append(_summed(surveyed, counts, live_workers, now_ms))
    return Overview(
        sums, None if live_workers.problem else len(live_workers.members), live_workers.problem, now_ms
    )


def slots_to_look_at(topics: Iterable[Topic]) -> dict[str, Sequence[int]]:
    """Choose the slots to read: all if there are few, the smallest topics first."""
    chosen: dict[str, Sequence[int]] = {}
    left = 2 * LIVE_SLOTS
    for topic in sorted(topics, key=lambda one: one.slots):
        if topic.slots <= min(left, LIVE_SLOTS):
            left -= topic.slots
            chosen[topic.name] = range(topic.slots)
        else:
            chosen[topic.name] = range(0, topic.slots, max(1, topic.slots // PARTIAL_SLOTS))
    return chosen


class _SurveyedTopic:
    """One topic of a survey, whose slots are read in up to three round trips."""

    __slots__ = ("_counted", "counts", "others", "paused_others", "slots", "topic", "uncounted")

    def __init__(self, topic: Topic, slots: Sequence[int], held: Sequence[int]) -> None:
        self.topic = topic
        self.slots = slots
        self.counts: dict[int, Counts | None] = {slot: None for slot in held if slot in slots}
        """What the slots hold that held messages at the last look. None if they have to be counted one by one."""
        self.others = [slot for slot in slots if slot not in self.counts] if self.counts else slots
        self.paused_others = 0
        """How many of the other slots are paused."""
        self.uncounted: Collection[int] = ()
        """The other slots that hold messages now, or about which something cannot be read: the count says why."""
        self._counted: dict[int, Answer[Counts]] = {}

    def count_others(self, pipeline: BrokerPipeline) -> None:
        """Count one by one the slots that are not counted yet."""
        for slot in {*self.uncounted, *(slot for slot, counts in self.counts.items() if counts is None)}:
            self._counted[slot] = pipeline.add(inspect.count(self.topic, slot))

    def all_counts(self) -> list[tuple[int, Counts | RmqError]]:
        """Return what the slots hold that were counted, in order."""
        counts_of = [(slot, counts) for slot, counts in self.counts.items() if counts is not None]
        return sorted([*counts_of, *((slot, answer.result()) for slot, answer in self._counted.items())])

    def paused(self, counts: Iterable[tuple[int, Counts | RmqError]]) -> int:
        """Return how many slots are paused. The ``counts`` say it of the slots that were counted at once."""
        return self.paused_others + sum(
            slot in self.counts and isinstance(each, Counts) and each.paused for slot, each in counts
        )


def _count_held(pipeline: BrokerPipeline, surveyed_topics: Iterable[_SurveyedTopic]) -> Callable[[], None]:
    """Count the slots that held messages at the last look, those of several topics with one script.

    The function that is returned takes the answers. It raises ``ServerTrouble``.
    """
    alike = defaultdict[tuple[TopicType, int], list[tuple[_SurveyedTopic, int]]](list)
    for surveyed in surveyed_topics:
        # These are the facts that the script takes from the topic.
        alike[surveyed.topic.type, surveyed.topic.timeout] += [(surveyed, slot) for slot in surveyed.counts]
    asked = []
    for slots in alike.values():
        for at in range(0, len(slots), COUNTED_AT_ONCE):
            some = slots[at : at + COUNTED_AT_ONCE]
            call = inspect.count_slots([AtSlots(surveyed.topic, (slot,)) for surveyed, slot in some])
            asked.append((some, pipeline.add(call)))

    def take() -> None:
        for some, answer in asked:
            # After an error these slots have no counts. They are then counted one by one, which finds the bad one.
            for (surveyed, slot), counts in zip(some, _known(answer) or (), strict=False):
                surveyed.counts[slot] = counts

    return take


_Parts = list[tuple[_SurveyedTopic, Sequence[int]]]


def _grouped(surveyed_topics: Iterable[_SurveyedTopic]) -> list[_Parts]:
    """Return the other slots of all topics, in groups that are asked about together."""
    groups, room = list[_Parts](), 0
    for surveyed in surveyed_topics:
        for slots in _parts(surveyed.others, EMPTY_AT_ONCE):
            if len(slots) > room:
                groups.append([])
                room = EMPTY_AT_ONCE
            groups[-1].append((surveyed, slots))
            room -= len(slots)
    return groups


class _OtherSlots:
    """Slots of several topics that held no messages at the last look."""

    __slots__ = ("_any", "_occupied", "_parts", "_pauses")

    def __init__(self, pipeline: BrokerPipeline, parts: _Parts) -> None:
        """Ask whether any of them has messages now, and which are paused."""
        self._parts = parts
        self._any = pipeline.add(inspect.any_messages(self._places()))
        self._pauses = pipeline.add(inspect.find_paused(self._places()))
        self._occupied: Answer[list[bool | None]] | None = None

    def find(self, pipeline: BrokerPipeline) -> None:
        """Ask which of them hold messages, if any does. Raises ``ServerTrouble``."""
        if _known(self._any) is not False:
            self._occupied = pipeline.add(inspect.find_occupied(self._places()))

    def take_uncounted(self) -> None:
        """Give the topics the slots that are paused, and those that have to be counted. Raises ``ServerTrouble``."""
        pauses = _known(self._pauses)
        if pauses is not None and not any(pauses) and self._occupied is None:
            return
        slots = [(surveyed, slot) for surveyed, slots in self._parts for slot in slots]
        uncounted = {*range(len(slots))} if pauses is None else {*pauses.unread}
        for place in pauses.paused if pauses else ():
            slots[place][0].paused_others += 1
        if self._occupied:
            occupied = _known(self._occupied) or [None] * len(slots)
            uncounted.update(place for place, holds in enumerate(occupied) if holds is not False)
        for surveyed, slot in (slots[place] for place in uncounted):
            surveyed.uncounted = [*surveyed.uncounted, slot]

    def _places(self) -> list[AtSlots]:
        return [AtSlots(surveyed.topic, slots) for surveyed, slots in self._parts]


def _known(answer: Answer[T]) -> T | None:
    """Return what was answered, or None after an error about some slot. Raises ``ServerTrouble``: it concerns all topics."""
    reply = answer.result()
    if isinstance(reply, ServerTrouble):
        raise reply
    return None if isinstance(reply, RmqError) else reply


def _parts(slots: Sequence[int], size: int) -> list[Sequence[int]]:
    return [slots[at : at + size] for at in range(0, len(slots), size)]


def _summed(
    surveyed: _SurveyedTopic,
    counts: Sequence[tuple[int, Counts | RmqError]],
    live_workers: WorkerList,
    now_ms: int,
) -> TopicStats:
    topic, (counted, problems) = surveyed.topic, _counted(counts)
    total = _total(counted)
    serving = live_workers.serving(topic)
    unowned = live_workers.unowned(topic, counts) if total.due else []
    return TopicStats(
        topic,
        store=total.store,
        due=total.due,
        prepare=total.prepare,
        retry=total.retry,
        dead=total.dead,
        claimed=total.claimed,
        unleased=total.unleased,
        oldest_due_ms=total.oldest_due_ms,
        age_ms=_since(total.oldest_due_ms, now_ms),
        undrained_since_ms=total.undrained_since_ms,
        undrained_ms=_since(total.undrained_since_ms, now_ms),
        running_since_ms=total.running_since_ms,
        running_ms=_since(total.running_since_ms, now_ms),
        paused_slots=surveyed.paused(counts),
        consumers=serving.workers,
        threads=serving.threads,
        owned_slots=live_workers.owned(topic),
        unowned_due=sum(one.due for one in unowned),
        unowned_ms=_since(_earliest(one.oldest_due_ms or one.undrained_since_ms for one in unowned), now_ms),
        workers_problem=live_workers.problem,
        definition_problem=connections.unreadable(topic),
        looked_at=len(surveyed.slots) - len(problems),
        now_ms=now_ms,
        problems=tuple(problems),
    )


def _total(counted: Sequence[Counts]) -> Counts:
    """Return what slots hold together."""
    if len(counted) < 2:  # Most topics have few messages.
        return counted[0] if counted else NOTHING
    store, due, prepare, retry, dead, claimed = map(sum, zip(*(one[:6] for one in counted), strict=True))
    return Counts(
        store,
        due,
        prepare,
        retry,
        dead,
        claimed,
        _earliest(one.oldest_due_ms for one in counted),
        undrained_since_ms=_earliest(one.undrained_since_ms for one in counted),
        running_since_ms=_earliest(one.running_since_ms for one in counted),
        unleased=sum(one.unleased for one in counted),
    )


def _counted(counts: Iterable[tuple[int, Counts | RmqError]]) -> tuple[list[Counts], list[str]]:
    """Return the counts of the slots that can be read, and why the others cannot. Raises ``ServerTrouble``."""
    counted, problems = list[Counts](), []
    for slot, answer in counts:
        if isinstance(answer, Counts):
            counted.append(answer)
        # A server that does not answer concerns all topics. Any other error, such as a key of a wrong type, concerns
        # this slot.
        elif isinstance(answer, ServerTrouble):
            raise answer
        else:
            problems.append(f"slot {slot}: {answer}")
    return counted, problems


def _since(at_ms: int | None, now_ms: int) -> int | None:
    return None if at_ms is None else max(0, now_ms - at_ms)


def _earliest(instants: Iterable[int | None]) -> int | None:
    return min((at for at in instants if at is not None), default=None)


_COUNTERS = {"sent": ("sent",), "done": ("committed", "acked"), "failed": ("failed", "expired", "rejected")}


def flow(context: OperationContext, names: Iterable[str] | None = None) -> TopicCounters:
    """Return counters of topics; two calls give rates. Topics with very many slots are left out."""
    context.actor.require(Permission.VIEW)
    return read_counters(context.broker, context.present_all(names))


def read_counters(broker: Broker, topics: Sequence[Topic]) -> TopicCounters:
    """Return the counters of ``topics``; those with very many slots are left out. Raises ``ServerTrouble``."""
    chosen = slots_to_look_at(topics)
    # A rate needs the counters of all slots, so a topic that is read only in part is left out.
    small = [topic for topic in topics if len(chosen[topic.name]) == topic.slots]
    now_ms = broker.now_ms()
    calls = [
        (topic, part, history.sample(topic, part))
        for topic in small
        for part in _parts(chosen[topic.name], SLOTS_AT_ONCE)
    ]
    counted = {topic.name: dict.fromkeys(TopicCounters.RATES, 0) for topic in small}
    problems, unread = [], list[tuple[Topic, int]]()
    for (topic, part, _), answer in zip(calls, run_all(broker, [call for *_, call in calls]), strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        if isinstance(answer, RmqError):
            problems.append(f"topic {topic.name}: {answer}")
            continue
        if answer.slots < len(part):
            unread += [(topic, slot) for slot in part]
        for name, counters in _COUNTERS.items():
            counted[topic.name][name] += sum(answer.counters[counter] for counter in counters)
    # A sum does not say which of its slots it leaves out, and why.
    answers = run_all(broker, [inspect.audit_ledger(topic, slot) for topic, slot in unread])
    problems += [
        f"topic {topic.name}, slot {slot}: {answer}"
        for (topic, slot), answer in zip(unread, answers, strict=True)
        if isinstance(answer, RmqError)
    ]
    return TopicCounters(now_ms, counted, tuple(problems))
