"""The scripts of rates, permits, answers, results and consumers do what the oracle does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.keys import answer_key, bucket_key, consumer_key, limits_key, result_key
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker

TOPIC = Topic("topic", TopicType.RANGE_MERGE, slots=1, timeout=3, max_in_flight=9)


passing = st.sampled_from([0, 1, 17, 250, 1_999, 4_001, 30_000, 3_600_000, -5_000])


def pair(client: redis.Redis, key: bytes) -> tuple[list[Any], Clock]:
    clock = Clock()
    client.delete(key)
    return [Broker(client, "alike:", clock), OracleBroker("alike:", clock)], clock


def both(brokers: list[Any], key: bytes, method: str, *args: Any, **options: Any) -> Any:
    """Call both brokers, which answer alike and leave the same at the key; return the answer."""
    one, other = (getattr(broker, method)(*args, **options) for broker in brokers)
    assert one == other
    # It expires by the clock of the server, not by that of the test.
    assert brokers[0].client.hgetall(key) == dict(brokers[1].keyspace.get(key, {}))
    return one


@given(
    st.sampled_from([1.0, 0.5, 333_333.3333333333, 100_000.0]),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(-3, 20), passing), min_size=1, max_size=25),
)
def test_both_brokers_spend_alike_and_never_more_than_the_rate(
    redis_client: redis.Redis, each: float, size: int, history: list[Any]
) -> None:
    key = bucket_key("alike:", "who")
    brokers, clock = pair(redis_client, key)
    spent, given_back, passed_us = 0, 0, 0
    for wanted, ms in history:
        clock.advance(max(0, ms) / 1000)
        passed_us += max(0, ms) * 1000
        wait_us = both(brokers, key, "spend", "who", each, size, wanted)
        redis_client.persist(key)
        if wait_us == 0:
            spent += wanted
            # What is given back beyond a full bucket is lost.
            given_back += max(0, -wanted)
    assert spent <= given_back + size + passed_us / each + 1


def test_a_bucket_is_full_again_after_its_time_and_survives_a_clock_that_is_set_back(
    redis_client: redis.Redis,
) -> None:
    brokers, clock = pair(redis_client, bucket_key("alike:", "who"))
    for broker in brokers:
        assert broker.spend("who", 1e6, 3, 3) == 0
        assert broker.spend("who", 1e6, 3, 1) == 1_000_000
    clock.advance("999ms")
    assert [broker.spend("who", 1e6, 3, 1) for broker in brokers] == [1_000, 1_000]
    clock.advance("1ms")
    assert [broker.spend("who", 1e6, 3, 1) for broker in brokers] == [0, 0]
    clock.advance(-3600)
    assert [broker.spend("who", 1e6, 3, 3) for broker in brokers] == [0, 0]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.sampled_from("ab"), st.sampled_from(["t1", "t2"]), passing),
            st.tuples(
                st.just("keep"), st.sampled_from([b"", b"kept"]), st.sampled_from(["t1", "t2"]), passing
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_both_brokers_answer_alike(redis_client: redis.Redis, history: list[Any]) -> None:
    key = answer_key("alike:", "request")
    brokers, clock = pair(redis_client, key)
    for act, given_, token, ms in history:
        clock.advance(ms / 1000)
        if act == "begin":
            both(brokers, key, "begin_request", "request", given_, token, 30_000)
        else:
            both(brokers, key, "store_answer", "request", token, given_, 60_000)


def test_a_request_is_done_once_unless_its_attempt_dies(redis_client: redis.Redis) -> None:
    brokers, clock = pair(redis_client, answer_key("alike:", "request"))
    for broker in brokers:
        assert broker.begin_request("request", "a", "t1", 30_000) == ("new", b"")
        assert broker.begin_request("request", "a", "t2", 30_000) == ("running", b"")
        assert broker.begin_request("request", "b", "t2", 30_000) == ("other", b"")
    clock.advance(30)
    for broker in brokers:
        assert broker.begin_request("request", "a", "t2", 30_000) == ("new", b"")
        assert broker.store_answer("request", "t1", b"late", 60_000) == "stale"
        assert broker.store_answer("request", "t2", b"kept", 60_000) == "ok"
        assert broker.begin_request("request", "a", "t3", 30_000) == ("done", b"kept")
        assert broker.store_answer("request", "t2", b"", 60_000) == "stale"
    assert 30_000 < redis_client.pttl(answer_key("alike:", "request")) <= 60_000


@given(st.lists(st.tuples(st.integers(1, 5), st.binary(max_size=3)), min_size=1, max_size=12))
def test_what_is_known_of_a_task_never_goes_back(redis_client: redis.Redis, history: list[Any]) -> None:
    key = result_key("alike:", "task")
    brokers, _ = pair(redis_client, key)
    known = 0
    for stamp, record in history:
        word = both(brokers, key, "store_result", "task", stamp, 60_000, b"job", record)
        assert word == ("ok" if stamp > known else "stale")
        known = max(known, stamp)
        assert both(brokers, key, "result", "task").stamp == known
    assert both(brokers, key, "result", "another") is None
    assert 0 < redis_client.pttl(key) <= 60_000


def holding(
    driver: str, checkpoint: str = "c", starts: bool = False, gone: str = "", passing: int = 0
) -> dict[str, Any]:
    return {"driver": driver, "checkpoint": checkpoint, "starts": starts, "gone": gone, "passing": passing}


@given(
    st.lists(
        st.one_of(
            st.builds(
                holding,
                st.sampled_from("ABC"),
                st.sampled_from("cd"),
                st.booleans(),
                st.sampled_from(["", "", "A", "B"]),
                passing,
            ),
            st.sampled_from(["", "A", "B"]),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_a_consumer_has_one_driver_at_a_time(redis_client: redis.Redis, history: list[Any]) -> None:
    key = consumer_key("alike:", "topic:nightly")
    brokers, clock = pair(redis_client, key)
    had: list[str] = []
    checkpoint, until = "", 0
    for step in history:
        if isinstance(step, str):
            left = bool(had) and step in ("", had[-1])
            word = both(brokers, key, "leave_consumer", TOPIC, "nightly", step)
            assert word == ("left" if left else "absent")
            until = 0 if left else until
        else:
            clock.advance(step.pop("passing") / 1000)
            now_ms = clock() // 1000
            how = {"about": "web-3", "lease_ms": 2_000, **step}
            holder = both(brokers, key, "hold_consumer", TOPIC, "nightly", **how)
            mine = not had or had[-1] == step["driver"]
            same = step["starts"] and (step["checkpoint"] == checkpoint or step["gone"] in had[-1:])
            assert (holder is None) == (mine or bool(same) or (step["starts"] and until <= now_ms))
            if holder is None:
                if not had or had[-1] != step["driver"]:
                    checkpoint = step["checkpoint"]
                had.append(step["driver"])
                until = now_ms + 2_000
            else:
                assert (holder.name, holder.about, holder.until_ms) == (had[-1], "web-3", until)
        both(brokers, key, "driver_of_consumer", TOPIC, "nightly")


@pytest.mark.parametrize("which", [0, 1])
def test_a_driver_has_a_consumers_name_until_its_lease_ends(redis_client: redis.Redis, which: int) -> None:
    key = consumer_key("alike:", "topic:nightly")
    brokers, clock = pair(redis_client, key)
    broker = brokers[which]

    def hold(driver: str, checkpoint: str, **more: Any) -> str | None:
        found = broker.hold_consumer(TOPIC, "nightly", driver, checkpoint, f"on {driver}", 2_000, **more)
        return None if found is None else found.about

    assert hold("A", "c", starts=True) is None
    clock.advance("1999ms")
    assert hold("B", "d", starts=True) == "on A", "another query"
    assert hold("A", "c") is None
    assert hold("A2", "c", starts=True) is None, "started again from its checkpoint"
    assert hold("A", "c") == "on A2", "superseded"
    clock.advance("1999ms")
    assert hold("B", "d", starts=True) == "on A2"
    clock.advance("1ms")
    assert hold("B", "d", starts=True) is None, "the lease has ended"
    clock.advance("9999ms")
    assert hold("A2", "c") == "on B", "it has lost the name, though its successor is gone too"
    assert hold("B", "d") is None
    assert hold("C", "e", starts=True, gone="A2") == "on B"
    assert hold("C", "e", starts=True, gone="B") is None, "known to be dead"
    assert broker.leave_consumer(TOPIC, "nightly", "B") == "absent"
    assert broker.leave_consumer(TOPIC, "nightly", "C") == "left"
    assert hold("D", "f", starts=True) is None
    assert broker.leave_consumer(TOPIC, "nightly") == "left"
    assert broker.leave_consumer(TOPIC, "another") == "absent"
    assert broker.driver_of_consumer(TOPIC, "another") is None
    assert broker.reported_loss(TOPIC, "nightly") == broker.reported_loss(TOPIC, "another") == ""
    broker.report_loss(TOPIC, "nightly", "7 f")
    assert hold("D", "f", starts=True) is None
    assert broker.reported_loss(TOPIC, "nightly") == "7 f"
    assert which or 80_000_000 < redis_client.pttl(key) <= 86_402_000


def test_what_did_nothing_is_forgotten(redis_client: redis.Redis) -> None:
    brokers, _ = pair(redis_client, answer_key("alike:", "request"))
    for broker in brokers:
        broker.begin_request("request", "a", "t1", 30_000)
        assert broker.store_answer("request", "t1", b"", 60_000) == "ok"
        assert broker.begin_request("request", "b", "t2", 30_000) == ("new", b"")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allow"), st.sampled_from("AB"), st.integers(0, 9), passing),
            st.tuples(st.just("end"), st.sampled_from("AB"), st.integers(0, 4), passing),
            st.tuples(st.just("renew"), st.sampled_from("AB"), st.integers(0, 4), passing),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_both_brokers_end_permits_alike(redis_client: redis.Redis, history: list[Any]) -> None:
    key = limits_key("alike:", "topic")
    brokers, clock = pair(redis_client, key)
    for act, worker, count, ms in history:
        clock.advance(ms / 1000)
        if act == "allow":
            how = {"tokens": 0, "in_use": count, "wanted": 0, "lease_ms": 4_000}
            both(brokers, key, "allow", TOPIC, worker, **how)
        else:
            lease_ms = 4_000 if act == "renew" else 0
            both(brokers, key, "end_permits", TOPIC, worker, count, lease_ms)


def test_permits_end_with_what_they_are_for_and_last_as_long_as_it_is_extended(
    redis_client: redis.Redis,
) -> None:
    brokers, clock = pair(redis_client, limits_key("alike:", "topic"))

    def free(broker: Any) -> int:
        found = broker.allow(TOPIC, "other", tokens=0, in_use=0, wanted=9, lease_ms=4_000).permits
        broker.allow(TOPIC, "other", tokens=0, in_use=0, wanted=0, lease_ms=4_000)
        return int(found)

    for broker in brokers:
        broker.allow(TOPIC, "d", tokens=0, in_use=5, wanted=0, lease_ms=4_000)
        assert (free(broker), broker.end_permits(TOPIC, "d", 2), free(broker)) == (4, 3, 6)
    clock.advance(3)
    for broker in brokers:
        assert broker.end_permits(TOPIC, "d", 0, 4_000) == 3
    clock.advance(3)
    assert [free(broker) for broker in brokers] == [6, 6]
    clock.advance(2)
    assert [free(broker) for broker in brokers] == [9, 9]
    assert [broker.end_permits(TOPIC, "d", 1) for broker in brokers] == [0, 0]


@given(
    st.sampled_from([None, 0.001, 1.0, 3.7, 20.0, 1000.0, 1e6]),
    st.sampled_from([None, 1, 2, 5, 30]),
    st.lists(
        st.tuples(
            st.sampled_from("ABCD"), st.integers(-3, 20), st.integers(0, 6), st.integers(0, 12), passing
        ),
        min_size=1,
        max_size=25,
    ),
)
def test_both_brokers_share_alike(
    redis_client: redis.Redis, rate: float, permits: int, history: list[Any]
) -> None:
    key = limits_key("alike:", "topic")
    topic = replace(TOPIC, max_rate=rate, max_in_flight=permits)
    brokers, clock = pair(redis_client, key)
    for worker, tokens, in_use, wanted, ms in history:
        clock.advance(ms / 1000)
        how = {"tokens": tokens, "in_use": in_use, "wanted": wanted, "lease_ms": 4_000}
        both(brokers, key, "allow", topic, worker, **how)
