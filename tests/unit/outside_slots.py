"""The rules of all scripts, as those keep them that belong to no slot."""

from __future__ import annotations

import re
from typing import Any

import redis

from django_rmq.core import lua
from django_rmq.core.commands.script_call import Call
from tests.support.brokers import Broker
from tests.unit import test_lua as rules


class Recorder(Broker):
    """Answers with the call that would be made."""

    def run(self, call: Call[Any]) -> Any:
        return call


def check_header(source: rules.Source, *, typed: bool = True) -> None:
    """``typed``: its keys have fixed types, which it looks at first."""
    rules.test_a_header_begins_with_one_sentence_and_says_what_is_returned(source)
    rules.test_keys_and_fixed_arguments_are_read_by_their_names_only(source)
    rules.test_every_declared_key_and_argument_is_used(source)
    if typed:
        rules.test_the_types_that_a_header_names_are_looked_at_before_anything_else(source)
    for table in ("KEYS", "ARGV"):
        rules.test_what_a_header_declares_is_numbered_from_one_without_gaps(source, table)


def check_bytecode(source: rules.Source, client: redis.Redis, also: frozenset[str] = frozenset()) -> None:
    """No unknown global is read, and Redis computes the same SHA."""
    script = lua.load(source.name)
    dump = client.eval("return string.dump(loadstring(ARGV[1]))", 0, script.text)
    assert isinstance(dump, bytes)
    chunk = rules.Bytecode(dump)
    assert chunk.read <= rules.KNOWN_GLOBALS | also
    assert chunk.written == set()
    assert client.script_load(script.text).encode() == script.sha


def check_code(source: rules.Source, also: frozenset[str] = frozenset()) -> list[str]:
    """Return the commands that are called, which are those of all scripts and what is allowed ``also``."""
    commands: list[str] = re.findall(r"redis\.p?call\('([A-Z]+)'", source.code)
    assert len(commands) == len(re.findall(r"redis\.p?call", source.code))
    assert set(commands) <= rules.READS | rules.WRITES | also
    assert "tostring" not in source.code
    assert "cjson" not in source.code
    assert not re.search(r"\bwhile\b|\brepeat\b|\bgoto\b|math\.random|\bos\.|\bio\.", source.code)
    assert list(rules.joined(source.code)) == []
    assert max(map(len, source.text.split("\n"))) <= 130
    return commands
