"""Records of several threads share round trips, and each thread learns whether Redis has its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_rmq.exceptions import ServerFull, ServerUnavailable, WrongType
from django_rmq.tasks import record_writer
from django_rmq.tasks.record_writer import RecordWriter
from tests.support.workers import eventually

LONG = 10.0


class Trips:
    """Stands for Redis: it answers a call with itself, notes which calls came together, and takes as long as a test says."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.gate = threading.Semaphore(0)
        self.refused: set[Any] = set()
        self.interrupts = 1

    def __call__(self, broker: Any, calls: Sequence[Any]) -> list[Any]:
        self.seen.append(list(calls))
        assert self.gate.acquire(timeout=LONG)
        if "cut" in calls:
            raise ServerUnavailable("cut")
        if "interrupt" in calls and self.interrupts:
            self.interrupts -= 1
            raise SystemExit
        return [self._answer(call) for call in calls]

    def _answer(self, call: Any) -> Any:
        if str(call).startswith("bad"):
            return WrongType(call)
        return ServerFull(call) if call in self.refused else call

    def run(self, call: Any) -> Any:
        """Answer a call that comes alone."""
        (answer,) = self(self, [call])
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def written(self) -> list[Any]:
        return [call for each in self.seen for call in each]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    found = Trips()
    monkeypatch.setattr(record_writer, "run_all", found)
    monkeypatch.setattr(record_writer, "PAUSE", 0.01)
    return found


@pytest.fixture
def writer(trips: Trips) -> Any:
    return RecordWriter(lambda: trips)  # type: ignore[arg-type, return-value]


def test_what_comes_during_a_round_trip_is_written_in_the_next_one(trips: Trips, writer: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(writer.write, "first")
        eventually(lambda: trips.seen == [["first"]])
        rest = [pool.submit(writer.write, name) for name in ("a", "bad b", "c")]
        eventually(lambda: len(writer._waiting) == 3)
        trips.gate.release(2)
        for each in (first, rest[0], rest[2]):
            each.result(LONG)
        with pytest.raises(WrongType, match="bad b"):
            rest[1].result(LONG)
    assert sorted(trips.seen[1]) == ["a", "bad b", "c"]


def test_what_a_server_in_trouble_has_not_written_is_written_later(trips: Trips, writer: Any) -> None:
    trips.refused = {"a"}
    with ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(writer.write, name) for name in ("a", "b")]
        trips.gate.release(100)
        writing[1].result(LONG)
        eventually(lambda: trips.written.count("a") > 3)
        assert not writing[0].done()
        trips.refused.clear()
        writing[0].result(LONG)
    assert trips.written.count("b") == 1


@pytest.mark.parametrize("what", ["cut", "refused"])
def test_whoever_waits_learns_that_patience_is_over(
    trips: Trips, writer: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "PATIENCE", 0.1)
    trips.refused = {"refused"}
    trips.gate.release(1_000)
    with pytest.raises((ServerUnavailable, ServerFull), match=what):
        writer.write(what)
    assert len(trips.seen) > 1
    trips.seen.clear()
    writer.write("later")
    assert trips.seen == [["later"]]


def test_a_round_trip_that_is_interrupted_is_made_again_by_another_thread(trips: Trips, writer: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(writer.write, "first")
        eventually(lambda: len(trips.seen) == 1)
        interrupted = pool.submit(writer.write, "interrupt")
        eventually(lambda: len(writer._waiting) == 1)
        trips.gate.release(2)
        first.result(LONG)
        with pytest.raises(SystemExit):
            interrupted.result(LONG)
        trips.gate.release()
        writer.write("later")
    assert trips.seen == [["first"], ["interrupt"], ["interrupt", "later"]]


def test_many_threads_learn_of_their_own_records(trips: Trips, writer: Any) -> None:
    trips.gate.release(100_000)
    names = [f"{'bad ' if number % 7 == 0 else ''}{number}" for number in range(10_000)]

    def write(name: str) -> str:
        try:
            writer.write(name)
        except WrongType as error:
            return f"refused {error}"
        return name

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(write, names))
    assert answers == [f"refused {name}" if name.startswith("bad") else name for name in names]
    assert sorted(trips.written) == sorted(names)
    assert not writer._waiting


