"""One slot of one topic, with the words that every test of the contract would repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, cast

import pytest

from django_rmq.core.commands.broker_interface import run_all
from django_rmq.core.commands.insert import InsertRows, insert
from django_rmq.core.commands.script_call import Call
from django_rmq.core.model.bounds import BATCH
from django_rmq.core.model.envelope import Envelope, encode_envelope
from django_rmq.core.model.keys import SlotKeys, slot_keys
from django_rmq.core.model.replies import Delivery, Failure, Prepared, Sent
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.testing import Clock
from tests.contract.keyspaces import SETS, Found, Keyspace

START_MS = 1_800_000_000_000
TYPES = [kind for kind in TopicType if kind is not TopicType.FIFO]
"""The types whose score is a time or a priority; ``test_fifo.py`` has the contract of the other one."""
TIME_TYPES = [TopicType.RANGE_MERGE, TopicType.FIXED_TIME]
CONSTANT = BackOff(1_000, 1_000)
NO_BACKOFF = BackOff(0, 0)
BOTH = ["body", "key"]
"""The identities that a topic may have."""


def slot_of_each(kinds: Iterable[TopicType], **options: Any) -> pytest.MarkDecorator:
    """Give a test a slot of a topic of each type in turn, with these options: of a list each of its values in turn."""
    lists = {name: values for name, values in options.items() if isinstance(values, list)}
    cases = []
    for kind, *chosen in product(kinds, *lists.values()):
        each = {"type": kind, **options, **dict(zip(lists, chosen, strict=True))}
        cases.append(pytest.param(each, id="-".join([kind.value, *map(str, chosen)])))
    return pytest.mark.parametrize("slot", cases, indirect=True)


each_type = slot_of_each(TYPES)


class Slot:
    """One slot of one topic: the broker's methods without the words that every test would repeat."""

    def __init__(self, broker: Any, keyspace: Keyspace, clock: Clock, topic: Topic, index: int = 0) -> None:
        self.broker, self.keyspace, self.clock, self.topic, self.index = broker, keyspace, clock, topic, index
        self.strangers = 0
        """Members that came by a plain ZADD: how far the ledger is ahead until an audit adopts them."""

    def with_topic(self, **changes: Any) -> Slot:
        """Return the same slot as a client sees it whose settings differ."""
        return Slot(self.broker, self.keyspace, self.clock, replace(self.topic, **changes), self.index)

    @property
    def keys(self) -> SlotKeys:
        return slot_keys(self.broker.prefix, self.topic.name, self.index)

    @property
    def now_ms(self) -> int:
        return self.clock() // 1000

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.broker, name)
        return lambda *args, **kwargs: method(self.topic, self.index, *args, **kwargs)

    # --- by state

    def zset(self, state: str) -> dict[bytes, float]:
        return self.keyspace.zset(getattr(self.keys, state))

    def bodies(self) -> dict[str, bytes]:
        """Return the bodies of a keyed slot that holds one member: the key each lies in, and the body without its head."""
        found = {name: self.hash(name).values() for name in ("body", "prepare_body", "claim_body")}
        found["deaths"] = self.hash("deaths").values()
        return {name: one.rpartition(b"\n")[2] for name, values in found.items() for one in values}

    def hash(self, name: str) -> dict[bytes, bytes]:
        return self.keyspace.hash(getattr(self.keys, name))

    def read(self, *names: str) -> Found:
        """Return what several keys of the slot hold."""
        keys = self.keys
        return self.keyspace.read({name: getattr(keys, name) for name in names})

    def where(self, member: bytes) -> str:
        """Return the letters of PROTOCOL.md's states: W w T F C D, or - for absent."""
        letters, found = "", self.read("prepare", "claim", "store", "retry", "dead")
        if member in found["prepare"]:
            letters += "F"
        if member in found["claim"]:
            letters += "C"
        score = found["store"].get(member)
        if score is not None:
            floor = max(16, self.topic.max_retries) if self.topic.is_priority else 999
            letters += "w" if score <= floor or score % 1 else "W"
        if member in found["retry"]:
            letters += "T"
        if member in found["dead"]:
            letters += "D"
        return letters or "-"

    def envelope(self, body: bytes = b"body", **parts: Any) -> bytes | None:
        return encode_envelope(Envelope(body, **parts)) if self.topic.keyed else None

    def envelopes(self, count: int, body: bytes = b"body", envelope: bytes | None = None) -> list[bytes]:
        one = envelope or self.envelope(body)
        return [] if one is None else [one] * count

    # --- what tests do all the time

    def due_in(self, ms: int) -> int:
        """Return the score to send with, on a topic of time, for a message that is due so many ms from now."""
        return self.now_ms + ms if self.topic.type is TopicType.FIXED_TIME else ms

    def fresh_score(self, n: int = 0) -> int:
        """Return the n-th score to send with: every one due now, later ones after earlier ones."""
        return 100 - n if self.topic.is_priority else self.now_ms - 1_000 + n

    def send(self, *members: bytes, score: int | None = None, **how: Any) -> list[Sent]:
        """Send members, takeable at once unless ``score`` says otherwise (range_merge: ms to wait).

        ``how``: their ``body`` or their ``envelope``.
        """
        if len(members) > BATCH:
            first = self.send(*members[:BATCH], score=score, **how)
            return [*first, *self.send(*members[BATCH:], score=score, **how)]
        envelopes = self.envelopes(len(members), **how)
        if self.topic.type is TopicType.RANGE_MERGE:
            return self.send_merge(score or 0, list(members), envelopes)
        if self.topic.is_fifo:
            return self.send_fifo(score or 0, list(members), envelopes)
        scores = [self.fresh_score(n) if score is None else score for n in range(len(members))]
        return self.send_replace(scores, list(members), envelopes)

    def insert(self, *members: bytes, scores: Sequence[int] | None = None) -> Counter[str] | None:
        """Insert members, due one TIME_RANGE from now, or takeable at once unless ``scores`` say otherwise."""
        if scores is None and self.topic.type is TopicType.RANGE_MERGE:
            scores = [self.now_ms + (self.topic.time_range_ms or 0)] * len(members)
        elif scores is None:
            scores = [self.fresh_score(n) for n in range(len(members))]
        calls = insertion(self.topic, self.index, scores, members)
        return cast("Counter[str] | None", run_all(self.broker, calls)[-1])

    def take(self, limit: int = 10, owner: str = "A", epoch: int | None = None, **kwargs: Any) -> Prepared:
        return self.broker.prepare(self.topic, self.index, owner, epoch, limit, **kwargs)

    def take_one(self, owner: str = "A") -> tuple[int, Delivery]:
        """Take exactly one; return its receipt and the delivery."""
        answer = self.take(1, owner)
        assert answer.status == "ok", answer
        return answer.receipt, answer.deliveries[0]

    def fail(
        self,
        receipt: int,
        *members: bytes,
        delay_ms: int | None = None,
        kind: str = "failed",
        error: str = "no",
    ) -> list[str]:
        return self.rollback(receipt, [Failure(member, kind, delay_ms, error) for member in members])

    def reject(self, receipt: int, *members: bytes) -> list[str]:
        return self.fail(receipt, *members, kind="rejected")

    def fail_one(self, member: bytes, **how: Any) -> None:
        """Take the member that comes next, and let it fail."""
        receipt, delivery = self.take_one()
        assert delivery.member == member
        assert self.fail(receipt, member, **how) == ["ok"]

    def bring(self, state: str, *, dead: bool = False) -> int:
        """Bring message a into a state, beside a dead copy if it has one; return the receipt of its delivery, or no receipt.

        What is claimed is sealed, number 1, and belongs to s for a minute.
        """
        a, receipt = b"a", 77
        if state != "-":
            self.send(a)
        if state in ("w", "T"):
            self.fail_one(a, delay_ms=0 if state == "w" else 5_000)
        if "F" in state:
            receipt, _ = self.take_one()
        if "C" in state:
            assert self.claim("s", 1, 60_000, 100).status == "ok"
            self.renew_claim("s", 1, 60_000, seal=True)
        if len(state) == 2:
            self.send(a)
        assert self.where(a) == (state.strip("-") + "D" if dead else state)
        return receipt

    def bring_one_into_each(self) -> None:
        """Bring messages into Dead, Resting, Running and Waiting that are called dead, rests, runs and waits."""
        self.send(b"dead")
        self.kill(b"dead")
        self.send(b"rests")
        self.fail_one(b"rests")
        self.send(b"runs")
        self.take_one()
        self.send(b"waits")

    def fail_to_death(self, member: bytes) -> list[int]:
        """Fail every delivery until the member is dead; return the retries left to each."""
        lefts: list[int] = []
        while member not in self.zset("dead"):
            assert len(lefts) < 1_001, "this never ends"
            receipt, delivery = self.take_one()
            lefts.append(delivery.retries_left)
            assert self.fail(receipt, member) == ["ok"]
            self.clock.advance(self.topic.backoff.cap_ms / 1000)
        return lefts

    def kill(self, member: bytes) -> None:
        """Bring a member that waits alone into Dead by rejection."""
        self.fail_one(member, kind="rejected")

    def end(self, how: str, receipt: int, *members: bytes, **failure: Any) -> list[str] | None:
        """End deliveries in one of the ways there are; return the answer. A time-out has none."""
        if how == "time_out":
            self.clock.advance(self.topic.timeout + 1)
            assert self.time_out() == len(members)
            return None
        if how in ("commit", "release"):
            return cast("list[str]", getattr(self, how)(receipt, list(members)))
        return self.fail(receipt, *members, kind="rejected" if how == "reject" else "failed", **failure)

    @contextmanager
    def woken(self) -> Iterator[None]:
        """Require that the block wakes who sleeps in the slot, once."""
        wakeups = self.broker.wakeups([self.topic])
        try:
            yield
            assert wakeups.get(5) == [(self.topic.name, self.index)]
        finally:
            wakeups.close()

    @contextmanager
    def foreign(self, name: str) -> Iterator[None]:
        """Let a key of the slot be of another type while the block runs."""
        key = getattr(self.keys, name)
        kept = self.keyspace.dump().get(key, {})
        self.keyspace.delete(key)
        self._put(key, {b"x": 1 if name not in SETS else b"1"})
        yield
        self.keyspace.delete(key)
        self._put(key, kept)

    def _put(self, key: bytes, content: dict[bytes, Any]) -> None:
        for field, value in content.items():
            (self.keyspace.hset if isinstance(value, bytes) else self.keyspace.zadd)(key, field, value)

    def zadd(self, member: bytes, score: float) -> None:
        """Send as the article's producers do."""
        self.strangers += self.keyspace.zadd(self.keys.store, member, score)

    def fill(self, members: Mapping[bytes, float]) -> None:
        """Put members in as a stranger would, with these scores."""
        for member, score in members.items():
            self.zadd(member, score)

    def counted(self, name: str) -> int:
        return int(self.hash("stats").get(name.encode(), 0))

    def snapshot(self, *without: str) -> dict[bytes, dict[bytes, Any]]:
        """Return every key; ``without``: counters to leave out."""
        found = self.keyspace.dump()
        stats = found.get(self.keys.stats, {})
        for name in without:
            stats.pop(name.encode(), None)
        if not stats:
            found.pop(self.keys.stats, None)
        return found


Make = Callable[..., Slot]
"""What makes a slot of a topic with the options that it is given."""


def insertion(topic: Topic, slot: int, scores: Sequence[int], members: Sequence[bytes]) -> list[Call[object]]:
    """Return the calls that insert these members, of which none is empty."""
    pairs = [part for pair in zip(scores, members, strict=True) for part in pair]
    rows = InsertRows(len(members), pairs, min(scores), max(scores))
    return insert(topic, slot, rows)


class Drift(NamedTuple):
    live: int
    dead: int
    deliveries: int
    claims: int


def drift(slot: Slot) -> Drift:
    ledger = slot.audit_ledger()
    return Drift(ledger.live_drift, ledger.dead_drift, ledger.delivery_drift, ledger.claim_drift)
