from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.admin.body_display import BYTES_OF_DUMP, MAX_SHOWN, show_body, summary, visible
from django_rmq.core.model import body_codec
from django_rmq.core.model.body_codec import beginning, encode_json
from django_rmq.core.model.topic import Topic, TopicType

JSON = Topic("orders", TopicType.FIXED_TIME)
TEXT = Topic("orders", TopicType.FIXED_TIME, body="text")
BYTES = Topic("orders", TopicType.FIXED_TIME, body="bytes")


def text_of(topic: Topic, raw: bytes) -> str:
    return "".join(text for _, text in show_body(topic, raw).pieces)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
def test_json_is_shown_with_indents_and_nothing_lost(body: Any) -> None:
    shown = text_of(JSON, encode_json(body))
    assert shown == visible(json.dumps(json.loads(encode_json(body)), ensure_ascii=False, indent=2))


def test_the_pieces_of_json_say_what_they_are() -> None:
    pieces = show_body(JSON, b'{"a":[1,-2.5e3,"x\\"y:",true,null]}').pieces
    assert [piece for piece in pieces if piece[0]] == [
        ("key", '"a"'), ("number", "1"), ("number", "-2.5e3"), ("text", '"x\\"y:"'), ("word", "true"),
        ("word", "null"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", ["12345678901234567890123", "12345678901234567.89", "1.50", "1E2"])
def test_a_number_is_shown_as_it_is_stored(number: str) -> None:
    assert text_of(JSON, number.encode()) == number


@given(st.binary(max_size=300))
def test_any_bytes_can_be_shown_and_summed_up(raw: bytes) -> None:
    for topic in (JSON, TEXT, BYTES):
        assert text_of(topic, raw).replace("\n", "").replace("\t", "").isprintable()
        assert len(summary(topic, raw, 40)) <= 40
        assert "\n" not in summary(topic, raw, 40)


def test_what_is_not_seen_is_shown_by_its_number() -> None:
    assert visible("a\u202eb\x1b[0m\u200b\ud800\n") == "a\\u202eb\\u001b[0m\\u200b\\ud800\n"


def test_what_is_neither_json_nor_text_is_a_dump() -> None:
    shown = show_body(JSON, bytes(range(256)) * 20)
    assert shown.kind == "bytes"
    assert shown.is_cut and len(shown.pieces[0][1].splitlines()) == BYTES_OF_DUMP // 16
    assert shown.pieces[0][1].splitlines()[4] == (
        "000040  40 41 42 43 44 45 46 47  48 49 4a 4b 4c 4d 4e 4f  @ABCDEFGHIJKLMNO"
    )


@pytest.mark.parametrize("topic", [JSON, TEXT])
def test_a_long_body_is_cut(topic: Topic) -> None:
    whole = show_body(topic, b'"%b"' % (b"x" * (MAX_SHOWN - 2)))
    assert not whole.is_cut and len(text_of(topic, b'"%b"' % (b"x" * (MAX_SHOWN - 2)))) == MAX_SHOWN
    shown = show_body(topic, b'"%b"' % (b"x" * (MAX_SHOWN - 1)))
    assert shown.is_cut and len(shown.pieces[0][1]) == MAX_SHOWN


@pytest.mark.parametrize("number", ["1", "1.50"])
def test_of_lists_within_lists_no_more_is_made_than_is_shown(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of them has 64 megabytes with its indents."""
    made = list[int]()

    def count(pieces: Iterable[str], length: int) -> tuple[str, bool]:
        text, is_whole = beginning(pieces, length)
        made.append(len(text))
        return text, is_whole

    monkeypatch.setattr(body_codec, "beginning", count)
    raw = f"[{','.join(['[' * 90 + number + ']' * 90] * 5000)}]".encode()
    shown = show_body(JSON, raw)
    assert shown.is_cut and MAX_SHOWN < made[-1] < 2 * MAX_SHOWN
    assert re.sub(r"\s", "", shown.pieces[0][1]) == raw.decode()[: len(re.sub(r"\s", "", shown.pieces[0][1]))]


def test_nesting_that_no_parser_takes_is_shown_as_text() -> None:
    raw = b"[" * 200_000
    assert show_body(JSON, raw).kind == "text"
    assert summary(JSON, raw).startswith("[[[")


def hide_card(topic: str, body: Any) -> Any:
    return {**body, "card": f"{topic} ***"}


def fail(topic: str, body: Any) -> Any:
    raise RuntimeError(body)


@pytest.fixture
def formatter(settings: Any):
    def set_formatter(given: object) -> None:
        settings.RMQ = {
            "BROKER": "memory",
            "TOPICS": {"orders": {"TYPE": "fixed_time"}},
            "ADMIN": {"FORMATTER": given},
        }

    return set_formatter


def test_a_formatter_stands_before_page_and_list(formatter: Any) -> None:
    formatter({"orders": f"{__name__}.hide_card"})
    raw = b'{"card":"4111","order":1}'
    shown = show_body(JSON, raw)
    assert shown.formatted
    assert "4111" not in text_of(JSON, raw)
    assert "4111" not in summary(JSON, raw)
    assert "orders ***" in summary(JSON, raw)
    other = Topic("other", TopicType.FIXED_TIME)
    assert "4111" in text_of(other, raw)


@pytest.mark.parametrize("path", ["fail", "missing"])
def test_a_formatter_that_fails_withholds_the_body(formatter: Any, path: str) -> None:
    formatter(f"{__name__}.{path}")
    raw = b'{"card":"4111"}'
    assert show_body(JSON, raw).kind == "withheld"
    assert "4111" not in text_of(JSON, raw) + summary(JSON, raw)
