"""A call is a value: a broker runs it at once, a pipeline has its answer after it has run, and types say so."""

from __future__ import annotations

from typing import Any

import pytest

from django_rmq.core.commands import ack, fetch, inspect, membership, send
from django_rmq.core.commands.script_call import Answer, AtSlot
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import SlotMoved
from django_rmq.testing import Clock
from tests.support.brokers import Broker, OracleBroker

TOPIC = Topic("t", TopicType.RANGE_MERGE, slots=4)


def test_a_call_says_its_script_its_place_and_its_arguments() -> None:
    call = ack.commit(TOPIC, 3, 7, [b"m"])
    assert (call.script, call.place, call.own) == ("commit", AtSlot(TOPIC, 3), (7, b"m"))
    call_of_workers = membership.leave("w", "t")
    assert (call_of_workers.script, call_of_workers.own) == ("workers/leave", ("w", "t"))


def test_a_call_knows_its_keys_below_any_prefix() -> None:
    call = inspect.audit_ledger(TOPIC, 2)
    assert call.keys("")[0] == b"t_2" and call.keys("p:")[0] == b"p:t_2"
    assert membership.leave("w", "t").keys("p:")[0] == b"sessions_{p:rmq:workers}"


def test_a_call_of_many_slots_has_a_part_for_each() -> None:
    call = inspect.heads(TOPIC, [0, 3])
    assert [key for part in call.parts() for key in part.keys("p:")] == call.keys("p:")
    assert inspect.count(TOPIC, 1).parts() == [inspect.count(TOPIC, 1)]


def test_an_answer_is_there_once_the_pipeline_has_run() -> None:
    answer: Answer[list[str]] = Answer()
    for read in (answer.get, answer.result):
        with pytest.raises(RuntimeError, match="has not run"):
            read()
    answer.become(["ok"])
    assert answer.get() == answer.result() == ["ok"]
    answer.become(SlotMoved("the topic has 8 slots by now"))
    assert isinstance(answer.result(), SlotMoved)
    with pytest.raises(SlotMoved):
        answer.get()


def test_a_pipeline_answers_what_was_added(redis_client: Any, prefix: str) -> None:
    broker = Broker(redis_client, prefix)
    pipeline = broker.pipeline()
    sent = pipeline.add(send.send_merge(TOPIC, 0, 0, [b"a"]))
    moved = pipeline.add(send.ensure(Topic("t", TopicType.RANGE_MERGE, slots=8), 0, [0], [b"b"]))
    counts = pipeline.add(inspect.count(TOPIC, 0))
    with pytest.raises(RuntimeError):
        counts.get()
    assert pipeline.execute() == [sent.result(), moved.result(), counts.result()]
    assert sent.get()[0].status == "stored"
    assert isinstance(moved.result(), SlotMoved)
    assert counts.get().store == broker.run(inspect.count(TOPIC, 0)).store == 1


def test_what_an_owner_holds_is_found_although_its_heartbeat_moves_some_of_it_meanwhile() -> None:
    clock = Clock()
    broker, topic = OracleBroker(clock=clock), Topic("t", TopicType.PRIORITY, slots=1)
    members = [b"%04d" % n for n in range(1_500)]
    broker.send_replace(topic, 0, [100] * 1_000, members[:1_000])
    broker.send_replace(topic, 0, [100] * 500, members[1_000:])
    known = broker.prepare(topic, 0, "me", None, 1_000)
    clock.advance("1s")
    broker.prepare(topic, 0, "me", None, 1_000)
    first = broker.list_held(topic, 0, "me")
    assert first is not None and len(first) == 1_000
    clock.advance("1s")
    broker.extend(topic, 0, known.receipt, [delivery.member for delivery in known.deliveries])
    held = fetch.all_held(broker, topic, 0, "me", first)
    assert sorted(thing.delivery.member for thing in held) == members
