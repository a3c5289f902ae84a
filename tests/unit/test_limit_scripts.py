"""The script of the limits keeps to the rules of all scripts, though it belongs to no slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import redis
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.keys import limits_key
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker
from tests.unit import outside_slots
from tests.unit import test_lua as rules
from tests.unit.outside_slots import Recorder

SOURCE = rules.Source("limits/allow")
TOPIC = Topic("topic", TopicType.RANGE_MERGE, slots=1, timeout=3)


def test_a_call_hands_over_what_the_header_declares() -> None:
    ask: Any = Recorder(None, "P:")
    call = ask.allow(TOPIC, "w", tokens=1, in_use=2, wanted=3, lease_ms=4)
    assert call.script == "limits/allow"
    assert list(call.keys("P:")) == [limits_key("P:", "topic")] == [b"limits_{P:rmq:limits:topic}"]
    assert [key.kind for key in SOURCE.declared("KEYS")] == ["HASH"]
    arguments = SOURCE.declared("ARGV")
    assert len(call.arguments("P:")) == len(arguments) - 1
    assert arguments[-1].name == "now"


def test_header_bindings_and_code_keep_to_the_rules() -> None:
    outside_slots.check_header(SOURCE)
    commands = outside_slots.check_code(SOURCE, also=frozenset({"PEXPIRE"}))
    assert next(command for command in commands if command in rules.WRITES) == "HDEL"


def test_it_reads_no_unknown_global_and_has_the_sha_that_redis_computes(redis_client: redis.Redis) -> None:
    outside_slots.check_bytecode(SOURCE, redis_client, frozenset({"table"}))


asks = st.tuples(
    st.sampled_from("ABCD"),
    st.integers(-3, 20),
    st.integers(0, 6),
    st.integers(0, 12),
    st.sampled_from([0, 1, 17, 250, 1_999, 4_001, 3_600_000, -5_000]),
)


@given(
    st.sampled_from([None, 0.001, 1.0, 3.7, 20.0, 1000.0, 1e6]),
    st.sampled_from([None, 1, 2, 5, 30]),
    st.lists(asks, min_size=1, max_size=25),
)
def test_both_brokers_share_alike(
    redis_client: redis.Redis, rate: float, permits: int, history: list[Any]
) -> None:
    topic, clock = replace(TOPIC, max_rate=rate, max_in_flight=permits), Clock()
    redis_client.delete(limits_key("alike:", "topic"))
    brokers: list[Any] = [Broker(redis_client, "alike:", clock), OracleBroker("alike:", clock)]
    for worker, tokens, in_use, wanted, ms in history:
        clock.advance(ms / 1000)
        one, other = (
            broker.allow(topic, worker, tokens=tokens, in_use=in_use, wanted=wanted, lease_ms=4_000)
            for broker in brokers
        )
        assert one == other
        kept = brokers[1].keyspace.get(limits_key("alike:", "topic"), {})
        assert redis_client.hgetall(limits_key("alike:", "topic")) == dict(kept)
