"""The scripts about definitions keep to the rules of all scripts, though they belong to no slot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.keys import topics_key
from tests.support.brokers import Broker
from tests.unit import outside_slots
from tests.unit import test_lua as rules

SCRIPTS = {name: rules.Source(name) for name in lua.names("topics")}
each_script = pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS)


class Client:
    """Knows no topic."""

    def execute_command(self, *command: Any) -> None:
        assert command[0] == "HGET"


class Recorder(Broker):
    """Notes the call that would be made."""

    call: Call[Any]

    def run(self, call: Call[Any]) -> Any:
        self.call = call
        return True


@each_script
def test_a_call_hands_over_what_the_header_declares(source: rules.Source) -> None:
    broker = Recorder(Client(), "P:")
    assert broker.redefine("prices", lambda known: {"slots": 4}) == {"slots": 4}
    keys, arguments = source.declared("KEYS"), source.declared("ARGV")
    assert broker.call.script == source.name == "topics/redefine"
    assert list(broker.call.keys("P:")) == [topics_key("P:")]
    assert [(key.name, key.kind) for key in keys] == [("topics", "HASH")]
    assert len(broker.call.arguments("P:")) == len(arguments) - 1
    assert arguments[-1].name == "now"


@each_script
def test_header_and_code_keep_to_the_rules(source: rules.Source) -> None:
    outside_slots.check_header(source)
    commands = outside_slots.check_code(source)
    written = [command for command in commands if command in rules.WRITES]
    assert written[0] == "HDEL"
    assert not re.search(r"\bfor\b|\.\.", source.code)


@each_script
def test_a_script_reads_no_unknown_global(source: rules.Source, redis_client: redis.Redis) -> None:
    outside_slots.check_bytecode(source, redis_client)
