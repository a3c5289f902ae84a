"""A call is a value: a broker runs it at once, a pipeline has its answer after it has run, and types say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mypy import api

from django_rmq.core import lua
from django_rmq.core.commands import ack, inspect, registry, send
from django_rmq.core.commands.script_call import Answer, AtSlot, signature
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import SlotMoved
from tests.support.brokers import Broker

TOPIC = Topic("t", TopicType.RANGE_MERGE, slots=4)


def test_a_call_says_its_script_its_place_and_its_arguments() -> None:
    call = ack.commit(TOPIC, 3, 7, [b"m"])
    assert (call.script, call.place, call.own) == ("commit", AtSlot(TOPIC, 3), (7, b"m"))
    call_of_workers = registry.leave("w", "t")
    assert (call_of_workers.script, call_of_workers.own) == ("workers/leave", ("w", "t"))


def test_a_call_knows_its_keys_below_any_prefix() -> None:
    call = inspect.audit(TOPIC, 2)
    assert call.keys("")[0] == b"t_2" and call.keys("p:")[0] == b"p:t_2"
    assert registry.redefine("t", b"", "{}").keys("p:") == (b"p:rmq:topics",)


def test_a_call_of_many_slots_has_a_part_for_each() -> None:
    call = inspect.heads(TOPIC, [0, 3])
    assert [key for part in call.parts() for key in part.keys("p:")] == call.keys("p:")
    assert inspect.count(TOPIC, 1).parts() == [inspect.count(TOPIC, 1)]


@pytest.mark.parametrize("name", lua.all_names())
def test_every_header_can_be_read(name: str) -> None:
    assert signature(name).keys


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


MISUSE = """
from django_rmq.core.commands.ack import commit
from django_rmq.core.commands.fetch import prepare
from django_rmq.core.redis.broker import RedisBroker
from django_rmq.core.model.replies import Prepared
from django_rmq.core.model.topic import Topic


def use(broker: RedisBroker, topic: Topic) -> None:
    words: list[str] = broker.run(commit(topic, 0, 1, [b"a"]))
    pipeline = broker.pipeline()
    later: list[str] = pipeline.add(commit(topic, 0, 1, [b"a"]))
    answer = pipeline.add(prepare(topic, 0, "owner", None, 1))
    for word in answer:
        print(word)
    prepared: Prepared = answer.get()
    counted: int = answer.get()
"""


@pytest.mark.slow
def test_types_tell_an_answer_from_what_will_hold_it(tmp_path: Path) -> None:
    file = tmp_path / "misuse.py"
    file.write_text(MISUSE)
    found, _, _ = api.run(["--strict", "--config-file=", "--cache-dir", str(tmp_path / "cache"), str(file)])
    errors = [
        line.split(": error: ")[1] for line in found.splitlines() if f"{file}:" in line and "error" in line
    ]
    assert [error.rsplit("[", 1)[1].rstrip("]") for error in errors] == [
        "assignment",
        "attr-defined",
        "assignment",
    ], found
    assert "Answer[list[str]]" in errors[0]
