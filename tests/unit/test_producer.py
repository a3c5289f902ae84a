"""The producer: what it refuses, where a message goes, and how many become few round trips. No server."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from django_rmq.core.commands.broker_interface import batched
from django_rmq.core.commands.send import takes_scattered
from django_rmq.core.model.envelope import Envelope, basis_bytes, decode_envelope
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Failure
from django_rmq.core.model.send_results import SendResults
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.bulk_send import ROUND_TRIP, TRIP_BYTES
from django_rmq.core.producer.placement import Outgoing, instant_ms, slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.exceptions import (
    InvalidMessage,
    MessageTooLarge,
    RmqError,
    ServerUnavailable,
    SlotMoved,
    WrongType,
)
from django_rmq.testing import Clock
from tests.oracle.keyspace import SortedSet
from tests.support.brokers import OracleBroker

MERGE = Topic("prices", TopicType.RANGE_MERGE, time_range_ms=5000)
PRIORITY = Topic("renders", TopicType.PRIORITY)
FIXED = Topic("orders", TopicType.FIXED_TIME)
FIFO = Topic("lines", TopicType.FIFO, identity="key", slot_basis="shop")
KEYED = replace(MERGE, name="keyed", identity="key")


def ms(at: datetime) -> int:
    return instant_ms("at", at)


TOMORROW = ms(datetime.now(UTC) + timedelta(days=1))


@pytest.fixture
def broker() -> OracleBroker:
    return OracleBroker(clock=Clock())


@pytest.fixture
def producer(broker: OracleBroker) -> Producer:
    return Producer(broker)


def refusal(producer: Producer, topic: Topic, body: Any = "x", **options: Any) -> str:
    with pytest.raises(InvalidMessage) as caught:
        producer.build(topic, body, **options)
    return str(caught.value)


@pytest.mark.parametrize("given", [0, -1, 0.5, "5", True, 10**18, float("nan"), timedelta(seconds=1)])
def test_a_time_range_that_is_none_is_refused(producer: Producer, given: Any) -> None:
    assert "time_range must be" in refusal(producer, MERGE, time_range=given)


def test_a_time_range_is_the_sends_or_the_topics(producer: Producer) -> None:
    assert producer.build(MERGE, "x").score == 5000
    assert producer.build(MERGE, "x", time_range=7).score == 7
    assert "TIME_RANGE" in refusal(producer, replace(MERGE, time_range_ms=None))


@pytest.mark.parametrize(
    "given", [16, -1, 0, 17.5, "9", True, float("nan"), float("inf"), 2**43 + 1, 2**53 + 1]
)
def test_a_priority_out_of_bounds_is_refused(producer: Producer, given: Any) -> None:
    assert "priority must be" in refusal(producer, PRIORITY, priority=given)


def test_priorities_begin_above_what_reads_as_a_retry(producer: Producer) -> None:
    assert producer.build(PRIORITY, "x", priority=17).score == 17
    assert producer.build(PRIORITY, "x", priority=2**43).score == 2**43
    patient = replace(PRIORITY, max_retries=100)
    assert "from 101 " in refusal(producer, patient, priority=100)
    assert "pass priority=" in refusal(producer, PRIORITY)


def test_a_topic_may_say_the_priority_of_a_send_that_gives_none(producer: Producer) -> None:
    usual = replace(PRIORITY, default_priority=500)
    assert producer.build(usual, "x").score == 500
    assert producer.build(usual, "x", priority=17).score == 17
    results = SendResults(usual.name)
    producer.send_bodies(usual, ["y"], results=results)
    assert results[0].score == 500


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (None, "pass fixed_time="),
        (0, "not in the future"),
        (-5, "not in the future"),
        ("2030-01-01", "whole ms since the epoch"),
        (datetime(2090, 1, 1, tzinfo=UTC), "whole ms since the epoch"),
        (1e13, "whole ms since the epoch"),
        (True, "whole ms since the epoch"),
        (ms(datetime(9999, 1, 1, tzinfo=UTC)), "2100"),
        (
            ms(datetime.now(UTC) - timedelta(seconds=61)),
            "not in the future; to have it delivered at once, give the present time",
        ),
    ],
)
def test_a_fixed_time_that_cannot_be_meant_is_refused(producer: Producer, given: Any, rule: str) -> None:
    assert rule in refusal(producer, FIXED, fixed_time=given)


def test_an_instant_that_has_just_passed_is_taken_as_now(producer: Producer) -> None:
    before = ms(datetime.now(UTC))
    assert producer.build(FIXED, "x", fixed_time=before).score >= before
    keyed = replace(FIXED, identity="key")
    assert "not in the future" in refusal(producer, keyed, fixed_time=TOMORROW, expires=before - 1000)


def test_a_fixed_time_in_seconds_is_read_back_with_a_guess(producer: Producer) -> None:
    told = refusal(producer, FIXED, fixed_time=round(time.time()) + 3600)
    assert "1970-01-2" in told
    assert "is it a duration, or in seconds where ms are taken?" in told


@pytest.mark.parametrize(
    ("topic", "options", "wanted"),
    [
        (MERGE, {"priority": 50}, "time_range="),
        (MERGE, {"fixed_time": TOMORROW}, "time_range="),
        (PRIORITY, {"time_range": 50, "priority": 50}, "priority="),
        (FIXED, {"priority": 50, "fixed_time": TOMORROW}, "fixed_time="),
    ],
)
def test_an_option_of_another_type_is_refused(
    producer: Producer, topic: Topic, options: dict[str, Any], wanted: str
) -> None:
    told = refusal(producer, topic, **options)
    assert f"pass {wanted}" in told
    assert topic.type.value in told


@pytest.mark.parametrize(
    "body",
    [
        float("nan"), {"a": float("inf")}, "\ud800", {"\ud800": 1}, {1: "a"}, {"a": {None: 1}},
        [{"a": ({2: 3},)}], {1, 2}, object(), b"raw",
    ],
    ids=repr,
)  # fmt: skip
def test_what_json_cannot_carry_is_refused(producer: Producer, body: Any) -> None:
    assert "body" in refusal(producer, MERGE, body)


def test_equal_bodies_are_equal_bytes(producer: Producer) -> None:
    first = producer.build(MERGE, {"b": 1, "a": [date(2030, 1, 1), Decimal("1.50")]})
    second = producer.build(MERGE, {"a": (date(2030, 1, 1), Decimal("1.50")), "b": 1})
    assert first == second
    assert first.member == b'{"a":["2030-01-01","1.50"],"b":1}'


@pytest.mark.parametrize("body", ["text", "bytes"])
def test_text_and_bytes_are_taken_as_they_are_and_nothing_else(producer: Producer, body: str) -> None:
    topic = replace(MERGE, body=body)
    good, bad = ("ä", b"x") if body == "text" else (b"\xff\x00", "x")
    assert producer.build(topic, good).member == (good if isinstance(good, bytes) else good.encode())
    for wrong in (bad, None, 5, good[:0]):
        assert "body" in refusal(producer, topic, wrong)


def test_a_body_larger_than_the_topic_allows_is_refused_with_its_size(producer: Producer) -> None:
    small = replace(MERGE, max_body=10)
    assert producer.build(small, "x" * 8).member == b'"xxxxxxxx"'
    with pytest.raises(MessageTooLarge, match=r"has 11 bytes.*MAX_BODY = 10"):
        producer.build(small, "x" * 9)


@pytest.mark.parametrize("key", ["", 5, b"k", "\ud800", "ä" * 257])
def test_a_key_that_could_not_be_a_member_is_refused(producer: Producer, key: Any) -> None:
    assert "key " in refusal(producer, KEYED, key=key)


def test_a_message_without_a_key_gets_one_of_its_own(producer: Producer) -> None:
    assert producer.build(KEYED, "x").member != producer.build(KEYED, "x").member


@pytest.mark.parametrize(
    "options",
    [{"key": "k"}, {"headers": {"a": "b"}}, {"expires": TOMORROW}, {"max_retries": 0}, {"timeout": 5}],
    ids=str,
)
def test_keys_headers_expiry_and_limits_need_a_keyed_topic(
    producer: Producer, options: dict[str, Any]
) -> None:
    assert "IDENTITY 'key'" in refusal(producer, MERGE, **options)


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, ["a"], "a", {"a": "\ud800"}, {"a": "x" * 9000}])
def test_headers_are_a_little_text(producer: Producer, headers: Any) -> None:
    assert "headers" in refusal(producer, KEYED, headers=headers)


def test_an_expiry_is_a_time_to_come_and_is_called_by_its_name(producer: Producer) -> None:
    assert refusal(producer, KEYED, expires=ms(datetime.now(UTC)) - 1000).startswith("expires ")
    assert refusal(producer, KEYED, expires=5.5).startswith("expires ")


@pytest.mark.parametrize("value", [-1, 17, 1.0, "3", True, 10**400])
def test_a_number_of_retries_is_at_most_that_of_the_topic(producer: Producer, value: Any) -> None:
    told = refusal(producer, KEYED, max_retries=value)
    assert told.startswith("max_retries must be a whole number from 0 to 16, the MAX_RETRIES of topic ")


@pytest.mark.parametrize("value", [0, 31, 1.5, "3", True, 10**400, timedelta(seconds=3)])
def test_a_time_out_is_at_most_that_of_the_topic(producer: Producer, value: Any) -> None:
    told = refusal(producer, KEYED, timeout=value)
    assert told.startswith("timeout must be whole seconds from 1 to 30, the TIMEOUT of topic ")


def test_the_limits_are_the_first_entry_of_the_meta_where_the_scripts_look_for_them(
    producer: Producer,
) -> None:
    def head(**options: Any) -> bytes:
        out = producer.build(KEYED, {}, key="k", headers={" ": "x"}, **options)
        return (out.envelope or b"").partition(b',"headers')[0]

    assert head(max_retries=0) == b'0 {"!":"0 "'
    assert head(timeout=30) == b'0 {"!":" 30"'
    assert head(max_retries=16, timeout=1) == b'0 {"!":"16 1"'


def test_what_travels_with_a_keyed_body_comes_back(producer: Producer) -> None:
    out = producer.build(
        KEYED,
        {"a": 1},
        key="k",
        headers={"trace": "ü"},
        expires=TOMORROW,
        slot_basis="shop 7",
        max_retries=3,
        timeout=20,
    )
    assert out.envelope is not None
    body, expires_ms, basis, headers, origin, bodies, retries, timeout = decode_envelope(out.envelope)
    assert (body, basis, headers, origin) == (b'{"a":1}', "shop 7", {"trace": "ü"}, None)
    assert (bodies, retries, timeout) == (None, 3, 20)
    assert 0 <= expires_ms - TOMORROW < 1


def test_the_slot_is_that_of_the_basis_the_field_the_key_or_the_body(producer: Producer) -> None:
    by_field = replace(PRIORITY, slot_basis="shop")
    body = {"shop": 7, "sku": 1}
    assert producer.build(PRIORITY, body, priority=20).slot == zlib.crc32(b'{"shop":7,"sku":1}') % 16
    assert producer.build(by_field, body, priority=20).slot == zlib.crc32(b"7") % 16
    assert "has SLOT_BASIS 'shop'" in refusal(producer, by_field, body, priority=20, slot_basis="other")
    assert producer.build(KEYED, body, key="k").slot == zlib.crc32(b"k") % 16


@pytest.mark.parametrize("body", [{"sku": 1}, [1], "shop", None])
def test_a_body_without_the_field_of_its_slot_is_refused(producer: Producer, body: Any) -> None:
    assert "SLOT_BASIS 'shop'" in refusal(producer, replace(MERGE, slot_basis="shop"), body)


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ("ä", "ä".encode()),
        (b"\xff", b"\xff"),
        (7, b"7"),
        (None, b"null"),
        ([1, "a"], b'[1,"a"]'),
        (uuid.UUID(int=5), b"00000000-0000-0000-0000-000000000005"),
        (date(2030, 1, 2), b"2030-01-02"),
        (Decimal("1.50"), b"1.50"),
    ],
)
def test_a_basis_is_the_same_before_and_after_it_travelled_as_json(value: Any, raw: bytes) -> None:
    assert basis_bytes(value) == raw


def test_a_basis_that_is_no_text_cannot_be_kept_with_a_keyed_body(producer: Producer) -> None:
    assert "not UTF-8" in refusal(producer, KEYED, slot_basis=b"\xff")
    assert "512" in refusal(producer, KEYED, slot_basis="x" * 513)
    assert "Unicode" in refusal(producer, MERGE, slot_basis="\ud800")
    assert producer.build(MERGE, "x", slot_basis=b"\xff").slot == zlib.crc32(b"\xff") % 16


def test_a_basis_of_its_own_is_noted_once_when_the_first_such_message_is_sent(
    producer: Producer, broker: OracleBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(broker, "note_slot_basis", lambda topic: noted.append(topic.name))
    messages = [producer.build(MERGE, n, slot_basis="a") for n in range(3)]
    assert noted == []
    producer.send(messages)
    producer.send([producer.build(MERGE, 9, slot_basis="b"), producer.build(KEYED, 9, slot_basis="b")])
    assert noted == ["prices"]


@pytest.mark.parametrize("restores", [False, True])
def test_a_basis_is_noted_again_after_a_while_because_redis_may_have_lost_the_note(
    producer: Producer, broker: OracleBroker, monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(broker, "note_slot_basis", lambda topic: noted.append(topic.name))
    message = producer.build(MERGE, "x", slot_basis="a")
    producer.send([message])
    for _ in range(2):
        producer._noted["prices"] = time.monotonic() - 1
        producer.send([producer.restore(message) if restores else producer.build(MERGE, "x", slot_basis="a")])
    assert noted == ["prices"] * 3


def test_two_threads_may_note_the_same_basis(
    producer: Producer, broker: OracleBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one thread waits for Redis, the other one has noted the basis, or another topic gets one."""
    noted: list[str] = []

    def note(topic: Topic) -> None:
        noted.append(topic.name)
        if len(noted) == 1:
            producer.note_slot_bases()
            producer.build(FIXED, "x", slot_basis="a", fixed_time=TOMORROW)

    monkeypatch.setattr(broker, "note_slot_basis", note)
    producer.send([producer.build(MERGE, "x", slot_basis="a")])
    assert noted == ["prices", "prices"]
    producer.note_slot_bases()
    assert noted == ["prices", "prices", "orders"]


