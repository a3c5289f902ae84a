"""The scripts about schedules leave what the oracle leaves."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.keys import schedules_key
from django_rmq.core.model.schedule import LocalTime, Schedule, ScheduleRecord, local_times_text
from django_rmq.exceptions import ServerRefused
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker

KEY = schedules_key("alike:")
SPEC = Schedule("s", "reports", cron="0 3 * * *").text
OTHER = Schedule("s", "reports", every=60).text


def pair(client: redis.Redis) -> tuple[list[Any], Clock]:
    clock = Clock(1_800_000_000_000)
    client.delete(KEY)
    return [Broker(client, "alike:", clock), OracleBroker("alike:", clock)], clock


def answer(broker: Any, name: str, *args: Any, **options: Any) -> Any:
    try:
        return getattr(broker, name)(*args, **options)
    except ServerRefused:
        return "refused"


changes = st.tuples(
    st.just("change_schedule"),
    st.sampled_from(
        [
            ("spec", SPEC),
            ("spec", SPEC),
            ("paused", "1"),
            ("paused", ""),
            ("removed", "1"),
            ("override", '{"cron":"1 1 * * *"}'),
            ("spec", OTHER),
            ("walls", '[[1,2,"UTC"]]'),
        ]
    ),
    st.integers(0, 3),
)
renewals = st.tuples(st.just("renew_schedule"), st.booleans(), st.just(2))
plans = st.tuples(st.just("plan_tick"), st.sampled_from([-1_000, 0, 1_000, 60_000]), st.integers(0, 9))
settlements = st.tuples(st.just("settle_tick"), st.sampled_from(["written", "removed"]), st.integers(0, 9))
passing = st.sampled_from([0, 1, 999, 1_000, 60_000])


@given(
    st.lists(st.tuples(st.one_of(changes, renewals, plans, settlements), passing), min_size=1, max_size=30)
)
def test_both_brokers_go_through_every_history_alike(redis_client: redis.Redis, history: list[Any]) -> None:
    brokers, clock = pair(redis_client)
    generations: list[int] = [0]
    for (act, what, other), ms in history:
        clock.advance(ms / 1000)
        found = {record.name: record for record in brokers[1].read_schedules()}
        record = found.get("s")
        # Now and then somebody comes late, with what was true before.
        generation = record.generation - (other == 0) if record else 1
        at = record.at - (other == 1) if record else 0
        if act == "change_schedule":
            args: tuple[Any, ...] = ("s", *what)
            renewed = record.renewed_ms if record else 0
            options = {"from_now": other % 2 == 1, "renewed": [None, None, renewed, renewed - 1][other]}
        elif act == "renew_schedule":
            args, options = ("s",), {"ends": what}
        elif act == "plan_tick":
            local_times = '[[3,4,"UTC"]]' if other % 2 else ""
            args, options = ("s", generation, at, at + what, "reports", 7, local_times), {}
        else:
            args, options = ("s", generation, at, what), {}
        one, two = (answer(broker, act, *args, **options) for broker in brokers)
        assert one == two
        assert redis_client.hgetall(KEY) == dict(brokers[1].keyspace.get(KEY, {}))
        assert brokers[0].read_schedules() == brokers[1].read_schedules()
        newest = int(brokers[1].keyspace.get(KEY, {}).get(b"generation", 0))
        assert (newest > generations[-1]) == (one == "changed")
        assert newest >= generations[-1]
        generations.append(newest)
        if act == "settle_tick" and record is not None and one == "settled":
            assert record.state in ("writing", "retracting")


@pytest.fixture(params=["redis", "memory"])
def broker(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Any:
    brokers, clock = pair(redis_client)
    broker = brokers[request.param == "memory"]
    broker.time = clock
    return broker


def record(broker: Any) -> ScheduleRecord:
    (found,) = broker.read_schedules()
    assert isinstance(found, ScheduleRecord)
    return found


def declared(broker: Any) -> ScheduleRecord:
    assert broker.change_schedule("s", "spec", SPEC) == "changed"
    return record(broker)


def written(broker: Any, ahead_ms: int = 5_000) -> ScheduleRecord:
    found = declared(broker)
    instant = found.at + ahead_ms
    assert broker.plan_tick("s", found.generation, found.at, instant, "reports", 7) == "planned"
    assert broker.settle_tick("s", found.generation, instant, "written") == "settled"
    return record(broker)


def test_a_schedule_that_nobody_declared_is_not_changed(broker: Any) -> None:
    assert broker.change_schedule("s", "paused", "1") == "not_found"
    assert broker.read_schedules() == []
    declared(broker)
    assert [broker.change_schedule("s", "spec", SPEC), broker.change_schedule("s", "paused", "")] == [
        "same"
    ] * 2


def test_one_of_many_plans_a_tick_and_only_once_it_is_due(broker: Any) -> None:
    first = declared(broker)
    assert (first.state, first.at) == ("ready", broker.now_ms())
    ask = lambda found, at: broker.plan_tick("s", found.generation, found.at, at, "reports", 7)  # noqa: E731
    assert [ask(first, first.at + 5_000), ask(first, first.at + 5_000)] == ["planned", "lost"]
    writing = record(broker)
    assert (writing.state, writing.at, writing.topic, writing.crc) == (
        "writing",
        first.at + 5_000,
        "reports",
        7,
    )
    assert ask(writing, writing.at + 1) == "lost"
    broker.settle_tick("s", writing.generation, writing.at, "written")
    assert ask(writing, writing.at + 1) == "early"
    broker.time.advance(5)
    assert ask(writing, writing.at + 1) == "planned"
    assert record(broker).last == writing.at
    later = record(broker)
    broker.settle_tick("s", later.generation, later.at, "written")
    broker.time.advance(5)
    assert answer(broker, "plan_tick", "s", later.generation, later.at, later.at, "reports", 7) == "refused"


def test_how_late_a_tick_is_written_is_noted(broker: Any) -> None:
    assert written(broker).late_ms == 0
    broker.change_schedule("s", "removed", "1")
    found = record(broker)
    broker.settle_tick("s", found.generation, found.at, "removed")
    first = declared(broker)
    broker.time.advance(70)
    broker.plan_tick("s", first.generation, first.at, first.at + 10_000, "reports", 7)
    broker.settle_tick("s", first.generation, first.at + 10_000, "written")
    assert record(broker).late_ms == 60_000


@pytest.mark.parametrize("field", ["spec", "override", "paused"])
def test_a_change_takes_back_the_tick_that_waits_and_fences_who_computed_it_before(
    broker: Any, field: str
) -> None:
    before = written(broker)
    value = (
        "1"
        if field == "paused"
        else Schedule("s", "reports", every=60).text
        if field == "spec"
        else '{"every":60}'
    )
    assert broker.change_schedule("s", field, value) == "changed"
    changed = record(broker)
    assert (changed.state, changed.at) == ("retracting", before.at)
    assert changed.generation > before.generation
    assert broker.plan_tick("s", before.generation, before.at, before.at + 1, "reports", 7) == "lost"
    assert broker.plan_tick("s", changed.generation, changed.at, before.at + 1, "reports", 7) == "lost"
    assert broker.settle_tick("s", before.generation, before.at, "written") == "lost"
    assert broker.settle_tick("s", changed.generation, changed.at, "removed") == "settled"
    # Counted from the change: the tick that was taken back is planned again, if it still is one.
    assert (record(broker).state, record(broker).at) == ("ready", changed.changed_ms)


def test_a_tick_that_somebody_has_taken_is_not_planned_again(broker: Any) -> None:
    before = written(broker)
    broker.change_schedule("s", "override", '{"every":60}')
    changed = record(broker)
    assert broker.settle_tick("s", changed.generation, changed.at, "written") == "settled"
    assert (record(broker).state, record(broker).at) == ("written", before.at)


def test_a_tick_that_is_due_stays_when_its_schedule_changes(broker: Any) -> None:
    before = written(broker)
    broker.time.advance(5)
    broker.change_schedule("s", "override", '{"every":60}')
    assert (record(broker).state, record(broker).at, record(broker).last) == ("ready", before.at, before.at)


def test_a_tick_that_was_due_and_perhaps_not_written_is_planned_again(broker: Any) -> None:
    first = declared(broker)
    broker.plan_tick("s", first.generation, first.at, first.at + 5_000, "reports", 7)
    broker.time.advance(6)
    broker.change_schedule("s", "override", '{"every":60}')
    changed = record(broker)
    assert changed.state == "retracting"
    broker.settle_tick("s", changed.generation, changed.at, "removed")
    assert record(broker).at == first.at + 4_999


def test_what_is_resumed_counts_from_now(broker: Any) -> None:
    declared(broker)
    broker.change_schedule("s", "paused", "1")
    assert record(broker).is_paused
    broker.time.advance(90)
    found = record(broker)
    assert broker.plan_tick("s", found.generation, found.at, found.at + 1, "reports", 7) == "lost"
    broker.change_schedule("s", "paused", "", from_now=True)
    assert (record(broker).is_paused, record(broker).at) == (False, broker.now_ms())


def test_a_schedule_that_is_removed_is_forgotten_after_its_tick_unless_it_returns_before(broker: Any) -> None:
    written(broker)
    assert broker.change_schedule("s", "removed", "1") == "changed"
    assert broker.change_schedule("s", "removed", "1") == "same"
    assert record(broker).is_removed
    assert broker.change_schedule("s", "spec", SPEC) == "changed"
    back = record(broker)
    assert (back.is_removed, back.state) == (False, "retracting")
    broker.settle_tick("s", back.generation, back.at, "removed")
    assert record(broker).state == "ready"
    broker.change_schedule("s", "removed", "1")
    gone = record(broker)
    assert broker.settle_tick("s", gone.generation, gone.at, "removed") == "forgotten"
    assert broker.read_schedules() == []
    # A generation is never given again: slots remember the last one.
    assert declared(broker).generation > gone.generation


def test_a_generation_is_not_given_again_after_the_key_was_lost(redis_client: redis.Redis) -> None:
    brokers, clock = pair(redis_client)
    for broker in brokers:
        first = written(broker)
        redis_client.delete(KEY)
        brokers[1].keyspace.clear()
        clock.advance("1ms")
        assert declared(broker).generation > first.generation


def test_what_a_worker_has_declared_meanwhile_is_not_changed(broker: Any) -> None:
    first = declared(broker)
    assert (first.renewed_ms, first.former) == (broker.now_ms(), "")
    broker.time.advance("5ms")
    assert broker.renew_schedule("s") == "renewed"
    for field, value in (("spec", OTHER), ("removed", "1")):
        assert broker.change_schedule("s", field, value, renewed=first.renewed_ms) == "same"
    assert record(broker).declared == first.declared
    assert broker.change_schedule("s", "spec", OTHER, renewed=first.renewed_ms + 5) == "changed"
    assert record(broker).former == first.declared.digest
    assert broker.renew_schedule("s", ends=True) == "renewed"
    assert record(broker).renewed_ms == 0
    assert broker.change_schedule("s", "removed", "1", renewed=0) == "changed"
    assert broker.renew_schedule("s") == broker.renew_schedule("t") == "not_found"


def test_what_the_clock_on_the_wall_showed_belongs_to_the_tick_that_was_planned(broker: Any) -> None:
    first = declared(broker)
    local_times = (LocalTime(first.at + 5_000, 7_200, "Europe/Berlin"),)
    broker.plan_tick(
        "s", first.generation, first.at, first.at + 5_000, "reports", 7, local_times_text(local_times)
    )
    assert (record(broker).local_times, local_times[0].local_ms) == (
        local_times,
        first.at + 5_000 + 7_200_000,
    )
    broker.change_schedule("s", "walls", "")
    assert (record(broker).local_times, record(broker).state) == ((), "retracting")


def test_what_an_older_version_leaves_of_a_schedule_is_no_schedule(redis_client: redis.Redis) -> None:
    for broker in pair(redis_client)[0]:
        written(broker)
        redis_client.hdel(KEY, "s:spec")
        if isinstance(broker, OracleBroker):
            del broker.keyspace[KEY][b"s:spec"]
        assert broker.read_schedules() == []


def test_a_value_that_nobody_wrote_here_is_named(redis_client: redis.Redis) -> None:
    brokers, _ = pair(redis_client)
    redis_client.hset(KEY, mapping={"s:spec": "[]", "s:at": "x"})
    found = brokers[0].read_schedules()
    assert found == [] and "fields 's:…' of the hash 'alike:rmq:schedules'" in found.unreadable["s"]
