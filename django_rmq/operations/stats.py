"""Figures of topics, slots and workers, and the reads of workers and single slots.

An operation gets the actor's context and checks the permission; what has a broker instead reads for it, and for other
operations. ``survey`` reads the figures of topics.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from django_rmq.connections import coordinators
from django_rmq.core.commands import inspect, membership
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.script_call import Call
from django_rmq.core.coordination import Member, Worker
from django_rmq.core.coordination.stored_plan import (
    AssignmentPlan,
    Span,
    members_of_roster,
    plan_of_roster,
)
from django_rmq.core.model.replies import Counts, Roster
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable
from django_rmq.operations.authorization import Permission
from django_rmq.operations.context import OperationContext


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
        """Return the assigned slots of a topic among which ``slot`` is, or None if it is not assigned."""
        spans = self.spans.get(topic.name, ())
        at = bisect_right(spans, slot, key=lambda span: span.stop)
        return spans[at] if at < len(spans) and spans[at].start <= slot else None

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
        unowned = []
        for slot, counts in counted:
            if isinstance(counts, Counts) and counts.due and not counts.paused:
                span = self.span_of(topic, slot)
                if span is None or span.worker not in self._present:
                    unowned.append(counts)
        return unowned


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
    """The id of the worker to which the slot is assigned; empty if there is none, or the topic is not serial."""
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
    roster, answers, now_ms = _with_roster(broker, [inspect.count(topic, slot) for slot in wanted])
    live_workers = worker_list(broker, roster)
    rows = []
    for slot, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, ServerTrouble):
            raise answer
        row = SlotStats(slot, NOTHING if isinstance(answer, RmqError) else answer)
        if isinstance(answer, RmqError):
            row = replace(row, problem=str(answer))
        span = live_workers.span_of(topic, slot)
        if span is not None:
            row = replace(row, worker=span.worker, since_ms=span.since * 1000)
        rows.append(row)
    return SlotsStats(topic, rows, now_ms)


def _with_roster(
    broker: Broker, calls: Iterable[Call[Counts]]
) -> tuple[Roster | RmqError, list[Counts | RmqError], int]:
    """Run calls and read the live workers, in one round trip; return the roster, the answers and the server's ms."""
    pipeline = broker.pipeline()
    asked = pipeline.add(roster_call(broker))
    answers = [pipeline.add(call) for call in calls]
    pipeline.execute()
    roster = asked.result()
    return roster, [answer.result() for answer in answers], server_now_ms(broker, roster)


def server_now_ms(broker: Broker, roster: Roster | RmqError) -> int:
    """Return the server's ms. The answer with the roster has them; if it is an error, they take a request of their own."""
    return broker.now_ms() if isinstance(roster, RmqError) else roster.now_ms
