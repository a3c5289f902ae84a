"""The assignment of slots to workers: one pure function of topics, workers and the previous assignment.

It says who shall own a slot; ``core.consumer.slot_acquisition`` makes that binding in Redis.

It decides in two steps. ``round_quotas`` decides how many slots each worker gets: quotas are rounded so that everything is
balanced and few slots move. ``lay_out`` decides which slots those are, so that each worker keeps as many of its own as possible.

Which slots a topic has while it is being re-slotted is decided here, too (``served_topics``). Slots are held as runs, so that
2**20 of them cost as much as a few thousand runs. This module does not know how workers find each other or how an assignment is
stored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import lcm
from typing import Any, NamedTuple, TypeVar

from django_rmq.core.model.topic import slot_counts

Owner = TypeVar("Owner")

Step = tuple[int, int, int]
"""A unit that moves from one worker to another in a topic: (from, topic, to)."""

FAR = 1 << 40
"""A distance larger than all others."""


def round_quotas(
    slots: Sequence[int],
    threads: Sequence[int],
    serving: Sequence[Sequence[int]],
    held: Sequence[Counter[int]],
) -> list[dict[int, int]]:
    """Return for each topic the slots of each worker: of all balanced results, the one that moves least."""
    totals = [sum(threads[w] for w in members) for members in serving]
    unit = lcm(*totals) if totals else 1
    shares: list[dict[int, int]] = []
    fractions = [0] * len(threads)
    """For each worker: the sum of the fractional parts of its quotas, in 1/unit."""
    costs: list[dict[int, int]] = []
    """For each topic: the workers whose quota is not an integer, and the cost of rounding it up."""
    for count, total, members, counts_held in zip(slots, totals, serving, held, strict=True):
        share, cost = {}, {}
        for w in members:
            share[w], rest = divmod(count * threads[w], total)
            if rest:
                fractions[w] += rest * (unit // total)
                cost[w] = int(counts_held[w] <= share[w])
        shares.append(share)
        costs.append(cost)

    for share, chosen in zip(shares, _Rounding(slots, shares, costs, fractions, unit).best(), strict=True):
        for w in chosen:
            share[w] += 1
    return shares


class _Rounding:
    """Decides which quotas are rounded up: as many per topic as its slots require, and per worker as its sum requires.

    It is a flow from topics to workers, unit by unit. ``best`` begins with the cheapest choice of each topic by itself. If a
    worker then has too many or too few units, units move to other workers along cheapest paths.
    """

    def __init__(
        self,
        slots: Sequence[int],
        shares: Sequence[Mapping[int, int]],
        costs: Sequence[dict[int, int]],
        fractions: Sequence[int],
        unit: int,
    ) -> None:
        self.costs = costs
        self.needs = [count - sum(share.values()) for count, share in zip(slots, shares, strict=True)]
        self.low = [fraction // unit for fraction in fractions]
        self.spare = [int(fraction % unit > 0) for fraction in fractions]
        self.fractions = fractions
        self.unit = unit
        self.chosen: list[set[int]] = []
        self.load = [0] * len(fractions)
        self.topics_of: list[list[int]] = [[] for _ in fractions]
        for t, cost in enumerate(costs):
            for w in cost:
                self.topics_of[w].append(t)

    def best(self) -> list[list[int]]:
        """Return for each topic the workers whose quota is rounded up, in order."""
        for need, cost in zip(self.needs, self.costs, strict=True):
            # Among equal costs, the worker that lacks most comes first, so that little is left to correct.
            order = sorted(
                cost, key=lambda w: (cost[w], (self.load[w] + 1) * self.unit - self.fractions[w], w)
            )
            self.chosen.append(set(order[:need]))
            for w in order[:need]:
                self.load[w] += 1
        # A worker may have one unit more than its sum rounded down. That unit passes through the pool.
        self.pool = len(self.load)
        self.pooled = [
            min(max(load - low, 0), spare)
            for load, low, spare in zip(self.load, self.low, self.spare, strict=True)
        ]
        excess = [
            load - low - pooled for load, low, pooled in zip(self.load, self.low, self.pooled, strict=True)
        ]
        excess.append(sum(self.pooled) - (sum(self.needs) - sum(self.low)))
        while any(over > 0 for over in excess):
            for path in self._cheapest_paths(excess):
                excess[path[0][0]] -= 1
                excess[path[-1][2]] += 1
                for source, via, target in path:
                    if source == self.pool:
                        self.pooled[target] -= 1
                    elif target == self.pool:
                        self.pooled[source] += 1
                    else:
                        self.chosen[via].remove(source)
                        self.chosen[via].add(target)
        return [sorted(chosen) for chosen in self.chosen]

    def _cheapest_paths(self, excess: Sequence[int]) -> list[list[Step]]:
        """Return cheapest paths from workers with too many to workers with too few, as steps (from, topic, to).

        They come from different trees of one search, so they share no step and can all be taken.
        """
        workers, topics = len(self.load), len(self.costs)
        distance = [0 if over > 0 else FAR for over in excess]
        at_topic = [FAR] * topics
        came: list[tuple[int, int] | None] = [None] * (workers + 1)
        """For each node: the previous node, and the topic in which the unit changes hands."""
        queue = deque(i for i, over in enumerate(excess) if over > 0)
        queued = [over > 0 for over in excess]

        def reach(node: int, cost: int, source: int, via: int) -> None:
            if cost < distance[node]:
                distance[node] = cost
                came[node] = (source, via)
                if not queued[node]:
                    queued[node] = True
                    queue.append(node)

        while queue:
            node = queue.popleft()
            queued[node] = False
            here = distance[node]
            if node == self.pool:
                for w in range(workers):
                    if self.pooled[w]:
                        reach(w, here, node, -1)
                continue
            if self.pooled[node] < self.spare[node]:
                reach(self.pool, here, node, -1)
            for t in self.topics_of[node]:
                chosen, cost = self.chosen[t], self.costs[t]
                if node in chosen and here - cost[node] < at_topic[t]:
                    at_topic[t] = here - cost[node]
                    for w in cost:
                        if w not in chosen:
                            reach(w, at_topic[t] + cost[w], node, t)
        return _paths(came, distance, excess)


def _paths(
    came: Sequence[tuple[int, int] | None], distance: Sequence[int], excess: Sequence[int]
) -> list[list[Step]]:
    """Read the paths back from workers with too few, the cheapest of each tree."""
    paths: dict[int, list[Step]] = {}
    short = sorted((distance[i], i) for i, over in enumerate(excess) if over < 0 and distance[i] < FAR)
    for _, node in short:
        path: list[Step] = []
        step = came[node]
        while step is not None:
            path.append((step[0], step[1], node))
            node = step[0]
            step = came[node]
        paths.setdefault(node, path[::-1])
    assert paths, "quotas can always be rounded"
    return list(paths.values())


Piece = tuple[int, int, int]
"""Start, stop, and the index of the owner: a run during the calculation."""


def lay_out(slots: int, kept: Sequence[Piece], held: Counter[int], share: Mapping[int, int]) -> list[Piece]:
    """Return runs that give every worker its share. Each keeps ``min(held, share)`` slots of its own.

    A worker with too many slots gives its smallest runs first, and a worker with too few takes slots next to
    its own if it can. So repeated joins and leaves do not fragment the runs.
    """
    staying = _shrink(kept, {w: held[w] - share[w] for w in held if held[w] > share[w]})
    lacking = {w: count - held[w] for w, count in share.items() if count > held[w]}
    grown: list[Piece] = []
    unassigned: list[tuple[int, int]] = []
    before = {stop: owner for _, stop, owner in staying}
    after = {start: owner for start, _, owner in staying}
    for start, stop in _gaps(slots, staying):
        owner = before.get(start, -1)
        take = min(lacking.get(owner, 0), stop - start)
        if take:
            lacking[owner] -= take
            grown.append((start, start + take, owner))
            start += take
        owner = after.get(stop, -1)
        take = min(lacking.get(owner, 0), stop - start)
        if take:
            lacking[owner] -= take
            grown.append((stop - take, stop, owner))
            stop -= take
        if start < stop:
            unassigned.append((start, stop))
    takers = deque((w, lack) for w, lack in sorted(lacking.items()) if lack)
    for start, stop in unassigned:
        while start < stop:
            w, lack = takers.popleft()
            take = min(lack, stop - start)
            grown.append((start, start + take, w))
            start += take
            if lack > take:
                takers.appendleft((w, lack - take))
    return join_neighbours(sorted([*staying, *grown]))


def _shrink(pieces: Sequence[Piece], surplus: dict[int, int]) -> list[Piece]:
    """Take the surplus from each worker: its smallest runs, then the end of the next one."""
    staying: list[Piece] = []
    for start, stop, owner in sorted(pieces, key=lambda piece: (piece[1] - piece[0], piece[0])):
        give = min(surplus.get(owner, 0), stop - start)
        if give:
            surplus[owner] -= give
        if give < stop - start:
            staying.append((start, stop - give, owner))
    return sorted(staying)


def _gaps(slots: int, pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    stops, starts = [0, *(stop for _, stop, _ in pieces)], [*(start for start, _, _ in pieces), slots]
    return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]


def join_neighbours(pieces: Iterable[tuple[int, int, Owner]]) -> list[tuple[int, int, Owner]]:
    """Return pieces that are in order, with one in place of neighbours that have the same owner."""
    runs: list[tuple[int, int, Owner]] = []
    for start, stop, owner in pieces:
        if runs and runs[-1][1:] == (start, owner):
            start = runs.pop()[0]
        runs.append((start, stop, owner))
    return runs


class TopicSlots(NamedTuple):
    """The properties of a topic that matter for the assignment."""

    name: str
    slots: int
    serial: bool = True
    """Whether slots are assigned. If not, all workers that serve the topic share all of its slots."""


def served_topics(
    served: Iterable[Iterable[TopicSlots]], registered: Mapping[str, Mapping[str, object]]
) -> list[TopicSlots]:
    """Return the topics that any worker serves, as registered, otherwise as the first worker has them.

    ``served``: the topics of each worker.
    """
    slots_of: dict[str, TopicSlots] = {}
    for topic in chain.from_iterable(served):
        slots_of.setdefault(topic.name, topic)
    for name, topic in slots_of.items():
        definition = registered.get(name, {})
        # While a topic is being re-slotted, messages are in old and in new slots, so all of them are assigned.
        counts: tuple[Any, ...] = slot_counts({"slots": topic.slots, **definition})
        if all(isinstance(slots, int) and slots > 0 for slots in counts):
            slots_of[name] = TopicSlots(name, max(counts), bool(definition.get("serial", topic.serial)))
    return list(slots_of.values())


class WorkerCapacity(NamedTuple):
    """The properties of a worker that matter for the assignment."""

    worker: str
    threads: int
    topics: frozenset[str]
    full: frozenset[str] = frozenset()
    """The topics for which it has had no free thread for long, so that other workers should own the slots."""


class SlotRun(NamedTuple):
    """Slots ``start`` to ``stop - 1`` of a topic, owned by ``worker``."""

    start: int
    stop: int
    worker: str


Assignment = dict[str, tuple[SlotRun, ...]]
"""Serial topic -> its runs in order. Together they cover all of its slots, and neighbours have different owners."""


def assign(
    topics: Iterable[TopicSlots], workers: Iterable[WorkerCapacity], previous: Mapping[str, Sequence[SlotRun]]
) -> Assignment:
    """Return the new assignment. Topics that no worker serves, and those that are not serial, are left out.

    ``previous`` may be anything: runs of workers that are gone, beyond the slots, or overlapping (then the
    one that begins first counts). The order of the arguments' items does not matter.

    A topic goes to the workers that are not full for it; if all of them are, to all that serve it.

    **Balance.** The quota of worker w in topic t is ``slots(t) * threads(w) / sum of threads that serve t``.
    Of every topic it serves a worker owns its quota rounded down or up, and over all topics the sum of its
    quotas rounded down or up. Both always hold: a matrix of quotas can be rounded so that every entry and
    every row and column sum is a neighbour of its exact value, because such a rounding is a flow with
    integral bounds.

    **Movement.** A slot moves if its new owner differs from its previous one. No assignment that is balanced
    as above moves fewer slots. *Proof.* Let n(w, t) be the number an assignment gives to a worker and h(w, t)
    the number the worker held before. At least ``max(0, n - h)`` slots of t move to w, in sum ``M(n)``.
    Laying out n (``lay_out``) moves exactly M(n): every worker keeps ``min(n, h)`` of its own, and only
    surplus or ownerless slots go to the workers that lack some. It remains to choose the balanced n with the
    smallest M. With f the quota rounded down, n is f or f + 1, and M(n) is a constant plus, for each cell
    rounded up, 1 where ``h <= f`` and 0 where ``h > f``. So the cheapest rounding is wanted: a flow of unit
    arcs with these costs, which ``round_quotas`` finds by cheapest paths. It starts without negative cycles
    and creates none, so the flow has minimal cost. ∎ In particular nothing moves if the previous assignment
    is balanced (its M is 0, and no other n has an M of 0). With one topic and equal threads, a leave moves
    only the leaver's slots, and a join only the slots that the joiner gets.

    Raises ``ValueError`` for a worker or topic named twice, and for fewer than one thread or slot.
    """
    capacities = sorted(workers)
    wanted = sorted(topics)
    _check(wanted, capacities)
    serial = [topic for topic in wanted if topic.serial]
    serving = {topic.name: _serving(topic.name, capacities) for topic in serial}
    served = [topic for topic in serial if serving[topic.name]]
    index = {one.worker: i for i, one in enumerate(capacities)}

    kept = [
        _still_valid(topic, previous.get(topic.name, ()), index, set(serving[topic.name])) for topic in served
    ]
    held_counts = [_count(runs) for runs in kept]
    shares = round_quotas(
        [topic.slots for topic in served],
        [one.threads for one in capacities],
        [serving[topic.name] for topic in served],
        held_counts,
    )
    return {
        topic.name: tuple(
            SlotRun(start, stop, capacities[owner].worker)
            for start, stop, owner in lay_out(topic.slots, runs, count_held, share)
        )
        for topic, runs, count_held, share in zip(served, kept, held_counts, shares, strict=True)
    }


def _serving(topic: str, capacities: Sequence[WorkerCapacity]) -> list[int]:
    """Return the indexes of the workers that should own slots of a topic."""
    serving = [i for i, one in enumerate(capacities) if topic in one.topics]
    return [i for i in serving if topic not in capacities[i].full] or serving


def _check(topics: Sequence[TopicSlots], capacities: Sequence[WorkerCapacity]) -> None:
    for names in (Counter(topic.name for topic in topics), Counter(one.worker for one in capacities)):
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"{name} is listed {times} times")
    for topic in topics:
        if topic.slots < 1:
            raise ValueError(f"topic {topic.name} has {topic.slots} slots")
    for one in capacities:
        if one.threads < 1:
            raise ValueError(f"worker {one.worker} has {one.threads} threads")


def _still_valid(
    topic: TopicSlots, runs: Sequence[SlotRun], index: Mapping[str, int], serving: set[int]
) -> list[Piece]:
    """Return the parts of the previous runs that can stay, in order and disjoint."""
    pieces: list[Piece] = []
    at = 0
    for start, stop, worker in sorted(runs):
        start, stop, owner = max(start, at), min(stop, topic.slots), index.get(worker, -1)
        if start < stop and owner in serving:
            pieces.append((start, stop, owner))
            at = stop
    return pieces


def _count(pieces: Iterable[Piece]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start, stop, owner in pieces:
        counts[owner] += stop - start
    return counts
