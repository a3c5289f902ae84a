"""Topics are re-slotted on every kind of broker: what moves where, what is refused, and what is lost with a reply."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from django_rmq.core import reslotting
from django_rmq.core.model.body_codec import decode_body
from django_rmq.core.model.delivered_message import Message
from django_rmq.core.model.envelope import decode_envelope
from django_rmq.core.model.keys import slot_keys
from django_rmq.core.model.replies import Death, Failure
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.core.producer.placement import slot_of
from django_rmq.core.producer.producer import Producer
from django_rmq.core.reslotting import DrainProgress
from django_rmq.exceptions import ConfigurationError, LostRace
from tests.support.brokers import Broker, ClusterBroker, OracleBroker
from tests.support.workers import Worker, cluster_of, eventually

LATE = 3_600_000
KINDS = [
    pytest.param(kind, identity, basis, id=f"{kind.value}-{identity}-{basis or 'whole'}")
    for kind, identity, basis in (
        (TopicType.RANGE_MERGE, "body", None),
        (TopicType.PRIORITY, "body", "shop"),
        (TopicType.FIXED_TIME, "key", None),
        (TopicType.PRIORITY, "key", "shop"),
    )
]


@pytest.fixture(params=["redis", "cluster"])
def broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "redis":
        yield Broker(request.getfixturevalue("redis_client"), request.getfixturevalue("prefix"))
    else:
        cluster = cluster_of(request.getfixturevalue("redis_cluster"))
        yield ClusterBroker(cluster, f"t{uuid4().hex[:12]}:")
        cluster.close()


class Filled:
    """A topic with messages in every state, and what must become of them."""

    def __init__(
        self, broker: Any, kind: TopicType, identity: str, basis: str | None, slots: int = 4
    ) -> None:
        self.broker = broker
        options: dict[str, Any] = {"identity": identity, "slot_basis": basis, "max_retries": 5}
        self.topic = Topic("prices", kind, slots=slots, time_range_ms=LATE, **options)
        broker.define(self.topic)
        self.producer = Producer(broker)
        self.all: set[bytes] = set()

    def options(self) -> dict[str, Any]:
        if self.topic.is_priority:
            return {"priority": 50}
        return {} if self.topic.type is TopicType.RANGE_MERGE else {"fixed_time": self.broker.now_ms() + LATE}

    def send(self, *numbers: int) -> list[Any]:
        topic = self.topic
        built = []
        for number in numbers:
            how = self.options() | ({"key": f"k{number}"} if topic.keyed else {})
            if topic.keyed and topic.slot_basis is None:
                how |= {"slot_basis": number % 7, "headers": {"n": str(number)}, "max_retries": number % 5}
            built.append(self.producer.build(topic, {"n": number, "shop": number % 7}, **how))
        results = self.producer.send(built)
        self.all |= {result.member for result in results}
        return results

    def fill(self, count: int = 200) -> None:
        """Send, let some fail and rest, and let some die."""
        self.send(*range(count))
        for slot in range(self.topic.slots):
            entries = self.broker.list_messages(self.topic, slot, "store", limit=12).entries
            self.broker.bury(self.topic, slot, [entry.member for entry in entries[:3]], "why")
            if self.topic.is_priority:
                answer = self.broker.prepare(self.topic, slot, "A", None, 6)
                members = [delivery.member for delivery in answer.deliveries]
                failures = [Failure(member, "failed", LATE, "no") for member in members[:3]]
                failures += [Failure(member, "failed", 0, "no") for member in members[3:]]
                self.broker.rollback(self.topic, slot, answer.receipt, failures)

    def reslot(self, slots: int, **how: Any) -> DrainProgress:
        found = reslotting.begin(self.broker, self.topic, slots)
        assert found is not None
        progress = reslotting.move(self.broker, found, **how)
        reslotting.finish(self.broker, found)
        return progress

    def entries(self, slots: int) -> dict[tuple[str, bytes], tuple[Any, ...]]:
        """Return everything, but for the slots."""
        topic = replace(self.topic, slots=slots)
        found = {}
        for slot, state in itertools.product(range(slots), ("store", "retry", "dead")):
            for entry in self.broker.list_messages(topic, slot, state, limit=1000).entries:
                assert (state, entry.member) not in found
                found[state, entry.member] = (entry.score, entry.envelope, entry.record)
                assert slot_of(self.basis(state, entry), slots) == slot
        return found

    def basis(self, state: str, entry: Any) -> bytes:
        envelope = Death.parse(entry.record).envelope if state == "dead" else entry.envelope
        if not self.topic.keyed and self.topic.slot_basis is None:
            return bytes(entry.member)
        body = entry.member if envelope is None else decode_envelope(envelope).body
        return str(decode_body(self.topic, body)["shop"]).encode()

    def check_books(self, most: int) -> None:
        ledgers = [self.broker.audit_ledger(self.topic, slot) for slot in range(most)]
        assert all(ledger.balanced for ledger in ledgers)
        for kind in ("moved", "moved_dead"):
            assert sum(one[f"{kind}_out"] for one in ledgers) == sum(one[f"{kind}_in"] for one in ledgers)


@pytest.mark.parametrize(("kind", "identity", "basis"), KINDS)
def test_everything_moves_to_where_it_belongs_and_stays_what_it_is(
    broker: Any, kind: TopicType, identity: str, basis: str | None
) -> None:
    filled = Filled(broker, kind, identity, basis)
    filled.fill()
    before = filled.entries(4)
    for slots in (16, 2, 1, 8):
        assert filled.reslot(slots).strays == 0
        assert filled.entries(slots) == before
        for slot in range(slots, 16):
            assert broker.count(filled.topic, slot)[:5] == (0, 0, 0, 0, 0)
        filled.check_books(16)
    assert broker.definitions()["prices"]["reslot"] == {"number": 4, "former": [1, 2, 4, 16]}
    assert {result.status for result in filled.send(*range(1_000, 1_100))} == {"stored"}
    assert reslotting.begin(broker, filled.topic, 8) is None


def test_a_million_slots_are_no_matter_of_memory() -> None:
    found = reslotting.Reslotting(Topic("t", TopicType.PRIORITY, slots=1 << 20), 1, 1)
    sizes = (len(found.families), len(found.slots(0)), found.sources(0), found.targets(0)[-1])
    assert sizes == (1, 1 << 20, range(1), (1 << 20) - 1)


def test_who_is_late_with_an_older_re_slotting_is_told_so(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", None)
    filled.fill()
    first = reslotting.begin(broker, filled.topic, 16)
    assert first is not None
    reslotting.move(broker, first)
    reslotting.finish(broker, first)
    before = filled.entries(16)
    filled.reslot(2)
    with pytest.raises(LostRace, match="re-slotted by another process"):
        reslotting.move(broker, first)
    reslotting.finish(broker, first)
    assert broker.definitions()["prices"]["slots"] == 2
    assert filled.entries(2) == before


def test_families_may_be_moved_by_several_processes(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", "shop")
    filled.fill()
    before = filled.entries(4)
    found = reslotting.begin(broker, filled.topic, 16)
    assert found is not None
    for families in ([2, 0], [1, 2], [3]):
        assert reslotting.move(broker, found, families).done == len(families)
    assert reslotting.under_way(broker, filled.topic) == found
    reslotting.finish(broker, found)
    assert reslotting.under_way(broker, filled.topic) is None
    assert filled.entries(16) == before


@pytest.mark.slow
def test_a_slot_waits_for_what_runs_and_times_out_what_nobody_runs(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", None, slots=1)
    topic = filled.topic = replace(filled.topic, timeout=1)
    filled.send(*range(20))
    answer = broker.prepare(topic, 0, "A", None, 3)
    looked: list[int] = []

    def report(step: str, progress: DrainProgress) -> None:
        if step == "waiting":
            looked.append(progress.waiting)
            if len(looked) == 1:
                broker.commit(topic, 0, answer.receipt, [answer.deliveries[0].member])

    progress = filled.reslot(4, report=report)
    assert looked[0] == 3
    assert set(looked[1:]) == {2}
    assert progress.waiting == 0
    topic = replace(topic, slots=4)
    assert sum(broker.count(topic, slot).store + broker.count(topic, slot).retry for slot in range(4)) == 19
    assert sum(broker.audit_ledger(topic, slot)["expired"] for slot in range(4)) == 2


def test_more_slots_are_refused_where_bases_are_hidden_and_fewer_are_not(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", None)
    build = filled.producer.build
    filled.producer.send([build(filled.topic, n, priority=50, slot_basis=f"b{n}") for n in range(40)])
    before = {slot: broker.count(filled.topic, slot).store for slot in range(4)}
    said = r"slot_basis=.* the new slots of its 40 messages are unknown"
    with pytest.raises(ConfigurationError, match=said):
        reslotting.begin(broker, filled.topic, 8)
    assert broker.definitions()["prices"]["slots"] == 4
    filled.reslot(2)
    topic = replace(filled.topic, slots=2)
    counts = [broker.count(topic, slot).store for slot in range(2)]
    assert counts == [before[0] + before[2], before[1] + before[3]]
    for slot in range(2):
        broker.purge(topic, slot, "store")
    assert filled.reslot(8).strays == 0


def test_a_slot_with_hidden_bases_is_shut_only_when_it_is_empty() -> None:
    broker: Any = OracleBroker()
    filled = Filled(broker, TopicType.PRIORITY, "body", None, slots=1)
    broker.note_slot_basis(filled.topic)
    found = reslotting.begin(broker, filled.topic, 4)
    assert found is not None
    out = filled.producer.build(filled.topic, "x", priority=50, slot_basis="hidden")
    filled.producer.send([out])
    waited = threading.Event()

    def report(step: str, progress: DrainProgress) -> None:
        if step == "waiting" and not waited.is_set():
            waited.set()
            answer = broker.prepare(filled.topic, 0, "A", None, 1)
            assert answer.status == "ok"
            broker.commit(filled.topic, 0, answer.receipt, [out.member])

    assert reslotting.move(broker, found, report=report).strays == 0
    assert waited.is_set()


def test_what_a_stranger_put_where_nobody_can_tell_it_belongs_stays(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", "shop", slots=2)
    filled.send(*range(20))
    for member in (b"no json", b'{"n":1}'):
        broker.send_replace(filled.topic, 0, [50], [member])
    assert filled.reslot(8).strays == 2
    left = {entry.member for entry in broker.list_messages(filled.topic, 0, "store").entries}
    assert left >= {b"no json", b'{"n":1}'}


def test_the_dead_move_although_another_program_has_written_their_records(
    redis_client: Any, prefix: str
) -> None:
    filled = Filled(Broker(redis_client, prefix), TopicType.PRIORITY, "body", None, slots=2)
    members = [out.member for out in filled.send(*range(20))]
    for slot in range(2):
        filled.broker.bury(filled.topic, slot, members, "no")
        records = slot_keys(prefix, filled.topic.name, slot).deaths
        redis_client.hset(records, mapping=dict.fromkeys(redis_client.hkeys(records), b"x"))
    assert filled.reslot(8).strays == 0
    topic = replace(filled.topic, slots=8)
    depths = [filled.broker.count(topic, slot).dead for slot in range(8)]
    assert sum(depths) == 20 and sum(depths[2:]) > 0


def test_another_re_slotting_has_to_end_before(broker: Any) -> None:
    filled = Filled(broker, TopicType.PRIORITY, "body", None)
    found = reslotting.begin(broker, filled.topic, 16)
    assert reslotting.begin(broker, filled.topic, 16) == found
    with pytest.raises(ConfigurationError, match="is being re-slotted from 4 to 16 slots"):
        reslotting.begin(broker, filled.topic, 8)
    with pytest.raises(ConfigurationError, match="power of two"):
        reslotting.begin(broker, filled.topic, 6)


@pytest.mark.parametrize("serial", [True, False])
def test_a_worker_goes_on_under_the_count_that_it_is_told(broker: Any, serial: bool) -> None:
    topic = Topic("prices", TopicType.PRIORITY, slots=4, serial=serial, slot_basis="shop")
    broker.define(topic)
    producer = Producer(broker)
    ran: list[int] = []
    told: set[str] = set()

    def send(*numbers: int) -> None:
        producer.send([producer.build(topic, {"n": n, "shop": n}, priority=50) for n in numbers])

    def listener(message: Message) -> None:
        ran.append(message.body["n"])

    send(*range(100))
    with Worker(broker, topic, listener, on_moved=told.add) as worker:
        for round_, slots in enumerate((8, 1), 1):
            found = reslotting.begin(broker, topic, slots)
            assert found is not None
            send(*range(1_000 * round_, 1_000 * round_ + 100))
            reslotting.move(broker, found)
            reslotting.finish(broker, found)
            worker.dispatcher.own((topic.name, slot) for slot in range(slots))
            send(*range(1_000 * round_ + 100, 1_000 * round_ + 200))
            eventually(lambda: len(ran) >= 100 + 200 * round_, "all running")  # noqa: B023
    assert told == {"prices"}
    assert sorted(ran) == [*range(100), *range(1_000, 1_200), *range(2_000, 2_200)]
