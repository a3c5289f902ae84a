"""Workers that share slots, as coordinators in threads; what they own is what their callbacks were told."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self

import pytest

from django_rmq.core.coordination import Holding, Worker, topic_slots
from django_rmq.core.model.topic import Topic, TopicType
from django_rmq.exceptions import ConfigurationError
from tests.support.workers import LONG, eventually

SESSION = 60.0
"""Nobody loses such a session because the machine stands still for some seconds."""

SHORT = 2.0
"""A session whose end a test waits for."""

PATIENCE = 30
"""Tests bound liveness by so many times the goal."""

TAKE_OVER = SHORT + 1.5
"""The goal: seconds from the last sign of a worker until others own its slots."""

SERIAL = Topic("serial", TopicType.PRIORITY, slots=64)
SHARED = Topic("shared", TopicType.PRIORITY, slots=4, serial=False)
Slot = tuple[str, int]
Told = Callable[[Iterable[Slot]], None]


class Member:
    """A worker of the party and what it was told; `make` makes its coordinator."""

    def __init__(
        self,
        party: Party,
        make: Callable[..., Any],
        topics: Iterable[Topic],
        *,
        threads: int = 4,
        identity: str = "",
        **options: Any,
    ) -> None:
        self.party = party
        self.slots: set[Slot] = set()
        self.lost: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.silent = False
        """Killed: what it believes to own concerns nobody."""
        identity = identity or uuid.uuid4().hex
        worker = Worker(identity, "host", os.getpid(), time.time(), threads, topic_slots(topics))
        self.coordinator = make(worker, self.own, self.disown, **options)

    @property
    def worker(self) -> Worker:
        found: Worker = self.coordinator.worker
        return found

    @property
    def id(self) -> str:
        return self.worker.id

    def own(self, slots: Iterable[Slot]) -> None:
        with self.party.changed:
            for slot in slots:
                if slot in self.slots:
                    self.wrong.append(f"owns {slot} twice")
                self.slots.add(slot)
            self.party.changed.notify_all()

    def disown(self, slots: Iterable[Slot]) -> None:
        with self.party.changed:
            for slot in slots:
                if slot not in self.slots:
                    self.wrong.append(f"loses {slot} that it had not")
                self.slots.discard(slot)
                self.lost[slot[0]] += 1
            self.party.changed.notify_all()

    def serial(self) -> set[int]:
        return {slot for topic, slot in self.slots if topic == SERIAL.name}

    def leave(self) -> None:
        self.coordinator.stop(LONG)
        with self.party.changed:
            self.silent = True


class Party(ABC):
    """Workers that belong together."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.changed = threading.Condition()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def live(self) -> list[Any]:
        return [member for member in self.all if not member.silent]

    def wait_for(self, fact: Callable[[], bool], what: str, seconds: float = TAKE_OVER * PATIENCE) -> float:
        """Return how long it took until ``fact``, which is looked at whenever a worker is told something."""
        started = time.monotonic()
        with self.changed:
            assert self.changed.wait_for(fact, seconds), f"not within {seconds} s: {what}; {self.shown()}"
        return time.monotonic() - started

    def settle_for(self, seconds: float) -> None:
        """Let slots be assigned when nobody has come or gone for so long."""
        for member in self.all:
            member.coordinator._settle_seconds = seconds

    def shown(self) -> str:
        return "; ".join(f"{member.id[:6]} {sorted(member.serial())}" for member in self.live())

    def is_shared_out(self, slots: int = SERIAL.slots) -> bool:
        """Every slot is owned once, and each worker has its share."""
        live = self.live()
        owned = [member.serial() for member in live]
        if Counter(slot for each in owned for slot in each) != Counter(range(slots)):
            return False
        threads = sum(member.worker.threads for member in live)
        quotas = [slots * member.worker.threads / threads for member in live]
        return all(abs(len(each) - quota) < 1 for each, quota in zip(owned, quotas, strict=True))

    def wait_until_shared_out(self, seconds: float = TAKE_OVER * PATIENCE) -> float:
        return self.wait_for(self.is_shared_out, "every slot owned once, in fair shares", seconds)

    def share(self, count: int, **options: Any) -> list[Any]:
        """Add workers, wait until they share all slots, and return them."""
        added = [self.add(**options) for _ in range(count)]
        self.wait_until_shared_out()
        return added

    def wait_until_settled(self, members: Iterable[Any] = (), seconds: float = TAKE_OVER * PATIENCE) -> None:
        """Wait until these workers, or all that live, apply the newest assignment."""
        for member in members or self.live():
            assert member.coordinator.wait_settled(seconds)

    @abstractmethod
    def add(self, **options: Any) -> Any:
        """Start a worker."""

    @abstractmethod
    def add_mortal(self, **options: Any) -> Any:
        """Start a worker with a short session that a test can kill."""

    @abstractmethod
    def holdings(self) -> list[Holding]:
        """Return who owns what, as people see it."""

    @abstractmethod
    def members(self) -> list[str]:
        """Return the ids of the workers that are known."""

    @abstractmethod
    def coordinator(self, topic: Topic, own: Told, disown: Told) -> Any:
        """Return a coordinator, which is not started, of a worker with one topic."""

    def end(self) -> None:
        for member in self.all:
            member.coordinator.stop(0.2 if member.silent else 2.0)
        assert [member.wrong for member in self.all] == [[] for _ in self.all]


