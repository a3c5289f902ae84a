"""Bodies as bytes: what is stored for values that JSON does not have, and what is refused. No server, no settings."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal, localcontext
from typing import Any

import pytest
from django.utils.dateparse import parse_duration
from django.utils.functional import SimpleLazyObject, lazy
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.body_codec import (
    DEEPEST,
    ExactNumber,
    decode_body,
    dumps,
    encode_decoded,
    encode_json,
    exact_body,
    exact_json,
    floats_beside_bodies,
    is_deeper,
    stored_number,
)
from django_rmq.core.model.envelope import basis_bytes
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import InvalidMessage


class User:
    """An object that JSON cannot represent, and whose text would be taken for it."""

    def __str__(self) -> str:
        return "alice"


def nested(levels: int, inner: Any = 1) -> Any:
    for level in range(levels):
        inner = [inner] if level % 2 else {"a": inner}
    return inner


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (gettext_lazy("Yes"), b'"Yes"'),
        (lazy(lambda: 7, int)(), b"7"),
        (SimpleLazyObject(lambda: None), b"null"),
        (SimpleLazyObject(lambda: {"b": 1, "a": [2]}), b'{"a":[2],"b":1}'),
        (SimpleLazyObject(lambda: gettext_lazy("Yes")), b'"Yes"'),
        ([lazy(lambda: [1], list)()], b"[[1]]"),
    ],
)
def test_a_lazy_object_is_stored_as_what_it_stands_for(given: Any, stored: bytes) -> None:
    assert encode_json(given) == stored
    assert encode_json({"at": given}) == b'{"at":' + stored + b"}"


def test_a_lazy_object_that_json_cannot_represent_is_refused_by_its_own_type() -> None:
    with pytest.raises(InvalidMessage, match="of type User"):
        encode_json({"user": SimpleLazyObject(User)})


def test_a_lazy_object_with_keys_that_are_not_text_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="JSON keys must be str"):
        encode_json({"at": SimpleLazyObject(lambda: {1: 2})})


tokens = st.from_regex(r"\A-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,2})?\Z")
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=5).map(json.dumps)
texts = st.recursive(
    tokens | words | st.sampled_from(["true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(words, inner, max_size=4).map(
            lambda items: "{" + ",".join(f"{key}: {value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=12,
)


def exactly(text: str | bytes) -> Any:
    """Read a JSON text without a float: each number is a Decimal, which is as long as its text."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


@given(texts)
def test_any_json_text_becomes_a_body_of_the_same_value(text: str) -> None:
    with localcontext(prec=200):
        stored = encode_json(exact_json(text))
        assert exactly(stored) == exactly(text)
        assert encode_json(exact_json(stored.decode())) == stored
        assert encode_decoded(exact_json(text)) == stored
        assert exactly(dumps(exact_json(text), indent=2)) == exactly(text)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ('{"b":12345678901234567.89,"a":1.50}', b'{"a":1.50,"b":12345678901234567.89}'),
        ("[1e2, 100, 100.0, 1E+2]", b"[1e2,100,100.0,1E+2]"),
        ("[0.1, 1.5, -0.0, 1e22]", b"[0.1,1.5,-0.0,1e22]"),
        ("12345678901234567890123", b"12345678901234567890123"),
    ],
)
def test_a_number_is_written_as_it_was_read(text: str, stored: bytes) -> None:
    assert encode_json(exact_json(text)) == stored


@pytest.mark.parametrize("text", ["1e400", "-1e999", "9" * 400 + ".0"])
def test_a_number_that_no_listener_could_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="out of range"):
        exact_json(text)


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', '[{"b":{"x":1,"y":2,"x":1}}]', '{"é":1,"\\u00e9":1}'])
def test_a_text_that_has_a_key_twice_is_refused(text: str) -> None:
    for one in (text, text.encode(), f"\ufeff{text}".encode()):
        with pytest.raises(ValueError, match=r"an object has the key '(a|x|é)' twice"):
            exact_json(one)
    topic = Topic("t", TopicType.PRIORITY)
    assert exact_body(topic, text.encode()) == decode_body(topic, text.encode()) == json.loads(text)


def test_a_stored_number_without_a_float_is_written_as_a_number() -> None:
    read = {token: stored_number(token) for token in ("1.50", "1e2", "12345678901234567.89", "1e400")}
    assert read == {"1.50": 1.5, "1e2": 100.0, **{token: Decimal(token) for token in list(read)[2:]}}
    assert json.loads(encode_json(list(read.values())), parse_float=Decimal) == list(map(Decimal, read))
    assert encode_json(Decimal("12345678901234567.89")) == b'"12345678901234567.89"'


def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    body = {"a": ExactNumber("1.50"), "b": "1.50", "c": repr(ExactNumber("1.50"))}
    assert encode_json(body) == b'{"a":1.50,"b":"1.50","c":"1.50"}'


def test_a_slot_basis_is_the_float_that_a_listener_reads() -> None:
    assert basis_bytes(ExactNumber("1.50")) == basis_bytes(1.5) == b"1.5"


def test_numbers_outside_of_bodies_are_floats() -> None:
    read = exact_json('{"rate": 0.50, "messages": [{"body": {"rate": 0.50}, "at": 1.0e3}]}')
    found = floats_beside_bodies(read)
    assert found == {"rate": 0.5, "messages": [{"body": {"rate": ExactNumber("0.50")}, "at": 1000.0}]}


@given(st.timedeltas())
def test_a_duration_is_read_back_by_django(duration: timedelta) -> None:
    assert parse_duration(json.loads(encode_json(duration))) == duration


@pytest.mark.parametrize("encode", [encode_json, encode_decoded])
def test_the_limit_of_nesting_is_the_same_on_every_stack(encode: Any) -> None:
    assert json.loads(encode(nested(DEEPEST))) == nested(DEEPEST)
    for levels in (DEEPEST + 1, 900, 100_000):
        with pytest.raises(InvalidMessage, match=f"{DEEPEST} lists and objects"):
            encode(nested(levels))

    def deep_in_the_stack(calls: int) -> bytes:
        return deep_in_the_stack(calls - 1) if calls else encode(nested(DEEPEST))

    assert deep_in_the_stack(500) == encode(nested(DEEPEST))


def test_many_lists_beside_each_other_and_brackets_in_texts_are_not_nested() -> None:
    body = [["["] * 5, {"{": "{" * 500}] * 200
    assert json.loads(encode_json(body)) == body
    assert is_deeper([[[]]], 2)
    assert not is_deeper([[[]]], 3)


def test_a_body_that_contains_itself_is_refused() -> None:
    body: list[Any] = []
    body.append(body)
    with pytest.raises(InvalidMessage, match="contains itself"):
        encode_json(body)
