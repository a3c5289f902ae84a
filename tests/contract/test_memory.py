"""What the broker in memory adds to the rules: threads, pipelines, a clock; and what it does without."""

from __future__ import annotations

from django_rmq.core import lua
from django_rmq.core.commands import inspect, send
from django_rmq.core.commands.broker_interface import Broker, BrokerPipeline
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import SlotMoved
from django_rmq.testing import Clock
from tests.contract.slots import START_MS, TYPES, Slot, slot_of_each
from tests.oracle.broker import RULES
from tests.oracle.broker import Pipeline as MemoryPipeline
from tests.support.brokers import OracleBroker
from tests.support.commands import printed_by


def test_it_needs_neither_redis_nor_django() -> None:
    code = (
        "import sys, tests.oracle.broker; "
        "print([name for name in sys.modules if name.split('.')[0] in ('redis', 'django', 'hiredis')])"
    )
    assert printed_by(code) == "[]"


def test_it_has_rules_for_every_script_and_every_other_method_of_a_broker() -> None:
    # An insertion is a transaction of commands, and definitions are changed by a method.
    names = {name.removesuffix(lua.SECOND) for name in lua.all_names()}
    assert RULES.keys() == names - {"insert", "topics/redefine"}
    for protocol, ours in ((Broker, OracleBroker), (BrokerPipeline, MemoryPipeline)):
        asked = {
            name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")
        }
        assert asked and all(callable(getattr(ours, name)) for name in asked)


@slot_of_each(TYPES, slots=4)
def test_a_pipeline_answers_each_call_in_order_and_errors_in_their_places(slot: Slot) -> None:
    slot.send(b"a")
    broker, topic = slot.broker, slot.topic
    pipeline = broker.pipeline()
    assert pipeline.execute() == []
    score = 0 if slot.topic.type is TopicType.RANGE_MERGE else slot.fresh_score()
    indexes = [
        pipeline.ensure(topic, 0, [score], [b"a"]),
        pipeline.ensure(slot.with_topic(slots=8).topic, 0, [score], [b"b"]),
        pipeline.prepare(topic, 0, "A", None, 5),
        pipeline.commit(topic, 0, slot.clock() + 1, [b"a"]),
    ]
    assert indexes == [0, 1, 2, 3] and len(pipeline) == 4
    present, moved, prepared, committed = pipeline.send().receive()
    assert present[0].status == "present" and isinstance(moved, SlotMoved)
    assert prepared.deliveries[0].member == b"a" and committed == ["ok"]
    assert len(pipeline) == 0


def test_it_runs_calls() -> None:
    broker, topic = OracleBroker(clock=Clock(START_MS)), Topic("t", TopicType.PRIORITY, slots=1)
    assert broker.run(send.send_replace(topic, 0, [50], [b"a"])) == [("stored", 50)]
    page = broker.run(inspect.list_messages(topic, 0, "store", limit=5))
    assert [entry.member for entry in page.entries] == [b"a"]
    assert broker.run(inspect.heads(topic, [0])) == broker.heads(topic, [0]) == [0]
