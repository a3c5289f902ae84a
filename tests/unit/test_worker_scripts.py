"""The scripts about workers keep to the rules of all scripts, though they belong to no slot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import WorkerKeys, worker_keys
from tests.unit import outside_slots
from tests.unit import test_lua as rules
from tests.unit.outside_slots import Recorder

FOLDER = Path(lua.__file__).parent / "workers"
NAMES = sorted(f"workers/{path.stem}" for path in FOLDER.glob("*.lua"))
SCRIPTS = {name: rules.Source(name) for name in NAMES}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=NAMES)


def calls_of_every_script() -> dict[str, Call]:
    ask: Any = Recorder(None, "P:")
    calls: list[Call] = [
        ask.beat("w", "t", 4000, record="t {}", known_members="1", known_number="2"),
        ask.leave("w", "t"),
        ask.assign("1", "2", "{}"),
        ask.roster(),
    ]
    return {call.script: call for call in calls}


CALLS = calls_of_every_script()


def test_there_is_a_method_for_each_script() -> None:
    assert sorted(CALLS) == NAMES


@each_script
def test_a_call_hands_over_what_the_header_declares(source: rules.Source) -> None:
    call = CALLS[source.name]
    keys, arguments = source.declared("KEYS"), source.declared("ARGV")
    assert list(call.keys("P:")) == [getattr(worker_keys("P:"), key.name) for key in keys]
    assert [key.kind for key in keys] == ["ZSET" if key.name == "sessions" else "HASH" for key in keys]
    assert len(call.arguments("P:")) == len(arguments) - 1
    assert arguments[-1].name == "now"


def test_all_keys_lie_on_one_node_of_a_cluster() -> None:
    tags = {re.search(rb"\{(.*?)\}", key)[1] for key in worker_keys("P:")}  # type: ignore[index]
    assert tags == {b"P:rmq:workers"}
    assert len(set(worker_keys("P:"))) == len(WorkerKeys._fields)


@each_script
def test_header_and_bindings_keep_to_the_rules(source: rules.Source) -> None:
    outside_slots.check_header(source)


@each_script
def test_code_keeps_to_the_rules(source: rules.Source) -> None:
    commands = outside_slots.check_code(source)
    assert (set(commands) & rules.WRITES == set()) == (source.name == "workers/roster")


@each_script
def test_a_script_that_writes_begins_with_a_removal(source: rules.Source) -> None:
    """Redis lets the rest of a script pass when memory is full, if its first write needs none."""
    written = [
        command for command in re.findall(r"redis\.call\('([A-Z]+)'", source.code) if command in rules.WRITES
    ]
    assert written[:1] in ([], ["ZREM"], ["HDEL"])


@each_script
def test_a_script_reads_no_unknown_global_and_has_the_sha_that_redis_computes(
    source: rules.Source, redis_client: redis.Redis
) -> None:
    outside_slots.check_bytecode(source, redis_client)
