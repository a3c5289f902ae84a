"""What the relay decides: which rows of a message it sends, with which time, and when it tries again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.identity import draw_members
from django_rmq.core.producer.placement import Outgoing
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import InvalidMessage, MessageTooLarge, TopicFull, UnknownTopic
from django_rmq.outbox.merged_rows import merge_rows, outgoing
from django_rmq.outbox.relay import LONGEST_REST_MS, REFUSALS, next_attempt
from django_rmq.outbox.rows import StoredRow, identity_of
from tests.support.brokers import OracleBroker, direct

NOW = 1_790_000_000_000
TOPICS = [
    Topic("t", kind, slots=1, identity=identity)
    for kind in TopicType
    if kind is not TopicType.FIFO
    for identity in ("body", "key")
]
LOOSE = [
    Topic("t", TopicType.FIFO, slots=1, identity="key", order="loose", on_duplicate=met)
    for met in ("keep", "replace")
]


def row(topic: Topic, number: int, act: str, score: int, **more: Any) -> StoredRow:
    envelope = None
    if topic.keyed and act != "remove":
        envelope = encode_envelope(Envelope(b"%d" % number))
    given: dict[str, Any] = {
        "id": number,
        "topic": topic.name,
        "type": topic.type.value,
        "act": act,
        "identity": UUID(int=1),
        "crc": crc32(b"m"),
        "member": b"m",
        "envelope": envelope,
        "score": score,
        "replicas": 0,
        "fsync": False,
        "sent_ms": NOW,
        "due_ms": NOW,
        "attempts": 0,
        **more,
    }
    return StoredRow(**given)


def score_of(topic: Topic, number: int) -> int:
    if topic.type in (TopicType.RANGE_MERGE, TopicType.FIFO):
        return 60_000 + number
    return 100 + number if topic.is_priority else NOW + 60_000 + number


def state_after(topic: Topic, before: list[Outgoing], messages: list[Outgoing]) -> list[Any]:
    broker = OracleBroker("", lambda: NOW)
    producer = Producer(broker)
    producer.attempt(before)
    results, errors = producer.attempt(messages, removes=True)
    assert not errors and "failed" not in {result.status for result in results}
    # The place of a fifo message within its millisecond counts what was sent to the slot meanwhile.
    return [
        (entry.member, int(entry.score), entry.envelope)
        for entry in direct(broker).list_messages(topic, 0, "store").entries
    ]


acts = st.lists(st.sampled_from(["send", "ensure", "remove"]), min_size=1, max_size=8)


@given(topic=st.sampled_from(TOPICS + LOOSE), acts=acts, waits=st.booleans())
def test_folding_leaves_what_all_rows_one_after_the_other_leave(
    topic: Topic, acts: list[str], waits: bool
) -> None:
    rows = [row(topic, number, act, score_of(topic, number)) for number, act in enumerate(acts, 1)]
    before = [outgoing(row(topic, 0, "send", score_of(topic, 50)), topic, NOW)] if waits else []
    one_by_one = state_after(topic, before, [outgoing(each, topic, NOW) for each in rows])
    kept = merge_rows(rows, keeps=topic.is_fifo and topic.on_duplicate == "keep")
    assert state_after(topic, before, [outgoing(each, topic, NOW) for each in kept]) == one_by_one
    assert len(kept) <= 2
    assert [each.act for each in kept if each.act == "remove"] == ["remove"][: len(kept)] * ("remove" in acts)


def test_a_message_with_an_earlier_send_keeps_its_time_only_if_it_merges() -> None:
    merging, replacing = TOPICS[0], TOPICS[2]
    for topic, score in ((merging, 60_001), (replacing, 102)):
        rows = [row(topic, number, "send", score_of(topic, number)) for number in (1, 2)]
        (found,) = merge_rows(rows)
        assert (found.id, found.score) == (2, score)


@pytest.mark.parametrize(
    ("acts", "times", "due"),
    [
        (["send"], [0], 60_000),
        (["send", "send"], [0, 20_000], 80_000),
        (["send", "send", "send"], [0, 50_000, 80_000], 90_000),
        (["ensure", "send"], [0, 50_000], 90_000),
        (["send", "remove", "send"], [0, 40_000, 50_000], 110_000),
        (["send", "send"], [0, 600_000], 90_000),
    ],
)
def test_rows_of_a_message_put_it_off_until_max_wait_after_the_first_send(
    acts: list[str], times: list[int], due: int
) -> None:
    topic = replace(TOPICS[0], debounce=True, max_wait_ms=90_000)
    rows = [
        row(topic, number, act, 60_000)._replace(sent_ms=NOW + at)
        for number, (act, at) in enumerate(zip(acts, times, strict=True), 1)
    ]
    *_, last = merge_rows(rows, max_wait_ms=topic.debounce_ms)
    now = NOW + times[-1]
    assert now + outgoing(last, topic, now).score == max(NOW + due, now)


def test_a_delay_above_max_wait_ends_with_it() -> None:
    topic = replace(TOPICS[0], debounce=True, max_wait_ms=90_000)
    (merged,) = merge_rows([row(topic, 1, "send", 600_000)], max_wait_ms=topic.debounce_ms)
    assert outgoing(merged, topic, NOW + 50_000).score == 40_000


@pytest.mark.parametrize(
    ("late", "waits"), [(0, 60_000), (59_999, 1), (60_000, 0), (10**9, 0), (-5_000, 60_000)]
)
def test_the_time_of_a_message_runs_from_its_send(late: int, waits: int) -> None:
    topic = TOPICS[0]
    assert outgoing(row(topic, 1, "send", 60_000), topic, NOW + late).score == waits


@pytest.mark.parametrize(("keeps", "number"), [(True, 1), (False, 2)])
def test_of_two_sends_with_a_key_a_fifo_topic_gets_one_in_the_place_of_the_first(
    keeps: bool, number: int
) -> None:
    for first in ("send", "ensure"):
        rows = [row(LOOSE[0], 1, first, 60_001), row(LOOSE[0], 2, "send", 60_002)]
        (found,) = merge_rows(rows, keeps=keeps)
        assert (found.act, found.id, found.score) == ("send", number, 60_001)


def test_a_fifo_message_waits_from_its_send_and_has_its_envelope_in_its_member() -> None:
    held = draw_members(1)[0] + encode_envelope(Envelope(b"[1]"))
    one = row(LOOSE[0], 1, "send", 60_000, member=held, envelope=None)
    assert outgoing(one, LOOSE[0], NOW + 59_000).score == 1_000
    assert outgoing(one, LOOSE[0], NOW + 10**9).score == 0
    with pytest.raises(MessageTooLarge):
        outgoing(one, replace(LOOSE[0], max_body=2), NOW)
    with pytest.raises(InvalidMessage):
        outgoing(one, TOPICS[1], NOW)


def test_other_types_keep_their_score_however_late_it_is() -> None:
    for topic in TOPICS[2:]:
        each = row(topic, 1, "send", score_of(topic, 1))
        assert outgoing(each, topic, NOW + 10**9).score == each.score


def test_a_message_of_another_type_or_identity_is_refused() -> None:
    body, key = TOPICS[2], TOPICS[3]
    for had, has in ((body, key), (key, body), (body, TOPICS[4])):
        with pytest.raises(InvalidMessage):
            outgoing(row(had, 1, "send", 100), has, NOW)
    assert outgoing(row(body, 1, "remove", 0), key, NOW).act == "remove"


def test_attempts_are_made_less_and_less_often_and_end_only_for_what_cannot_help() -> None:
    for error in (TopicFull(), UnknownTopic()):
        rests = [next_attempt(error, attempts, 0, 5_000) for attempts in range(1, REFUSALS)]
        assert rests == [10_000, 20_000, 40_000, 80_000]
    assert next_attempt(UnknownTopic(), REFUSALS, 0, 5_000) is None
    assert next_attempt(TopicFull(), 10_000, 0, 5_000) == LONGEST_REST_MS


def test_the_identity_is_that_of_topic_member_and_slot_basis() -> None:
    out = Outgoing(Topic("a", TopicType.PRIORITY), 0, b"m", 1, None, "send", crc32(b"m"))
    same = [out._replace(slot=3, score=9, act="remove", envelope=b"x"), out._replace(crc=None)]
    other = [
        out._replace(topic=Topic("b", TopicType.PRIORITY)),
        out._replace(member=b"n"),
        out._replace(crc=7),
        out._replace(topic=Topic("a m", TopicType.PRIORITY), member=b""),
    ]
    assert {identity_of(each) for each in same} == {identity_of(out)}
    assert len({identity_of(each) for each in [out, *other]}) == 5
    assert uuid4() != identity_of(out)
