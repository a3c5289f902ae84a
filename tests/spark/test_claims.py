"""The claims of a query: one driver at a time has the name of a consumer, whatever dies or is started again; and what time
makes due is claimed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from django_rmq.core.commands import broker_interface, inspect
from django_rmq.core.model.keys import consumer_key, slot_keys
from django_rmq.core.model.topic import BackOff
from django_rmq.core.redis.broker import ServerConnection
from django_rmq.exceptions import LostRace, NodeUnavailable, RmqError, ServerUnavailable, WrongType
from django_rmq.spark import claims
from django_rmq.spark.acknowledger import acknowledge
from django_rmq.spark.stream_reader import StreamReader
from tests.spark.conftest import MakeQueue, Queue
from tests.spark.test_streaming import ALL, fail_all, first_batch, plan, reader, rows
from tests.support.sends import counted_trips
from tests.support.workers import eventually


class ShiftedClock:
    """The time in microseconds, as far ahead as a test has advanced it."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000 + self.ahead_us

    def advance(self, ms: int) -> None:
        self.ahead_us += ms * 1_000


@pytest.fixture
def redis_clock(monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    """The clock of all brokers that are made from now on."""
    clock, make = ShiftedClock(), ServerConnection.__init__

    def with_clock(self: ServerConnection, client: Any, prefix: str, _: Any) -> None:
        make(self, client, prefix, clock)

    monkeypatch.setattr(ServerConnection, "__init__", with_clock)
    return clock


def run_once(source: StreamReader, start: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Consume with availableNow to its end; return the last offset and the number of rows."""
    source.prepareForTriggerAvailableNow()
    total, at = 0, start
    while (end := source.latestOffset(at, ALL)) != at:
        total += rows(source, at, end).total()
        at = end
    source.commit(at)
    return at, total


@pytest.fixture
def topic(queue: MakeQueue) -> Queue:
    return queue(slots=4)


@pytest.mark.parametrize("count", [0, 100])
def test_a_second_query_with_the_same_consumer_ends_at_its_first_poll(topic: Queue, count: int) -> None:
    topic.send(list(range(count)))
    one, start, first = first_batch(topic, ReadMaxRows(40), consumerId="nightly")
    other = reader(topic, consumerId="nightly")
    assert (first == start) == (count == 0)
    host, pid, *_ = claims.about_this_process().split(" ")
    said = f"another query has consumerId nightly of topic {topic.topic.name}: host {host}, process {pid}, since 2"
    with pytest.raises(LostRace, match=said):
        other.latestOffset(other.initialOffset(), ALL)
    # It has touched nothing, and the first one goes on.
    assert rows(one, start, first).total() == topic.depth("claimed")
    second = one.latestOffset(first, ALL)
    assert second["rows"] + topic.total("acked") == count
    # Another name is another consumer.
    third = reader(topic, consumerId="hourly")
    begin = third.initialOffset()
    assert third.latestOffset(begin, ALL) == begin


def test_a_query_that_is_started_again_goes_on_at_once_and_one_that_still_runs_ends(topic: Queue) -> None:
    topic.send(list(range(100)))
    one, start, first = first_batch(topic, ReadMaxRows(40), consumerId="nightly")
    again = reader(topic, consumerId="nightly")
    # Spark runs the logged batch again before it asks for another offset.
    assert rows(again, start, first).total() == first["rows"]
    second = again.latestOffset(first, ALL)
    assert second["rows"] == 100 - first["rows"] and topic.total("acked") == first["rows"]
    with pytest.raises(
        LostRace, match=r"another query has taken over consumerId nightly .* from the same checkpoint"
    ):
        one.latestOffset(first, ALL)
    with pytest.raises(LostRace, match="taken over"):
        one.latestOffset(first, ALL)
    assert rows(again, first, second).total() == second["rows"]
    assert again.latestOffset(second, ALL) == second and topic.total("acked") == 100


def test_every_message_is_recorded_by_one_of_two_queries_that_share_a_consumer(
    redis_clock: ShiftedClock, queue: MakeQueue
) -> None:
    topic = queue(slots=8)
    topic.send(list(range(8_000)))
    recorded: Counter[bytes] = Counter()
    one, start, slow = first_batch(topic, ReadMaxRows(1_000), consumerId="nightly", claimTimeout="60")
    read_by_one = rows(one, start, slow)
    other = reader(topic, consumerId="nightly", claimTimeout="60")
    begin = other.initialOffset()
    with pytest.raises(LostRace, match="another query has consumerId nightly"):
        other.latestOffset(begin, ALL)
    # The first one hangs until its lease has ended: the second one gets the name.
    redis_clock.advance(ms=61_000)
    at = begin
    for _ in range(3):
        end = other.latestOffset(at, ReadMaxRows(1_000))
        recorded += rows(other, at, end)
        at = end
        # It is killed after Spark has recorded the batch, and started again.
        other = reader(topic, consumerId="nightly", claimTimeout="60")
    with pytest.raises(LostRace, match="taken over"):
        one.latestOffset(slow, ReadMaxRows(1_000))
    while (end := other.latestOffset(at, ALL)) != at:
        recorded += rows(other, at, end)
        at = end
    assert topic.total("acked") == 8_000 == len(recorded)
    # What was lost is delivered again; nothing is acknowledged that no query has recorded.
    assert set(recorded.values()) == {1} and read_by_one.keys() <= recorded.keys()


def test_a_start_acknowledges_only_what_its_own_checkpoint_names(
    redis_clock: ShiftedClock, topic: Queue
) -> None:
    topic.send(list(range(100)))
    one, _start, first = first_batch(topic, ReadMaxRows(40), consumerId="nightly", claimTimeout="600")
    second = one.latestOffset(first, ALL)
    acknowledged = topic.total("acked")
    # Another checkpoint has recorded later batches under the same name, before; and the first driver has left.
    one.stop()
    other = reader(topic, consumerId="nightly")
    theirs = {**other.initialOffset(), "claim": 4}
    end = other.latestOffset(theirs, ALL)
    assert topic.total("acked") == acknowledged
    # What the first query had not recorded is delivered, now by the other one.
    assert rows(other, theirs, end).total() == second["rows"]


def test_a_run_leaves_its_name_at_its_end(topic: Queue) -> None:
    for night in range(3):
        topic.send([f"{night} {n}" for n in range(50)])
        # A checkpoint that is thrown away after each run.
        source = reader(topic, consumerId="nightly")
        assert run_once(source, source.initialOffset())[1] == 50
        found = topic.broker.driver_of_consumer(topic.topic, "nightly")
        assert found is not None and found.until_ms == 0
        source._claims.lease.identity.renew()
        assert topic.broker.driver_of_consumer(topic.topic, "nightly") == found


def test_the_name_and_the_lease_are_renewed_while_a_batch_runs(topic: Queue) -> None:
    topic.send(["x"])
    source, start, end = first_batch(topic, consumerId="nightly", claimTimeout="1")

    def ends() -> tuple[int, int]:
        """When the name ends, and when the lease."""
        found = topic.broker.driver_of_consumer(topic.topic, "nightly")
        heads = topic.broker.heads(topic.topic, list(range(4)), upkeep=True)
        return (0 if found is None else int(found.until_ms)), max(int(at or 0) for at in heads)

    first = ends()
    eventually(lambda: all(map(int.__gt__, ends(), first)), "a renewal", 10)
    assert rows(source, start, end) == {b'"x"': 1}


@pytest.mark.parametrize("broken", ["a slot", "the name of the consumer"])
def test_a_renewal_that_fails_in_one_place_renews_the_others(
    topic: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setattr(broker_interface.walk, "__defaults__", (1,))
    monkeypatch.setattr(claims, "SLOTS_AT_ONCE", 1)
    topic.send(list(range(100)))
    source, *_ = first_batch(topic, consumerId="nightly", claimTimeout="1")
    claimed = [
        slot_keys(topic.broker.prefix, topic.topic.name, slot).claimants
        for slot in source._claims.lease.slots()
    ]
    key = (
        claimed.pop(0)
        if broken == "a slot"
        else consumer_key(topic.broker.prefix, f"{topic.topic.name}:nightly")
    )
    topic.broker.client.delete(key)
    topic.broker.client.set(key, "of another program")
    assert len(claimed) >= 3

    def ends() -> list[float]:
        return [topic.broker.client.zscore(one, "nightly") or 0.0 for one in claimed]

    first = ends()
    eventually(lambda: all(map(float.__gt__, ends(), first)), "a renewal", 10)
    eventually(lambda: "Cannot renew the claims of topic" in caplog.text, "a warning", 10)


@pytest.mark.parametrize("by_the_query", [True, False])
@pytest.mark.parametrize("broken", ["claims", "retry"])
def test_what_is_recorded_is_acknowledged_in_all_slots_that_can_be_reached(
    topic: Queue, monkeypatch: pytest.MonkeyPatch, broken: str, by_the_query: bool
) -> None:
    monkeypatch.setattr(claims, "SLOTS_AT_ONCE", 1)
    topic.send(list(range(100)))
    source, _, end = first_batch(topic, consumerId="nightly")
    first = source._claims.lease.slots()[0]
    key = getattr(slot_keys(topic.broker.prefix, topic.topic.name, first), broken)
    held = topic.broker.count(topic.topic, first).claimed
    stored = topic.broker.client.dump(key)
    topic.broker.client.delete(key)
    topic.broker.client.set(key, "of another program")
    by_others = partial(acknowledge, {**topic.options, "patience": "0"})
    with pytest.raises(WrongType, match=key.decode()):
        (source.commit if by_the_query else by_others)(end)
    topic.broker.client.delete(key)
    if stored is not None:
        topic.broker.client.restore(key, 0, stored)
    assert 0 < held == topic.depth("claimed") and topic.total("acked") == 100 - held
    source.commit(end)
    assert topic.total("acked") == 100


def test_a_renewal_that_takes_long_or_fails_in_any_way_does_not_put_off_the_next(
    topic: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, now = claims.Lease(topic.broker, topic.topic, 30_000), [0.0]
    begun: list[float] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 100:
            raise TimeoutError

    def renew() -> None:
        begun.append(now[0])
        now[0] += 7 if len(begun) < 4 else 25
        if len(begun) == 2:
            raise ValueError("a value that nobody has foreseen")

    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(lease, "_renew_all", renew)
    with pytest.raises(TimeoutError):
        lease._renew()
    assert begun == [10, 20, 30, 40, 65, 90]


def test_slots_behind_a_node_that_takes_long_to_fail_are_given_up(
    topic: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips, now = [], [0.0]

    def fail_slowly(_: object, calls: list[object]) -> list[RmqError]:
        trips.append(len(calls))
        now[0] += 12
        return [NodeUnavailable("away")] * len(calls)

    monkeypatch.setattr(broker_interface, "run_all", fail_slowly)
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    calls = (inspect.count(topic.topic, 0) for _ in range(1 << 20))
    with pytest.raises(NodeUnavailable):
        list(claims.each_reached(topic.broker, calls))
    assert trips == [claims.SLOTS_AT_ONCE] * 3


def test_a_round_trip_claims_from_many_slots_of_few_messages(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = queue(slots=64)
    topic.send(list(range(320)))
    source = reader(topic)
    start = source.initialOffset()
    with counted_trips(monkeypatch) as trips:
        assert source.latestOffset(start, ALL)["rows"] == 320
    assert 0 < sum("claim" in trip for trip in trips) <= 5


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_a_driver_that_died_on_this_machine_keeps_no_name(
    topic: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = a_process()
    assert process.stdin is not None
    host, _, machine, _ = claims.about_this_process().split(" ")
    about = f"{host} {process.pid} {machine} {claims._start_of(process.pid)}"
    with monkeypatch.context() as patch:
        patch.setattr(claims, "about_this_process", lambda: about)
        dead = reader(topic, consumerId="nightly")
        assert dead.latestOffset(begin := dead.initialOffset(), ALL) == begin
    other = reader(topic, consumerId="nightly")
    with pytest.raises(LostRace, match=f"process {process.pid},"):
        other.latestOffset(other.initialOffset(), ALL)
    process.stdin.close()
    process.wait()
    topic.send(["a"])
    assert other.latestOffset(other.initialOffset(), ALL)["rows"] == 1


@pytest.mark.parametrize(
    ("change", "dead"),
    [
        pytest.param({}, False, id="it-runs"),
        pytest.param({3: "1"}, True, id="another-process-has-its-number"),
        pytest.param({0: "another-host", 3: "1"}, False, id="another-host"),
        pytest.param({2: "boot/1", 3: "1"}, False, id="another-container-or-boot"),
        pytest.param({3: "-"}, False, id="a-system-without-proc"),
    ],
)
def test_a_driver_is_dead_only_if_this_machine_knows_it(change: dict[int, str], dead: bool) -> None:
    parts = claims.about_this_process().split(" ")
    about = " ".join(change.get(at, part) for at, part in enumerate(parts))
    assert claims.is_dead(about) is dead
    assert not claims.is_dead("") and not claims.is_dead("x")


@pytest.mark.parametrize("other_user", [False, True])
def test_a_driver_that_the_system_hides_is_dead_only_if_there_is_no_such_process(
    monkeypatch: pytest.MonkeyPatch, other_user: bool
) -> None:
    process, kill = a_process(), os.kill

    def kill_as_another_user(pid: int, number: int) -> None:
        kill(pid, number)
        raise PermissionError

    host, _, machine, _ = claims.about_this_process().split(" ")
    about = f"{host} {process.pid} {machine} {claims._start_of(process.pid)}"
    # With `hidepid`, /proc has only the processes of its reader.
    monkeypatch.setattr(claims, "_start_of", lambda pid: None)
    if other_user:
        monkeypatch.setattr(os, "kill", kill_as_another_user)
    assert not claims.is_dead(about)
    process.communicate()
    assert claims.is_dead(about) and claims.is_dead(f"{host} {10**30} {machine} 1")


def test_a_query_that_stops_while_redis_is_away_leaves_its_name_to_the_lease(
    topic: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = reader(topic, consumerId="nightly")
    source.latestOffset(source.initialOffset(), ALL)

    def away(*_: Any) -> None:
        raise ServerUnavailable("away")

    monkeypatch.setattr(type(source._claims.lease.identity._broker), "run", away)
    source.stop()


# --- what time makes due


def test_a_run_takes_what_has_rested_and_starves_nothing_new(
    redis_clock: ShiftedClock, queue: MakeQueue
) -> None:
    topic = queue(slots=4, backoff=BackOff(1_000, 1_000))
    topic.send(list(range(1_000)))
    for slot in range(4):
        fail_all(topic, slot, delay=None)
    assert topic.depth("retry") == 1_000
    redis_clock.advance(ms=2_000)
    topic.send([f"new {n}" for n in range(10)])
    source = reader(topic)
    _, taken = run_once(source, source.initialOffset())
    assert taken == 1_010
    assert topic.total("acked") == 1_010


@pytest.mark.parametrize("left", ["rested", "claimed"])
def test_a_query_that_waits_for_a_number_sees_what_time_makes_due(
    redis_clock: ShiftedClock, queue: MakeQueue, left: str
) -> None:
    topic = queue(slots=2, backoff=BackOff(1_000, 1_000))
    topic.send([1, 2, 3, 4])
    if left == "claimed":
        dead = reader(topic, claimTimeout="60")
        dead.latestOffset(dead.initialOffset(), ALL)
    else:
        for slot in range(2):
            fail_all(topic, slot, delay=None)
    source = reader(topic, minMessagesPerTrigger="4", maxTriggerDelay="1h")
    start = source.initialOffset()
    assert source.latestOffset(start, ALL) == start
    redis_clock.advance(ms=61_000)
    eventually(lambda: source.latestOffset(start, ALL)["rows"] == 4, "the batch")


@pytest.mark.parametrize("runs_on", [True, False])
def test_a_query_brings_all_back_that_a_dead_one_held(
    redis_clock: ShiftedClock, queue: MakeQueue, runs_on: bool
) -> None:
    topic = queue(slots=2)
    topic.send(list(range(3_000)))
    dead = reader(topic, claimTimeout="60")
    dead.latestOffset(dead.initialOffset(), ALL)
    redis_clock.advance(ms=61_000)
    topic.send(["new"])
    source = reader(topic)
    start = source.initialOffset()
    if runs_on:
        # One look is enough, whatever the number of steps.
        end = source.latestOffset(start, ALL)
        assert end["rows"] == 3_001 == rows(source, start, end).total()
    else:
        assert run_once(source, start)[1] == 3_001 == topic.total("acked")


def test_a_query_goes_on_while_what_it_has_lost_comes_back(
    redis_clock: ShiftedClock, queue: MakeQueue
) -> None:
    topic = queue(slots=1)
    topic.send(list(range(3_000)))
    source, _start, first = first_batch(topic, claimTimeout="60")
    redis_clock.advance(ms=61_000)
    assert topic.broker.time_out(topic.topic, 0) == 400
    topic.send(["new"])
    second = source.latestOffset(first, ALL)
    assert second["rows"] == 3_001 and topic.total("acked") == 0
    assert source.latestOffset(second, ALL) == second and topic.total("acked") == 3_001


def test_a_run_keeps_the_batch_that_it_repeats_although_its_lease_has_ended(
    redis_clock: ShiftedClock, queue: MakeQueue
) -> None:
    topic = queue(slots=4)
    topic.send(list(range(2_000)))
    _, start, first = first_batch(topic, ReadMaxRows(1_000), claimTimeout="60")
    redis_clock.advance(ms=61_000)
    source = reader(topic, claimTimeout="60")
    source.prepareForTriggerAvailableNow()
    # Spark repeats the batch before its first poll.
    assert rows(source, start, first).total() == first["rows"]
    last, taken = run_once(source, first)
    assert first["rows"] + taken == topic.total("acked") == 2_000
    assert source.latestOffset(last, ALL) == last


def test_a_batch_that_is_repeated_has_a_whole_lease(redis_clock: ShiftedClock, queue: MakeQueue) -> None:
    topic = queue(slots=4)
    topic.send(list(range(100)))
    _, start, end = first_batch(topic, claimTimeout="600")
    redis_clock.advance(ms=599_000)
    source = reader(topic, claimTimeout="600")
    repeated = plan(source, start, end)
    redis_clock.advance(ms=500_000)
    assert [topic.broker.time_out(topic.topic, slot) for slot in range(4)] == [0, 0, 0, 0]
    assert sum(batch.num_rows for executor, task in repeated for batch in executor.read(task)) == 100


def test_what_is_lost_between_a_look_and_its_renewal_is_in_no_task(
    queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = queue(slots=1)
    topic.send([1, 2])
    _, start, end = first_batch(topic)
    source = reader(topic)
    reads = source._claims.reads

    def read_then_lose(*args: Any) -> list[Any]:
        found = reads(*args)
        topic.broker.return_claim(topic.topic, 0, end["consumer"], end["claim"])
        return found

    monkeypatch.setattr(source._claims, "reads", read_then_lose)
    assert source.partitions(start, end) == []


def test_a_run_says_what_it_leaves_to_others(queue: MakeQueue, caplog: pytest.LogCaptureFixture) -> None:
    topic = queue(slots=2)
    topic.send(list(range(100)))
    topic.broker.pause(topic.topic, 0)
    source = reader(topic)
    _, taken = run_once(source, source.initialOffset())
    assert 0 < taken < 100
    left = 100 - taken
    assert f"leaves {left} of the messages that were due at its start" in caplog.text
