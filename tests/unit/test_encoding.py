"""Bodies as bytes: what is stored for values that JSON does not have, and what is refused. No server, no settings."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.utils.dateparse import parse_duration
from django.utils.functional import SimpleLazyObject, lazy
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.words.bodies import DEEPEST, encode_decoded, encode_json, is_deeper
from django_rmq.exceptions import InvalidMessage


class User:
    """An object that JSON cannot represent, and whose text would be taken for it."""

    def __str__(self) -> str:
        return "alice"


def nested(levels: int, inner: Any = 1) -> Any:
    for level in range(levels):
        inner = [inner] if level % 2 else {"a": inner}
    return inner


# --- lazy objects of Django


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


# --- durations


@given(st.timedeltas())
def test_a_duration_is_read_back_by_django(duration: timedelta) -> None:
    assert parse_duration(json.loads(encode_json(duration))) == duration


# --- nesting


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
