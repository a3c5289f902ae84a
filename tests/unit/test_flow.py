"""The algorithm behind FLOW "auto", on simulated listeners that share something of limited capacity."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_rmq.core.consumer.flow import AdaptiveConcurrency


class Backend:
    """What calls use: ``capacity`` at a time take ``seconds`` each, more take turns.

    ``noise``: the standard deviation of these seconds, as a part of them.
    """

    def __init__(self, capacity: int, seconds: float, noise: float = 0.0, seed: int = 1) -> None:
        self.capacity, self.seconds, self.noise = capacity, seconds, noise
        self.chance = random.Random(seed)
        self.now = 0.0
        self.free = [0.0] * capacity

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = sorted(self.free + [self.now] * capacity)[:capacity]

    def call(self) -> float:
        """Begin a call now; return when it ends."""
        seconds = self.seconds * (max(0.05, self.chance.gauss(1, self.noise)) if self.noise else 1)
        end = max(self.now, heapq.heappop(self.free)) + seconds
        heapq.heappush(self.free, end)
        return end


class Simulation:
    """A worker that always has something to do and begins as many calls as its flow allows."""

    def __init__(self, backend: Backend, flow: AdaptiveConcurrency) -> None:
        self.backend, self.flow = backend, flow
        self.running: list[tuple[float, float]] = []
        self.done = 0

    def run(
        self, seconds: float, seen: Callable[[int], None] = lambda limit: None, demand: int = 10_000
    ) -> None:
        until = self.backend.now + seconds
        while self.backend.now < until:
            while len(self.running) < min(self.flow.limit, demand):
                heapq.heappush(self.running, (self.backend.call(), self.backend.now))
            end, begun = heapq.heappop(self.running)
            self.backend.now = end
            self.done += 1
            self.flow.note(end - begun, 1, len(self.running) + 1, end)
            seen(self.flow.limit)


def settled(simulation: Simulation, seconds: float) -> float:
    """Return the limit that held for the median call."""
    limits: list[int] = []
    simulation.run(seconds, limits.append)
    return sorted(limits)[len(limits) // 2]


def is_near(limit: float, best: int) -> bool:
    return best * 0.75 - 0.01 <= limit <= best * 1.25 + 0.01


class Unfair(Simulation):
    """The calls that a backend has room for are any of those that wait, as with a semaphore."""

    def run(
        self, seconds: float, seen: Callable[[int], None] = lambda limit: None, demand: int = 10_000
    ) -> None:
        backend, until = self.backend, self.backend.now + seconds
        while backend.now < until:
            while len(self.running) + len(self.waiting) < min(self.flow.limit, demand):
                self.waiting.append(backend.now)
            while self.waiting and len(self.running) < backend.capacity:
                begun = self.waiting.pop(backend.chance.randrange(len(self.waiting)))
                noise = max(0.05, backend.chance.gauss(1, backend.noise)) if backend.noise else 1
                heapq.heappush(self.running, (backend.now + backend.seconds * noise, begun))
            backend.now, begun = heapq.heappop(self.running)
            in_use = len(self.running) + len(self.waiting) + 1
            self.flow.note(backend.now - begun, 1, in_use, backend.now)
            seen(self.flow.limit)

    def __init__(self, backend: Backend, flow: AdaptiveConcurrency) -> None:
        super().__init__(backend, flow)
        self.waiting: list[float] = []


@pytest.mark.parametrize("kind", [Simulation, Unfair])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seconds", [0.005, 0.5])
@pytest.mark.parametrize("capacity", [1, 3, 8, 31])
def test_it_settles_within_a_quarter_of_the_capacity(
    capacity: int, seconds: float, noise: float, kind: type[Simulation]
) -> None:
    simulation = kind(Backend(capacity, seconds, noise), AdaptiveConcurrency(64))
    simulation.run(40 * seconds + 5)
    limit = settled(simulation, 400 * seconds + 20)
    assert is_near(limit, capacity), limit


def test_without_a_bottleneck_it_takes_all_there_is() -> None:
    simulation = Simulation(Backend(1000, 0.5), AdaptiveConcurrency(16))
    simulation.run(15)
    assert simulation.flow.limit == 16


@pytest.mark.parametrize("capacity", [2, 4, 8])
def test_a_listener_that_becomes_a_hundred_times_slower_is_measured_anew(capacity: int) -> None:
    simulation = Simulation(Backend(capacity, 0.005), AdaptiveConcurrency(16))
    simulation.run(5)
    simulation.backend.seconds = 0.5
    simulation.run(25)
    assert is_near(settled(simulation, 60), capacity)
    simulation.backend.seconds = 0.005
    simulation.run(3)
    assert is_near(settled(simulation, 5), capacity)


def test_a_bottleneck_that_narrows_and_widens_is_followed() -> None:
    simulation = Simulation(Backend(16, 0.05), AdaptiveConcurrency(64))
    simulation.run(20)
    for capacity in (4, 12, 2, 16):
        simulation.backend.resize(capacity)
        simulation.run(60)
        assert is_near(settled(simulation, 60), capacity), capacity


def test_what_it_costs_to_look_is_little() -> None:
    """Against the best fixed limit, in calls done."""
    flowing, fixed = (
        Simulation(Backend(8, 0.05), AdaptiveConcurrency(64)),
        Simulation(Backend(8, 0.05), AdaptiveConcurrency(64)),
    )
    fixed.flow.limit = 8
    fixed.flow.note = lambda *args: None  # type: ignore[method-assign]
    for simulation in (flowing, fixed):
        simulation.run(10)
        simulation.done = 0
        simulation.run(100)
    assert flowing.done >= 0.93 * fixed.done


def test_little_to_do_teaches_nothing_and_changes_nothing() -> None:
    simulation = Simulation(Backend(64, 0.01), AdaptiveConcurrency(64))
    simulation.run(5)
    assert simulation.flow.limit == 64
    before = simulation.flow.limit
    simulation.run(30, demand=3)
    assert simulation.flow.limit == before
    assert simulation.flow.base == pytest.approx(0.01, rel=0.05)


def test_what_began_under_another_limit_is_not_counted() -> None:
    flow = AdaptiveConcurrency(8)
    for at in range(4):
        flow.note(1.0, 1, 1, 10.0 + at)
    assert flow.limit == 2
    for _ in range(20):
        flow.note(30.0, 1, 2, 13.5)
    assert flow.limit == 2


@settings(max_examples=100)
@given(
    st.integers(1, 64),
    st.lists(
        st.tuples(
            st.floats(0, 1000, allow_nan=False), st.integers(-1, 500), st.integers(0, 100), st.floats(0, 5)
        ),
        max_size=300,
    ),
)
def test_whatever_it_is_told_the_limit_stays_in_its_bounds(
    most: int, notes: list[tuple[float, int, int, float]]
) -> None:
    flow, now = AdaptiveConcurrency(most), 0.0
    for seconds, messages, in_use, passed in notes:
        now += passed
        flow.note(seconds, messages, in_use, now)
        assert 1 <= flow.limit <= most
