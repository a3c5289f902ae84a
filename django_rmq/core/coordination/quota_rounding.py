"""Decides how many slots each worker gets: quotas are rounded so that everything is balanced and few slots move."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import lcm

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
    totals = [sum(threads[w] for w in crew) for crew in serving]
    unit = lcm(*totals) if totals else 1
    shares: list[dict[int, int]] = []
    fractions = [0] * len(threads)
    """For each worker: the sum of the fractional parts of its quotas, in 1/unit."""
    costs: list[dict[int, int]] = []
    """For each topic: the workers whose quota is not an integer, and the cost of rounding it up."""
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
    """Which quotas are rounded up: as many per topic as its slots require, and as many per worker as its sum requires.

    A flow from topics to workers, unit by unit. ``best`` begins with the cheapest choice of each topic by
    itself. If a worker then has too many or too few of them, units move to others along cheapest paths.
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
            # Among equals, the one that lacks most, so that little is left to correct.
            order = sorted(
                cost, key=lambda w: (cost[w], (self.load[w] + 1) * self.unit - self.fractions[w], w)
            )
            self.chosen.append(set(order[:need]))
            for w in order[:need]:
                self.load[w] += 1
        # Beyond the rounded-down sum a worker may have one more: a unit that passes through the pool.
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
