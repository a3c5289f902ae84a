"""The scripts of the history keep to the rules of all scripts, though they belong to no slot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from django_rmq import lua
from django_rmq.broker import Broker, Call
from django_rmq.history import EDGES_MS
from django_rmq.keys import HistoryKeys, history_keys, times_key
from django_rmq.messages import LATENESS_BUCKETS, SAMPLED
from tests.unit import test_lua as rules

FOLDER = Path(lua.__file__).parent / "history"
NAMES = sorted(f"history/{path.stem}" for path in FOLDER.glob("*.lua"))
SCRIPTS = {name: rules.Source(name) for name in NAMES}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=NAMES)


class Recorder(Broker):
    """Answers with the call that would be made."""

    def _run(self, call: Call) -> Any:
        return call


def calls_of_every_script() -> dict[str, Call]:
    ask: Any = Recorder(None, "P:")
    found: dict[str, Call] = {}
    recorded = Recorder._run
    try:

        def record(self: Recorder, call: Call) -> Any:
            found[call.script] = call
            return recorded(self, call)

        Recorder._run = record  # type: ignore[method-assign]
        ask.sample(rules.TOPIC, [0, 1])
        ask.claim_minute(rules.TOPIC, 7)
        ask.note_late(rules.TOPIC, [1] * LATENESS_BUCKETS)
        ask.note_times(rules.TOPIC, [1] * LATENESS_BUCKETS, 24, [0] * LATENESS_BUCKETS, 0)
        ask.keep_minute(rules.TOPIC, 7, "1 2 3", 60)
    finally:
        Recorder._run = recorded  # type: ignore[method-assign]
    return found


CALLS = calls_of_every_script()


def test_there_is_a_method_for_each_script() -> None:
    assert sorted(CALLS) == NAMES


@each_script
def test_a_call_hands_over_what_the_header_declares(source: rules.Source) -> None:
    call = CALLS[source.name]
    keys, arguments = source.declared("KEYS"), source.declared("ARGV")
    if source.name == "history/sample":
        assert len(call.keys) == 2 * 5
    elif source.name == "history/times":
        assert list(call.keys) == [times_key("P:", "topic")]
    else:
        assert list(call.keys) == [getattr(history_keys("P:", "topic"), key.name) for key in keys]
        assert {key.kind for key in keys} == {"HASH"}
    assert len(call.args) == len(arguments) - 1
    assert arguments[-1].name == "now"


def test_all_keys_of_a_topic_lie_on_one_node_of_a_cluster() -> None:
    keys = (*history_keys("P:", "topic"), times_key("P:", "topic"))
    tags = {re.search(rb"\{(.*?)\}", key)[1] for key in keys}  # type: ignore[index]
    assert tags == {b"P:rmq:history:topic"}
    assert len(set(history_keys("P:", "topic"))) == len(HistoryKeys._fields)


@each_script
def test_header_and_bindings_keep_to_the_rules(source: rules.Source) -> None:
    rules.test_a_header_begins_with_one_sentence_and_says_what_is_returned(source)
    rules.test_every_declared_key_and_argument_is_bound_to_its_name_and_no_other_is_read(source)
    rules.test_keys_and_fixed_arguments_are_read_in_bindings_only(source)
    if source.name != "history/sample":
        rules.test_the_types_that_a_header_names_are_looked_at_before_anything_else(source)
    for table in ("KEYS", "ARGV"):
        rules.test_what_a_header_declares_is_numbered_from_one_without_gaps(source, table)


@each_script
def test_code_keeps_to_the_rules(source: rules.Source) -> None:
    code = source.code
    commands = re.findall(r"redis\.p?call\('([A-Z]+)'", code)
    assert len(commands) == len(re.findall(r"redis\.p?call", code))
    writes = rules.WRITES | {"EXPIRE"}
    assert set(commands) <= rules.READS | writes
    assert (set(commands) & writes == set()) == (source.name == "history/sample")
    assert "tostring" not in code
    assert "cjson" not in code
    assert list(rules.joined(code)) == []
    assert not re.search(r"\bwhile\b|\brepeat\b|\bgoto\b|math\.random|\bos\.|\bio\.", code)
    assert max(map(len, source.text.split("\n"))) <= 130


@each_script
def test_a_script_that_writes_begins_with_a_removal(source: rules.Source) -> None:
    written = [
        command for command in re.findall(r"redis\.call\('([A-Z]+)'", source.code) if command in rules.WRITES
    ]
    assert written[:1] in ([], ["HDEL"])


def test_the_counters_that_are_read_are_those_that_are_named() -> None:
    listed = re.search(r"'HMGET', slots_keys\[i \+ 4\], ([^)]*)\)", SCRIPTS["history/sample"].code)
    assert listed
    assert tuple(re.findall(r"'(\w+)'", listed[1])) == SAMPLED
    assert len(EDGES_MS) + 1 == LATENESS_BUCKETS
    assert list(EDGES_MS) == sorted(set(EDGES_MS))


@each_script
def test_a_script_reads_no_unknown_global_and_has_the_sha_that_redis_computes(
    source: rules.Source, redis_client: redis.Redis
) -> None:
    script = lua.load(source.name)
    dump = redis_client.eval("return string.dump(loadstring(ARGV[1]))", 0, script.text)
    assert isinstance(dump, bytes)
    chunk = rules.Bytecode(dump)
    assert chunk.read <= rules.KNOWN_GLOBALS | {"table"}
    assert chunk.written == set()
    assert redis_client.script_load(script.text).encode() == script.sha
