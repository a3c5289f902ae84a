"""A lone message goes at once to the owner of its slot, if that sleeps, has made an offer and was at work a moment ago."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_rmq.core.commands.broker_interface import WakeupSubscription
from django_rmq.core.model.bounds import NEVER
from django_rmq.core.model.replies import Prepared, Pushed
from django_rmq.core.model.topic import TopicType
from django_rmq.exceptions import WrongType
from tests.contract.conftest import ON_ONE_SERVER
from tests.contract.slots import NO_BACKOFF, Make, Slot, slot_of_each

# A cluster has no inboxes: a script learns only of the subscribers of its own node.
pytestmark = ON_ONE_SERVER
every_type = pytest.mark.parametrize("kind", list(TopicType))


class Owner:
    """The owner of a slot, with a subscription to its inbox."""

    def __init__(self, slot: Slot, name: str = "owner") -> None:
        self.slot, self.name = slot, name
        self.inbox: bytes = slot.broker.inbox(name)
        self.wakeups: WakeupSubscription = slot.broker.wakeups([slot.topic], self.inbox)
        self.epoch = slot.acquire()

    def take(self, limit: int = 10, **changes: Any) -> Prepared:
        """Take what is there, and offer to receive pushes."""
        options = {"epoch": self.epoch, "inbox": self.inbox} | changes
        return self.slot.take(limit, self.name, **options)

    def work(self) -> None:
        """End one delivery, so that the slot is empty, asleep and warm."""
        self.slot.send(b"first")
        answer = self.take()
        assert answer.sleeping_until == NEVER
        assert self.slot.commit_delivery(answer.receipt, 1) == ["ok"]
        self.slot.clock.advance("1ms")

    def pushed(self) -> Pushed:
        """Return the one push that came, and nothing else."""
        [pushed] = self.heard()
        assert isinstance(pushed, Pushed)
        return pushed

    def heard(self, count: int = 1) -> list[tuple[str, int] | Pushed]:
        """Return what came: ``count`` items, or what comes within a short time if there are fewer."""
        heard: list[tuple[str, int] | Pushed] = []
        while len(heard) < count and (more := self.wakeups.get(10)):
            heard += more
        return heard


@pytest.fixture
def owners() -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def make(slot: Slot, name: str = "owner") -> Owner:
        made.append(Owner(slot, name))
        return made[-1]

    yield make
    for owner in made:
        owner.wakeups.close()


MakeOwner = Callable[..., Owner]


def wakes(owner: Owner, member: bytes = b"next", **options: Any) -> bool:
    """Send a message; return whether it wakes the owner and waits, instead of being pushed."""
    # A second message of the same millisecond is not the next one in its line by the clock alone.
    owner.slot.clock.advance("1ms")
    [sent] = owner.slot.send(member, **options)
    assert sent.status == "stored"
    [heard] = owner.heard()
    if heard == (owner.slot.topic.name, owner.slot.index):
        assert owner.slot.where(member) in ("W", "w")
        return True
    assert isinstance(heard, Pushed)
    assert owner.slot.where(member) == "F"
    return False


@slot_of_each(list(TopicType))
def test_a_lone_message_is_in_flight_at_once_and_its_owner_receives_it(slot: Slot, owners: MakeOwner) -> None:
    owner = owners(slot)
    owner.work()
    [sent] = slot.send(b"next")
    pushed = owner.pushed()
    assert (pushed.topic, pushed.slot) == (slot.topic.name, slot.index)
    assert (pushed.delivery.member, pushed.delivery.score) == (b"next", sent.score)
    assert (pushed.delivery.retries_left, pushed.delivery.envelope) == (slot.topic.max_retries, None)
    assert slot.where(b"next") == "F"
    assert slot.hash("control")[b"deliveries"] == b"%d" % pushed.receipt
    [held] = slot.list_held(owner.name)
    assert (held.delivery, held.receipt) == (pushed.delivery, pushed.receipt)
    assert slot.commit_delivery(pushed.receipt, 1) == ["ok"]
    assert slot.where(b"next") == "-"
    assert not wakes(owner, b"another"), "and so on, without a prepare"


@slot_of_each(list(TopicType))
def test_what_comes_while_a_push_is_in_flight_waits(slot: Slot, owners: MakeOwner) -> None:
    owner = owners(slot)
    owner.work()
    assert not wakes(owner, b"a")
    assert wakes(owner, b"b")


@slot_of_each(list(TopicType), backoff=NO_BACKOFF)
def test_a_pushed_message_that_fails_rests_and_comes_again_by_a_prepare(
    slot: Slot, owners: MakeOwner
) -> None:
    owner = owners(slot)
    owner.work()
    slot.send(b"a")
    pushed = owner.pushed()
    slot.fail(pushed.receipt, b"a")
    assert owner.heard() == [(slot.topic.name, slot.index)]
    assert slot.send(b"b")
    assert slot.where(b"b") in ("W", "w"), "nothing is pushed beside a retry"


def test_only_a_slot_in_which_a_delivery_began_lately_gets_pushes(make_slot: Make, owners: MakeOwner) -> None:
    owner = owners(make_slot(TopicType.FIFO))
    owner.work()
    owner.slot.clock.advance("1998ms")
    assert not wakes(owner, b"a")
    [held] = owner.slot.list_held(owner.name)
    owner.slot.commit_delivery(held.receipt, 1)
    owner.slot.clock.advance("2s")
    assert wakes(owner, b"b")


def test_nothing_is_pushed_where_the_receipt_is_ahead_of_the_clock(
    make_slot: Make, owners: MakeOwner
) -> None:
    owner = owners(make_slot(TopicType.PRIORITY))
    owner.work()
    owner.slot.clock.advance(-3)
    assert wakes(owner)


@pytest.mark.parametrize("ms", [2, 60_000])
@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.FIXED_TIME, TopicType.FIFO])
def test_what_is_not_due_waits(make_slot: Make, kind: TopicType, ms: int, owners: MakeOwner) -> None:
    owner = owners(make_slot(kind))
    owner.work()
    at = owner.slot.now_ms + ms if kind is TopicType.FIXED_TIME else ms
    assert wakes(owner, score=at)


@pytest.mark.parametrize("kind", [TopicType.RANGE_MERGE, TopicType.PRIORITY, TopicType.FIFO])
def test_several_messages_of_one_send_wait(make_slot: Make, kind: TopicType, owners: MakeOwner) -> None:
    owner = owners(make_slot(kind))
    owner.work()
    owner.slot.send(b"a", b"b")
    assert owner.heard() == [(owner.slot.topic.name, owner.slot.index)]
    assert len(owner.take().deliveries) == 2


@every_type
def test_messages_with_a_body_of_their_own_wait(make_slot: Make, kind: TopicType, owners: MakeOwner) -> None:
    owner = owners(make_slot(kind, identity="key"))
    owner.slot.send(b"first")
    owner.slot.commit(owner.take().receipt, [b"first"])
    assert wakes(owner)


@pytest.mark.parametrize("changes", [{"inbox": b""}, {"epoch": None}], ids=["no-inbox", "no-epoch"])
def test_nothing_is_pushed_without_an_offer_or_an_epoch(
    make_slot: Make, owners: MakeOwner, changes: dict[str, Any]
) -> None:
    owner = owners(make_slot(TopicType.FIFO))
    owner.slot.send(b"first")
    owner.slot.commit(owner.take(**changes).receipt, [b"first"])
    assert wakes(owner)


def test_who_asks_without_an_offer_withdraws_the_earlier_one(make_slot: Make, owners: MakeOwner) -> None:
    owner = owners(make_slot(TopicType.PRIORITY))
    owner.work()
    assert owner.slot.hash("control")[b"inbox"] == owner.inbox
    assert owner.take(inbox=b"").status == "empty"
    assert not owner.slot.hash("control").keys() & {b"inbox", b"inbox_epoch"}
    assert wakes(owner)


@pytest.mark.parametrize("again", [True, False], ids=["by-itself", "by-another"])
def test_an_offer_ends_when_the_slot_is_acquired(make_slot: Make, owners: MakeOwner, again: bool) -> None:
    owner = owners(make_slot(TopicType.FIFO))
    owner.work()
    slot = owner.slot
    if again:
        slot.acquire()
    else:
        slot.broker.acquire_slots(slot.topic, [slot.index])
    assert wakes(owner)


def test_an_offer_ends_when_somebody_else_takes(make_slot: Make, owners: MakeOwner) -> None:
    owner = owners(make_slot(TopicType.FIFO))
    owner.work()
    # A worker of an earlier version, or a Spark consumer, says nothing of offers.
    owner.slot.keyspace.hset(owner.slot.keys.control, b"owner", b"stranger")
    assert wakes(owner)


@pytest.mark.parametrize("state", ["paused", "moving", "inserting"])
def test_nothing_is_pushed_into_a_slot_that_is_shut(make_slot: Make, owners: MakeOwner, state: str) -> None:
    owner = owners(make_slot(TopicType.RANGE_MERGE))
    owner.work()
    owner.slot.keyspace.hset(owner.slot.keys.control, state.encode(), b"1")
    assert wakes(owner)


def test_nothing_is_pushed_to_an_owner_that_has_gone(make_slot: Make, owners: MakeOwner) -> None:
    slot = make_slot(TopicType.FIFO)
    owner, ear = owners(slot), slot.broker.wakeups([slot.topic])
    owner.work()
    owner.wakeups.close()
    [sent] = slot.send(b"a")
    assert sent.status == "stored"
    assert ear.get(10) == [(slot.topic.name, slot.index)]
    assert slot.where(b"a") == "W"
    assert b"inbox" not in slot.hash("control"), "the next send does not try again"
    ear.close()


def test_who_refuses_pushes_still_reads_those_that_were_made_before(
    make_slot: Make, owners: MakeOwner
) -> None:
    owner = owners(make_slot(TopicType.FIFO))
    owner.work()
    owner.slot.send(b"a")
    owner.wakeups.stop_pushes()
    pushed = owner.pushed()
    while owner.wakeups.has_pushes:
        owner.wakeups.get(0.1)
    owner.slot.commit_delivery(pushed.receipt, 1)
    assert wakes(owner, b"b")


@pytest.mark.parametrize("key", ["prepare", "inflight"])
def test_a_message_waits_where_another_program_has_put_a_key(
    make_slot: Make, owners: MakeOwner, key: str
) -> None:
    owner = owners(make_slot(TopicType.RANGE_MERGE))
    slot = owner.slot
    owner.work()
    with slot.foreign(key):
        slot.send(b"next")
        assert owner.heard() == [(slot.topic.name, slot.index)]
    assert slot.where(b"next") == "W"


@pytest.mark.parametrize("key", ["retry", "body", "stats"])
def test_a_send_that_finds_a_key_of_another_type_is_refused_and_pushes_nothing(
    make_slot: Make, owners: MakeOwner, key: str
) -> None:
    owner = owners(make_slot(TopicType.RANGE_MERGE))
    slot = owner.slot
    owner.work()
    with slot.foreign(key), pytest.raises(WrongType):
        slot.send(b"a")
    assert not wakes(owner), "the one push that was heard is that of the second send"
