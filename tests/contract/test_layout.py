"""The article's layout, byte for byte: what our scripts write, and what its producers may write."""

from __future__ import annotations

import pytest

from django_rmq.core.model.delivered_message import message_id
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.testing import Clock
from tests.contract.slots import BOTH, CONSTANT, NO_BACKOFF, TYPES, Make, Slot, each_type, slot_of_each


def key(slot: Slot, text: str) -> bytes:
    return text.replace("K", slot.keys.store.decode()).encode()


def test_every_key_of_a_slot_has_the_documented_name(make_slot: Make) -> None:
    slot = make_slot(name="price", index=3)
    prefix = slot.broker.prefix
    assert slot.keys.store == f"{prefix}price_3".encode()
    names = [
        "prepare_body", "prepare", "inflight", "retry", "dead", "deaths", "failures", "body", "stats",
        "control", "claims",
    ]  # fmt: skip
    for name in [*names, "claimants"]:
        assert getattr(slot.keys, name) == key(slot, name + "_{K}")


def test_the_slot_is_javas_crc_32_modulo_the_slot_count() -> None:
    assert slot_of(b"123456789", 1 << 20) == 0xCBF43926 % (1 << 20)
    assert slot_of(b"", 16) == 0
    assert message_id(3, b"\xff\xfe?") == "3.__4_"


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        (TopicType.RANGE_MERGE, 1_800_000_060_000),
        (TopicType.PRIORITY, 900),
        (TopicType.FIXED_TIME, 1_800_000_060_000),
    ],
)
def test_a_send_is_one_member_of_store_with_due_time_or_priority(
    make_slot: Make, kind: TopicType, score: int
) -> None:
    slot = make_slot(kind)
    slot.send(b'{"sku":1}', score=60_000 if kind is TopicType.RANGE_MERGE else score)
    dump = slot.snapshot()
    assert dump[slot.keys.store] == {b'{"sku":1}': score}
    assert dump[key(slot, "stats_{K}")] == {b"stored": b"1"}


@slot_of_each(TYPES, identity=BOTH, max_retries=1, backoff=CONSTANT, timeout=30)
def test_the_keys_and_values_of_a_whole_life(slot: Slot, clock: Clock) -> None:
    """One message fails twice and dies; every key is as documented at every step."""
    slot.send(b"m", body=b"the body")
    score = slot.zset("store")[b"m"]
    text = b"%d" % score
    envelope = slot.envelope(b"the body")
    body = {slot.keys.body: {b"m": envelope}} if envelope else {}
    assert envelope in (None, b"0 {}\nthe body")
    clock.advance("1500ms")
    control = {b"slots": b"1", b"timeout": b"30", b"max_retries": b"1"}
    since = {b"undrained_since": b"1800000000000"} if slot.topic.is_priority else {}
    assert slot.hash("control").items() >= since.items()

    slot.take_one("owner-1")
    taken = {**control, b"owner": b"owner-1", b"deliveries": b"1800000001500001"}
    taken |= {b"marked": b"1800000001500001"} if envelope else {}  # it has to be committed by name
    stats = {b"stored": b"1", b"prepared": b"1"}
    assert slot.snapshot() == {
        **({slot.keys.prepare_body: {b"m": envelope}} if envelope else {}),
        key(slot, "prepare_{K}"): {b"m": 1_800_000_001_001},
        key(slot, "inflight_{K}"): {b"m": b"1800000001500001 " + text},
        key(slot, "control_{K}"): taken,
        key(slot, "stats_{K}"): stats,
    }

    slot.fail(clock() + 1, b"m", error="boom")
    stats[b"failed"] = b"1"
    assert slot.snapshot() == {
        **body,
        key(slot, "retry_{K}"): {b"m": 1_800_000_002_500 + 1 / 1024},
        key(slot, "failures_{K}"): {b"m": b"failed 1 1800000001500 1800000001500 " + text + b"\nboom"},
        key(slot, "control_{K}"): taken,
        key(slot, "stats_{K}"): stats,
    }

    clock.advance(1)
    slot.promote()
    retry = score + 1 / 1024 if slot.topic.is_priority else 1
    assert slot.zset("store") == {b"m": retry}

    receipt, delivery = slot.take_one("owner-1")
    assert (delivery.score, delivery.retries_left) == (retry, 0)
    assert slot.zset("prepare") == {b"m": 1_800_000_002_000}

    slot.fail(receipt, b"m", error="boom again")
    stats |= {b"prepared": b"2", b"failed": b"2", b"died": b"1"}
    death = b"failed 2 1800000001500 1800000002500 %s 10 %d\nboom again" % (text, bool(envelope))
    assert slot.snapshot() == {
        key(slot, "dead_{K}"): {b"m": 1_800_000_002_500},
        key(slot, "deaths_{K}"): {b"m": death + (envelope or b"")},
        key(slot, "control_{K}"): {
            **taken,
            b"deliveries": b"1800000002500000",
            b"marked": b"1800000002500000",
        },
        key(slot, "stats_{K}"): stats,
    }


@slot_of_each([TopicType.RANGE_MERGE, TopicType.FIXED_TIME], backoff=NO_BACKOFF)
def test_a_retry_without_back_off_waits_with_the_articles_scores_16_to_1(slot: Slot) -> None:
    slot.send(b"a")
    seen: list[float] = []
    while slot.where(b"a") != "D":
        slot.fail_one(b"a")
        seen += slot.zset("store").values()
    assert seen == list(range(16, 0, -1))


@each_type
def test_a_plain_zadd_is_served_like_a_send(slot: Slot) -> None:
    slot.zadd(b"plain", slot.fresh_score())
    assert slot.audit_ledger().live_drift == 1
    receipt, delivery = slot.take_one()
    assert (delivery.member, delivery.retries_left, delivery.envelope) == (b"plain", 16, None)
    assert slot.commit(receipt, [b"plain"]) == ["ok"]
    assert slot.adopt(1, 0) == "ok"
    assert slot.audit_ledger().balanced
    slot.strangers = 0


def test_the_definitions_of_all_topics_are_one_hash(make_slot: Make) -> None:
    slot = make_slot()
    broker, topic = slot.broker, slot.topic
    assert broker.definitions() == {}
    assert broker.define(topic) == topic.definition()
    changed = Topic(topic.name, topic.type, slots=8)
    assert broker.define(changed) == topic.definition()
    assert broker.definitions() == {topic.name: topic.definition()}
    assert broker.define(changed, replace=True) == changed.definition() == broker.definitions()[topic.name]
    broker.note_slot_basis(topic)
    assert slot.keyspace.hash(f"{broker.prefix}rmq:topics:explicit_basis".encode()) == {
        topic.name.encode(): b"1"
    }
