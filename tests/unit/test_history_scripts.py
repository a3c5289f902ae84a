"""The scripts of the history keep to the rules of all scripts, though they belong to no slot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import HistoryKeys, history_keys, times_key
from django_rmq.core.model.replies import LATENESS_BUCKETS, SAMPLED
from django_rmq.core.monitoring.history import EDGES_MS
from tests.unit import outside_slots
from tests.unit import test_lua as rules
from tests.unit.outside_slots import Recorder

FOLDER = Path(lua.__file__).parent / "history"
NAMES = sorted(f"history/{path.stem}" for path in FOLDER.glob("*.lua"))
SCRIPTS = {name: rules.Source(name) for name in NAMES}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=NAMES)


def calls_of_every_script() -> dict[str, Call]:
    ask: Any = Recorder(None, "P:")
    found: dict[str, Call] = {}
    recorded = Recorder.run
    try:

        def record(self: Recorder, call: Call) -> Any:
            found[call.script] = call
            return recorded(self, call)

        Recorder.run = record  # type: ignore[method-assign]
        ask.sample(rules.TOPIC, [0, 1])
        ask.claim_minute(rules.TOPIC, 7)
        ask.note_late(rules.TOPIC, [1] * LATENESS_BUCKETS)
        ask.note_times(rules.TOPIC, [1] * LATENESS_BUCKETS, 24, [0] * LATENESS_BUCKETS, 0)
        ask.keep_minute(rules.TOPIC, 7, "1 2 3", 60)
    finally:
        Recorder.run = recorded  # type: ignore[method-assign]
    return found


CALLS = calls_of_every_script()


def test_there_is_a_method_for_each_script() -> None:
    assert sorted(CALLS) == NAMES


@each_script
def test_a_call_hands_over_what_the_header_declares(source: rules.Source) -> None:
    call = CALLS[source.name]
    keys, arguments = source.declared("KEYS"), source.declared("ARGV")
    if source.name == "history/sample":
        assert len(call.keys("P:")) == 2 * 9
    elif source.name == "history/times":
        assert list(call.keys("P:")) == [times_key("P:", "topic")]
    else:
        assert list(call.keys("P:")) == [getattr(history_keys("P:", "topic"), key.name) for key in keys]
        assert {key.kind for key in keys} == {"HASH"}
    assert len(call.arguments("P:")) == len(arguments) - 1
    assert arguments[-1].name == "now"


def test_all_keys_of_a_topic_lie_on_one_node_of_a_cluster() -> None:
    keys = (*history_keys("P:", "topic"), times_key("P:", "topic"))
    tags = {re.search(rb"\{(.*?)\}", key)[1] for key in keys}  # type: ignore[index]
    assert tags == {b"P:rmq:history:topic"}
    assert len(set(history_keys("P:", "topic"))) == len(HistoryKeys._fields)


@each_script
def test_header_and_bindings_keep_to_the_rules(source: rules.Source) -> None:
    outside_slots.check_header(source, typed=source.name != "history/sample")


@each_script
def test_code_keeps_to_the_rules(source: rules.Source) -> None:
    commands = outside_slots.check_code(source, also=frozenset({"EXPIRE"}))
    assert (set(commands) & {*rules.WRITES, "EXPIRE"} == set()) == (source.name == "history/sample")


@each_script
def test_a_script_that_writes_begins_with_a_removal(source: rules.Source) -> None:
    written = [
        command for command in re.findall(r"redis\.call\('([A-Z]+)'", source.code) if command in rules.WRITES
    ]
    assert written[:1] in ([], ["HDEL"])


def test_the_counters_that_are_read_are_those_that_are_named() -> None:
    code = SCRIPTS["history/sample"].code
    listed = re.search(r"for j, name in ipairs\(\{([^}]*)\}", code)
    sums = re.search(r"local depths, sums = [^}]*\}, \{([^}]*)\}", code)
    assert listed
    assert sums
    assert sums[1].count("0") == len(SAMPLED)
    assert tuple(re.findall(r"'(\w+)'", listed[1])) == SAMPLED
    assert len(EDGES_MS) + 1 == LATENESS_BUCKETS
    assert list(EDGES_MS) == sorted(set(EDGES_MS))


@each_script
def test_a_script_reads_no_unknown_global_and_has_the_sha_that_redis_computes(
    source: rules.Source, redis_client: redis.Redis
) -> None:
    outside_slots.check_bytecode(source, redis_client, frozenset({"table"}))
