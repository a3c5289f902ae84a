"""The scripts that belong to no slot keep to the rules of all scripts, which ``test_lua`` has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import HistoryKeys, WorkerKeys, history_keys, worker_keys
from django_rmq.core.model.replies import LATENESS_BUCKETS, SAMPLED
from django_rmq.core.monitoring.history import EDGES_MS
from tests.support.brokers import Broker
from tests.unit import test_lua as rules
from tests.unit.test_lua import TOPIC, Source

NAMES = [name for name in lua.all_names() if "/" in name]
SCRIPTS = {name: Source(name) for name in NAMES}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=NAMES)

READING = {"history/sample", "workers/roster"}
REFUSED_BY_A_FULL_SERVER = {"stored_results/begin_request", "limits/spend", "stored_results/store_result"}
LOOPING = {
    "history/store_minute", "history/count_lateness", "history/sample", "history/count_times",
    "limits/allow", "workers/beat", "workers/roster",
}  # fmt: skip


class NoTopics:
    """A client of a Redis that knows no topic."""

    def execute_command(self, *command: Any) -> None:
        assert command[0] == "HGET"


class Recorder(Broker):
    """Notes the calls that would be made."""

    def __init__(self) -> None:
        super().__init__(NoTopics(), "P:")
        self.calls: dict[str, Call[Any]] = {}

    def run(self, call: Call[Any]) -> Any:
        self.calls[call.script] = call
        return True


def calls_of_every_script() -> dict[str, Call[Any]]:
    ask: Any = Recorder()
    ask.begin_request("r", "c", "t", 1)
    ask.store_answer("r", "t", b"k", 1)
    ask.hold_consumer(TOPIC, "c", "d", "cp", "a", 1)
    ask.leave_consumer(TOPIC, "c", "d")
    ask.sample(TOPIC, [0, 1])
    ask.take_minute(TOPIC, 7)
    ask.count_lateness(TOPIC, [1] * LATENESS_BUCKETS)
    ask.count_times(TOPIC, [1] * LATENESS_BUCKETS, 24, [0] * LATENESS_BUCKETS, 0)
    ask.store_minute(TOPIC, 7, "1 2 3", 60)
    ask.allow(TOPIC, "w", tokens=1, in_use=2, wanted=3, lease_ms=4)
    ask.end_permits(TOPIC, "w", 1, 2)
    ask.spend("s", 1.5, 2, 1)
    ask.store_result("r", 3, 1, b"j", b"k")
    ask.change_schedule("s", "paused", "1")
    ask.renew_schedule("s")
    ask.plan_tick("s", 1, 2, 3, "reports", 4)
    ask.settle_tick("s", 1, 2, "written")
    assert ask.redefine("prices", lambda known: {"slots": 4}) == {"slots": 4}
    ask.beat("w", "t", 4000, record="t {}", known_members_version="1", known_plan_version="2")
    ask.leave("w", "t")
    ask.assign("1", "2", "{}")
    ask.roster()
    found: dict[str, Call[Any]] = ask.calls
    return found


CALLS = calls_of_every_script()
_WORKERS, _HISTORY = worker_keys("P:"), history_keys("P:", "topic")
KEYS = {
    "answer": b"answer_{P:rmq:answer:r}",
    "bucket": b"bucket_{P:rmq:bucket:s}",
    "consumer": b"consumer_{P:rmq:consumer:topic:c}",
    "limits": b"limits_{P:rmq:limits:topic}",
    "result": b"result_{P:rmq:result:r}",
    "schedules": b"P:rmq:schedules",
    "times": b"times_{P:rmq:history:topic}",
    "topics": b"P:rmq:topics",
    **_WORKERS._asdict(),
    **_HISTORY._asdict(),
}
"""Name of a key in the headers → the key."""


def test_there_is_a_call_of_each_script() -> None:
    assert sorted(CALLS) == NAMES


@each_script
def test_a_call_hands_over_what_the_header_declares(source: Source) -> None:
    call = CALLS[source.name]
    declared = lua.declaration(source.name)
    if source.name == "history/sample":
        assert len(call.keys("P:")) == 2 * 9
    else:
        assert list(call.keys("P:")) == [KEYS[key.name] for key in declared.keys]
    assert len(call.arguments("P:")) == len(declared.arguments) + bool(declared.rest)


def test_all_keys_of_workers_and_of_a_history_lie_on_one_node_of_a_cluster() -> None:
    for keys, tag in ((_WORKERS, b"P:rmq:workers"), ((*_HISTORY, KEYS["times"]), b"P:rmq:history:topic")):
        assert {re.search(rb"\{(.*?)\}", key)[1] for key in keys} == {tag}  # type: ignore[index]
    assert len(set(_WORKERS)) == len(WorkerKeys._fields)
    assert len(set(_HISTORY)) == len(HistoryKeys._fields)


@each_script
def test_a_header_keeps_to_the_rules(source: Source) -> None:
    rules.test_a_header_begins_with_one_sentence_and_says_what_is_returned(source)
    rules.test_keys_and_fixed_arguments_are_read_by_their_names_only(source)
    rules.test_every_declared_key_and_argument_is_used(source)
    if source.name != "history/sample":
        rules.test_the_types_that_a_header_names_are_looked_at_before_anything_else(source)


@each_script
def test_code_keeps_to_the_rules(source: Source) -> None:
    commands = re.findall(r"redis\.p?call\('([A-Z]+)'", source.code)
    assert len(commands) == len(re.findall(r"redis\.p?call", source.code))
    assert set(commands) <= rules.READS | rules.WRITES | {"EXPIRE"}
    assert not re.search(
        r"\bwhile\b|\brepeat\b|\bgoto\b|math\.random|\bos\.|\bio\.|tostring|cjson", source.code
    )
    assert bool(re.search(r"\bfor\b", source.code)) == (source.name in LOOPING)
    assert set(rules.joined(source.code)) == (
        {"", "name", "part"} if source.name.startswith("schedules/") else set()
    )
    assert max(map(len, source.text.split("\n"))) <= 130


@each_script
def test_a_script_that_writes_begins_with_a_removal(source: Source) -> None:
    """Redis lets the rest of a script pass when memory is full, if its first write needs none."""
    writes = rules.WRITES | {"EXPIRE"}
    written = [each for each in re.findall(r"redis\.p?call\('([A-Z]+)'", source.code) if each in writes]
    assert (not written) == (source.name in READING)
    assert (written[:1] == ["HSET"]) == (source.name in REFUSED_BY_A_FULL_SERVER)
    assert written[:1] in ([], ["HSET"], ["HDEL"], ["ZREM"])


@each_script
def test_a_script_reads_no_unknown_global_and_has_the_sha_that_redis_computes(
    source: Source, redis_client: redis.Redis
) -> None:
    script = lua.load(source.name)
    chunk = rules.Bytecode.of(script.text, redis_client)
    assert chunk.read <= rules.KNOWN_GLOBALS | {"table"}
    assert chunk.written == set()
    assert redis_client.script_load(script.text).encode() == script.sha


def test_the_counters_of_a_sample_are_those_that_are_named() -> None:
    code = SCRIPTS["history/sample"].code
    listed = re.search(r"for j, name in ipairs\(\{([^}]*)\}", code)
    sums = re.search(r"local depths, sums = [^}]*\}, \{([^}]*)\}", code)
    assert listed
    assert sums
    assert sums[1].count("0") == len(SAMPLED)
    assert ("sent", *re.findall(r"'(\w+)'", listed[1])) == SAMPLED
    assert len(EDGES_MS) + 1 == LATENESS_BUCKETS
    assert list(EDGES_MS) == sorted(set(EDGES_MS))