class Sharing:
    """What holds wherever workers meet; the fixture ``party`` says where they do."""

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_workers_share_out_all_slots(self, party: Any, count: int) -> None:
        for threads in range(1, count + 1):
            party.add(threads=threads)
        party.wait_until_shared_out()
        for member in party.live():
            assert member.coordinator.wait_settled(TAKE_OVER * PATIENCE)
            assert {slot for topic, slot in member.slots if topic == "shared"} == set(range(4))
            owned = member.coordinator.owned()
            assert {(topic, slot) for topic, parts in owned.items() for part in parts for slot in part} == (
                member.slots
            )

    def test_when_a_worker_leaves_the_others_take_over_at_once_and_keep_what_they_have(
        self, party: Any
    ) -> None:
        first, second, third = party.share(3)
        for member in (first, second, third):
            member.lost.clear()
        second.leave()
        assert second.slots == set()
        party.wait_until_shared_out(1.0 * PATIENCE)
        assert [member.lost for member in (first, third)] == [Counter(), Counter()]

    @pytest.mark.parametrize("first_assigns", [True, False])
    def test_a_topic_that_is_served_no_more_goes_to_others(self, party: Any, first_assigns: bool) -> None:
        identities = ["0" * 32, "1" * 32] if first_assigns else ["1" * 32, "0" * 32]
        first, second = (party.add(identity=identity) for identity in identities)
        party.wait_until_shared_out()
        first.coordinator.announce(topics=[SHARED])
        party.wait_for(lambda: not first.serial() and len(second.serial()) == 64, "all for the second")
        assert ("shared", 3) in first.slots

    def test_a_worker_without_room_gives_its_slots_to_those_that_have_some(self, party: Any) -> None:
        first, second = party.add(), party.add(threads=2)
        party.wait_until_shared_out()

        def note(member: Any, *topics: str) -> None:
            # It may have noted something just before.
            eventually(
                lambda: (
                    member.coordinator.note_full(frozenset(topics))
                    or member.coordinator._announced.full == frozenset(topics)
                )
            )

        note(first, SERIAL.name, SHARED.name)
        party.wait_for(
            lambda: len(second.serial()) == 64 and not first.serial() and ("shared", 3) in first.slots,
            "all that is assigned for the second",
        )
        note(second, SERIAL.name)
        party.wait_until_shared_out()
        note(first)
        party.wait_for(lambda: len(first.serial()) == 64, "all for the first")
        note(second)
        party.wait_until_shared_out()
        assert first.coordinator.wait_settled(TAKE_OVER * PATIENCE)

    def test_workers_of_different_topics_get_their_own_only(self, party: Any) -> None:
        other = Topic("other", TopicType.PRIORITY, slots=8)
        first, second = party.add([SERIAL]), party.add([other])
        party.wait_for(lambda: len(first.slots) == 64 and len(second.slots) == 8, "each its own topic")
        assert {topic for topic, _ in second.slots} == {"other"}

    def test_when_a_worker_joins_the_others_give_only_what_it_gets(self, party: Any) -> None:
        first, second = party.share(2)
        first.lost.clear()
        second.lost.clear()
        [third] = party.share(1)
        assert first.lost + second.lost == Counter({"serial": len(third.serial())})
        assert third.lost == Counter()

    @pytest.mark.slow
    def test_if_the_first_worker_does_not_assign_the_next_one_does(self, party: Any) -> None:
        first = party.add(identity="0" * 32)
        party.wait_until_shared_out()
        first.coordinator._assign = lambda why: None
        party.add(session_seconds=SHORT)
        party.wait_until_shared_out()

    @pytest.mark.slow
    def test_the_worker_that_assigns_can_die_as_well(self, party: Any) -> None:
        workers = sorted((party.add_mortal() for _ in range(3)), key=lambda member: member.id)
        party.wait_until_shared_out()
        for member in workers[:2]:
            member.kill()
            party.wait_until_shared_out()

    @pytest.mark.slow
    def test_flapping_workers_leave_every_slot_owned_once(self, party: Any) -> None:
        chance = random.Random(20)
        party.add()
        mortal = [party.add_mortal()]
        for step in range(16):
            if mortal and chance.random() < 0.5:
                one = mortal.pop(chance.randrange(len(mortal)))
                one.leave() if chance.random() < 0.5 else one.kill()
            else:
                mortal.append(party.add_mortal(threads=chance.randint(1, 4)))
            if step % 4 == 3:
                party.wait_until_shared_out()
        party.wait_until_shared_out()

        def is_known() -> bool:
            found = (one for one in party.holdings() if one.topic == SERIAL.name)
            owners = {slot: one.worker for one in found for slot in range(one.start, one.stop)}
            return owners == {slot: member.id for member in party.live() for slot in member.serial()}

        eventually(is_known, "who owns what being known")

    def test_a_second_worker_with_the_same_id_is_refused(self, party: Any) -> None:
        [first] = party.share(1)
        with pytest.raises(
            ConfigurationError, match=rf"{first.id} is already in use \(process {os.getpid()} on host\)"
        ):
            party.add(identity=first.id)
        party.all.pop().coordinator.stop()
        assert len(first.serial()) == 64
        assert party.members() == [first.id]

    def test_people_see_workers_and_who_owns_what_since_when(self, party: Any) -> None:
        first = party.add(identity="1" * 32, threads=3)
        party.wait_until_shared_out()
        assert first.coordinator.wait_settled(TAKE_OVER * PATIENCE)
        (holding,) = party.holdings()
        assert (holding.topic, holding.start, holding.stop, holding.worker) == ("serial", 0, 64, "1" * 32)
        assert abs(holding.since - time.time()) < 60
        (member,) = first.coordinator.members()
        assert member.worker == first.worker and 0 < member.session_left <= SESSION
        assert party.members() == [first.id]
        first.leave()
        assert party.members() == []

    def test_a_callback_that_raises_stops_nothing(self, party: Any, caplog: pytest.LogCaptureFixture) -> None:
        told: list[int] = []

        def own(slots: Iterable[Slot]) -> None:
            told.append(len(list(slots)))
            raise RuntimeError("not today")

        coordinator = party.coordinator(SERIAL, own, lambda slots: None)
        coordinator.start()
        try:
            assert coordinator.wait_settled(TAKE_OVER * PATIENCE)
            assert told == [64]
            assert "Cannot apply a new assignment: the worker gains" in caplog.text
        finally:
            coordinator.stop()

    def test_a_million_slots_find_their_owners(self, party: Any) -> None:
        """Told in parts, so that sessions go on meanwhile."""
        topic = Topic("million", TopicType.PRIORITY, slots=1 << 20)
        counts = [0, 0]
        parts: list[int] = []
        done = threading.Condition()

        def count(which: int, sign: int) -> Told:
            def told(slots: Iterable[Slot]) -> None:
                number = sum(1 for _ in slots)
                with done:
                    parts.append(number)
                    counts[which] += sign * number
                    done.notify_all()

            return told

        coordinators = [party.coordinator(topic, count(which, 1), count(which, -1)) for which in range(2)]
        for coordinator in coordinators:
            coordinator.start()
        try:
            with done:
                assert done.wait_for(lambda: counts == [1 << 19, 1 << 19], 60)
            assert max(parts) <= 8192
            self.check_sizes(party)
        finally:
            for coordinator in coordinators:
                coordinator.stop(LONG)
        assert counts == [0, 0]

    def check_sizes(self, party: Any) -> None:
        """Check what the assignment of a million slots takes."""
