"""Messages of fifo topics without a key: what their members hold, and what is read from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.envelope import (
    LARGEST_HELD,
    MARK,
    WIDTH,
    Envelope,
    body_of,
    content_of,
    decode_envelope,
    encode_envelope,
    envelope_of,
    key_of,
    raw_body,
    stored_basis,
)
from django_rmq.core.model.replies import Delivery
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.identity import draw_members
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.testing import Clock
from tests.support.brokers import OracleBroker

LINES = Topic("lines", TopicType.FIFO, slots=8, identity="key", body="text")
ENTITIES = Topic("entities", TopicType.FIFO, slots=8, identity="key", slot_basis="shop")
KEYED = Topic("keyed", TopicType.RANGE_MERGE, slots=8, time_range_ms=1, identity="key", body="text")
PLAIN = Topic("plain", TopicType.RANGE_MERGE, slots=8, time_range_ms=1, body="bytes")


def build(topic: Topic, body: Any, **options: Any) -> Outgoing:
    return Producer(OracleBroker(clock=Clock())).build(topic, body, **options)


@given(
    body=st.text(st.characters(codec="utf-8"), min_size=1, max_size=80),
    headers=st.none() | st.just({"trace": "a\nb"}),
    basis=st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_a_message_without_a_key_is_one_member_that_says_all(
    body: str, headers: dict[str, str] | None, basis: str | None
) -> None:
    out = build(LINES, body, headers=headers, slot_basis=basis)
    assert out.envelope is None
    message: Message[Any] = Message(LINES, out.slot, 1, Delivery(out.member, 5.0, 3))
    assert (message.body, message.headers, message.key) == (body, headers or {}, None)
    assert raw_body(LINES, out.member, None) == content_of(LINES, out.member, None).body == body.encode()
    known = stored_basis(LINES, out.member, None)
    assert known == ("lines" if basis is None else basis).encode()
    assert out.slot == crc32(known) & 7


@pytest.mark.parametrize("shop", [7, "seven", "", True, 1.5, None, {"a": [1]}])
def test_the_body_says_which_entity_a_message_belongs_to(shop: Any) -> None:
    out = build(ENTITIES, {"shop": shop})
    assert content_of(ENTITIES, out.member, None).slot_basis is None
    known = stored_basis(ENTITIES, out.member, None)
    assert known is not None
    assert out.slot == crc32(known) & 7 == build(ENTITIES, {"shop": shop}, key="k").slot


def test_without_an_entity_a_loose_message_is_in_the_slot_of_its_member() -> None:
    loose = replace(LINES, order="loose")
    out = build(loose, "x")
    assert stored_basis(loose, out.member, None) == out.member
    assert out.slot == crc32(out.member) & 7


def test_equal_messages_have_members_of_their_own() -> None:
    assert len({build(LINES, "x").member for _ in range(100)}) == 100
    drawn = draw_members(5_000)
    assert len(set(drawn)) == 5_000
    assert {len(member) for member in drawn} == {WIDTH}


@pytest.mark.parametrize("options", [{"expires": 1 << 41}, {"max_retries": 1}, {"timeout": 3}], ids=str)
def test_what_scripts_have_to_read_is_beside_the_member(options: dict[str, Any]) -> None:
    out = build(LINES, "x", **options)
    assert len(out.member) == WIDTH
    assert out.envelope is not None
    assert content_of(LINES, out.member, out.envelope).body == b"x"
    assert key_of(LINES, out.member) is None
    assert stored_basis(LINES, out.member, out.envelope) == b"lines"


@pytest.mark.parametrize(("extra", "held"), [(0, True), (1, False)])
def test_a_large_message_is_beside_its_member(extra: int, held: bool) -> None:
    head = encode_envelope(Envelope(b"", slot_basis="lines"))
    body = "x" * (LARGEST_HELD - len(head) + extra)
    alone = build(LINES, body)
    assert (alone.envelope is None) is held
    broker = OracleBroker(clock=Clock())
    (result,) = Producer(broker).send_bodies(LINES, [body])
    assert (len(result.member) > WIDTH) is held


def test_an_envelope_that_was_stored_since_counts() -> None:
    out = build(LINES, "first")
    edited = encode_envelope(Envelope(b"second"))
    assert content_of(LINES, out.member, edited).body == b"second"


@pytest.mark.parametrize(
    "member",
    [b"\xff", b"\xff" * 40, MARK + b"a stranger's own value, without a head", b"sixteen letters!0 {}\nx"],
)
def test_a_value_of_another_program_is_a_body(member: bytes) -> None:
    assert envelope_of(LINES, member, None) is None
    assert raw_body(LINES, member, None) == member


@pytest.mark.parametrize(
    "raw",
    [
        b"00 {}\n000000001 -3:abc",
        b"00 {}\n000000001 +1:a",
        b"00 {}\n000000001 :a",
        b"0 " + b"[" * 100_000 + b"\nx",
    ],
    ids=range(4),
)
def test_an_envelope_of_another_program_is_a_body_as_well(raw: bytes) -> None:
    assert decode_envelope(raw) == Envelope(raw)
    assert body_of(raw) == raw


@pytest.mark.parametrize("basis", ["5", "[]", '"\\ud800"'])
def test_a_basis_of_another_program_that_is_no_text_has_no_slot(basis: str) -> None:
    out = build(KEYED, "x", key="k")
    assert stored_basis(KEYED, out.member, b'0 {"basis":%s}\nx' % basis.encode()) is None


@given(
    st.sampled_from([b"0 ", b"5 ", b"00 ", b"", b"x "]),
    st.sampled_from([b"{}", b"5", b"[]", b'{"headers":1}', b'{"basis":"a"}', b'{"!":"1 2"}', b"{", b""]),
    st.sampled_from([b"\n", b""]),
    st.sampled_from([b"", b"x", b"a\nb", b"000000001 1:x", b"000000002 1:x1:y"]),
)
def test_the_quick_way_to_a_body_finds_the_same(start: bytes, meta: bytes, end: bytes, body: bytes) -> None:
    raw = start + meta + end + body
    assert body_of(raw) == decode_envelope(raw).body


@pytest.mark.parametrize("member", [build(LINES, "x").member, MARK + b"fifteen letters" + b"0 {}\nx"])
def test_other_topics_hold_nothing_in_members(member: bytes) -> None:
    assert raw_body(PLAIN, member, None) == member
    assert raw_body(KEYED, member, None) == member
    assert envelope_of(PLAIN, member, b"0 {}\nx") is None
    assert key_of(KEYED, b"k") == "k"
    assert key_of(PLAIN, b"k") is None


def test_no_key_looks_like_a_drawn_member() -> None:
    key = "\xff" * 20 + "0 {}\nx"
    out = build(LINES, "body", key=key)
    assert key_of(LINES, out.member) == key
    assert raw_body(LINES, out.member, out.envelope) == b"body"