def test_coroutines_that_wait_at_the_same_time_share_a_round_trip(trips: Trips, writer: Any) -> None:
    async def write(name: str) -> str:
        try:
            await writer.awrite(name)
        except WrongType as error:
            return f"refused {error}"
        return name

    async def write_all() -> list[str]:
        first = asyncio.ensure_future(write("first"))
        await asyncio.to_thread(eventually, lambda: trips.seen == [["first"]])
        rest = [asyncio.ensure_future(write(name)) for name in ("a", "bad b", "cancelled", "c")]
        await asyncio.to_thread(eventually, lambda: len(writer._waiting) == 4)
        rest.pop(2).cancel()
        trips.gate.release(2)
        return await asyncio.gather(first, *rest)

    assert asyncio.run(write_all()) == ["first", "a", "refused bad b", "c"]
    assert trips.seen == [["first"], ["a", "bad b", "cancelled", "c"]]


def test_a_coroutine_waits_until_a_server_in_trouble_has_its_record(trips: Trips, writer: Any) -> None:
    trips.refused = {"a"}
    trips.gate.release(1_000)

    async def write() -> None:
        writing = asyncio.ensure_future(writer.awrite("a"))
        await asyncio.to_thread(eventually, lambda: len(trips.seen) > 3)
        assert not writing.done()
        trips.refused.clear()
        await asyncio.wait_for(writing, LONG)

    asyncio.run(write())


def test_a_record_that_may_wait_is_written_soon_though_no_thread_waits_for_it(
    trips: Trips, writer: Any
) -> None:
    trips.gate.release(10)
    write = writer.add("a")
    eventually(lambda: write.is_over)
    writer.wait(write)
    assert trips.seen == [["a"]]


def test_the_error_of_a_record_that_may_wait_is_raised_to_the_thread_that_waits(
    trips: Trips, writer: Any
) -> None:
    trips.gate.release(10)
    write, other = writer.add("bad a"), writer.add("b")
    writer.wait(other)
    with pytest.raises(WrongType, match="bad a"):
        writer.wait(write)


def test_records_that_may_wait_share_a_round_trip(
    trips: Trips, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "TURN_SECONDS", LONG)
    trips.gate.release(10)
    writes = [writer.add(number) for number in range(record_writer.FULL - 1)]
    assert trips.seen == []
    for write in writes:
        writer.wait(write)
    assert trips.seen == [list(range(record_writer.FULL - 1))]


def test_no_further_record_may_wait_while_many_do(trips: Trips, writer: Any) -> None:
    trips.refused = {*range(100)}
    trips.gate.release(10_000)
    ended: list[Any] = []

    def end_tasks() -> None:
        ended.extend(map(writer.add, range(100)))

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_tasks)
        eventually(lambda: trips.written.count(record_writer.FULL - 1) > 3)
        assert len(ended) == record_writer.FULL - 1
        trips.refused.clear()
        ending.result(LONG)
    for write in ended:
        writer.wait(write)


def test_the_start_of_an_attempt_is_written_unless_it_has_ended(trips: Trips, writer: Any) -> None:
    class Attempt:
        def __init__(self, name: str, ended: bool) -> None:
            self.name, self.ended = name, ended

        def start(self) -> str:
            return self.name

    trips.gate.release(10)
    for name, ended in (("short", True), ("long", False)):
        writer.begin(Attempt(name, ended))
    eventually(lambda: trips.seen)
    eventually(lambda: not writer._begun)
    assert trips.seen == [["long"]]


def test_a_thread_that_could_not_start_is_started_by_the_next_record(
    trips: Trips, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        writer.add("first")
    trips.gate.release(2)
    writer.add("second")
    eventually(lambda: sorted(trips.written) == ["first", "second"])
