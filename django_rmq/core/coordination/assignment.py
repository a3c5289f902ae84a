"""Which worker owns which slots: one pure function of topics, workers and what was before.

Slots are held as runs, so that 2**20 of them cost what a few thousand runs cost. Nothing here knows how
workers find each other or how an assignment is stored. Stdlib only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import NamedTuple


class TopicSlots(NamedTuple):
    """A topic as far as it is assigned."""

    name: str
    slots: int
    serial: bool = True
    """False: all workers that serve the topic share all of its slots; none is assigned."""


class Capacity(NamedTuple):
    """A worker as far as slots are assigned to it."""

    worker: str
    threads: int
    topics: frozenset[str]


class Run(NamedTuple):
    """Slots ``start`` to ``stop - 1`` of a topic, owned by ``worker``."""

    start: int
    stop: int
    worker: str


Assignment = dict[str, tuple[Run, ...]]
"""Serial topic -> its runs in order: together all of its slots, neighbours with different owners."""


def assign(
    topics: Iterable[TopicSlots],
    workers: Iterable[Capacity],
    previous: Mapping[str, Sequence[Run]],
) -> Assignment:
    """Return who owns what now. Topics that nobody serves, and those that are not serial, are left out.

    ``previous`` may be anything: runs of workers that are gone, beyond the slots, or one over another
    (then the one that begins first counts). The order of the arguments' items changes nothing.

    **Balance.** The quota of worker w in topic t is ``slots(t) * threads(w) / sum of threads that serve t``.
    Of every topic it serves a worker owns its quota rounded down or up, and over all topics the sum of
    its quotas rounded down or up. Both hold always: a matrix of quotas can be rounded so that every entry
    and every row and column sum is a neighbour of its exact value, because such a rounding is a flow with
    integral bounds.

    **Movement.** A slot moves if its owner is not who owned it before. No assignment that is balanced as
    above moves fewer slots. *Proof.* Let n(w, t) be what an assignment gives a worker and h(w, t) what the
    worker held of it before. At least ``max(0, n - h)`` slots of t move to w, in sum ``M(n)``. Laying out n
    (``_lay_out``) moves exactly M(n): every worker keeps ``min(n, h)`` of its own, and only what is over or
    ownerless goes to those that lack. It remains to choose the balanced n of the smallest M. With f the
    quota rounded down, n is f or f + 1, and M(n) is a constant plus, for each cell rounded up, 1 where
    ``h <= f`` and 0 where ``h > f``. So the rounding of the smallest cost is wanted: a flow of unit arcs with these
    costs, which ``_round`` finds by cheapest paths. It starts without negative cycles and keeps it so: the
    flow is of minimal cost. ∎ In particular nothing moves where the previous assignment is balanced (its M is 0,
    and no other n has an M of 0). With one topic and equal threads, a leave moves the leaver's slots only,
    and a join only what the joiner gets.

    Raises ``ValueError`` for a worker or topic named twice, and for fewer than one thread or slot.
    """
    crew = sorted(workers)
    wanted = sorted(topics)
    _check(wanted, crew)
    serial = [topic for topic in wanted if topic.serial]
    serving = {topic.name: [i for i, one in enumerate(crew) if topic.name in one.topics] for topic in serial}
    served = [topic for topic in serial if serving[topic.name]]
    index = {one.worker: i for i, one in enumerate(crew)}

    kept = [
        _still_valid(topic, previous.get(topic.name, ()), index, set(serving[topic.name])) for topic in served
    ]
    held = [_count(runs) for runs in kept]
    shares = _round(
        [topic.slots for topic in served],
        [one.threads for one in crew],
        [serving[topic.name] for topic in served],
        held,
    )
    return {
        topic.name: tuple(
            Run(start, stop, crew[owner].worker)
            for start, stop, owner in _lay_out(topic.slots, runs, had, share)
        )
        for topic, runs, had, share in zip(served, kept, held, shares, strict=True)
    }


def moved(previous: Sequence[Run], now: Sequence[Run]) -> int:
    """Return how many slots of a topic have another owner ``now``, or had none before."""
    same = sum(stop - start for start, stop, owner, before in _overlay(previous, now) if owner == before)
    return sum(run.stop - run.start for run in now) - same


def _overlay(previous: Sequence[Run], now: Sequence[Run]) -> Iterable[tuple[int, int, str, str]]:
    """Yield (start, stop, owner now, owner before) where both say something."""
    i = 0
    for run in now:
        while i < len(previous) and previous[i].stop <= run.start:
            i += 1
        j = i
        while j < len(previous) and previous[j].start < run.stop:
            before = previous[j]
            yield max(run.start, before.start), min(run.stop, before.stop), run.worker, before.worker
            j += 1


def _check(topics: Sequence[TopicSlots], crew: Sequence[Capacity]) -> None:
    for names in (Counter(topic.name for topic in topics), Counter(one.worker for one in crew)):
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"{name} is there {times} times")
    for topic in topics:
        if topic.slots < 1:
            raise ValueError(f"topic {topic.name} has {topic.slots} slots")
    for one in crew:
        if one.threads < 1:
            raise ValueError(f"worker {one.worker} has {one.threads} threads")


# A run of a worker's index instead of its id, while counting goes on.
_Piece = tuple[int, int, int]


def _still_valid(
    topic: TopicSlots, runs: Sequence[Run], index: Mapping[str, int], serving: set[int]
) -> list[_Piece]:
    """Return what of the previous runs can stay where it is, in order and disjoint."""
    pieces: list[_Piece] = []
    at = 0
    for start, stop, worker in sorted(runs):
        start, stop, owner = max(start, at), min(stop, topic.slots), index.get(worker, -1)
        if start < stop and owner in serving:
            pieces.append((start, stop, owner))
            at = stop
    return pieces


def _count(pieces: Iterable[_Piece]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start, stop, owner in pieces:
        counts[owner] += stop - start
    return counts


# --- how many slots each worker gets --------------------------------------------------------------


def _round(
    slots: Sequence[int],
    threads: Sequence[int],
    serving: Sequence[Sequence[int]],
    held: Sequence[Counter[int]],
) -> list[dict[int, int]]:
    """Return for each topic the slots of each worker: balanced, and of these the one that moves least."""
    totals = [sum(threads[w] for w in crew) for crew in serving]
    unit = lcm(*totals) if totals else 1
    shares: list[dict[int, int]] = []
    fractions = [0] * len(threads)
    """Of each worker: the sum of what its quotas have beyond their integers, in 1/unit."""
    costs: list[dict[int, int]] = []
    """Of each topic: the workers whose quota is no integer, and what rounding it up costs."""
    for count, total, crew, had in zip(slots, totals, serving, held, strict=True):
        share, cost = {}, {}
        for w in crew:
            share[w], rest = divmod(count * threads[w], total)
            if rest:
                fractions[w] += rest * (unit // total)
                cost[w] = int(had[w] <= share[w])
        shares.append(share)
        costs.append(cost)

    for share, chosen in zip(shares, _Rounding(slots, shares, costs, fractions, unit).best(), strict=True):
        for w in chosen:
            share[w] += 1
    return shares


class _Rounding:
    """Which quotas are rounded up: as many of a topic as its slots ask for, and of a worker as its sum asks for.

    A flow from topics to workers, unit by unit. ``best`` begins with the cheapest choice of each topic by
    itself; where a worker has too many or too few of them then, units go to others along cheapest paths.
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
            # Among equals the one that lacks most: then little is left to be put right.
            order = sorted(
                cost, key=lambda w: (cost[w], (self.load[w] + 1) * self.unit - self.fractions[w], w)
            )
            self.chosen.append(set(order[:need]))
            for w in order[:need]:
                self.load[w] += 1
        # Beyond the rounded-down sum a worker may have one more: units that pass through the pool.
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

    def _cheapest_paths(self, excess: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """Return cheapest paths from those with too much to those with too little, as steps (from, topic, to).

        They come from different trees of one search, so they share no step and can all be taken.
        """
        workers, topics = len(self.load), len(self.costs)
        far = 1 << 40
        distance = [0 if over > 0 else far for over in excess]
        at_topic = [far] * topics
        came: list[tuple[int, int] | None] = [None] * (workers + 1)
        """Of each node: the node before it and the topic in which the unit changes hands."""
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

        paths: dict[int, list[tuple[int, int, int]]] = {}
        short = sorted((distance[i], i) for i, over in enumerate(excess) if over < 0 and distance[i] < far)
        for _, node in short:
            path: list[tuple[int, int, int]] = []
            step = came[node]
            while step is not None:
                path.append((step[0], step[1], node))
                node = step[0]
                step = came[node]
            paths.setdefault(node, path[::-1])
        assert paths, "quotas can always be rounded"
        return list(paths.values())


# --- which slots these are ------------------------------------------------------------------------


def _lay_out(
    slots: int, kept: Sequence[_Piece], held: Counter[int], share: Mapping[int, int]
) -> list[_Piece]:
    """Return runs that give every worker its share. Each keeps ``min(held, share)`` slots of its own.

    Who gives, gives its smallest runs first, and who takes, takes at the edge of its own where it can: so
    the comings and goings of workers do not crumble what was whole.
    """
    staying = _shrink(kept, {w: held[w] - share[w] for w in held if held[w] > share[w]})
    lacking = {w: count - held[w] for w, count in share.items() if count > held[w]}
    free = _gaps(slots, staying)
    grown: list[_Piece] = []
    left: list[tuple[int, int]] = []
    before = {stop: owner for _, stop, owner in staying}
    after = {start: owner for start, _, owner in staying}
    for start, stop in free:
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
            left.append((start, stop))
    takers = deque((w, lack) for w, lack in sorted(lacking.items()) if lack)
    for start, stop in left:
        while start < stop:
            w, lack = takers.popleft()
            take = min(lack, stop - start)
            grown.append((start, start + take, w))
            start += take
            if lack > take:
                takers.appendleft((w, lack - take))
    return _joined(sorted([*staying, *grown]))


def _shrink(kept: Sequence[_Piece], surplus: dict[int, int]) -> list[_Piece]:
    """Take from each worker what it has too much: its smallest runs, then the end of the next one."""
    staying: list[_Piece] = []
    for start, stop, owner in sorted(kept, key=lambda piece: (piece[1] - piece[0], piece[0])):
        give = min(surplus.get(owner, 0), stop - start)
        if give:
            surplus[owner] -= give
        if give < stop - start:
            staying.append((start, stop - give, owner))
    return sorted(staying)


def _gaps(slots: int, pieces: Iterable[_Piece]) -> list[tuple[int, int]]:
    gaps: list[tuple[int, int]] = []
    at = 0
    for start, stop, _ in pieces:
        if at < start:
            gaps.append((at, start))
        at = stop
    if at < slots:
        gaps.append((at, slots))
    return gaps


def _joined(pieces: Iterable[_Piece]) -> list[_Piece]:
    runs: list[_Piece] = []
    for start, stop, owner in pieces:
        if runs and runs[-1][1] == start and runs[-1][2] == owner:
            runs[-1] = (runs[-1][0], stop, owner)
        else:
            runs.append((start, stop, owner))
    return runs


__all__ = ["Assignment", "Capacity", "Run", "TopicSlots", "assign", "moved"]
