"""The live workers, as known to Redis or ZooKeeper, and their assignments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from django_rmq import connections
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.commands.registry import roster
from django_rmq.core.coordination import Holding, Member, Worker
from django_rmq.core.coordination.redis_coordinator import describe_roster, members_of_roster
from django_rmq.core.model.replies import Roster
from django_rmq.core.model.topic import Topic
from django_rmq.exceptions import RmqError, ServerTrouble, ServerUnavailable


@dataclass(slots=True)
class TopicWorkers:
    """The live workers of one topic."""

    workers: int = 0
    threads: int = 0
    owned_slots: list[Holding] = field(default_factory=list)
    """For serial topics, by slot; includes those of workers that are gone."""


class WorkerList:
    """The live workers and the assignment, by topic."""

    def __init__(
        self, members: Sequence[Member] = (), holdings: Sequence[Holding] = (), problem: str = ""
    ) -> None:
        self.members = members
        self.holdings = holdings
        self.problem = problem
        """Why the workers are unknown. Empty: they are known."""
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
        for one in holdings:
            self._serving[one.topic].owned_slots.append(one)

    def serving(self, topic: Topic) -> TopicWorkers:
        """Return the workers that serve a topic."""
        return self._serving.get(topic.name) or TopicWorkers()

    def owned(self, topic: Topic) -> int:
        """Return how many slots of a topic live workers own."""
        return sum(
            max(0, min(one.stop, topic.slots) - one.start)
            for one in self.serving(topic).owned_slots
            if one.worker in self._present
        )


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One live worker and its assignment."""

    member: Member
    slots: dict[str, int] = field(default_factory=dict)
    """Serial topic -> the number of its slots."""
    shared: tuple[str, ...] = ()
    """Topics that all their workers share."""


def workers(broker: Broker) -> list[WorkerStats]:
    """Return all live workers, by host and start. Raises ``ServerTrouble``."""
    crew = crew_of(broker.run(roster()))
    if crew.problem:
        raise ServerUnavailable(crew.problem)
    owned: dict[str, dict[str, int]] = {}
    for one in crew.holdings:
        topics = owned.setdefault(one.worker, {})
        topics[one.topic] = topics.get(one.topic, 0) + one.stop - one.start
    found = [
        WorkerStats(
            member,
            owned.get(member.worker.id, {}),
            tuple(topic.name for topic in member.worker.topics if not topic.serial),
        )
        for member in crew.members
    ]
    return sorted(found, key=lambda one: (one.member.worker.host, one.member.worker.started))


def serving(broker: Broker, topic: str) -> list[str]:
    """Return the live workers that serve ``topic``, as text. Raises ``ServerTrouble``."""
    found = [one.member.worker for one in workers(broker)]
    return [f"process {one.pid} on {one.host}" for one in found if topic in one.capacity.topics]


def crew_of(roster: Roster | RmqError) -> WorkerList:
    """Return the live workers: from ZooKeeper if it is the coordinator, otherwise from the roster.

    While ZooKeeper is unavailable, or the roster cannot be read, the data in Redis can still be shown.
    """
    if isinstance(roster, ServerTrouble):
        raise roster
    if isinstance(roster, RmqError):
        return _crew_in_zookeeper() or WorkerList(problem=str(roster))
    return _crew_in_zookeeper() or WorkerList(members_of_roster(roster), describe_roster(roster))


def _crew_in_zookeeper() -> WorkerList | None:
    """Return the live workers if ZooKeeper is the coordinator. None: it is not."""
    try:
        found = connections.survey_zookeeper()
    except ServerTrouble as error:
        return WorkerList(problem=str(error))
    return None if found is None else WorkerList(found.members, found.holdings)


def holding_of(holdings: Sequence[Holding], slot: int) -> Holding | None:
    """Return the holding that contains ``slot``; holdings are in order and do not overlap."""
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


__all__ = ["WorkerList", "WorkerStats", "crew_of", "holding_of", "serving", "workers"]
