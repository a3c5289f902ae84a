"""Calls of several threads share round trips, and each thread gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_rmq.exceptions import ServerRefused, ServerUnavailable
from django_rmq.tasks import execution
from django_rmq.tasks.execution import WriteBatching


class Trips:
    """Stands for Redis: answers a call with itself, notes what came together, and waits as long as it is told to."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.gate = threading.Semaphore(0)

    def __call__(self, broker: Any, calls: Sequence[Any]) -> list[Any]:
        self.seen.append(list(calls))
        assert self.gate.acquire(timeout=10)
        if "cut" in calls:
            raise ServerUnavailable("cut")
        if "interrupt" in calls:
            raise SystemExit
        return [ServerRefused(call) if str(call).startswith("bad") else call for call in calls]

    def run(self, call: Any) -> Any:
        """Answer a call that comes alone."""
        (answer,) = self(self, [call])
        if isinstance(answer, ServerRefused):
            raise answer
        return answer


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    found = Trips()
    monkeypatch.setattr(execution, "run_all", found)
    return found


def shared(trips: Trips) -> WriteBatching:
    return WriteBatching(lambda: trips)  # type: ignore[arg-type, return-value]


def until(condition: Any) -> None:
    for _ in range(1_000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to be")


def test_what_comes_during_a_round_trip_is_run_in_the_next_one(trips: Trips) -> None:
    calls = shared(trips)
    with ThreadPoolExecutor(8) as pool:
        first: Any = pool.submit(calls.run, "first")  # type: ignore[arg-type]
        until(lambda: trips.seen == [["first"]])
        rest = [pool.submit(calls.run, name) for name in ("a", "bad b", "c")]  # type: ignore[arg-type]
        until(lambda: len(calls._waiting) == 3)
        trips.gate.release()
        assert first.result(10) == "first"
        until(lambda: len(trips.seen) == 2)
        trips.gate.release()
        assert (rest[0].result(10), rest[2].result(10)) == ("a", "c")
        with pytest.raises(ServerRefused, match="bad b"):
            rest[1].result(10)
    assert sorted(trips.seen[1]) == ["a", "bad b", "c"]


@pytest.mark.parametrize(("what", "leader"), [("cut", ServerUnavailable), ("interrupt", SystemExit)])
def test_a_round_trip_that_fails_fails_for_all_and_the_next_one_runs(
    trips: Trips, what: str, leader: type[BaseException]
) -> None:
    calls = shared(trips)
    with ThreadPoolExecutor(8) as pool:
        first: Any = pool.submit(calls.run, "first")  # type: ignore[arg-type]
        until(lambda: len(trips.seen) == 1)
        leading: Any = pool.submit(calls.run, what)  # type: ignore[arg-type]
        until(lambda: len(calls._waiting) == 1)
        other: Any = pool.submit(calls.run, "other")  # type: ignore[arg-type]
        until(lambda: len(calls._waiting) == 2)
        trips.gate.release(2)
        with pytest.raises(leader):
            leading.result(10)
        with pytest.raises(ServerUnavailable):
            other.result(10)
        assert first.result(10) == "first"
        trips.gate.release()
        assert calls.run("later") == "later"  # type: ignore[arg-type]
    assert [len(each) for each in trips.seen] == [1, 2, 1]


def test_many_threads_get_their_own_answers(trips: Trips) -> None:
    calls = shared(trips)
    trips.gate.release(100_000)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(calls.run, map(str, range(20_000))))
    assert found == list(map(str, range(20_000)))
    assert sorted(int(call) for each in trips.seen for call in each) == list(range(20_000))
    assert not calls._waiting and not calls._is_busy


def test_the_error_of_a_call_that_comes_alone_is_raised(trips: Trips) -> None:
    trips.gate.release()
    with pytest.raises(ServerRefused, match="bad"):
        shared(trips).run("bad")  # type: ignore[arg-type]
