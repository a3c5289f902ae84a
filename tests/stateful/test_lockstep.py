"""Every history of transitions leaves Lua on Redis and the rules in Python with equal answers and keys.

The invariants are those of ``docs/state_machine.md``, by the same names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha1
from typing import Any, cast

import redis
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_rmq.core.commands import operate
from django_rmq.core.commands import send as send_commands
from django_rmq.core.commands.broker_interface import Woken, run_all
from django_rmq.core.commands.insert import end_insertion
from django_rmq.core.commands.operate import Deleted, TrashShare, into_trash
from django_rmq.core.commands.script_call import AtSlots, Call
from django_rmq.core.model import replies
from django_rmq.core.model.bounds import MAX_PRIORITY, NEVER
from django_rmq.core.model.envelope import Envelope, decode_envelope, encode_envelope
from django_rmq.core.model.keys import slot_keys, trash_key
from django_rmq.core.model.topic import BackOff, Topic, TopicType
from django_rmq.exceptions import RmqError
from django_rmq.testing import Clock
from tests.contract.keyspaces import Dump, MemoryKeyspace, RedisKeyspace, in_one_form
from tests.contract.slots import insertion
from tests.stateful.promises import ANY, FULL, Flight, Promise, Promises
from tests.support.brokers import Broker, OracleBroker

START_MS = 1_800_000_000_123
OWNERS = ["A", "B"]
CONSUMERS = ["s", "s", "t"]
ACTS = ["one", "two"]
FOREIGN_SCORES = [-math.inf, math.inf, -5.0, 0.0, 0.5, 7.0, 16.0, 99.75, 999.0, 1e15, 1e300]
MEMBERS = [b"a", b"a", b"b", b"b", b"c", b"", b"\0\xff"]

members = st.sampled_from(MEMBERS)
some_members = st.lists(members, min_size=1, max_size=3)
errors = st.sampled_from(["", "boom", "a.boom: so", "nul \0 in it", "é" * 600])
limits = st.sampled_from([1, 2, 3, 10])
RARELY = [False] * 30 + [True]
topics = st.builds(
    Topic,
    name=st.just("topic"),
    type=st.sampled_from(TopicType),
    slots=st.just(2),
    debounce=st.sampled_from([False, False, True]),
    max_wait_ms=st.sampled_from([700, 5_000, 3_600_000]),
    accumulate=st.sampled_from([None, 2, 4]),
    identity=st.sampled_from(["body", "key"]),
    serial=st.sampled_from([True, True, False]),
    timeout=st.sampled_from([1, 30]),
    max_retries=st.sampled_from([0, 1, 2, 3, 16, 20]),
    backoff=st.sampled_from([BackOff(0, 0), BackOff(1_000, 1_000), BackOff(100, 1_600), BackOff()]),
    retry_priority=st.sampled_from(["original", "lowest"]),
    order=st.sampled_from(["strict", "strict", "loose"]),
    on_duplicate=st.sampled_from(["keep", "replace"]),
    max_backlog=st.sampled_from([None, None, 4]),
    max_prepared=st.sampled_from([1, 2, 1_000]),
    slot_rate=st.sampled_from([None, None, None, 0.5, 3.0, 50.0]),
    # Redis deletes the keys after this time by its own clock, which a history must not outlive.
    outcome_retention_ms=st.sampled_from([None, 60_000, 3_600_000]),
).map(
    lambda topic: (
        topic if topic.keyed and topic.type is TopicType.RANGE_MERGE else replace(topic, accumulate=None)
    )
)


def choose(data: st.DataObject, values: Sequence[Any]) -> Any:
    """Draw one of the values; what stands there more than once is drawn more often."""
    return data.draw(st.sampled_from(values))


def comparable(answer: Any) -> Any:
    """Return an answer so that equal ones compare equal: NaN is NaN, and numbers have one form."""
    if isinstance(answer, RmqError):
        return type(answer).__name__
    if isinstance(answer, (replies.Prepared, replies.Page)) and answer.cursor is not None:
        answer = answer._replace(cursor=(float(answer.cursor[0]), answer.cursor[1]))  # type: ignore[arg-type]
    if isinstance(answer, (replies.DescribeReply, replies.FoundReply)) and answer.in_flight is not None:
        answer = answer._replace(in_flight=in_one_form(answer.in_flight))
    if isinstance(answer, replies.ClaimRead):
        # Servers write scores in forms of their own.
        rows = [float(text) if at % 2 else text for at, text in enumerate(answer.rows)]
        answer = (*answer[:3], rows, answer.envelopes)
    if type(answer) in (list, tuple):
        return [comparable(item) for item in answer]
    if isinstance(answer, tuple):
        return (type(answer).__name__, *map(comparable, answer))
    if isinstance(answer, float):
        return "nan" if math.isnan(answer) else answer
    return answer


class Lockstep(RuleBasedStateMachine):
    """Slot 0 of one topic, in Redis and in memory, under one clock."""

    client: redis.Redis
    base_prefix: str
    examples = pushes = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.prefix = f"{self.base_prefix}{self.examples}:"
        self.clock = Clock(START_MS)
        self.latest_ms = START_MS
        self.redis = Broker(self.client, self.prefix, self.clock)
        self.memory = OracleBroker(self.prefix, self.clock)
        self.redis_keys = RedisKeyspace(self.client, self.prefix)
        self.memory_keys = MemoryKeyspace(self.memory)
        self.promises = Promises()
        self.strangers = 0
        self.adopted = 0
        self.epochs = dict.fromkeys(OWNERS, 0)
        self.highest_epoch = 0
        self.last_receipt = 0
        self.has_lost_receipts = False
        self.bodies = self.ordered = 0
        self.handed: list[tuple[int, bytes]] = [(99, b"a")]
        self.alone: set[int] = set()
        self.cursor: tuple[str, bytes] | None = None
        self.before: Dump = {}
        self.after: Dump = {}
        self.kept_by_strangers: set[bytes] = set()
        self.line: dict[bytes, float] = {}
        """fifo: the place of each member's last send that was due at once."""
        self.order: dict[tuple[bytes, bytes], int] = {}
        """Member and envelope -> the how manyth send or replay has brought it last."""
        self.sealed: tuple[str, int, list[bytes]] | None = None
        """The claim that was read last, and its rows."""
        self.failed_claimed: dict[bytes, str] = {}
        """What its query has failed of the claim there is: failed or rejected."""
        self.asleep_until: int | None = None
        """The ms until which the last consumer that asked need not ask again unless it is woken."""
        self.heard: list[Woken] = []
        self.has_old_places = False
        """Whether a message came back to its place of fifo, which a clock that was set back may have given again."""
        self.trash: dict[str, dict[tuple[str, bytes], Promise]] = {act: {} for act in ACTS}
        """Act -> what it has deleted that waited or rested, as it was promised; the dead have no promise."""

    @initialize(
        topic=topics,
        is_warm=st.sampled_from([True, True, False]),
        first=members,
        second=members,
        third=members,
    )
    def declare(self, topic: Topic, is_warm: bool, first: bytes, second: bytes, third: bytes) -> None:
        self.topic = topic
        self.keys = slot_keys(self.prefix, topic.name, 0)
        self.all_keys = [self.keys, slot_keys(self.prefix, topic.name, 1)]
        self.trash_keys = {act: trash_key(self.prefix, topic.name, 0, act) for act in ACTS}
        # Nobody has subscribed to the inbox of the other owner.
        brokers = (self.redis, self.memory)
        self.wakeups = [broker.wakeups([topic], broker.inbox(OWNERS[0])) for broker in brokers]
        # A slot that has held a few messages is seldom empty again, and only into an empty one a send pushes.
        if is_warm and not topic.keyed:
            self.lone_messages_come_to_a_worker(first, second, third)

    def teardown(self) -> None:
        if not hasattr(self, "topic"):
            return
        # A wake-up of our own, behind which there can be no other; -1 and -2 say that a slot was paused.
        self.client.publish(f"{self.prefix}rmq:wake:topic", -99)
        heard: list[Woken] = []
        while not heard or heard[-1][1] != -99:
            heard += self.wakeups[0].get(10)
        try:
            self.heard += self.wakeups[1].get()
            self.require("INV-15", heard[:-1] == self.heard, heard, self.heard)
            # Nobody uses the topic any more: an empty slot leaves nothing behind, another one stays as it is.
            held = self.after
            answer = self.both(lambda b: b.retire(self.topic, 0))
            trash = {key: held[key] for key in self.trash_keys.values() if key in held}
            self.require("INV-14", self.after == (trash if answer == "retired" else held), answer)
        finally:
            for wakeups in self.wakeups:
                wakeups.close()
            if keys := [key for keys in self.all_keys for key in keys]:
                self.client.unlink(*keys, *self.trash_keys.values())

    # --- both at once

    def require(self, name: str, holds: bool, *details: object) -> None:
        assert holds, f"{name} is broken: {details}"

    def both(self, call: Callable[[Any], Any], *, topic: Topic | None = None) -> Any:
        """Run a call on both brokers and return the answer; a refusal is one as well."""
        answers: list[Any] = []
        for broker in (self.redis, self.memory):
            try:
                answers.append(call(broker))
            except RmqError as error:
                answers.append(error)
        self.require("INV-1", comparable(answers[0]) == comparable(answers[1]), *answers)
        self.look()
        return answers[1]

    def reading(self, call: Callable[[Any], Any]) -> Any:
        answer = self.both(call)
        self.require("INV-14", self.before == self.after)
        return answer

    def look(self) -> None:
        self.before, self.after = (
            self.after,
            self.redis_keys.dump_slots(self.all_keys, list(self.trash_keys.values())),
        )
        mine = self.memory_keys.dump()
        self.require("INV-2", self.after == mine, self.after, mine)

    def zset(self, state: str, dump: Dump | None = None) -> dict[bytes, float]:
        return (self.after if dump is None else dump).get(getattr(self.keys, state), {})

    def vanished_from(self, state: str) -> set[bytes]:
        return set(self.zset(state, self.before)) - set(self.zset(state))

    @property
    def now_ms(self) -> int:
        return self.clock() // 1000

    @property
    def max_retries(self) -> int:
        """The slot's own, as the scripts have left it."""
        control = self.after.get(self.keys.control, {})
        return int(control.get(b"max_retries", self.topic.max_retries))

    @property
    def earlier_counts(self) -> bool:
        return self.topic.type in (TopicType.RANGE_MERGE, TopicType.FIFO)

    def elsewhere(self) -> Topic:
        """Return the topic as a client knows it that missed a re-slotting; the first to come settles the count."""
        settled = b"slots" in self.after.get(self.keys.control, {})
        return replace(self.topic, slots=4) if settled else self.topic

    # --- sending

    def scores(self, data: st.DataObject, count: int) -> list[int]:
        """Draw what to send with: ms to wait, priorities, or instants; mostly takeable now."""
        if self.topic.type is TopicType.RANGE_MERGE:
            choices = [0, 0, 0, 1, 500, 60_000]
        elif self.topic.is_priority:
            choices = [21, 100, 100, 101, 1 << 42, MAX_PRIORITY]
        else:
            choices = [self.now_ms + ms for ms in (-5_000, -1, 0, 0, 1, 500, 60_000)]
        scores = data.draw(st.lists(st.sampled_from(choices), min_size=count, max_size=count))
        if choose(data, RARELY):
            scores[-1] = -1 if self.topic.type is TopicType.RANGE_MERGE else 5
        return scores

    def envelopes(self, data: st.DataObject, count: int) -> list[bytes]:
        """Draw envelopes, none of which there was before."""
        if not self.topic.keyed:
            return []
        expires = data.draw(
            st.lists(st.sampled_from([0, 0, self.now_ms + 700]), min_size=count, max_size=count)
        )
        self.bodies += count
        bodies = [b"\0\xff\n%d.%d" % (self.bodies, n) for n in range(count)]
        limits = st.tuples(
            st.sampled_from([None, None, 0, 1, 2, 30]), st.sampled_from([None, None, 1, 5, 40])
        )
        return [
            encode_envelope(
                Envelope(body, ends, bodies=(body,) if self.topic.accumulate else None)._replace(
                    max_retries=retries, timeout=timeout
                )
            )
            for body, ends in zip(bodies, expires, strict=True)
            for retries, timeout in [data.draw(limits)]
        ]

    def most(self, envelope: bytes | None) -> int:
        """How often a message may be tried again: its own number, but at most the slot's."""
        own = None if envelope is None else decode_envelope(envelope).max_retries
        return self.max_retries if own is None else min(own, self.max_retries)

    def note_new_limits(self, promise: Promise, envelope: bytes | None) -> Promise:
        """A message that keeps its place keeps its failures, too; they count against its new number."""
        if promise.left in (None, FULL) or not self.topic.is_fifo:
            return promise
        had = None if promise.body == ANY else promise.body
        return replace(promise, left=promise.left + self.most(envelope) - self.most(had))

    def parts_of(self, envelope: bytes) -> Sequence[bytes]:
        """The bodies that a topic with ACCUMULATE has collected in an envelope; on others the envelope."""
        return decode_envelope(envelope).bodies or () if self.topic.accumulate else [envelope]

    def note_order(self, member: bytes, envelope: bytes | None) -> None:
        for part in () if envelope is None else self.parts_of(envelope):
            self.ordered += 1
            self.order[member, part] = self.ordered

    def order_of(self, member: bytes, envelope: bytes) -> int:
        """When the last body of an envelope was sent. Those that were collected are in the order of sending, once each."""
        orders = [self.order[member, part] for part in self.parts_of(envelope)]
        self.require("INV-21", orders == sorted(set(orders)), member, envelope, orders)
        return orders[-1]

    def promised(self, envelope: bytes | None) -> bytes | None:
        """The envelope that a message comes with. What a topic collects is looked at by `order_of`."""
        return ANY if self.topic.accumulate else envelope

    def envelope_of(self, name: str, member: bytes, dump: Dump | None = None) -> bytes | None:
        found: bytes | None = (
            (self.after if dump is None else dump).get(getattr(self.keys, name), {}).get(member)
        )
        if name == "deaths":
            return None if found is None else replies.Death.parse(found).envelope
        return found

    def note_sent(self, names: list[bytes], scores: list[float], envelopes: list[bytes], answer: Any) -> None:
        if isinstance(answer, RmqError):
            self.require("INV-13", self.before == self.after, answer)
            return
        bodies: Sequence[bytes | None] = envelopes or [None] * len(names)
        for member, score, envelope, sent in zip(names, scores, bodies, answer, strict=True):
            not_before = 0 if self.topic.is_priority else score
            if sent.status in ("stored", "superseded") or (
                sent.status == "replaced" and not self.topic.is_fifo
            ):
                self.promises.waiting[member] = Promise(
                    min(not_before, sent.score)
                    if self.topic.debounce_ms or self.topic.accumulate
                    else not_before,
                    body=self.promised(envelope),
                    latest_ms=self.now_ms + self.most_wait,
                )
                self.note_due(member, sent.score, score)
                self.kept_by_strangers.discard(member)
                self.note_order(member, envelope)
            elif sent.status == "merged" or (sent.status == "replaced" and self.topic.is_fifo):
                self.require("INV-11", member in self.promises.waiting, member)
                promise = self.note_new_limits(self.promises.waiting[member], envelope)
                promise = replace(promise, body=self.promised(envelope))
                if self.topic.debounce_ms:
                    promise = replace(promise, not_before_ms=min(score, sent.score))
                elif self.topic.accumulate and sent.score <= self.now_ms:
                    # A message that has collected as much as it may is due at once.
                    promise = replace(promise, not_before_ms=sent.score)
                self.promises.waiting[member] = promise
                self.note_due(member, sent.score, score)
                self.note_order(member, envelope)
            elif sent.status == "refused" and self.topic.accumulate and member in self.promises.waiting:
                promise = self.promises.waiting[member]
                earliest = min(promise.not_before_ms, self.now_ms)
                self.promises.waiting[member] = replace(promise, not_before_ms=earliest)
            elif sent.status == "present":
                promises = self.promises
                present = member in {*promises.waiting, *promises.flying, *promises.claimed}
                self.require("INV-11", present, member)

    @property
    def most_wait(self) -> float:
        return self.topic.debounce_ms or math.inf

    def note_due(self, member: bytes, due: float, wanted: float) -> None:
        """A debounced message waits as long as its last send says, but not beyond its deadline."""
        if self.topic.debounce_ms:
            latest = self.promises.waiting[member].latest_ms
            # One that is full is due at once, though its deadline may have passed.
            latest = max(min(wanted, latest), self.now_ms if self.topic.accumulate else 0)
            self.require("INV-20", math.floor(due) <= latest, member, due, wanted, latest)

    def send_fifo(self, data: st.DataObject, *, ensure: bool) -> None:
        names, envelopes, topic = self.draw_outgoing(data)
        lives = {*self.promises.waiting, *self.promises.flying, *self.promises.claimed}
        self.line = {member: place for member, place in self.line.items() if member in lives}
        delay_ms = choose(data, [0, 0, 0, 0, 1, 500, 60_000, -1])
        self.put_in_line(topic, delay_ms, names, envelopes, ensure=ensure)

    def put_in_line(
        self, topic: Topic, delay_ms: int, names: list[bytes], envelopes: list[bytes], *, ensure: bool = False
    ) -> None:
        answer = self.both(lambda b: b.send_fifo(topic, 0, delay_ms, names, envelopes, ensure=ensure))
        self.note_sent(names, [self.now_ms + delay_ms] * len(names), envelopes, answer)
        if isinstance(answer, RmqError):
            return
        promises = self.promises
        for member, sent in zip(names, answer, strict=True):
            alive = {*promises.waiting, *promises.flying, *promises.claimed} - {member}
            if sent.status == "stored":
                alike = [score for name, score in self.zset("store").items() if name in alive]
                is_free = bool(self.kept_by_strangers) or self.has_old_places or sent.score not in alike
                self.require("INV-18", is_free, sent, alike)
            if sent.status == "stored" and not delay_ms:
                ahead = [place for name, place in self.line.items() if name in alive]
                self.require("INV-18", sent.score > max(ahead, default=0), sent, ahead)
                self.line[member] = sent.score

    def send(self, data: st.DataObject) -> None:
        if self.topic.is_fifo:
            self.send_fifo(data, ensure=False)
            return
        names, envelopes, topic = self.draw_outgoing(data)
        if topic.type is TopicType.RANGE_MERGE:
            [range_ms] = self.scores(data, 1)
            self.merge(topic, range_ms, names, envelopes)
        else:
            self.replace(topic, self.scores(data, len(names)), names, envelopes)

    send_once = rule(data=st.data())(send)
    send_again = rule(data=st.data())(send)

    def merge(self, topic: Topic, range_ms: int, names: list[bytes], envelopes: list[bytes]) -> None:
        answer = self.both(lambda b: b.send_merge(topic, 0, range_ms, names, envelopes))
        self.note_sent(names, [self.now_ms + range_ms] * len(names), envelopes, answer)

    def replace(
        self, topic: Topic, scores: Sequence[int], names: list[bytes], envelopes: list[bytes]
    ) -> None:
        answer = self.both(lambda b: b.send_replace(topic, 0, scores, names, envelopes))
        self.note_sent(names, list(scores), envelopes, answer)

    def send_alone(self, member: bytes) -> None:
        """Send a message that is due at once, and read what its send pushes."""
        # A second message of the same millisecond is not the next one in its line by the clock alone.
        self.clock.advance("1ms")
        self.latest_ms = max(self.latest_ms, self.now_ms)
        if self.topic.is_fifo:
            lives = {*self.promises.waiting, *self.promises.flying, *self.promises.claimed}
            self.line = {name: place for name, place in self.line.items() if name in lives}
            self.put_in_line(self.topic, 0, [member], [])
        elif self.topic.type is TopicType.RANGE_MERGE:
            self.merge(self.topic, 0, [member], [])
        else:
            self.replace(self.topic, [60 if self.topic.is_priority else self.now_ms], [member], [])
        self.hear()

    def draw_outgoing(self, data: st.DataObject) -> tuple[list[bytes], list[bytes], Topic]:
        names = data.draw(some_members)
        running = sorted({*self.promises.flying, *self.promises.claimed})
        if running and choose(data, [True, False]):
            # A newer copy behind what runs: where bodies can be mistaken for each other.
            names[0] = choose(data, running)
        envelopes = self.envelopes(data, len(names))
        if self.topic.is_fifo and choose(data, [False, False, True]):
            # Sent without keys: each is new, and holds its envelope.
            names = [b"\xff%015d0 {}\n1" % (self.bodies + n) for n in range(len(names))]
            envelopes = []
        moved = choose(data, RARELY)
        return names, envelopes, self.elsewhere() if moved else self.topic

    @precondition(lambda self: send_commands.takes_scattered(self.topic))
    @rule(data=st.data())
    def scatter(self, data: st.DataObject) -> None:
        """Send one message the fast way, or leave everything as it is."""
        names, _, topic = self.draw_outgoing(data)
        [range_ms] = self.scores(data, 1)
        answer = self.both(lambda b: b.scatter(topic, [0], range_ms, names[:1]))
        if answer == [None]:
            self.require("INV-13", self.before == self.after)
            return
        sent = answer if isinstance(answer, RmqError) else answer[0]
        self.note_sent(names[:1], [self.now_ms + range_ms], [], sent)

    @precondition(lambda self: not self.topic.keyed and not self.topic.is_fifo)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """Insert in one transaction: the same as a send, or nothing. Empty messages cannot be inserted."""
        names, _, topic = self.draw_outgoing(data)
        names = [name or b"d" for name in names]
        scores = self.scores(data, len(names))
        if topic.type is TopicType.RANGE_MERGE:
            late = choose(data, [0, 0, 0, 500, -500, 1_001, -1_001])
            scores = [self.now_ms - late] * len(names)

        def inserted(broker: Any) -> Counter[str] | None:
            calls = insertion(topic, 0, scores, names)
            found = run_all(broker, calls)[-1]
            if found is None:
                # The server may have lost its scripts: the end, called by itself, brings them back.
                run_all(broker, [end_insertion(topic, 0)])
                broker.load_scripts()
                found = run_all(broker, calls)[-1]
            return cast("Counter[str] | None", found)

        counts = self.both(inserted)
        self.require("INV-25", self.keys.inserting not in self.after, self.after)
        if counts is None:
            self.require("INV-25", self.before == self.after)
            return
        waited, held = set(self.zset("store", self.before)), self.zset("store")
        met = "merged" if self.earlier_counts else "replaced"
        words = []
        for name in names:
            words.append(met if name in waited else "stored")
            waited.add(name)
        self.require("INV-25", counts == Counter(words), counts, words)
        answer = [replies.Sent(word, held[name]) for word, name in zip(words, names, strict=True)]
        self.note_sent(names, list(scores), [], answer)

    @rule(data=st.data())
    def ensure(self, data: st.DataObject) -> None:
        if self.topic.is_fifo:
            self.send_fifo(data, ensure=True)
            return
        names, envelopes, topic = self.draw_outgoing(data)
        scores = self.scores(data, len(names))
        answer = self.both(lambda b: b.ensure(topic, 0, scores, names, envelopes))
        merge = topic.type is TopicType.RANGE_MERGE
        dues: list[float] = [self.now_ms + score if merge else score for score in scores]
        self.note_sent(names, dues, envelopes, answer)

    @rule(data=st.data(), generation=st.integers(1, 3), retracts=st.sampled_from([False, False, True]))
    def a_schedule_ticks(self, data: st.DataObject, generation: int, retracts: bool) -> None:
        """Ticks of a keyed topic that has due times; members repeat, as instants of a schedule do not."""
        if not self.topic.keyed:
            return
        member, ahead = data.draw(members), choose(data, [0, 1_000, 2_000])
        instant = START_MS // 1_000 * 1_000 + ahead
        if retracts:
            answer = self.both(lambda b: b.retract(self.topic, 0, "s", generation, instant, member))
            waits = member in {**self.zset("store"), **self.zset("retry")}
            if answer == "removed" and not waits:
                self.promises.waiting.pop(member, None)
            return
        [envelope] = self.envelopes(data, 1)
        topic = self.elsewhere() if choose(data, RARELY) else self.topic
        answer = self.both(lambda b: b.put_tick(topic, 0, "s", generation, instant, member, envelope))
        if answer == "stored":
            self.promises.waiting[member] = Promise(instant, body=self.promised(envelope))
            self.kept_by_strangers.discard(member)
            self.note_order(member, envelope)

    @rule(member=members, score=st.sampled_from(FOREIGN_SCORES), due=st.booleans())
    def a_stranger_sends_by_zadd(self, member: bytes, score: float, due: bool) -> None:
        if due:
            score = 50.0 if self.topic.is_priority else float(self.now_ms - 1)
        new = self.redis_keys.zadd(self.keys.store, member, score)
        self.memory_keys.zadd(self.keys.store, member, score)
        self.strangers += new
        self.promises.waiting[member] = Promise(-math.inf, None, ANY)
        self.kept_by_strangers.add(member)
        self.line.pop(member, None)
        self.look()

    # --- consuming

    def prepare(self, data: st.DataObject) -> None:
        owner = choose(data, OWNERS)
        fenced = choose(data, [False, False, True])
        limit = data.draw(limits)
        max_bytes = choose(data, [1, 1_000_000, 1_000_000])
        after = choose(data, [None, None, self.cursor])
        moved = choose(data, RARELY)
        offers = choose(data, [True, True, False])
        epoch = self.epochs[owner] if fenced else None
        self.take(self.elsewhere() if moved else self.topic, owner, epoch, limit, max_bytes, after, offers)

    prepare_once = rule(data=st.data())(prepare)
    prepare_again = rule(data=st.data())(prepare)

    def take(
        self,
        topic: Topic,
        owner: str,
        epoch: int | None,
        limit: int,
        max_bytes: int,
        after: tuple[str, bytes] | None,
        offers: bool,
    ) -> replies.Prepared:
        flying = set(self.promises.flying)
        inbox = self.memory.inbox(owner) if offers else b""
        answer: replies.Prepared = self.both(
            lambda b: b.prepare(topic, 0, owner, epoch, limit, max_bytes, after, inbox=inbox)
        )
        self.cursor = answer.cursor or self.cursor
        if answer.status == "ok":
            self.asleep_until = answer.sleeping_until
        elif answer.status not in ("moved", "fenced"):
            due = NEVER if answer.next_due is None else answer.next_due
            self.asleep_until = (
                due if answer.status == "empty" and after is None and due > self.now_ms else None
            )
        if answer.status in ("moved", "fenced"):
            keys = self.before.keys() | self.after
            changed = {key for key in keys if self.before.get(key) != self.after.get(key)}
            counted = {self.keys.stats} if answer.status == "fenced" else set()
            self.require("INV-13", changed <= counted, answer, changed)
            return answer
        taken = {delivery.member for delivery in answer.deliveries}
        self.note_claim_ended()
        # Deliveries that are no longer in flight, or were handed out again in the same breath.
        self.note_timed_out({m for m in flying if m not in self.zset("prepare") or m in taken})
        if answer.status == "ok":
            self.require("INV-9", epoch is None or epoch >= self.highest_epoch, epoch)
            # Numbers come again only where they were lost and the clock went back behind them as well.
            may_repeat = self.has_lost_receipts and self.clock() <= self.last_receipt
            rises = answer.receipt > self.last_receipt
            self.require("INV-8", rises or may_repeat, answer.receipt, self.last_receipt)
            self.last_receipt, self.has_lost_receipts = answer.receipt, False
            self.require("INV-27", not answer.is_alone or self.zset("prepare").keys() == taken, answer, taken)
            (self.alone.add if answer.is_alone else self.alone.discard)(answer.receipt)
        for delivery in answer.deliveries:
            self.note_taken(owner, answer.receipt, delivery)
        if answer.deliveries and self.topic.is_fifo:
            self.note_line([delivery.score for delivery in answer.deliveries], after is None)
        if answer.deliveries and self.topic.is_strict:
            held_up = self.zset("prepare").keys() - taken, self.zset("retry"), self.zset("claimants")
            self.require("INV-19", not any(held_up), held_up)
        self.note_expired()
        return answer

    @precondition(lambda self: not self.topic.keyed)
    @rule(first=members, second=members, third=members)
    def lone_messages_come_to_a_worker(self, first: bytes, second: bytes, third: bytes) -> None:
        """It takes the first and offers that others are pushed to it."""
        self.send_alone(first)
        self.own(OWNERS[0], self.both(lambda b: b.acquire(self.topic, 0)))
        answer = self.take(self.topic, OWNERS[0], self.highest_epoch, 10, 1_000_000, None, offers=True)
        if answer.status == "ok":
            self.end(answer.receipt, [delivery.member for delivery in answer.deliveries])
        self.send_alone(second)
        self.send_alone(third)

    def note_pushed(self, pushed: replies.Pushed) -> None:
        """A send has delivered a single message, as a prepare of the owner that took last would have delivered it."""
        type(self).pushes += 1
        control, receipt = self.after[self.keys.control], pushed.receipt
        others = [self.zset(state) for state in ("store", "retry", "claim", "claimants")]
        alone = self.zset("prepare").keys() == {pushed.delivery.member} and not any(others)
        self.require("INV-30", alone, pushed, others)
        self.require("INV-30", control[b"owner"] == OWNERS[0].encode(), control)
        self.require("INV-30", self.epochs[OWNERS[0]] == self.highest_epoch, self.epochs)
        self.require("INV-30", not control.keys() & {b"paused", b"moving", b"inserting"}, control)
        self.require("INV-30", -1_000 < self.clock() - self.last_receipt < 2_000_000, self.last_receipt)
        may_repeat = self.has_lost_receipts and self.clock() <= self.last_receipt
        self.require("INV-8", receipt > self.last_receipt or may_repeat, receipt, self.last_receipt)
        self.last_receipt, self.has_lost_receipts = receipt, False
        self.alone.add(receipt)
        self.note_taken(OWNERS[0], receipt, pushed.delivery)

    def note_line(self, scores: list[float], from_head: bool) -> None:
        """Require that what was taken led the line; a copy that waits behind its older one may stay."""
        self.require("INV-19", scores == sorted(scores), scores)
        if from_head and self.topic.is_strict:
            left = self.zset("store").values()
            self.require("INV-19", min(left, default=math.inf) >= scores[-1], scores, left)

    def note_expired(self) -> None:
        for member in set(self.promises.waiting) - set(self.zset("store")) - set(self.zset("retry")):
            death = self.after.get(self.keys.deaths, {}).get(member, b"")
            self.require("INV-11", death.startswith(b"lapsed "), member, death)
            del self.promises.waiting[member]

    def note_taken(self, owner: str, receipt: int, delivery: replies.Delivery) -> None:
        member, left = delivery.member, delivery.retries_left
        promise = self.promises.waiting.pop(member, None)
        self.require("INV-11", promise is not None, member)
        assert promise is not None
        self.require("INV-17", promise.body in (ANY, delivery.envelope), delivery, promise)
        # A clock that was set back may take again what it has promoted before.
        self.require("INV-10", self.latest_ms >= promise.not_before_ms, member, promise, self.latest_ms)
        if promise.left is not None:
            wanted = max(0, min(promise.left, self.most(delivery.envelope)))
            self.require("INV-6", left == wanted, member, promise, left)
        self.require("INV-6", 0 <= left <= self.most(delivery.envelope), member, left)
        own = None if delivery.envelope is None else decode_envelope(delivery.envelope).timeout
        self.promises.flying[member] = Flight(
            owner, receipt, left, promise, since_ms=self.now_ms, timeout=own
        )
        self.handed.append((receipt, member))

    def note_timed_out(self, ended: set[bytes]) -> None:
        records = self.before.get(self.keys.inflight, {})
        places = {member: float(record.split()[1].partition(b":")[0]) for member, record in records.items()}
        for member in ended:
            is_marked = self.promises.flying[member].marked
            if self.topic.is_strict and not is_marked and places[member] > min(places.values()):
                # Only the first in line can have timed out.
                self.promises.released(member, earlier_counts=True)
                continue
            flight = self.promises.flying[member]
            has_timed_out = self.has_timed_out(flight)
            self.require("INV-22", has_timed_out or flight.since_ms < 0, member, flight, self.now_ms)
            rest = self.least_rest(flight.left, self.envelope_of("prepare_body", member, self.before))
            absorbs = self.absorbs(member, "prepare_body")
            self.promises.failed(member, self.now_ms + rest, self.max_retries, absorbs=absorbs)

    def has_timed_out(self, flight: Flight) -> bool:
        timeout = self.timeout if flight.timeout is None else min(flight.timeout, self.timeout)
        return self.now_ms // 1000 - flight.since_ms // 1000 > timeout

    def absorbs(self, member: bytes, state: str) -> bool:
        """Whether a delivery that fails takes along what was collected meanwhile."""
        both = self.envelope_of(state, member, self.before) and self.envelope_of("body", member, self.before)
        return bool(self.topic.accumulate and both)

    @property
    def timeout(self) -> int:
        """The slot's own, as the scripts have left it."""
        return int(self.after.get(self.keys.control, {}).get(b"timeout", self.topic.timeout))

    def least_rest(self, left: int, envelope: bytes | None) -> float:
        """Return the shortest back-off (ms) that the topic allows after a delivery with ``left``."""
        base, cap = self.topic.backoff.base_ms, self.topic.backoff.cap_ms
        delay = min(cap, base * 2 ** max(0, self.most(envelope) - left))
        return math.floor(delay * (0.5 if cap > base else 1))

    def some_delivery(self, data: st.DataObject) -> tuple[int, list[bytes]]:
        """Draw a receipt with members: mostly what is in flight, else what was or never was."""
        current = [(flight.receipt, member) for member, flight in self.promises.flying.items()]
        receipt, member = choose(data, current * 6 + self.handed[-3:])
        others = [other for other_receipt, other in current if other_receipt == receipt]
        more = data.draw(st.lists(st.sampled_from([*others, *others, b"a", b"b"]), max_size=2))
        return receipt, [member, *more]

    def ours(self, receipt: int, names: list[bytes], words: list[str]) -> list[bytes]:
        """Return the members whose delivery a call has ended; the rest is stale and unchanged."""
        held = [
            member in self.promises.flying and self.promises.flying[member].receipt == receipt
            for member in names
        ]
        for member, mine, word in zip(names, held, words, strict=True):
            if not mine or names.count(member) == 1:
                self.require("INV-13", word == ("ok" if mine else "stale"), receipt, member, word)
        if not any(held):
            keys = self.before.keys() | self.after
            changed = {key for key in keys if self.before.get(key) != self.after.get(key)}
            self.require("INV-13", changed <= {self.keys.stats}, changed)
        return [member for member, mine in dict(zip(names, held, strict=True)).items() if mine]

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.end(*self.some_delivery(data))

    def end(self, receipt: int, names: list[bytes]) -> None:
        words = self.both(lambda b: b.commit(self.topic, 0, receipt, names))
        ended = {member: self.promises.flying.pop(member) for member in self.ours(receipt, names, words)}
        succeeded = sum(flight.cancelled or not flight.marked for flight in ended.values())
        before, after = (dump.get(self.keys.stats, {}) for dump in (self.before, self.after))
        more = int(after.get(b"committed", 0)) - int(before.get(b"committed", 0))
        self.require("INV-23", more == succeeded, ended, more)
        for member, flight in ended.items():
            self.note_ended(member, "done", marked=flight.marked and not flight.cancelled)

    @precondition(lambda self: self.promises.flying)
    @rule(data=st.data())
    def commit_delivery(self, data: st.DataObject) -> None:
        """What is in flight is committed as a whole only while all of it is of one receipt, and unmarked."""
        receipt, _ = self.some_delivery(data)
        # Workers call it only for what was delivered alone.
        assume(receipt in self.alone)
        flying = self.promises.flying
        handed = sum(other == receipt for other, _ in self.handed)
        size = choose(data, [len(flying), len(flying), len(flying), handed, 1])
        noted_once = data.draw(st.sampled_from([(), tuple(flying)]), "members whose outcome is noted once")
        words = self.both(lambda b: b.commit_delivery(self.topic, 0, receipt, size, noted_once))
        if not words:
            self.require("INV-13", self.before == self.after, receipt, size)
            return
        self.require("INV-27", words == ["ok"] * len(flying), words, flying)
        for member, flight in list(flying.items()):
            self.require("INV-27", flight.receipt == receipt and not flight.marked, member, flight)
            del flying[member]
            self.note_ended(member, "done")

    def note_ended(self, member: bytes, state: str, *, marked: bool = False) -> None:
        """What became of a message can be seen at once, where it is kept."""
        found = self.memory.status(self.topic, 0, member).outcome
        if not self.topic.outcome_retention_ms:
            self.require("INV-24", found is None, found)
        elif not marked:
            outcome = replies.parse(found or b"")
            is_new = isinstance(outcome, replies.Outcome) and outcome.ended_ms == self.now_ms
            self.require("INV-24", is_new and outcome[0] == state, member, outcome)

    @precondition(lambda self: self.topic.outcome_retention_ms and self.promises.flying)
    @rule(data=st.data(), said=st.sampled_from([b"", b"half \xff\0\n"]))
    def report_progress(self, data: st.DataObject, said: bytes) -> None:
        receipt, names = self.some_delivery(data)
        thousandths = choose(data, [0, 500, 1_000])
        word = self.both(lambda b: b.progress(self.topic, 0, receipt, names[0], thousandths, said))
        if self.ours(receipt, names[:1], [word]):
            found = self.memory.status(self.topic, 0, names[0]).outcome
            self.require(
                "INV-24", found is not None and replies.parse(found)[:2] == (receipt, thousandths / 1000)
            )

    def told(self, receipt: int, names: list[bytes], words: list[str]) -> list[str]:
        """Check that the holder of a cancelled delivery is told so, and no other; return the words without that."""
        for member, word in zip(names, words, strict=True):
            flight = self.promises.flying.get(member)
            is_told = flight is not None and flight.receipt == receipt and flight.cancelled
            if names.count(member) == 1:
                self.require("INV-23", (word == "cancelled") == is_told, receipt, member, word)
        return ["ok" if word == "cancelled" else word for word in words]

    def rollback(self, data: st.DataObject) -> None:
        receipt, names = self.some_delivery(data)
        kind = choose(
            data, ["failed", "failed", "undecodable", "timed_out", "overran", "cancelled", "rejected"]
        )
        delay_ms = choose(data, [None, None, 0, 0, 1, 1_500])
        error = data.draw(errors)
        failures = [replies.Failure(member, kind, delay_ms, error) for member in names]
        words = self.both(lambda b: b.rollback(self.topic, 0, receipt, failures))
        for member in self.ours(receipt, names, self.told(receipt, names, words)):
            if kind == "rejected":
                flight = self.promises.flying.pop(member)
                body = self.envelope_of("deaths", member)
                self.require("INV-17", flight.marked or flight.promise.body in (ANY, body), member, body)
                self.note_ended(member, "dead", marked=flight.marked)
            elif kind == "cancelled":
                flight = self.promises.flying.pop(member)
                self.note_ended(member, "cancelled", marked=flight.marked and not flight.cancelled)
            else:
                left, body = (
                    self.promises.flying[member].left,
                    self.envelope_of("prepare_body", member, self.before),
                )
                rest = self.least_rest(left, body) if delay_ms is None else delay_ms
                absorbs = self.absorbs(member, "prepare_body")
                self.promises.failed(member, self.now_ms + rest, self.max_retries, absorbs=absorbs)

    rollback_once = rule(data=st.data())(rollback)
    rollback_again = precondition(lambda self: self.promises.flying)(rule(data=st.data())(rollback))

    @precondition(lambda self: self.promises.flying)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        receipt, names = self.some_delivery(data)
        words = self.both(lambda b: b.release(self.topic, 0, receipt, names))
        for member in self.ours(receipt, names, words):
            self.promises.released(member, earlier_counts=self.earlier_counts)

    @precondition(lambda self: self.promises.flying)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        receipt, names = self.some_delivery(data)
        words = self.both(lambda b: b.extend(self.topic, 0, receipt, names))
        for member in self.ours(receipt, names, self.told(receipt, names, words)):
            self.promises.flying[member] = replace(self.promises.flying[member], since_ms=self.now_ms)

    @rule(limit=limits, both_ways=st.booleans())
    def upkeep(self, limit: int, both_ways: bool) -> None:
        timed_out = self.both(lambda b: b.time_out(self.topic, 0, limit))
        self.note_claim_ended()
        self.note_timed_out(self.vanished_from("prepare"))
        if timed_out < limit:
            late = [flight for flight in self.promises.flying.values() if self.has_timed_out(flight)]
            self.require("INV-22", all(flight.since_ms < 0 for flight in late), late, self.now_ms)
        if both_ways:
            self.both(lambda b: b.promote(self.topic, 0, limit))

    # --- claims

    def ledger_of_claims(self, dump: Dump) -> dict[bytes, bytes]:
        return dump.get(self.keys.claims, {})

    def claim_state(self, consumer: str, dump: Dump | None = None) -> tuple[int, str]:
        record = self.ledger_of_claims(self.after if dump is None else dump).get(consumer.encode())
        number, state, _ = (record or b"0 none 0").decode().split(" ")
        return int(number), state

    def note_claim_ended(self, *, is_new: bool = False) -> None:
        """Note what has left the claim there was; ``is_new``: what is claimed now is another claim's."""
        ended = set(self.promises.claimed)
        if not is_new:
            ended -= set(self.zset("claim"))
        if not ended:
            return
        [holder] = self.zset("claimants", self.before)
        _, state = self.claim_state(holder.decode())
        if is_new:
            # Its state was overwritten by the new claim of the same consumer: only time can have ended it so fast.
            state = self.claim_state(holder.decode(), self.before)[1]
            state = "returned" if state == "open" else state
        for member in ended:
            noted = self.failed_claimed.pop(member, None)
            if noted == "rejected":
                del self.promises.claimed[member]
                self.require("INV-26", member in self.zset("dead"), member)
            elif state == "acked" and not noted:
                del self.promises.claimed[member]
            elif state == "returned" and not noted:
                self.promises.returned(member, earlier_counts=self.earlier_counts)
            else:
                left, body = (
                    self.promises.claimed[member].left,
                    self.envelope_of("claim_body", member, self.before),
                )
                most = self.most(body)
                rest = self.least_rest(most if left is None else max(0, min(left, most)), body)
                lives = member in self.zset("store") or member in self.zset("retry")
                lives = lives or member in self.zset("claim") or member in self.zset("prepare")
                absorbs = self.absorbs(member, "claim_body")
                self.promises.lost(member, self.now_ms + rest, most, lives=lives, absorbs=absorbs)

    def some_claim(self, data: st.DataObject) -> tuple[str, int]:
        """Draw a consumer and a claim of it: mostly its newest, else one before or after it."""
        consumer = choose(data, [name.decode() for name in self.zset("claimants")] * 6 + CONSUMERS)
        number, _ = self.claim_state(consumer)
        return consumer, max(1, choose(data, [number] * 6 + [number - 1, number + 1]))

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        consumer = choose(data, CONSUMERS)
        number, state = self.claim_state(consumer)
        usual = number if state == "open" else number + 1
        number = max(1, choose(data, [usual] * 8 + [number, number + 1, number - 1]))
        lease_ms = choose(data, [1_000, 60_000] * 4 + [0, 86_400_001])
        limit, max_bytes = data.draw(limits), choose(data, [1, 1_000_000, 1_000_000])
        moved = choose(data, RARELY)
        topic = self.elsewhere() if moved else self.topic
        flying = set(self.promises.flying)
        answer = self.both(lambda b: b.claim(topic, 0, consumer, number, lease_ms, limit, max_bytes))
        if isinstance(answer, RmqError) or answer.status == "moved":
            self.require("INV-13", self.before == self.after, answer)
            return
        self.note_timed_out({m for m in flying if m not in self.zset("prepare")})
        held_before = set(self.zset("claim", self.before))
        before = set(self.zset("claimants", self.before)) & {consumer.encode()}
        same = bool(before) and self.claim_state(consumer, self.before)[0] == number
        self.note_claim_ended(is_new=answer.taken > 0 and not same)
        taken = set(self.zset("claim")) - (held_before if same else set()) if answer.taken else set()
        self.require("INV-11", answer.taken == len(taken), answer, taken)
        for member in taken:
            promise = self.promises.waiting.pop(member, None)
            self.require("INV-11", promise is not None, member)
            assert promise is not None
            self.require("INV-10", self.latest_ms >= promise.not_before_ms, member, promise)
            body = self.envelope_of("claim_body", member)
            self.require("INV-17", promise.body in (ANY, body), member, promise, body)
            self.promises.claimed[member] = promise
        self.note_expired()

    @rule(
        data=st.data(),
        action=st.sampled_from(
            ["renew_claim", "ack_claim", "ack_claim", "fail_claimed", "return_claim", "read_claim"]
        ),
    )
    def a_claimant_goes_on(self, data: st.DataObject, action: str) -> None:
        getattr(self, action)(data)

    def renew_claim(self, data: st.DataObject) -> None:
        consumer, number = self.some_claim(data)
        seal, lease_ms = (choose(data, [True, True, False]), choose(data, [500, 60_000]))
        self.both(lambda b: b.renew_claim(self.topic, 0, consumer, number, lease_ms, seal=seal))

    def ack_claim(self, data: st.DataObject) -> None:
        consumer, number = self.some_claim(data)
        newest, state = self.claim_state(consumer)
        # Only what was sealed, and so was read whole, may be forgotten.
        good = number == newest and state in ("sealed", "acked")
        limit = data.draw(limits)
        word, left = self.both(lambda b: b.ack_claim(self.topic, 0, consumer, number, limit))
        self.require("INV-13", good == (word == "ok"), word, newest, state)
        if not good:
            self.require("INV-13", self.zset("claim") == self.zset("claim", self.before), word)
            return
        self.note_claim_ended()
        # What was acknowledged whole leaves nothing; what is claimed by now is another one's.
        is_over = state == "acked" and left == 0
        self.require("INV-11", is_over or left == len(self.zset("claim")), left)

    def fail_claimed(self, data: st.DataObject) -> None:
        consumer, number = self.some_claim(data)
        good = self.claim_state(consumer) == (number, "sealed")
        names = data.draw(st.lists(st.sampled_from(sorted(self.zset("claim")) * 3 + MEMBERS), max_size=3))
        failures = [replies.Failure(name, choose(data, ["failed", "failed", "rejected"])) for name in names]
        words = self.both(lambda b: b.fail_claimed(self.topic, 0, consumer, number, failures))
        for failure, word in zip(failures, words, strict=True):
            held = good and failure.member in self.promises.claimed
            known = failure.member in self.failed_claimed
            wanted = ("again" if known else "ok") if held else "not_found" if good else "refused"
            refused = "refused" if word in ("open", "stale") else word
            self.require("INV-26", refused == wanted, failure, word, wanted)
            if word == "ok":
                self.failed_claimed[failure.member] = failure.kind

    def return_claim(self, data: st.DataObject) -> None:
        consumer, number = self.some_claim(data)
        spent, limit = data.draw(st.booleans()), data.draw(limits)
        self.both(lambda b: b.return_claim(self.topic, 0, consumer, number, spent=spent, limit=limit))
        self.note_claim_ended()

    def read_claim(self, data: st.DataObject) -> None:
        consumer, number = self.some_claim(data)
        number = choose(data, [number, number, 0])
        offset, limit = choose(data, [0, 0, 0, 1]), choose(data, [0, 10, 10])
        read = self.reading(lambda b: b.read_claim(self.topic, 0, consumer, number, offset, limit))
        if read.state == "sealed" and limit and not offset:
            known = self.sealed and self.sealed[:2] == (consumer, read.number)
            rows = list(read.rows)
            self.require(
                "INV-16", not known or self.sealed == (consumer, read.number, rows), rows, self.sealed
            )
            self.sealed = (consumer, read.number, rows)

    # --- persons

    @rule(
        data=st.data(),
        action=st.sampled_from(
            [
                "replay", "replay", "bury", "remove", "cancel", "discard", "reschedule", "purge", "purge",
                "restore",
            ]
        ),
    )  # fmt: skip
    def a_person_acts(self, data: st.DataObject, action: str) -> None:
        getattr(self, action)(data)

    def replay(self, data: st.DataObject) -> None:
        dead = sorted(self.zset("dead")) or MEMBERS
        names = data.draw(st.lists(st.sampled_from(dead + MEMBERS[:1]), min_size=1, max_size=3))
        envelopes = self.envelopes(data, len(names)) if data.draw(st.booleans()) else []
        words = self.both(lambda b: b.replay(self.topic, 0, names, envelopes))
        given: Sequence[bytes | None] = envelopes or [None] * len(names)
        for member, envelope, word in zip(names, given, words, strict=True):
            died = self.envelope_of("deaths", member, self.before)
            if word == "replayed":
                self.line.pop(member, None)
                body = envelope or died
                older = member in self.promises.claimed or (
                    member in self.promises.flying and not self.promises.flying[member].marked
                )
                # What collects bodies waits behind the delivery instead.
                older = older and not self.topic.accumulate
                self.require("INV-17", envelope is not None or died is None or not older, member)
                self.promises.waiting[member] = Promise(
                    0 if self.topic.is_priority else self.now_ms, body=self.promised(body)
                )
                self.note_order(member, body)
            elif word == "merged" and envelope:
                changed = replace(self.promises.waiting[member], body=self.promised(envelope))
                self.promises.waiting[member] = changed
                self.note_order(member, envelope)
            elif word == "merged" and died and member not in self.kept_by_strangers:
                lives = [self.envelope_of(name, member) for name in ("body", "prepare_body", "claim_body")]
                newest = max((self.order_of(member, one) for one in lives if one is not None), default=0)
                self.require("INV-17", newest > self.order_of(member, died), member, died, lives)

    def note_marked(self, names: list[bytes]) -> None:
        for member in names:
            if member not in {*self.zset("store"), *self.zset("retry")}:
                self.promises.waiting.pop(member, None)
            if member in self.promises.flying:
                self.promises.flying[member] = replace(self.promises.flying[member], marked=True)

    def bury(self, data: st.DataObject) -> None:
        names, why = data.draw(some_members), data.draw(errors)
        self.both(lambda b: b.bury(self.topic, 0, names, why))
        self.note_marked(names)
        for member in names:
            if member in self.promises.flying:
                self.promises.flying[member] = replace(self.promises.flying[member], cancelled=False)

    def remove(self, data: st.DataObject) -> None:
        names, which = data.draw(some_members), choose(data, ["any", "live", "dead"])
        gone = self.waiting_alone(names) if which != "dead" else set()
        self.delete(data, operate.remove(self.topic, 0, names, which))
        if which != "dead":
            self.note_marked(names)
        for member in gone:
            self.note_ended(member, "removed")

    def waiting_alone(self, names: list[bytes]) -> set[bytes]:
        """Return those that wait or rest while no other copy of them runs."""
        running = {*self.zset("prepare"), *self.zset("claim")}
        return {*names} & {*self.zset("store"), *self.zset("retry")} - running

    def cancel(self, data: st.DataObject) -> None:
        names = data.draw(some_members)
        gone = self.waiting_alone(names)
        self.both(lambda b: b.cancel(self.topic, 0, names))
        self.note_marked(names)
        for member in gone:
            self.note_ended(member, "removed")
        for member in names:
            if member in self.promises.flying:
                self.promises.flying[member] = replace(self.promises.flying[member], cancelled=True)

    def discard(self, data: st.DataObject) -> None:
        names, off = data.draw(some_members), choose(data, [0, 0, 1])
        scores = [self.zset("dead").get(name, 0.0) + off for name in names]
        self.delete(data, operate.discard(self.topic, 0, scores, names))

    def delete(self, data: st.DataObject, call: Call[Any]) -> Any:
        """Run a call that deletes, as an act that keeps what it deletes or without one; return its answer."""
        act = choose(data, ["", *ACTS])
        if not act:
            return self.both(lambda b: b.run(call))
        trash = TrashShare(act, choose(data, [1, 1_000, 1_000]), choose(data, [1, 10**6, 10**6]))
        promises = dict(self.promises.waiting)
        found: Deleted[Any] = self.both(lambda b: b.run(into_trash(call, trash)))
        key = self.trash_keys[act]
        before, after = self.before.get(key, {}), self.after.get(key, {})
        self.require("INV-29", found.kept == len(after.keys() - before.keys()), found, before, after)
        self.require("INV-29", before.keys() <= after.keys(), before, after)
        for field, value in after.items():
            state, member = {b"s": "store", b"r": "retry", b"d": "dead"}[field[:1]], field[1:]
            if before.get(field) != value:
                score, _, _ = value.partition(b"\n")[0].split()
                self.require("INV-29", float(score) == self.zset(state, self.before)[member], field, value)
                self.require("INV-29", member not in self.zset(state), field, value)
                if state != "dead":
                    self.trash[act][state, member] = promises[member]
        return found.answer

    def restore(self, data: st.DataObject) -> None:
        act = choose(data, ACTS)
        runs = {*self.zset("prepare"), *self.zset("claim")}
        answer = self.both(lambda b: b.restore(self.topic, 0, act))
        key = self.trash_keys[act]
        gone = len(self.before.get(key, {}))
        self.require("INV-29", answer.back + answer.merged == gone and key not in self.after, answer, gone)
        back = 0
        for (state, member), promise in self.trash[act].items():
            if member not in self.zset(state) or member in self.zset(state, self.before):
                continue
            back += 1
            is_known = promise.body is not None and promise.body != ANY
            envelope = self.envelope_of("body", member)
            self.require("INV-17", not is_known or envelope == promise.body, member, envelope, promise)
            # It comes behind a delivery only if it is newer, so that it may be counted as sent now.
            self.promises.waiting[member] = promise
            self.note_order(member, envelope)
            self.line.pop(member, None)
            self.has_old_places = True
        back += len(self.zset("dead").keys() - self.zset("dead", self.before).keys())
        self.require("INV-29", back == answer.back, back, answer, runs)
        self.trash[act] = {}

    def reschedule(self, data: st.DataObject) -> None:
        names = data.draw(some_members)
        scores = self.scores(data, len(names))
        if self.topic.type is TopicType.RANGE_MERGE:
            scores = [self.now_ms + score if score >= 0 else score for score in scores]
        words = self.both(lambda b: b.reschedule(self.topic, 0, scores, names))
        if isinstance(words, RmqError):
            return
        for member, score, word in zip(names, scores, words, strict=True):
            if word in ("waiting", "resting"):
                promise = self.promises.waiting[member]
                not_before: float = 0 if self.topic.is_priority else score
                if promise.left is None:
                    # Of two copies, of which a stranger sent one, either may have been rescheduled.
                    not_before = min(not_before, promise.not_before_ms)
                self.promises.waiting[member] = Promise(not_before, promise.left, promise.body)

    def purge(self, data: st.DataObject) -> None:
        state = choose(data, ["store", "retry", "dead"])
        up_to = choose(data, [math.inf, 100.0, float(START_MS + 2_000)])
        limit = data.draw(limits)
        low = choose(data, [-math.inf, -math.inf, 1000.0])
        gone = self.delete(data, operate.purge(self.topic, 0, state, up_to, limit, min_score=low))
        self.require("INV-11", gone == len(self.vanished_from(state)), gone)
        if state != "dead":
            for member in self.vanished_from(state):
                if member not in self.zset("store") and member not in self.zset("retry"):
                    del self.promises.waiting[member]

    @rule(
        data=st.data(), action=st.sampled_from(["acquire", "acquire", "pause", "configure", "adopt", "flush"])
    )
    def somebody_administers(self, data: st.DataObject, action: str) -> None:
        getattr(self, action)(data)

    def acquire(self, data: st.DataObject) -> None:
        owner = choose(data, OWNERS)
        if data.draw(st.booleans()):
            epoch = self.both(lambda b: b.acquire(self.topic, 0))
        else:
            [(epoch, _)] = self.both(lambda b: b.acquire_slots(self.topic, [0]))
        self.own(owner, epoch)

    def own(self, owner: str, epoch: int) -> None:
        self.require("INV-9", epoch > self.highest_epoch, epoch, self.highest_epoch)
        self.epochs[owner] = self.highest_epoch = epoch

    def pause(self, data: st.DataObject) -> None:
        paused = choose(data, [False, False, True])
        self.both(lambda b: b.pause(self.topic, 0, paused))

    def configure(self, data: st.DataObject) -> None:
        max_retries = choose(data, [0, 1, 3, 16, 20])
        if self.topic.is_fifo:
            # What a message has left there is counted from its failures, which a promise does not know.
            max_retries = self.topic.max_retries
        topic = replace(self.topic, max_retries=max_retries, timeout=choose(data, [1, 30]))
        apply = data.draw(st.booleans())
        answer = self.both(lambda b: b.configure(topic, 0, apply))
        if answer == "ok" and apply:
            self.topic = topic

    def adopt(self, data: st.DataObject) -> None:
        """Book what strangers sent, as an audit does that saw ``foreign`` messages booked before."""
        drift = max(self.strangers, choose(data, [0, 0, 0, 1]))
        foreign = choose(data, [self.adopted] * 3 + [self.adopted + 1])
        if self.both(lambda b: b.adopt(self.topic, 0, drift, foreign)) == "ok":
            self.strangers -= drift
            self.adopted += drift

    def flush(self, data: st.DataObject) -> None:
        """Redis forgets every script, as after a restart."""
        self.client.script_flush()

    # --- looking

    @rule(data=st.data(), what=st.sampled_from(["page", "page", "places", "depths", "held"]))
    def somebody_looks(self, data: st.DataObject, what: str) -> None:
        getattr(self, what)(data)

    def page(self, data: st.DataObject) -> None:
        state = choose(data, ["store", "prepare", "retry", "dead", "claim"])
        rows = [(f"{score:.17g}", member) for member, score in self.zset(state).items()]
        options: dict[str, Any] = {
            "after": choose(data, [None, ("50", b"b"), ("-inf", b""), *rows]),
            "limit": data.draw(limits),
            "descending": data.draw(st.booleans()),
            "max_bytes": choose(data, [1, 1_000_000]),
            "min_score": choose(data, [-math.inf, 17.0, float(START_MS)]),
            "max_score": choose(data, [math.inf, 100.0]),
        }
        text = choose(data, [None, b"", b"a", b"\0", b"boom", b"failed"])
        if text is None:
            self.reading(lambda b: b.list_messages(self.topic, 0, state, **options))
        else:
            where = choose(data, ["anywhere", "error"])
            self.reading(
                lambda b: b.search_messages(self.topic, 0, state, text, scan=2, where=where, **options)
            )
        if state == "dead":
            scan = options.pop("limit")
            del options["descending"], options["after"]
            options |= {name: data.draw(st.integers(0, 3)) for name in ("skip", "stride", "run")}
            self.reading(lambda b: b.group_deaths(self.topic, 0, scan=scan, samples=1, **options))

    def places(self, data: st.DataObject) -> None:
        """Look for members by their digests, near some place."""
        state = choose(data, ["store", "prepare", "retry", "dead", "claim"])
        members = [b"a", b"b", b"nobody", *self.zset(state)]
        scores = [None, 50.0, *self.zset(state).values()]
        areas = [
            replies.Area(state, choose(data, scores), data.draw(limits), choose(data, [0, 1, 5]))
            for _ in range(data.draw(st.integers(0, 3)))
        ]
        digests = [sha1(member, usedforsecurity=False).digest() for member in dict.fromkeys(members)]
        scan = choose(data, [1, 2, 1_000])
        self.reading(lambda b: b.find_by_digest(self.topic, 0, digests, areas, scan=scan, max_bytes=scan))
        self.reading(lambda b: b.ranks(self.topic, 0, state, members))

    def depths(self, data: st.DataObject) -> None:
        upkeep = data.draw(st.booleans())
        self.reading(
            lambda b: [
                b.count(self.topic, 0),
                b.count_slots([AtSlots(self.topic, [1, 0])]),
                b.heads(self.topic, [0, 1], upkeep=upkeep),
                b.any_messages([AtSlots(self.topic, [0, 1])]),
                b.find_occupied([AtSlots(self.topic, [0, 1])]),
                b.find_paused([AtSlots(self.topic, [0, 1])]),
                b.audit_ledger(self.topic, 0),
            ]
        )
        state, low = choose(data, ["store", "prepare", "retry", "dead"]), data.draw(limits)
        self.reading(lambda b: b.count_between(self.topic, 0, state, low, 100.0))
        self.reading(lambda b: b.describe_messages(self.topic, 0, [b"a", b"b", b"", b"nobody"]))
        members = [b"a", b"b", b"", b"nobody"]
        self.reading(lambda b: [b.status(self.topic, 0, member) for member in members])

    def held(self, data: st.DataObject) -> None:
        owner, offset = choose(data, OWNERS), choose(data, [0, 0, 1])
        answer = self.reading(lambda b: b.list_held(self.topic, 0, owner, offset))
        if answer is not None and offset == 0 and self.topic.serial:
            mine = {(m, f.receipt, f.left) for m, f in self.promises.flying.items() if f.owner == owner}
            told = {(h.delivery.member, h.receipt, h.delivery.retries_left) for h in answer}
            self.require("INV-7", mine == told, mine, told)

    # --- the world

    @rule()
    def a_fail_over_loses_the_last_receipts(self) -> None:
        if self.last_receipt:
            for keyspace in (self.redis_keys, self.memory_keys):
                keyspace.hset(self.keys.control, b"deliveries", b"1")
            self.has_lost_receipts = True
            self.look()

    @rule(ms=st.sampled_from([0.137, 1, 499, 1_000, 1_000, 2_000, 2_000, 31_000, 31_000, 700_000, -1_500]))
    def time_passes(self, ms: float) -> None:
        self.clock.advance(ms / 1000)
        self.latest_ms = max(self.latest_ms, self.now_ms)
        if ms < 0:
            for member, flight in self.promises.flying.items():
                self.promises.flying[member] = replace(flight, since_ms=-math.inf)

    # --- after every step

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "topic"):
            return
        self.hear()
        ledger = self.memory.audit_ledger(self.topic, 0)
        store, prepare, retry, dead = map(self.zset, ("store", "prepare", "retry", "dead"))
        hashes = {
            name: self.after.get(getattr(self.keys, name), {})
            for name in (
                "inflight", "deaths", "failures", "body", "claim_body", "prepare_body", "claim_failed",
            )
        }  # fmt: skip
        waits = store.keys() | retry.keys()
        live = waits | prepare.keys()
        self.require("INV-3", ledger.live_drift == self.strangers, ledger, self.strangers)
        drifts = (ledger.dead_drift, ledger.delivery_drift, ledger.claim_drift)
        self.require("INV-4", not any(drifts), ledger)
        claim, claimants = self.zset("claim"), self.zset("claimants")
        self.require("INV-5", bool(claim) == bool(claimants) and len(claimants) <= 1, claim, claimants)
        self.require("INV-5", hashes["claim_body"].keys() <= claim.keys(), hashes["claim_body"], claim)
        self.require(
            "INV-26", hashes["claim_failed"].keys() == self.failed_claimed.keys(), self.failed_claimed
        )
        self.require("INV-5", hashes["inflight"].keys() == prepare.keys(), hashes["inflight"], prepare)
        self.require("INV-5", hashes["deaths"].keys() == dead.keys(), hashes["deaths"], dead)
        known = live | claim.keys()
        self.require("INV-5", hashes["failures"].keys() <= known, hashes["failures"], known)
        self.require("INV-5", hashes["body"].keys() <= waits, hashes["body"], waits)
        flying_bodies = hashes["prepare_body"]
        self.require("INV-5", flying_bodies.keys() <= prepare.keys(), flying_bodies, prepare)
        for member, waiting_body in hashes["body"].items():
            older = flying_bodies.get(member) or hashes["claim_body"].get(member)
            marked = member in self.promises.flying and self.promises.flying[member].marked
            if older is not None and not marked:
                newer = self.order_of(member, waiting_body) > self.order_of(member, older)
                self.require("INV-17", newer, member, waiting_body, older)
        for member in dead:
            body, before = self.envelope_of("deaths", member), self.envelope_of("deaths", member, self.before)
            if body and before:
                older, newer_body = self.order_of(member, before), self.order_of(member, body)
                self.require("INV-17", newer_body >= older, member, body)
        self.everybody_is_woken_in_time()
        twice = store.keys() & retry.keys()
        self.require("INV-12", twice <= self.kept_by_strangers, twice)
        if self.topic.serial:
            owners = {flight.owner for flight in self.promises.flying.values()}
            # What was lost or returned comes back beside what others take, but where there is an order.
            keeping = [
                name
                for name in claimants
                if self.topic.is_fifo or self.claim_state(name.decode())[1] not in ("lost", "returned")
            ]
            self.require("INV-7", len(owners) + len(keeping) <= 1, owners, keeping)
        else:
            self.require("INV-7", len(prepare) <= self.topic.max_prepared, prepare)
        waiting, flying = self.promises.waiting.keys(), self.promises.flying.keys()
        self.require("INV-11", waiting == store.keys() | retry.keys(), waiting, store, retry)
        self.require("INV-11", flying == prepare.keys(), flying, prepare)
        self.require("INV-11", self.promises.claimed.keys() == claim.keys(), self.promises.claimed, claim)
        twice = prepare.keys() & claim.keys()
        self.require("INV-7", not twice, twice)
        outcomes, times = self.after.get(self.keys.outcomes, {}), self.zset("outcome_times")
        self.require("INV-24", outcomes.keys() == times.keys(), outcomes, times)
        self.require("INV-24", not (outcomes and self.topic.outcome_retention_ms is None), outcomes)

    def hear(self) -> None:
        """Read what was published: who sleeps is awake then, and what was pushed is in flight."""
        news = self.wakeups[1].get()
        self.heard += news
        if (self.topic.name, 0) in news:
            self.asleep_until = None
        for pushed in news:
            if isinstance(pushed, replies.Pushed):
                self.note_pushed(pushed)

    def everybody_is_woken_in_time(self) -> None:
        """Require that nothing can be taken for which the last consumer that asked would sleep."""
        # Who has slept for as long as it was told asks again by itself.
        if self.asleep_until is None or self.asleep_until <= self.now_ms:
            return
        whole = math.floor if self.topic.is_fifo else math.ceil
        busy = self.zset("prepare").keys() | self.zset("claim").keys() | self.kept_by_strangers
        dues = [
            0 if self.topic.is_priority else whole(score)
            for member, score in self.zset("store").items()
            if member not in busy
        ]
        rests = self.zset("retry")
        dues += [math.floor(rests[member]) for member in rests.keys() - self.kept_by_strangers]
        self.require("INV-28", min(dues, default=NEVER) >= self.asleep_until, dues, self.asleep_until)


def test_lua_and_python_go_through_every_history_in_lockstep(redis_client: redis.Redis, prefix: str) -> None:
    class Machine(Lockstep):
        client, base_prefix = redis_client, prefix

    profile = settings.get_current_profile_name()
    # A step takes a millisecond: even the short run can afford ten thousand.
    steps = settings() if profile == "proof" else settings(max_examples=200, stateful_step_count=50)
    run_state_machine_as_test(Machine, settings=steps)
    assert Machine.pushes > 0
