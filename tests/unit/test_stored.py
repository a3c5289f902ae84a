"""Definitions and counters as they are read in Redis, where anybody may have written to them."""

from __future__ import annotations

import pytest

from django_rmq.core.model import keys
from django_rmq.core.model.keys import Definitions
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import WrongType
from tests.oracle.keyspace import Hash
from tests.support.brokers import OracleBroker

KEY = b"shop:rmq:topics"


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"null",
        b"1",
        b'"x"',
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b"9" * 5_000,
        b'{"slots": 3}',
        b'{"slots": "4"}',
        b'{"slots": true}',
        b'{"slots": 4, "reslot": null}',
        b'{"slots": 4, "reslot": []}',
        b'{"slots": 4, "reslot": {"to": 5, "number": 1}}',
        b'{"slots": 4, "reslot": {"to": 8}}',
        b'{"slots": 4, "reslot": {"to": 8, "number": "1"}}',
        b'{"slots": 4, "reslot": {"former": 7}}',
        b'{"slots": 4, "reslot": {"former": ["8"]}}',
    ],
    ids=lambda text: repr(text[:40]),
)
def test_what_is_no_definition_is_told_apart_and_nobody_writes_over_it(text: bytes) -> None:
    sound = b'{"slots": 4, "reslot": {"former": [2], "to": null}, "of a later version": null}'
    found = Definitions(KEY, [(b"spoilt", text), (b"sound", sound), (b"\xff", text)])
    assert list(found) == ["sound"]
    assert found.unreadable == {"spoilt", "\\xff"}
    assert found.of("sound") == found["sound"]
    assert found.of("unknown") is None
    assert found.problem("sound") == found.problem("unknown") == ""
    for call in (lambda: found.of("spoilt"), lambda: keys.definition(KEY, "spoilt", text)):
        with pytest.raises(WrongType, match="field 'spoilt' of the hash 'shop:rmq:topics'"):
            call()
    assert "shop:rmq:topics" in found.problem("spoilt")
    broker = OracleBroker()
    broker.keyspace[b"rmq:topics"] = Hash({b"spoilt": text})
    with pytest.raises(WrongType):
        broker.define(Topic("spoilt", TopicType.PRIORITY), replace=True)
    assert broker.definitions().unreadable == {"spoilt"}


def test_where_nothing_is_registered_the_definition_is_empty() -> None:
    assert keys.definition(KEY, "new", b"") == {}


@pytest.mark.parametrize("value", [b"x", b"1.5", b"nan", b"\xff", b"9" * 400, b"-" + b"9" * 30, b"9" * 5_000])
def test_a_counter_that_is_no_number_is_named_with_its_key(value: bytes) -> None:
    with pytest.raises(WrongType, match="field 'late3' of the hash 'times'"):
        keys.counters(b"times", [(b"late2", b"7"), (b"late3", value)])


def test_counters_are_whole_numbers_and_0_where_nothing_is() -> None:
    assert keys.counters(b"k", [(b"a", b"7"), (b"b", None), (b"c", b""), (b"\xff", b"-1")]) == {
        "a": 7,
        "b": 0,
        "c": 0,
        "\\xff": -1,
    }