def test_nothing_is_sent_while_the_basis_cannot_be_noted(
    producer: Producer, broker: OracleBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(topic: Topic) -> None:
        raise ServerUnavailable("away")

    message = producer.build(MERGE, "x", slot_basis="a")
    with monkeypatch.context() as patch:
        patch.setattr(broker, "note_slot_basis", away)
        with pytest.raises(ServerUnavailable):
            producer.send([message])
    assert broker.count(MERGE, message.slot).store == 0
    assert producer.send([message])[0].status == "stored"


def test_results_come_in_order_and_say_what_happened(producer: Producer) -> None:
    bodies = [1, 2, 1, 3]
    results = producer.send([producer.build(MERGE, body) for body in bodies])
    assert [result.member for result in results] == [b"1", b"2", b"1", b"3"]
    assert [result.status for result in results] == ["stored", "stored", "merged", "stored"]
    assert all(result.ok for result in results)


def test_topics_and_manners_may_be_mixed(producer: Producer) -> None:
    messages = [
        producer.build(MERGE, 1),
        producer.build(PRIORITY, 1, priority=50),
        producer.build(FIXED, 1, fixed_time=TOMORROW),
        producer.build(PRIORITY, 1, priority=60),
        producer.build(PRIORITY, 1, priority=70)._replace(act="ensure"),
        producer.build(KEYED, 1, key="k"),
    ]
    results = producer.send(messages)
    assert [result.status for result in results] == [*["stored"] * 3, "replaced", "present", "stored"]
    assert [result.score for result in results[1:5:2]] == [50.0, 60.0]


def test_sends_of_one_member_keep_their_order_whatever_is_grouped(
    producer: Producer, broker: OracleBroker
) -> None:
    # Another member of the slot opens a group of the shorter range first.
    topic = replace(MERGE, slots=1)
    messages = [
        producer.build(topic, "other", time_range=1),
        producer.build(topic, "it", time_range=9000),
        producer.build(topic, "it", time_range=1),
    ]
    results = producer.send(messages)
    assert [result.status for result in results] == ["stored", "stored", "merged"]
    assert results[1].score - broker.now_ms() == results[2].score - broker.now_ms() == 9000


@pytest.mark.parametrize("topic", [MERGE, replace(MERGE, slot_basis="shop"), replace(MERGE, body="bytes")])
def test_bulk_sends_do_what_sends_do_one_by_one(topic: Topic) -> None:
    bodies: list[Any] = [b"%d" % (n % 7) for n in range(20)]
    if topic.body == "json":
        bodies = [{"shop": n % 2, "sku": n % 3} for n in range(20)]
    bulk, single = (Producer(OracleBroker(clock=Clock())) for _ in range(2))
    results = bulk.send_bodies(topic, bodies)
    assert list(results) == [single.send([single.build(topic, body)])[0] for body in bodies]
    assert results.counts() == {
        "stored": len(set(map(str, bodies))),
        "merged": 20 - len(set(map(str, bodies))),
    }


class Recording(OracleBroker):
    """Records which script each call has run, and in how many slots."""

    def __init__(self) -> None:
        super().__init__(clock=Clock())
        self.ran: list[tuple[str, int]] = []

    def run(self, call: Any) -> Any:
        if call.script in ("scatter", "send_merge"):
            self.ran.append((call.script, len(call.place.slots) if call.script == "scatter" else 1))
        return super().run(call)


SPREAD = replace(MERGE, slots=4096, body="bytes")


def apart(count: int) -> list[bytes]:
    """Return bodies, each of which has a slot of its own."""
    found: dict[int, bytes] = {}
    for number in range(4 * count):
        found.setdefault(slot_of(b"%d" % number, SPREAD.slots), b"%d" % number)
    return list(found.values())[:count]


def test_messages_that_are_alone_in_their_slots_share_scripts() -> None:
    broker = Recording()
    results = Producer(broker).send_bodies(SPREAD, apart(70))
    assert broker.ran == [("scatter", 32), ("scatter", 32), ("scatter", 6)]
    assert results.counts() == {"stored": 70}
    assert {result.score for result in results} == {broker.now_ms() + 5000}


@pytest.mark.parametrize(
    "topic",
    [replace(SPREAD, debounce=True, max_wait_ms=9000), replace(SPREAD, max_backlog=10**6), KEYED, PRIORITY],
    ids=str,
)
def test_only_plain_merging_messages_share_scripts(topic: Topic) -> None:
    assert not takes_scattered(topic)
    assert takes_scattered(SPREAD)


def test_a_slot_that_needs_a_closer_look_has_its_message_sent_again() -> None:
    broker = Recording()
    bodies = apart(10)
    second = bodies[1]
    slot = slot_of(second, SPREAD.slots)
    broker.send_merge(SPREAD, slot, 0, [second])
    prepared = broker.prepare(SPREAD, slot, "A", None, 10)
    broker.rollback(SPREAD, slot, prepared.receipt, [Failure(second, delay_ms=60_000)])
    broker.ran.clear()
    results = Producer(broker).send_bodies(SPREAD, bodies)
    assert broker.ran == [("scatter", 10), ("send_merge", 1)]
    assert [result.member for result in results] == bodies
    assert [result.status for result in results] == ["stored", "superseded", *["stored"] * 8]


def test_a_foreign_key_in_one_slot_keeps_no_other_message_from_being_sent() -> None:
    broker = Recording()
    bodies = apart(10)
    key = slot_keys("", SPREAD.name, slot_of(bodies[3], SPREAD.slots)).stats
    broker.keyspace[key] = SortedSet({b"x": 1.0})
    with pytest.raises(WrongType):
        Producer(broker).send_bodies(SPREAD, bodies)
    sent = [
        body
        for body in bodies
        if slot_keys("", SPREAD.name, slot_of(body, SPREAD.slots)).store in broker.keyspace
    ]
    assert sent == [body for body in bodies if body != bodies[3]]


@pytest.mark.parametrize(
    "topic", [FIFO, replace(FIFO, slot_basis=None), replace(FIFO, slot_basis=None, order="loose")], ids=str
)
def test_fifo_messages_sent_in_bulk_are_those_sent_one_by_one(topic: Topic) -> None:
    bodies = [{"shop": n % 3, "n": n} for n in range(20)]
    bulk, single = (OracleBroker(clock=Clock()) for _ in range(2))
    results = Producer(bulk).send_bodies(topic, bodies)
    sent = [Producer(single).send([Producer(single).build(topic, body)])[0] for body in bodies]
    assert [one.status for one in results] == [one.status for one in sent] == ["stored"] * 20
    assert len({one.member for one in results}) == 20
    kept = [
        [
            decode_envelope(broker.describe_messages(topic, one.slot, [one.member])[0].envelope or b"")
            for one in some
        ]
        for broker, some in ((bulk, results), (single, sent))
    ]
    assert kept[0] == kept[1]
    if topic.is_strict:
        assert [one.slot for one in results] == [one.slot for one in sent]
    else:
        assert len({one.slot for one in results}) > 1


def test_bulk_sends_in_line_stop_behind_a_lost_reply() -> None:
    broker = Failing()
    broker.lost_from = 0
    with pytest.raises(ServerUnavailable):
        Producer(broker).send_bodies(replace(FIFO, slots=1), [{"shop": 1}] * (3 * ROUND_TRIP))
    assert broker.made == 2  # the second one was packed meanwhile


class Watched(OracleBroker):
    """Counts its pipelines, those that are under way at once, and the bytes of each."""

    def __init__(self) -> None:
        super().__init__(clock=Clock())
        self.most = 0
        self.bytes: list[int] = []
        self._under_way: set[Any] = set()

    def pipeline(self) -> Any:
        made = super().pipeline()
        add, send, receive = made.add, made.send, made.receive
        self.bytes.append(0)
        number = len(self.bytes) - 1

        def adding(call: Any) -> Any:
            self.bytes[number] += sum(len(each) for each in call.own if isinstance(each, bytes))
            return add(call)

        def sending() -> Any:
            self._under_way.add(made)
            self.most = max(self.most, len(self._under_way))
            return send()

        def receiving() -> Any:
            self._under_way.discard(made)
            return receive()

        made.add, made.send, made.receive = adding, sending, receiving  # type: ignore[method-assign]
        return made


def test_bulk_sends_in_line_wait_for_each_other() -> None:
    broker = Watched()
    Producer(broker).send_bodies(FIFO, [{"shop": 1}] * (3 * ROUND_TRIP))
    assert broker.most == 1
    Producer(broker).send_bodies(MERGE, list(range(3 * ROUND_TRIP)))
    assert broker.most == 2


@pytest.mark.parametrize("way", ["send", "send_bodies", "keyed", "remove"])
def test_a_round_trip_is_bounded_in_bytes(way: str) -> None:
    broker, size = Watched(), 300_000
    producer = Producer(broker)
    topic = replace(
        MERGE, body="bytes", max_body=4 * TRIP_BYTES, identity="key" if way == "keyed" else "body"
    )
    sizes = [size] * 20 + [3 * TRIP_BYTES] + [10] * 5
    bodies = [b"%010d" % n + b"x" * (size - 10) for n, size in enumerate(sizes)]
    if way == "send_bodies":
        results: Any = producer.send_bodies(topic, bodies)
    else:
        built = [producer.build(topic, body) for body in bodies]
        if way == "remove":
            built = [out._replace(act="remove") for out in built]
        results, errors = producer.attempt(built, removes=way == "remove")
        assert errors == {}
    assert [result.status for result in results] == ["not_found" if way == "remove" else "stored"] * len(
        bodies
    )
    per_trip = TRIP_BYTES // size
    assert len(broker.bytes) == -(-20 // per_trip) + 2
    assert sorted(broker.bytes)[-2] <= TRIP_BYTES
    assert broker.bytes[-2] >= 3 * TRIP_BYTES, "a large message has one of its own"


def test_two_sends_of_a_message_never_overtake_each_other() -> None:
    for bodies, most in (([1, 2], 2), ([1, 1], 1)):
        broker = Watched()
        producer = Producer(broker)
        large = [producer.build(KEYED, "x" * 250_000, key=f"{n}") for n in range(20)]
        first, last = (producer.build(KEYED, body, key=f"key {body}") for body in bodies)
        producer.send([first, *large, last])
        assert broker.most == most


def test_a_topic_with_keys_takes_no_bodies_in_bulk(producer: Producer) -> None:
    for topic in (KEYED, replace(FIFO, origin=True)):
        with pytest.raises(InvalidMessage, match="has IDENTITY 'key'"):
            producer.send_bodies(topic, [{"shop": 1}])


@pytest.mark.parametrize(
    ("topic", "bad"),
    [
        (MERGE, {1}),
        (replace(MERGE, slot_basis="shop"), {"sku": 1}),
        (replace(MERGE, body="bytes"), b""),
        (FIFO, {"sku": 1}),
    ],
)
def test_bulk_sends_name_the_bad_item_before_anything_is_written(topic: Topic, bad: Any) -> None:
    broker = OracleBroker()
    good: Any = b"x" if topic.body == "bytes" else {"shop": 1}
    with pytest.raises(InvalidMessage, match=r"^item 2: "):
        Producer(broker).send_bodies(topic, [good, good, bad, good])
    assert sum(broker.count(topic, slot).store for slot in range(topic.slots)) == 0


def test_many_messages_take_few_round_trips(
    producer: Producer, broker: OracleBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips = []
    pipeline = broker.pipeline

    def counted() -> Any:
        trips.append(pipeline())
        return trips[-1]

    monkeypatch.setattr(broker, "pipeline", counted)
    messages = [producer.build(replace(MERGE, slots=1), n) for n in range(ROUND_TRIP + 1)]
    results = producer.send(messages)
    assert len(trips) == 2
    assert len(results) == ROUND_TRIP + 1
    assert {result.status for result in results} == {"stored"}


class Failing(OracleBroker):
    """Loses the replies of every pipeline from the nth on, or answers with an error for a topic."""

    lost_from = 10**9
    error_for: str | None = None
    made = 0

    def pipeline(self) -> Any:
        made, pipeline = self.made, super().pipeline()
        self.made += 1
        receive = pipeline.receive

        def failing() -> list[Any]:
            if made >= self.lost_from:
                raise ServerUnavailable("reply lost")
            return receive()

        pipeline.receive = failing  # type: ignore[method-assign]
        return pipeline

    def run(self, call: Any) -> Any:
        if call.script == "send_merge" and call.place.topic.name == self.error_for:
            raise SlotMoved("32 slots by now")
        return super().run(call)


def attempt(broker: OracleBroker, messages: list[Outgoing]) -> tuple[list[str], dict[int, RmqError]]:
    results, errors = Producer(broker).attempt(messages)
    return [result.status for result in results], errors


def test_half_a_pipeline_that_fails_is_told_message_by_message() -> None:
    broker = Failing()
    broker.error_for = "keyed"
    build = Producer(broker).build
    messages = [build(MERGE, 1), build(KEYED, 1), build(PRIORITY, 1, priority=50), build(KEYED, 2)]
    statuses, errors = attempt(broker, messages)
    assert statuses == ["stored", "failed", "stored", "failed"]
    assert {index: type(error) for index, error in errors.items()} == {1: SlotMoved, 3: SlotMoved}
    with pytest.raises(SlotMoved):
        Producer(broker).send(messages)


def test_a_lost_reply_fails_its_own_round_trip_and_those_not_sent() -> None:
    broker = Failing()
    broker.lost_from = 1
    build = Producer(broker).build
    statuses, errors = attempt(broker, [build(MERGE, n) for n in range(ROUND_TRIP + 5)])
    assert statuses == ["stored"] * ROUND_TRIP + ["failed"] * 5
    assert sorted(errors) == list(range(ROUND_TRIP, ROUND_TRIP + 5))


def test_a_server_that_cannot_be_reached_fails_everything_without_a_result_of_ok() -> None:
    class Away(OracleBroker):
        def pipeline(self) -> Any:
            raise ServerUnavailable("away")

    messages = [Producer(Away()).build(MERGE, n) for n in range(3)]
    statuses, errors = attempt(Away(), messages)
    assert statuses == ["failed"] * 3
    assert sorted(errors) == [0, 1, 2]


def test_a_full_slot_refuses_and_says_so(producer: Producer) -> None:
    small = replace(MERGE, slots=1, max_backlog=2)
    results = producer.send([producer.build(small, n) for n in range(3)])
    assert [(result.status, result.ok) for result in results] == [
        ("stored", True),
        ("stored", True),
        ("refused", False),
    ]


def test_batches_are_drawn_as_they_are_needed() -> None:
    drawn = []

    def items() -> Iterator[int]:
        for n in range(5):
            drawn.append(n)
            yield n

    batches = batched(items(), 2)
    assert next(batches) == [0, 1]
    assert drawn == [0, 1]
    assert list(batches) == [[2, 3], [4]]


def test_each_send_to_a_topic_with_origins_has_its_own_and_they_rise_with_time(producer: Producer) -> None:
    topic = replace(KEYED, origin=True)
    origins = []
    for _ in range(3):
        out = producer.build(topic, {"a": 1}, key="k")
        assert out.envelope is not None
        origins.append(decode_envelope(out.envelope).origin or "")
        time.sleep(0.002)
    assert [uuid.UUID(each).version for each in origins] == [7, 7, 7]
    assert [uuid.UUID(each).variant for each in origins] == [uuid.RFC_4122] * 3
    assert origins == sorted(set(origins))
    sent_ms = uuid.UUID(origins[-1]).int >> 80
    assert abs(sent_ms - time.time() * 1000) < 60_000


def test_other_topics_store_not_a_byte_more(producer: Producer) -> None:
    out = producer.build(KEYED, {"a": 1}, key="k")
    assert out.envelope == b'0 {}\n{"a":1}'
    assert "origin" not in KEYED.definition()


def test_the_definition_of_a_topic_says_whether_it_has_origins() -> None:
    topic = replace(KEYED, origin=True)
    assert topic.definition()["origin"] is True
    assert Topic.registered(topic.name, topic.definition(), topic.slots).origin
    assert not Topic.registered(KEYED.name, KEYED.definition(), KEYED.slots).origin


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("timeout", "30", "has the timeout '30'"),
        ("max_retries", True, "has the max_retries True"),
        ("identity", ["key"], r"has the identity \['key'\]"),
        ("type", "stack", "has the type 'stack'"),
        ("body", "msgpack", "has the body 'msgpack'"),
        ("backoff", [1000], r"has the backoff \[1000\]"),
        ("accumulate", [], r"has the accumulate \[\]"),
        ("serial", None, "has the serial None"),
        ("timeout", ..., "has no timeout"),
    ],
)
def test_a_definition_with_a_value_that_no_setting_gives_is_refused_with_it(
    part: str, value: Any, text: str
) -> None:
    definition = {**KEYED.definition(), part: value}
    if value is ...:
        del definition[part]
    with pytest.raises(WrongType, match=f"the definition of topic keyed in Redis {text}"):
        Topic.registered("keyed", definition, 4)


@pytest.mark.parametrize(
    "topic", [MERGE, PRIORITY, FIXED, FIFO, KEYED, replace(KEYED, debounce=True, max_wait_ms=9, accumulate=3)]
)
def test_a_topic_that_is_built_from_its_definition_has_the_same_definition(topic: Topic) -> None:
    again = Topic.registered(topic.name, topic.definition(), topic.slots)
    assert again.definition() == topic.definition()


@pytest.mark.parametrize("origin", ["7", '""', "null", "[]"])
def test_an_origin_that_is_no_text_is_none(origin: str) -> None:
    assert decode_envelope(f'0 {{"origin":{origin}}}\n5'.encode()) == Envelope(b"5")
