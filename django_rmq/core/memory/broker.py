"""The protocol in plain Python: what every script does to a slot, without a Redis server.

``InMemoryBroker`` has the methods, arguments and results of ``broker.Broker`` and keeps the same
keyspace: the same key names, members, scores and fields, byte for byte. It is the specification that
the Lua files are compared with, and a broker for tests. It lives in one process and forgets
everything with it. Stdlib only.

From top to bottom: time, the two kinds of keys, the rules of one slot, the transitions, wake-ups.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha1
from typing import Any, Generic, NamedTuple, Self, TypeVar

from django_rmq.core.words import stored
from django_rmq.core.words.keys import (
    SlotKeys,
    answer_key,
    bucket_key,
    check_prefix,
    events_channel,
    explicit_basis_key,
    history_keys,
    limits_key,
    slot_keys,
    times_key,
    topics_key,
    wake_channel,
    worker_keys,
    workers_channel,
)
from django_rmq.core.words.messages import (
    BATCH,
    CLAIM_STEP,
    CLAIM_STEP_BYTES,
    GATE,
    LATENESS_BUCKETS,
    MAX_PRIORITY,
    MAX_RETRIES_LIMIT,
    NEVER,
    RECORDS,
    SAMPLED,
    TIMES,
    Acquired,
    Allowance,
    Area,
    Beat,
    Claimed,
    ClaimRead,
    Confirmed,
    Counts,
    Death,
    Delivery,
    Durability,
    Entry,
    Failure,
    FailureRecord,
    Handover,
    Held,
    Ledger,
    Looked,
    Loose,
    Page,
    Prepared,
    Roster,
    Row,
    Sample,
    Sent,
    Session,
    Sought,
    Survey,
    Times,
    Topic,
    TopicType,
    cut_error,
    redefined,
)
from django_rmq.core.words.stored import Definitions
from django_rmq.exceptions import RmqError, ServerRefused, SlotMoved, WrongType

LARGEST_WITH_RETRIES = (1 << 43) - 1
"""The largest score that ten bits of retries fit below in a double. At 2^43 they would be rounded."""

LONGEST_LEASE_MS = 86_400_000
"""A day: what a claim's consumer may be away at most."""

TOMBSTONE_MS = 30 * 86_400_000
"""How long it is remembered of a consumer how its newest claim ended."""

CONSUMERS = 1_000
"""Spark consumers that one slot remembers at most."""

LONGEST_DELAY_MS = 1 << 42
"""139 years: now plus this stays below ``LARGEST_WITH_RETRIES``."""

UPKEEP = 400
"""Deliveries that one prepare times out, and rested messages that it returns, at most; so too of a claim that was lost."""

MOVED = 250
"""Messages that one hand-over of a re-slotting takes from slot to slot, at most."""


class Clock:
    """A given time, for tests: microseconds since the epoch, moved by ``advance`` alone."""

    def __init__(self, start_ms: int = 1_800_000_000_000) -> None:
        self._micros = start_ms * 1000

    def __call__(self) -> int:
        return self._micros

    def advance(self, *, seconds: float = 0, ms: float = 0) -> None:
        """Go on by so much, to the microsecond; negative: a clock that was set back."""
        self._micros += round(seconds * 1_000_000) + round(ms * 1000)


def _system_clock() -> int:
    return time.time_ns() // 1000


# --- keys -----------------------------------------------------------------------------------------


class SortedSet(dict[bytes, float]):
    """A zset: member -> score, read in the order of (score, member)."""

    kind = "zset"

    def rows(self, *, descending: bool = False) -> list[tuple[bytes, float]]:
        """Return (member, score) in order; equal scores by the members' bytes."""
        return sorted(self.items(), key=lambda row: (row[1], row[0]), reverse=descending)


class Hash(dict[bytes, bytes]):
    """A hash: field -> value."""

    kind = "hash"


_Kind = TypeVar("_Kind", SortedSet, Hash)
_Told = TypeVar("_Told")
_SETS = frozenset({"store", "prepare", "retry", "dead", "claimants", "claim"})
_SENDING = ("store", "retry", "body", "stats", "control")
_ENDING = (
    "store", "prepare", "retry", "dead", "inflight", "deaths", "failures", "body", "stats", "control",
    "prepare_body",
)  # fmt: skip
_CLAIMING = ("claimants", "claim", "claims", "claim_body")
_STATES = {
    "store": ("store", "failures", "body"),
    "prepare": ("prepare", "inflight", "prepare_body"),
    "retry": ("retry", "failures", "body"),
    "dead": ("dead", "deaths", "body"),
    "claim": ("claim", "failures", "claim_body"),
}
_IN_FLIGHT = re.compile(rb"(\d+) (\S+) ?(\S*) ?(\S*)")
_RECORD = re.compile(rb"[^\s]+ \d+ \d+ \d+ [^\s]+[^\n]*\n")
_DEATH_HEAD = re.compile(rb"[^\s]+ \d+ \d+ \d+ [^\s]+ (\d+) [01]\n")
_CLASS = re.compile(rb"\s*([A-Za-z_][A-Za-z0-9_.<>]*)\s*")
_EXPIRES = re.compile(rb"(\d+) ")
_PERMITS = re.compile(rb"(\d+) (\d+) (\d+)")
_CLAIM = re.compile(rb"(\d+) ([a-z]+) (\d+)")


def score_text(score: float) -> str:
    """Write a score as Redis and Lua's ``%.17g`` do: no digit is lost."""
    return f"{score:.17g}"


def _floor(value: float) -> float:
    return math.floor(value) if math.isfinite(value) else value


def _ceil(value: float) -> float:
    return math.ceil(value) if math.isfinite(value) else value


def _bounded(value: float, low: float, high: float) -> int:
    """Return ``value`` as an integer in its bounds; what is no number is ``low``."""
    return int(low if math.isnan(value) else max(low, min(high, value)))


class _InFlight(NamedTuple):
    """What ``inflight_{K}`` says of a delivery: whose it is, where it came from, what a person wants."""

    receipt: int
    score: float
    mark: str = ""
    outlived: str = ""
    """``outlived``, where a newer copy of it was buried."""

    @classmethod
    def parse(cls, raw: bytes | None) -> _InFlight:
        match = _IN_FLIGHT.match(raw or b"")
        if match is None:
            return cls(0, 0.0)
        return cls(int(match[1]), float(match[2]), match[3].decode(), match[4].decode())

    def encode(self) -> bytes:
        return f"{self.receipt} {score_text(self.score)} {self.mark} {self.outlived}".rstrip().encode()


# --- the rules of one slot ------------------------------------------------------------------------


class _Slot:
    """One slot while a transition works on it: its keys, the instant, and what will be counted.

    Only the keys that the transition names are there, as a script has only the keys it declares.
    """

    store: SortedSet
    prepare: SortedSet
    retry: SortedSet
    dead: SortedSet
    claimants: SortedSet
    claim: SortedSet
    claims: Hash
    claim_body: Hash
    inflight: Hash
    deaths: Hash
    failures: Hash
    body: Hash
    stats: Hash
    control: Hash
    leaving: Hash
    arrived: Hash
    prepare_body: Hash

    def __init__(self, topic: Topic, index: int, micros: int, publish: Callable[[], None]) -> None:
        self.topic = topic
        self.index = index
        self.now_s, self.micros = divmod(micros, 1_000_000)
        self.now_ms = micros // 1000
        self.counts: Counter[str] = Counter()
        # Of a transition that does not name it, nothing it touches is claimed.
        self.claim = SortedSet()
        self.claimants = SortedSet()
        self._publish = publish

    # --- what the slot says of itself

    @property
    def max_retries(self) -> int:
        """The slot's own, once it has one: never a worker's."""
        return int(self.control.get(b"max_retries", self.topic.max_retries))

    @property
    def timeout(self) -> int:
        """Seconds; the slot's own, once it has one."""
        return int(self.control.get(b"timeout", self.topic.timeout))

    @property
    def moved_to(self) -> int | None:
        """The slot count that the slot was given, where the caller has another."""
        slots = self.control.get(b"slots")
        return None if slots is None or int(slots) == self.topic.slots else int(slots)

    @property
    def room(self) -> int:
        """The gate is open while Prepare holds fewer than this."""
        return 1 if self.topic.serial else self.topic.max_prepared

    def runs(self, member: bytes) -> bool:
        """Whether the member is in flight, or claimed by Spark."""
        return member in self.prepare or member in self.claim

    def count(self, name: str, by: int = 1) -> None:
        self.counts[name] += by

    # --- how a score carries the budget: q deliveries are left to who waits as a retry of q

    @property
    def floor_priority(self) -> int:
        """At most this, a priority score reads as a retry."""
        return max(16, self.max_retries)

    def is_retry(self, score: float) -> bool:
        if not self.topic.is_priority:
            return score <= 999
        return score <= self.floor_priority or (math.isfinite(score) and score % 1 != 0)

    def is_fresh(self, score: float) -> bool:
        """Whether a send may give this score."""
        if self.is_retry(score) or not math.isfinite(score) or score % 1 != 0:
            return False
        return score <= (MAX_PRIORITY if self.topic.is_priority else 1e14)

    def budget(self, score: float) -> int:
        """Return the retries left to a delivery that is taken with this score."""
        if not self.is_retry(score):
            return self.max_retries
        q = _floor(score)
        if self.topic.is_priority and score > self.floor_priority:
            q = _floor(score % 1 * 1024 + 0.5)
        return _bounded(q - 1, 0, self.max_retries)

    def retry_score(self, q: int, first: float) -> float:
        """Return the Store score of a retry of ``q``; ``first``: the score before the first failure."""
        q = _bounded(q, 1, MAX_RETRIES_LIMIT)
        if self.topic.is_priority and self.topic.retry_priority == "original" and first > self.floor_priority:
            return math.floor(min(first, LARGEST_WITH_RETRIES)) + q / 1024
        return q

    def first_score(self, score: float, failure: FailureRecord | None) -> float:
        """Return the score a message had before it first failed, as far as it is known."""
        if not self.is_retry(score):
            return score
        if self.topic.is_priority and score > self.floor_priority:
            return _floor(score)
        return float(failure.score) if failure else score

    # --- how a delivery ends that did not succeed

    def backoff_ms(self, failures: int, index: int) -> int:
        """Return the topic's exponential back-off, jittered by up to half. ``index`` spreads a batch."""
        base, cap = self.topic.backoff.base_ms, self.topic.backoff.cap_ms
        delay = min(cap, base * 2.0 ** min(failures, 40))
        if cap > base:
            delay *= 1 - (self.micros + index * 7919) % 1000 / 2000
        return math.floor(delay)

    def failure_of(self, member: bytes) -> FailureRecord | None:
        raw = self.failures.get(member)
        return None if raw is None else FailureRecord.parse(raw)

    def note_failure(
        self, member: bytes, kind: str, error: bytes, score: float, failure: FailureRecord | None
    ) -> None:
        times, first_ms = (failure.times + 1, failure.first_ms) if failure else (1, self.now_ms)
        head = f"{kind} {times} {first_ms} {self.now_ms} {score_text(score)}\n"
        self.failures[member] = head.encode() + error

    def land(self, member: bytes) -> bytes | None:
        """Let what a delivery was handed out with go where the message goes, unless a newer body is there; return it."""
        delivered = self.prepare_body.pop(member, None)
        if delivered is not None:
            self.body.setdefault(member, delivered)
        return delivered

    def forget(self, member: bytes) -> None:
        """Delete body and diagnosis of a member, unless it lives on; one that runs or is claimed has its own body."""
        if not (member in self.store or member in self.retry):
            self.body.pop(member, None)
            if not self.runs(member):
                self.failures.pop(member, None)

    def die(
        self,
        member: bytes,
        reason: str,
        error: bytes,
        score: float,
        failure: FailureRecord | None,
        failed: int,
        kept: bytes | None,
    ) -> None:
        """Put a member that its caller took from its place into Dead, with all a person wants to see.

        ``kept``: the body that it had there.
        """
        if member in self.dead:
            self.count("dead_merged")
        self.dead[member] = float(self.now_ms)
        times, first_ms = (failure.times, failure.first_ms) if failure else (0, self.now_ms)
        head = (
            f"{reason} {times + failed} {first_ms} {self.now_ms} {score_text(score)}"
            f" {len(error)} {int(kept is not None)}\n"
        )
        self.deaths[member] = head.encode() + error + (kept or b"")
        self.forget(member)
        self.count("lapsed" if reason == "lapsed" else "died")

    def bury_lapsed(self, member: bytes, score: float) -> None:
        """Bring a message to Dead that may no longer be delivered."""
        del self.store[member]
        _supersede_resting(self, member)
        failure = self.failure_of(member)
        kept = self.body.get(member)
        self.die(member, "lapsed", b"", self.first_score(score, failure), failure, 0, kept)

    def end_failed(
        self, member: bytes, left: int, what: str, error: bytes, delay_ms: int | None, index: int
    ) -> float | None:
        """End a delivery: removed, buried, dead, dropped for a newer send, waiting or resting again.

        Returns when the member can be taken again (ms), or None.
        """
        record = _InFlight.parse(self.inflight.pop(member, None))
        self.prepare.pop(member, None)
        kept = self.land(member)
        failure = self.failure_of(member)
        origin = self.first_score(record.score, failure)
        if record.mark == "removed":
            self.count("ended_marked")
            self.count("removed")
            self.forget(member)
            return None
        if record.mark == "buried":
            self.count("ended_marked")
            if record.outlived and member in self.dead:
                # The newer copy that was buried with it is the one that stays.
                self.count("dropped")
                self.forget(member)
            else:
                self.die(member, "buried", error, origin, failure, 1, kept)
            return None
        if what == "rejected":
            self.count("rejected")
            self.die(member, "rejected", error, origin, failure, 1, kept)
            return None
        self.count("expired" if what == "timed_out" else "failed")
        return self.go_on(member, left, what, error, origin, failure, delay_ms, index, kept)

    def go_on(
        self,
        member: bytes,
        left: int,
        what: str,
        error: bytes,
        origin: float,
        failure: FailureRecord | None,
        delay_ms: int | None,
        index: int,
        kept: bytes | None,
    ) -> float | None:
        """Give up for a newer copy what failed, or bring it to Dead, or make it a retry; as ``end_failed``."""
        if member in self.store or member in self.retry:
            self.count("dropped")
            self.note_failure(member, what, error, origin, failure)
            return None
        if left <= 0:
            self.die(member, what, error, origin, failure, 1, kept)
            return None
        if delay_ms is None:
            delay_ms = self.backoff_ms(self.max_retries - left, index)
        self.note_failure(member, what, error, origin, failure)
        if delay_ms > 0:
            self.retry[member] = self.now_ms + delay_ms + left / 1024
            return self.now_ms + delay_ms
        self.store[member] = float(self.retry_score(left, origin))
        return self.now_ms

    # --- upkeep

    def note_definition(self, slots: int) -> None:
        """Leave what people and sweepers have to know of the topic."""
        self.control[b"slots"] = b"%d" % slots
        self.control[b"timeout"] = b"%d" % self.timeout
        self.control[b"max_retries"] = b"%d" % self.max_retries

    def expire_due(self, limit: int) -> tuple[int, float | None]:
        """End up to ``limit`` deliveries that timed out; return how many, and when one can be taken again."""
        ahead = (self.now_s + self.timeout + 1) * 1000
        for member, score in [row for row in self.prepare.rows() if row[1] >= ahead][:limit]:
            self.prepare[member] = float(self.now_s * 1000 + _bounded(score % 1000, 0, self.max_retries))
        late = [row for row in self.prepare.rows() if row[1] < (self.now_s - self.timeout) * 1000][:limit]
        dues = []
        for index, (member, score) in enumerate(late):
            left = _bounded(score % 1000, 0, self.max_retries)
            dues.append(self.end_failed(member, left, "timed_out", b"", None, 2 * index + 1))
        lost, due = self.expire_claim(limit - len(late))
        dues.append(due)
        return len(late) + lost, min((due for due in dues if due is not None), default=None)

    def promote_due(self, limit: int) -> int:
        """Return up to ``limit`` rested messages to Store, unless a newer send waits; return how many."""
        rested = [row for row in self.retry.rows() if row[1] < self.now_ms + 1][:limit]
        for member, score in rested:
            del self.retry[member]
            if member in self.store:
                self.count("dropped")
            else:
                q = _bounded(_floor(score % 1 * 1024 + 0.5), 1, MAX_RETRIES_LIMIT)
                failure = self.failure_of(member)
                self.store[member] = float(self.retry_score(q, float(failure.score) if failure else 0.0))
        return len(rested)

    # --- claims: what a Spark consumer holds

    def newest_claim(self, consumer: str) -> tuple[int, str]:
        """Return number and state of the consumer's newest claim."""
        match = _CLAIM.fullmatch(self.claims.get(consumer.encode(), b""))
        return (int(match[1]), match[2].decode()) if match else (0, "none")

    def note_claim(self, consumer: str, number: int, state: str) -> None:
        self.claims[consumer.encode()] = f"{number} {state} {self.now_ms}".encode()

    def close_claim(self, consumer: str) -> int:
        """End the claim if it holds nothing any more; return how many are left."""
        if not self.claim:
            self.claimants.pop(consumer.encode(), None)
        return len(self.claim)

    def return_claimed(self, limit: int, *, spent: bool) -> tuple[int, float | None]:
        """Give back up to ``limit`` messages; return how many, and when one can be taken again."""
        rows = self.claim.rows()[: min(limit, UPKEEP) if spent else limit]
        dues: list[float] = []
        for index, (member, score) in enumerate(rows):
            del self.claim[member]
            kept = self.claim_body.pop(member, None)
            self.count("claim_returned")
            waiting = self.store.get(member)
            newer = waiting is not None or member in self.retry
            if kept is not None:
                self.body.setdefault(member, kept)
            due: float | None = None
            if spent:
                failure = self.failure_of(member)
                origin = self.first_score(score, failure)
                due = self.go_on(
                    member, self.budget(score), "timed_out", b"", origin, failure, None, 2 * index + 1, kept
                )
            else:
                merges = self.topic.type is TopicType.RANGE_MERGE and not self.is_retry(score)
                if newer:
                    self.count("dropped")
                if not newer or (merges and waiting is not None and score < waiting):
                    self.store[member] = score
                    due = 0 if self.topic.is_priority else score
            if due is not None:
                dues.append(due)
        return len(rows), min(dues, default=None)

    def forget_claimed(self, limit: int) -> None:
        """Forget up to ``limit`` acknowledged messages, or all where nothing needs tidying up."""
        gone = list(self.claim) if not self.failures else [member for member, _ in self.claim.rows()[:limit]]
        for member in gone:
            del self.claim[member]
            self.claim_body.pop(member, None)
            if member not in self.store and member not in self.retry:
                self.failures.pop(member, None)
        self.count("acked", len(gone))

    def expire_claim(self, limit: int) -> tuple[int, float | None]:
        """Go on with a claim whose lease has ended: lost, unless it was acknowledged before."""
        over = [(name, ends) for name, ends in self.claimants.rows()[:1] if ends <= self.now_ms]
        if limit < 1 or not over:
            return 0, None
        consumer = over[0][0].decode()
        number, state = self.newest_claim(consumer)
        held, earliest = len(self.claim), None
        if state == "acked":
            self.forget_claimed(limit)
        else:
            if state not in ("lost", "returned"):
                self.note_claim(consumer, number, "lost")
            _, earliest = self.return_claimed(limit, spent=state != "returned")
        return held - self.close_claim(consumer), earliest

    def make_room_for(self, consumer: str) -> bool:
        """Forget what ended thirty days ago, where ``consumer`` is new; return whether there is room for it."""
        if consumer.encode() in self.claims:
            return True
        for other, record in list(self.claims.items()):
            match = _CLAIM.fullmatch(record)
            since = int(match[3]) if match else 0
            if since < self.now_ms - TOMBSTONE_MS and other not in self.claimants:
                del self.claims[other]
        return len(self.claims) < CONSUMERS

    def note_undrained(self) -> None:
        """Note since when Store of a priority topic has not been empty: priorities hold no time."""
        if not self.topic.is_priority:
            return
        if self.store:
            self.control.setdefault(b"undrained_since", b"%d" % self.now_ms)
        else:
            self.control.pop(b"undrained_since", None)

    # --- sleeping and waking

    def next_due(self, *, at_once: bool) -> int | None:
        """Return the earliest instant (ms) at which asking again can help; None: no such instant."""
        dues: list[float] = [self.now_ms] if at_once else []
        if not self.topic.is_priority:
            dues += sorted(math.ceil(min(s, NEVER)) for s in self.store.values() if s > self.now_ms)[:1]
        if self.retry:
            dues.append(_floor(min(self.retry.values())))
        if self.prepare:
            dues.append((_floor(min(self.prepare.values()) / 1000) + self.timeout + 1) * 1000)
        dues += [_ceil(ends) for ends in self.claimants.values()]
        return _bounded(min(dues), 0, NEVER) if dues else None

    def sleep_until(self, due: int) -> None:
        self.control[b"sleeping_until"] = b"%d" % due

    def wake(self, due: float) -> None:
        """Wake who sleeps past ``due``, once: the next to fall asleep writes ``sleeping_until`` anew."""
        sleeping_until = self.control.get(b"sleeping_until")
        if sleeping_until is not None and due < int(sleeping_until):
            del self.control[b"sleeping_until"]
            self._publish()

    def wake_at_gate(self, due: float, *, ended: bool) -> None:
        """Wake for ``due``; at once where a delivery has ended and somebody waits at a gate that is open now."""
        waits = self.control.get(b"sleeping_until") == b"%d" % GATE
        self.wake(0 if ended and waits and len(self.prepare) < self.room else due)

    # --- sending

    def place(
        self,
        members: Sequence[bytes],
        scores: Sequence[float],
        envelopes: Sequence[bytes],
        met: str,
    ) -> list[Sent]:
        """Put members into Store, each after the other; ``met``: what to do about a copy that waits fresh.

        merged: it keeps its score. replaced: it gets the new score. present: nothing is sent, nor
        where the member rests or runs. A copy that waits or rests as a retry is superseded otherwise.
        """
        sent: list[Sent] = []
        room = (
            self.topic.slot_backlog - len(self.store) - len(self.retry)
            if self.topic.slot_backlog
            else math.inf
        )
        placed: dict[bytes, str] = {}
        earliest = math.inf
        for i, member in enumerate(members):
            waiting, resting = self.store.get(member), member in self.retry
            fresh = waiting is not None and (member in placed or not self.is_retry(waiting))
            if placed.get(member) == "refused":
                word = "refused"
            elif met == "present" and (
                waiting is not None or resting or member in self.prepare or member in self.claim
            ):
                word = "present"
            elif fresh:
                word = met
            elif waiting is not None or resting:
                word = "superseded"
            elif room < 1:
                word = "refused"
            else:
                word = "stored"
                room -= 1
            placed[member] = word
            self.count(word)
            if word in ("refused", "present"):
                sent.append(Sent(word, math.nan if waiting is None or word == "refused" else waiting))
                continue
            self.count("sent")
            if word == "superseded":
                self.count("stored")
                if waiting is not None:
                    self.count("dropped")
            if resting:
                del self.retry[member]
                self.count("dropped")
            if word != "merged":
                self.store[member] = float(scores[i])
                earliest = min(earliest, scores[i])
            if envelopes:
                self.body[member] = envelopes[i]
            sent.append(Sent(word, self.store[member]))
        self.control.setdefault(b"slots", b"%d" % self.topic.slots)
        if self.topic.is_priority:
            self.control.setdefault(b"max_retries", b"%d" % self.max_retries)
        self.note_undrained()
        if earliest < math.inf:
            self.wake(0 if self.topic.is_priority else earliest)
        return sent


# --- the transitions ------------------------------------------------------------------------------


class InMemoryBroker:
    """Runs every transition on dictionaries. See ``broker.Broker`` for what arguments and answers mean.

    ``clock`` returns microseconds since the epoch; by default the time of this machine. ``keyspace``
    may be read and written by tests, as a Redis would be by a stranger.
    """

    def __init__(self, prefix: str = "", clock: Callable[[], int] | None = None) -> None:
        self.prefix = check_prefix(prefix)
        self.keyspace: dict[bytes, SortedSet | Hash] = {}
        self._clock = clock or _system_clock
        self._lock = threading.RLock()
        self._listening: list[Wakeups] = []
        self._hearing: list[Events] = []

    @contextmanager
    def _slot(self, topic: Topic, index: int, *names: str) -> Iterator[_Slot]:
        """Open the named keys of a slot. A transition is atomic: nobody sees half of one."""
        with self._lock:
            keys = slot_keys(self.prefix, topic.name, index)
            slot = _Slot(topic, index, self._clock(), lambda: self._publish(topic, index))
            for name in names:
                key = getattr(keys, name)
                setattr(slot, name, self._open(key, SortedSet) if name in _SETS else self._open(key, Hash))
            yield slot
            if slot.counts:
                for name, by in slot.counts.items():
                    if by:
                        slot.stats[name.encode()] = b"%d" % (int(slot.stats.get(name.encode(), 0)) + by)
            for name in names:
                self._keep(getattr(keys, name), getattr(slot, name))

    def _open(self, key: bytes, kind: type[_Kind]) -> _Kind:
        found = self.keyspace.get(key)
        if found is None:
            return kind()
        if not isinstance(found, kind):
            raise WrongType(f"WRONGTYPE {key.decode()} is a {found.kind}, not a {kind.kind}")
        return found

    def _keep(self, key: bytes, value: SortedSet | Hash) -> None:
        if value:
            self.keyspace[key] = value
        else:
            self.keyspace.pop(key, None)

    def _publish(self, topic: Topic, index: int) -> None:
        channel = wake_channel(self.prefix, topic.name)
        for wakeups in self._listening:
            wakeups.put(channel, (topic.name, index))

    def load_scripts(self) -> None:
        """Return: there are no scripts here."""

    def pipeline(self) -> Pipeline:
        """Return a pipeline: its methods collect, ``execute`` runs all."""
        return Pipeline(self)

    # --- sending

    def send_merge(
        self,
        topic: Topic,
        slot: int,
        range_ms: int,
        members: Sequence[bytes],
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send range_merge messages due ``range_ms`` from now; what waits already keeps its time."""
        with self._slot(topic, slot, *_SENDING) as s:
            if not (0 <= range_ms <= 1e14 and 1 <= len(members) <= BATCH):
                raise ServerRefused("ERR range_ms or n is out of bounds")
            _raise_if_moved(s)
            return s.place(members, [s.now_ms + range_ms] * len(members), envelopes, "merged")

    def send_replace(
        self,
        topic: Topic,
        slot: int,
        scores: Sequence[int],
        members: Sequence[bytes],
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send priority or fixed_time messages; of several sends of a member the last score counts."""
        with self._slot(topic, slot, *_SENDING) as s:
            _check_batch(members, at_least=1)
            _raise_if_moved(s)
            _check_fresh(s, scores)
            return s.place(members, scores, envelopes, "replaced")

    def ensure(
        self,
        topic: Topic,
        slot: int,
        scores: Sequence[int],
        members: Sequence[bytes],
        envelopes: Sequence[bytes] = (),
    ) -> list[Sent]:
        """Send what neither waits, rests nor runs. ``scores``: range_ms on range_merge topics."""
        with self._slot(topic, slot, *_SENDING, "prepare", "claim") as s:
            _check_batch(members, at_least=1)
            _raise_if_moved(s)
            if topic.type is TopicType.RANGE_MERGE:
                scores = [s.now_ms + range_ms if range_ms >= 0 else range_ms for range_ms in scores]
            _check_fresh(s, scores)
            return s.place(members, scores, envelopes, "present")

    # --- consuming

    def acquire(self, topic: Topic, slot: int) -> int:
        """Begin to own the slot: return the new epoch, which fences every older prepare."""
        with self._slot(topic, slot, "control") as s:
            try:
                epoch = int(s.control.get(b"epoch", 0)) + 1
            except ValueError:
                raise ServerRefused("ERR hash value is not an integer") from None
            s.control[b"epoch"] = b"%d" % epoch
            return epoch

    def acquire_all(self, topic: Topic, slots: Sequence[int]) -> list[Acquired]:
        """Begin to own up to 1,024 slots, and fall asleep at once in those that hold nothing."""
        if len(slots) > 1024:
            raise ServerRefused("ERR too many slots")
        with self._lock:
            return [self._begin(topic, slot) for slot in slots]

    def _begin(self, topic: Topic, slot: int) -> Acquired:
        keys = slot_keys(self.prefix, topic.name, slot)
        with suppress(WrongType, ValueError), self._slot(topic, slot, "control") as s:
            epoch = int(s.control.get(b"epoch", 0)) + 1
            s.control[b"epoch"] = b"%d" % epoch
            slots = b"%d" % topic.slots
            is_open = (
                not s.control.keys() & {b"paused", b"moving"} and s.control.get(b"slots", slots) == slots
            )
            holding = {keys.store, keys.retry, keys.prepare, keys.claimants} & self.keyspace.keys()
            if holding or not is_open:
                return Acquired(epoch, is_asleep=False)
            s.control[b"slots"] = slots
            s.control.setdefault(b"timeout", b"%d" % topic.timeout)
            s.control.setdefault(b"max_retries", b"%d" % topic.max_retries)
            s.sleep_until(NEVER)
            return Acquired(epoch, is_asleep=True)
        return Acquired(None, is_asleep=False)

    def held(
        self, topic: Topic, slot: int, owner: str, offset: int = 0, limit: int = 1000
    ) -> list[Held] | None:
        """Return what Prepare holds for ``owner``; None: another owner holds it."""
        with self._slot(topic, slot, "prepare", "inflight", "prepare_body", "control") as s:
            holder = s.control.get(b"owner")
            if holder != owner.encode():
                return None if holder is not None and s.prepare else []
            found = []
            for member, score in s.prepare.rows()[offset : offset + min(limit, BATCH)]:
                record = _InFlight.parse(s.inflight.get(member))
                delivery = Delivery(member, record.score, int(score) % 1000, s.prepare_body.get(member))
                found.append(Held(delivery, record.receipt, bool(record.mark)))
            return found

    def prepare(
        self,
        topic: Topic,
        slot: int,
        owner: str,
        epoch: int | None,
        limit: int,
        max_bytes: int = 16_777_216,
        after: tuple[str, bytes] | None = None,
    ) -> Prepared:
        """Phase one: take up to ``limit`` messages, after the slot's upkeep. ``epoch`` None: not fenced."""
        with self._slot(topic, slot, *_ENDING, *_CLAIMING) as s:
            if s.moved_to is not None:
                return Prepared("moved", slots=s.moved_to)
            if epoch is not None and epoch < int(s.control.get(b"epoch", epoch)):
                s.count("fenced")
                return Prepared("fenced")
            limit = max(1, min(limit, BATCH))
            s.note_definition(topic.slots)
            share = min(limit, UPKEEP)
            expired, promoted = s.expire_due(share)[0], s.promote_due(share)
            behind = expired >= share or promoted >= share

            def idle(word: str, sleep: int | None, *, more: bool = False) -> Prepared:
                if sleep is not None:
                    s.sleep_until(sleep)
                s.note_undrained()
                return Prepared(word, s.next_due(at_once=behind or more))

            # The gate.
            in_flight = len(s.prepare)
            if topic.serial:
                others = s.control.get(b"owner") != owner.encode()
                shut = others and bool(in_flight or s.claimants)
            else:
                shut = in_flight >= s.room
            # While a re-slotting moves messages, nothing is handed out by anybody.
            if shut or b"moving" in s.control:
                return idle("busy", GATE)
            if b"paused" in s.control:
                return idle("paused", None)
            if not topic.serial:
                limit = min(limit, s.room - in_flight)

            # A member whose last end was a time-out is handed out alone, for it may kill its process.
            def suspicious(member: bytes) -> bool:
                return s.failures.get(member, b"").startswith(b"timed_out ")

            if topic.serial and in_flight == 1 and suspicious(next(iter(s.prepare))):
                return idle("busy", GATE)

            receipt = int(s.control.get(b"deliveries", 0)) + 1
            free, complete, last = _candidates(s, limit, receipt, after)

            taken: list[Delivery] = []
            lapsed: list[tuple[bytes, float]] = []
            more, refused = not complete or len(free) > limit, False
            size = 0
            for i, (member, score) in enumerate(free[:limit]):
                envelope = s.body.get(member)
                if envelope is not None and _has_lapsed(envelope, s.now_ms):
                    lapsed.append((member, score))
                    continue
                alone = suspicious(member)
                size += len(member) + len(envelope or b"")
                refused = alone and topic.serial and in_flight > 0 and not taken
                if refused or (taken and (alone or size > max_bytes)):
                    more = True
                    break
                taken.append(Delivery(member, score, s.budget(score), envelope or None))
                if alone:
                    more = more or i + 1 < len(free[:limit])
                    break

            for member, score in lapsed:
                s.bury_lapsed(member, score)
            for member, score, left, _ in taken:
                del s.store[member]
                _supersede_resting(s, member)
                s.prepare[member] = float(s.now_s * 1000 + left)
                s.inflight[member] = _InFlight(receipt, score).encode()
                if member in s.body:
                    # A delivery has its body for itself: a newer one may come while it runs.
                    s.prepare_body[member] = s.body.pop(member)
            if taken:
                s.control[b"owner"] = owner.encode()
                s.control[b"deliveries"] = b"%d" % receipt
                s.count("prepared", len(taken))
                s.note_undrained()
                due = s.next_due(at_once=behind or more)
                is_suspect = suspicious(taken[0].member)
                return Prepared("ok", due, receipt, taken, is_suspect=is_suspect)
            if refused:
                return idle("busy", GATE)
            if lapsed:
                return idle("empty", None, more=True)
            if last is not None and not complete:
                s.note_undrained()
                return Prepared("more", s.now_ms, cursor=(score_text(last[1]), last[0]))
            if last is not None:
                return idle("busy", GATE)
            due = s.next_due(at_once=behind)
            return idle("empty", NEVER if due is None else due)

    def commit(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Phase two, success. Answers ok or stale for each member."""
        with self._slot(topic, slot, *_ENDING) as s:
            _check_batch(members)
            words = _check_receipts(s, receipt, members)
            ending = [member for member, word in zip(members, words, strict=True) if word == "ok"]
            for i, member in enumerate(dict.fromkeys(ending)):
                if _InFlight.parse(s.inflight[member]).mark:
                    s.end_failed(member, 0, "failed", b"", None, i)
                else:
                    del s.inflight[member]
                    s.count("committed", int(s.prepare.pop(member, None) is not None))
                    s.land(member)
                    s.forget(member)
            s.wake_at_gate(math.inf, ended=bool(ending))
            return words

    def rollback(self, topic: Topic, slot: int, receipt: int, failures: Sequence[Failure]) -> list[str]:
        """Phase two, failure. Answers ok or stale for each."""
        with self._slot(topic, slot, *_ENDING) as s:
            _check_batch(failures)
            words: list[str] = []
            earliest = math.inf
            for i, (member, kind, delay_ms, error) in enumerate(failures):
                if _holds(s, receipt, member):
                    left = _bounded(s.prepare[member] % 1000, 0, s.max_retries)
                    if delay_ms is not None:
                        delay_ms = _bounded(delay_ms, 0, LONGEST_DELAY_MS)
                    due = s.end_failed(member, left, kind, cut_error(error), delay_ms, i)
                    earliest = min(earliest, math.inf if due is None else due)
                    words.append("ok")
                else:
                    words.append("stale")
                    s.count("stale")
            if "ok" in words:
                s.note_undrained()
            s.wake_at_gate(earliest, ended="ok" in words)
            return words

    def release(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Give deliveries back with nothing spent. Answers ok or stale for each."""
        with self._slot(topic, slot, *_ENDING) as s:
            _check_batch(members)
            words: list[str] = []
            earliest = math.inf
            for i, member in enumerate(members):
                if not _holds(s, receipt, member):
                    words.append("stale")
                    s.count("stale")
                    continue
                words.append("ok")
                record = _InFlight.parse(s.inflight[member])
                if record.mark:
                    s.end_failed(member, 0, "failed", b"", None, i)
                    continue
                del s.prepare[member], s.inflight[member]
                s.land(member)
                s.count("released")
                waiting = s.store.get(member)
                if waiting is None and member not in s.retry:
                    comes_back = True
                else:
                    s.count("dropped")
                    merges = topic.type is TopicType.RANGE_MERGE and not s.is_retry(record.score)
                    comes_back = merges and waiting is not None and record.score < waiting
                if comes_back:
                    s.store[member] = record.score
                    earliest = min(earliest, 0 if topic.is_priority else record.score)
            if "ok" in words:
                s.note_undrained()
            s.wake_at_gate(earliest, ended="ok" in words)
            return words

    def extend(self, topic: Topic, slot: int, receipt: int, members: Sequence[bytes]) -> list[str]:
        """Begin the time-out anew. Answers ok or stale for each."""
        with self._slot(topic, slot, "prepare", "inflight", "stats", "control") as s:
            _check_batch(members)
            words: list[str] = []
            for member in members:
                if _holds(s, receipt, member):
                    s.prepare[member] = float(s.now_s * 1000 + int(s.prepare[member] % 1000))
                    words.append("ok")
                else:
                    words.append("stale")
                    s.count("stale")
            return words

    def expire(self, topic: Topic, slot: int, limit: int = 1000) -> int:
        """Time out deliveries whose heartbeat stopped; return how many."""
        with self._slot(topic, slot, *_ENDING, *_CLAIMING) as s:
            expired, earliest = s.expire_due(min(limit, BATCH))
            if expired:
                s.note_undrained()
            s.wake_at_gate(math.inf if earliest is None else earliest, ended=expired > 0)
            return expired

    def promote(self, topic: Topic, slot: int, limit: int = 1000) -> int:
        """Return to Store what has rested long enough; return how many."""
        with self._slot(topic, slot, "store", "retry", "failures", "stats", "control") as s:
            promoted = s.promote_due(min(limit, BATCH))
            if promoted:
                s.note_undrained()
                s.wake(s.now_ms)
            return promoted

    # --- claims: what a Spark consumer holds

    def claim(
        self,
        topic: Topic,
        slot: int,
        consumer: str,
        number: int,
        lease_ms: int,
        limit: int,
        max_bytes: int = 16_777_216,
    ) -> Claimed:
        """Move up to ``limit`` messages into claim ``number`` of ``consumer``, after the slot's upkeep."""
        with self._slot(topic, slot, *_ENDING, *_CLAIMING) as s:
            _check_lease(lease_ms, number)
            if s.moved_to is not None:
                return Claimed("moved")
            limit = max(1, limit)
            s.note_definition(topic.slots)
            share = min(limit, UPKEEP)
            expired, earliest = s.expire_due(share)
            holding = bool(s.claimants)
            if s.promote_due(share):
                earliest = s.now_ms
            s.wake_at_gate(math.inf if earliest is None else earliest, ended=expired > 0)
            s.note_undrained()
            if not s.make_room_for(consumer):
                return Claimed("full")
            newest, state = s.newest_claim(consumer)
            ours = consumer.encode() in s.claimants
            if number < newest or (number == newest and state != "open"):
                return Claimed("stale")
            if ours and number > newest:
                return Claimed("unfinished")
            # While a re-slotting moves messages, nothing is handed out by anybody.
            if (holding and not ours) or (topic.serial and s.prepare) or b"moving" in s.control:
                return Claimed("busy")
            if b"paused" in s.control:
                return Claimed("paused")

            waiting = s.store.rows(descending=topic.is_priority)
            if not topic.is_priority:
                waiting = [row for row in waiting if row[1] <= s.now_ms]
            lapsed: list[tuple[bytes, float]] = []
            fit = None
            if not (s.prepare or s.claim or s.retry or s.body):
                fit = _as_they_are(waiting[:limit], len(s.store), max_bytes)
            if fit is not None:
                taken = waiting[:fit]
                more = fit == limit or fit < len(waiting)
            else:
                taken, limit, max_bytes = [], min(limit, BATCH), min(max_bytes, CLAIM_STEP_BYTES)
                for scan in (limit, limit + BATCH):
                    rows = waiting[:scan]
                    # Leave out what runs already: its newer copy waits for its end.
                    free = [
                        row for row in rows if row[0] not in s.prepare and not (ours and row[0] in s.claim)
                    ]
                    if free or len(rows) < scan:
                        break
                more = len(rows) == scan or len(free) > limit
                size = 0
                for member, score in free[:limit]:
                    envelope = s.body.get(member)
                    if envelope is not None and _has_lapsed(envelope, s.now_ms):
                        lapsed.append((member, score))
                        continue
                    size += len(member) + len(envelope or b"")
                    if taken and size > max_bytes:
                        more = True
                        break
                    taken.append((member, score))
            for member, score in lapsed:
                s.bury_lapsed(member, score)
            for member, score in taken:
                del s.store[member]
                _supersede_resting(s, member)
                s.claim[member] = score
                if member in s.body:
                    s.claim_body[member] = s.body.pop(member)
            if taken:
                if number > newest:
                    s.note_claim(consumer, number, "open")
                s.claimants[consumer.encode()] = float(s.now_ms + lease_ms)
                s.control[b"owner"] = consumer.encode()
                s.count("claimed", len(taken))
            s.note_undrained()
            return Claimed("ok", len(taken), len(s.claim), more)

    def renew(
        self, topic: Topic, slot: int, consumer: str, number: int, lease_ms: int, *, seal: bool = False
    ) -> int | None:
        """Let the lease of a claim begin anew; return what it holds, or None: it is no longer there."""
        with self._slot(topic, slot, "stats", "control", "claimants", "claim", "claims") as s:
            _check_lease(lease_ms)
            newest, state = s.newest_claim(consumer)
            if number != newest or state not in ("open", "sealed"):
                s.count("stale")
                return None
            if seal and state == "open":
                s.note_claim(consumer, number, "sealed")
            s.claimants[consumer.encode()] = float(s.now_ms + lease_ms)
            return len(s.claim)

    def ack(self, topic: Topic, slot: int, consumer: str, number: int, limit: int = 1000) -> tuple[str, int]:
        """Forget what a sealed claim held. Answers ok, open or stale, and how much is left: ask again until 0."""
        names = ("store", "prepare", "failures", "stats", "control", "retry", *_CLAIMING)
        with self._slot(topic, slot, *names) as s:
            newest, state = s.newest_claim(consumer)
            if number != newest or state not in ("open", "sealed", "acked"):
                s.count("stale")
                return "stale", 0
            if state == "open":
                return "open", len(s.claim)
            if consumer.encode() not in s.claimants:
                return "ok", 0
            if state == "sealed":
                s.note_claim(consumer, number, "acked")
            s.forget_claimed(min(limit, BATCH))
            left = s.close_claim(consumer)
            s.wake_at_gate(math.inf, ended=left == 0)
            return "ok", left

    def return_claim(
        self, topic: Topic, slot: int, consumer: str, number: int, *, spent: bool = False, limit: int = 1000
    ) -> tuple[str, int]:
        """Give back what a claim holds. Answers ok or stale, and how much is left: ask again until 0."""
        with self._slot(topic, slot, *_ENDING, *_CLAIMING) as s:
            newest, state = s.newest_claim(consumer)
            if number != newest or state == "acked":
                s.count("stale")
                return "stale", 0
            if consumer.encode() not in s.claimants:
                return "ok", 0
            # What was begun as one of the two ends as that one.
            if state in ("open", "sealed"):
                state = "lost" if spent else "returned"
                s.note_claim(consumer, number, state)
            _, earliest = s.return_claimed(min(limit, BATCH), spent=state == "lost")
            left = s.close_claim(consumer)
            s.note_undrained()
            s.wake_at_gate(math.inf if earliest is None else earliest, ended=left == 0)
            return "ok", left

    def read_claim(
        self, topic: Topic, slot: int, consumer: str, number: int = 0, offset: int = 0, limit: int = 0
    ) -> ClaimRead:
        """Return the state of the consumer's newest claim and, of a sealed one, rows from rank ``offset`` on."""
        with self._slot(topic, slot, "claim", "claims", "claim_body") as s:
            newest, state = s.newest_claim(consumer)
            if number > 0 and number != newest:
                return ClaimRead("none", newest, 0, [], [])
            if state not in ("open", "sealed"):
                return ClaimRead(state, newest, 0, [], [])
            rows = s.claim.rows()[offset : offset + min(limit, BATCH)] if state == "sealed" else []
            flat = [part for member, score in rows for part in (member, score_text(score).encode())]
            kept = [s.claim_body.get(member) for member, _ in rows] if s.claim_body else []
            return ClaimRead(state, newest, len(s.claim), flat, kept)

    # --- persons and programs

    def replay(
        self, topic: Topic, slot: int, members: Sequence[bytes], envelopes: Sequence[bytes] = ()
    ) -> list[str]:
        """Send dead messages again with their full budget. Answers replayed, merged or not_found."""
        with self._slot(topic, slot, *_ENDING, "claim") as s:
            _check_batch(members)
            _raise_if_moved(s)
            words: list[str] = []
            earliest = math.inf
            for member, envelope in zip(members, envelopes or [b""] * len(members), strict=True):
                if member not in s.dead:
                    words.append("not_found")
                    continue
                del s.dead[member]
                raw = s.deaths.pop(member, None)
                death = None if raw is None else Death.parse(raw)
                # What runs has a newer body than the dead copy, and keeps it unless a person has marked its end.
                runs = s.runs(member) and not _InFlight.parse(s.inflight.get(member)).mark
                is_older = not envelope and death is not None and death.envelope is not None
                if member in s.store or member in s.retry or (runs and is_older):
                    words.append("merged")
                    s.count("replay_merged")
                else:
                    words.append("replayed")
                    s.count("revived")
                    again = s.now_ms
                    if topic.is_priority:
                        again = _bounded(_floor(float(death.score)) if death else 0, 0, MAX_PRIORITY)
                        if s.is_retry(again):
                            again = s.floor_priority + 1
                    s.store[member] = float(again)
                    earliest = min(earliest, 0 if topic.is_priority else again)
                    if not envelope and death:
                        envelope = death.envelope or b""
                if envelope:
                    s.body[member] = envelope
            s.note_undrained()
            s.wake(earliest)
            return words

    def bury(self, topic: Topic, slot: int, members: Sequence[bytes], why: str = "") -> list[str]:
        """Put messages into Dead by hand. Answers what each was found as."""
        with self._slot(topic, slot, *_ENDING, "claim") as s:
            _check_batch(members)
            words: list[str] = []
            for member in members:
                word = "dead" if member in s.dead else "not_found"
                waiting, rested = s.store.get(member), s.retry.get(member)
                if waiting is not None or rested is not None:
                    word = "retry" if waiting is None else "waiting"
                kept = s.body.get(member)
                # What Spark holds cannot be marked. With a body of its own the newer copy stays: it would be dead
                # before the older one ends.
                stays = member in s.claim and kept is not None
                if word in ("waiting", "retry") and not stays:
                    s.store.pop(member, None)
                    s.retry.pop(member, None)
                    failure = s.failure_of(member)
                    if waiting is None:
                        waiting = float(failure.score) if failure else 0.0
                    elif rested is not None:
                        s.count("dropped")
                    score = s.first_score(waiting, failure)
                    s.die(member, "buried", cut_error(why), score, failure, 0, kept)
                words.append(_mark(s, member, "buried", word))
            s.note_undrained()
            return words

    def remove(self, topic: Topic, slot: int, members: Sequence[bytes], which: str = "any") -> list[str]:
        """Delete messages by hand: ``live``, ``dead``, or ``any`` (live, else dead). Answers as bury."""
        with self._slot(topic, slot, *_ENDING, "claim") as s:
            _check_batch(members)
            words: list[str] = []
            for member in members:
                word = "not_found"
                if which != "dead":
                    waited = s.store.pop(member, None) is not None
                    rested = s.retry.pop(member, None) is not None
                    s.count("removed", waited + rested)
                    word = "waiting" if waited else "retry" if rested else word
                    if waited or rested:
                        s.forget(member)
                    word = _mark(s, member, "removed", word)
                if word == "not_found" and which != "live" and s.dead.pop(member, None) is not None:
                    s.deaths.pop(member, None)
                    s.count("removed_dead")
                    word = "dead"
                words.append(word)
            s.note_undrained()
            return words

    def discard(
        self, topic: Topic, slot: int, scores: Sequence[float], members: Sequence[bytes]
    ) -> list[str]:
        """Delete dead messages that died at ``scores`` (ms). Answers dead, changed (died again since) or not_found."""
        with self._slot(topic, slot, "dead", "deaths", "stats") as s:
            _check_batch(members)
            words: list[str] = []
            for score, member in zip(scores, members, strict=True):
                died = s.dead.get(member)
                if died is None:
                    words.append("not_found")
                elif died != score:
                    words.append("changed")
                else:
                    del s.dead[member]
                    s.deaths.pop(member, None)
                    s.count("removed_dead")
                    words.append("dead")
            return words

    def reschedule(
        self, topic: Topic, slot: int, scores: Sequence[int], members: Sequence[bytes]
    ) -> list[str]:
        """Give waiting messages a new due time or priority. Answers what each was found as, or refused."""
        with self._slot(topic, slot, "store", "retry", "prepare", "stats", "control", "claim") as s:
            _check_batch(members)
            _check_fresh(s, scores)
            words: list[str] = []
            earliest = math.inf
            for score, member in zip(scores, members, strict=True):
                waiting, resting = s.store.get(member), s.retry.get(member)
                if waiting is not None and not s.is_retry(waiting):
                    s.store[member] = float(score)
                    words.append("waiting")
                elif waiting is not None or resting is not None:
                    if topic.is_priority:
                        words.append("refused")
                        continue
                    # What waits as a retry rests until then, so that its score still carries its budget.
                    if waiting is not None:
                        q = _floor(waiting)
                        del s.store[member]
                        if resting is not None:
                            s.count("dropped")
                    else:
                        q = _floor((resting or 0.0) % 1 * 1024 + 0.5)
                    rest = min(score, LARGEST_WITH_RETRIES)
                    s.retry[member] = rest + _bounded(q, 1, MAX_RETRIES_LIMIT) / 1024
                    words.append("retry")
                else:
                    running = member in s.prepare or member in s.claim
                    words.append("in_flight" if running else "not_found")
                    continue
                s.count("rescheduled")
                earliest = min(earliest, 0 if topic.is_priority else score)
            s.wake(earliest)
            return words

    def purge(
        self,
        topic: Topic,
        slot: int,
        state: str,
        up_to: float = math.inf,
        limit: int = 1000,
        *,
        min_score: float = -math.inf,
    ) -> int:
        """Delete up to ``limit`` of store, retry or dead with scores to ``up_to``; return how many."""
        if state not in ("store", "retry", "dead"):
            raise ValueError(f"cannot purge {state!r}: only store, retry and dead")
        names = (
            "store",
            "retry",
            "dead",
            "prepare",
            "deaths",
            "failures",
            "body",
            "stats",
            "claim",
            "control",
        )
        with self._slot(topic, slot, *names) as s:
            emptied: SortedSet = getattr(s, state)
            found = [member for member, score in emptied.rows() if min_score <= score <= up_to]
            gone = found[: min(limit, BATCH)]
            for member in gone:
                del emptied[member]
                if state == "dead":
                    s.deaths.pop(member, None)
                else:
                    s.forget(member)
            s.count("purged_dead" if state == "dead" else "purged", len(gone))
            if gone:
                s.note_undrained()
            return len(gone)

    def pause(self, topic: Topic, slot: int, paused: bool = True) -> str:
        """Stop handing out (or go on). Answers paused, resumed or unchanged."""
        with self._slot(topic, slot, "control") as s:
            if paused == (b"paused" in s.control):
                return "unchanged"
            if paused:
                s.control[b"paused"] = b"1"
                self._publish(topic, -1 - slot)
                return "paused"
            del s.control[b"paused"]
            s.control.pop(b"sleeping_until", None)
            self._publish(topic, slot)
            return "resumed"

    def configure(self, topic: Topic, slot: int, apply: bool = True) -> str:
        """Give the slot its topic's time-out, retries and slot count. Answers ok or refused."""
        with self._slot(topic, slot, "store", "prepare", "retry", "control", "claim") as s:
            live = s.store or s.prepare or s.retry or s.claim
            if topic.is_priority and max(16, topic.max_retries) != s.floor_priority and live:
                return "refused"
            if apply:
                s.control[b"slots"] = b"%d" % topic.slots
                s.control[b"timeout"] = b"%d" % topic.timeout
                s.control[b"max_retries"] = b"%d" % topic.max_retries
            return "ok"

    def adopt(self, topic: Topic, slot: int, drift: int, foreign: int) -> str:
        """Book ``drift`` messages beyond the account as foreign, if ``foreign`` are so far. Answers ok or changed."""
        if drift < 1:
            raise ServerRefused(f"drift is out of bounds: {drift}")
        with self._slot(topic, slot, "stats") as s:
            if int(s.stats.get(b"foreign", b"0")) != foreign:
                return "changed"
            s.count("foreign", drift)
            return "ok"

    def retire(self, topic: Topic, slot: int) -> str:
        """Forget an empty slot of a topic that nobody uses any more. Answers retired, or holds: nothing is changed."""
        with self._slot(topic, slot, *SlotKeys._fields) as s:
            if s.store or s.prepare or s.retry or s.dead or s.claimants or s.leaving or s.claim:
                return "holds"
            for name in set(SlotKeys._fields) - _SETS:
                getattr(s, name).clear()
            return "retired"

    def loose(self, topic: Topic, slot: int, kind: str, cursor: str = "0", repair: bool = False) -> Loose:
        """Look through the records of a kind for those that belong to no message."""
        homes = {
            "inflight": ("prepare",),
            "deaths": ("dead",),
            "body": ("store", "retry"),
            "failures": ("store", "retry", "prepare", "claim"),
            "claim_body": ("claim",),
            "prepare_body": ("prepare",),
        }[kind]
        with self._slot(topic, slot, "store", "prepare", "retry", "dead", "claim", *RECORDS) as s:
            records: Hash = getattr(s, kind)
            scanned = len(records)
            found = [member for member in records if not any(member in getattr(s, home) for home in homes)]
            for member in found if repair else ():
                del records[member]
            return Loose("0", scanned, found)

    # --- re-slotting: `reslotting` says in which order

    def shut(
        self, topic: Topic, slot: int, reslot: int, *, fresh: bool = False, only_empty: bool = False
    ) -> str:
        """Give the slot the count of ``topic`` and hand nothing out. Answers shut, known, stale or holds."""
        with self._slot(topic, slot, "control", "store", "prepare", "retry", "dead", "claimants") as s:
            known = int(s.control.get(b"reslot", 0))
            if known >= reslot:
                return "known" if known == reslot else "stale"
            if only_empty and (s.store or s.prepare or s.retry or s.dead or s.claimants):
                return "holds"
            s.control.pop(b"sleeping_until", None)
            s.control |= {b"slots": b"%d" % topic.slots, b"reslot": b"%d" % reslot, b"moving": b"1"}
            if fresh:
                s.control[b"timeout"] = b"%d" % topic.timeout
                s.control[b"max_retries"] = b"%d" % topic.max_retries
            self._publish(topic, slot)
            return "shut"

    def reopen(
        self, topic: Topic, slot: int, reslot: int, *, deliveries: int = 0, paused: bool = False
    ) -> str:
        """Hand out again, with receipts above ``deliveries``. Answers open, known or stale."""
        with self._slot(topic, slot, "control", "arrived") as s:
            if int(s.control.get(b"reslot", 0)) != reslot:
                return "stale"
            if b"moving" not in s.control:
                return "known"
            del s.control[b"moving"]
            s.control.pop(b"sleeping_until", None)
            s.arrived.clear()
            if deliveries > int(s.control.get(b"deliveries", 0)):
                s.control[b"deliveries"] = b"%d" % deliveries
            if paused:
                s.control[b"paused"] = b"1"
            self._publish(topic, slot)
            return "open"

    def survey(self, topic: Topic, slot: int) -> Survey:
        """Return how far a re-slotting is with the slot."""
        with self._slot(topic, slot, "control", "prepare", "claimants", "stats", "leaving") as s:
            slots = s.control.get(b"slots")
            return Survey(
                None if slots is None else int(slots),
                int(s.control.get(b"reslot", 0)),
                b"moving" in s.control,
                b"paused" in s.control,
                int(s.control.get(b"deliveries", 0)),
                len(s.prepare),
                len(s.claimants),
                int(s.stats.get(b"rescheduled", 0)),
                int(s.stats.get(b"revived", 0)),
                int(s.leaving.get(b"ticket", 0)),
            )

    def move_out(
        self,
        topic: Topic,
        slot: int,
        reslot: int,
        target: int,
        members: Sequence[tuple[str, bytes]] = (),
        *,
        arrived: int = 0,
        max_bytes: int = 1_048_576,
    ) -> Handover:
        """Take up to 250 (state, member) out for slot ``target``, once what left before has ``arrived``."""
        with self._slot(topic, slot, *_ENDING, "claimants", "leaving") as s:
            if len(members) > MOVED:
                raise ServerRefused("ERR too many members")
            if not _is_shut_by(s, reslot):
                return Handover("stale")
            staged = int(s.leaving.get(b"ticket", 0))
            if staged and staged != arrived:
                numbers = range(1, int(s.leaving[b"rows"]) + 1)
                return Handover(
                    "staged",
                    staged,
                    int(s.leaving[b"target"]),
                    [
                        Row(
                            s.leaving[b"state%d" % n].decode(),
                            s.leaving[b"member%d" % n],
                            s.leaving[b"score%d" % n].decode(),
                            s.leaving[b"failure%d" % n],
                            s.leaving[b"rest%d" % n],
                        )
                        for n in numbers
                    ],
                )
            s.leaving.clear()
            if s.prepare or s.claimants:
                return Handover("busy")
            rows: list[Row] = []
            size = 0
            for state, member in dict.fromkeys(members):
                score = getattr(s, state).get(member)
                if score is None or (rows and size >= max_bytes):
                    continue
                failure = b"" if state == "dead" else s.failures.get(member, b"")
                rest = (s.deaths if state == "dead" else s.body).get(member, b"")
                rows.append(Row(state, member, score_text(score), failure, rest))
                size += len(member) + len(failure) + len(rest)
            if not rows:
                return Handover("nothing")
            ticket = int(s.control.get(b"tickets", 0)) + 1
            s.control[b"tickets"] = b"%d" % ticket
            s.leaving |= {b"ticket": b"%d" % ticket, b"target": b"%d" % target, b"rows": b"%d" % len(rows)}
            for n, row in enumerate(rows, 1):
                parts = (row.state.encode(), row.member, row.score.encode(), row.failure, row.rest)
                for name, part in zip(("state", "member", "score", "failure", "rest"), parts, strict=True):
                    s.leaving[f"{name}{n}".encode()] = part
                del getattr(s, row.state)[row.member]
                if row.state == "dead":
                    s.deaths.pop(row.member, None)
                else:
                    s.forget(row.member)
                s.count("moved_dead_out" if row.state == "dead" else "moved_out")
            s.note_undrained()
            return Handover("moved", ticket, target, rows)

    def move_in(
        self, topic: Topic, slot: int, reslot: int, source: int, ticket: int, rows: Sequence[Row]
    ) -> str:
        """Take in what left slot ``source`` with ``ticket``, once. Answers in, known or stale."""
        names = ("store", "retry", "dead", "deaths", "failures", "body", "stats", "control", "arrived")
        with self._slot(topic, slot, *names) as s:
            if len(rows) > MOVED:
                raise ServerRefused("ERR too many members")
            if not _is_shut_by(s, reslot):
                return "stale"
            if int(s.arrived.get(b"%d" % source, 0)) >= ticket:
                return "known"
            for state, member, text, failure, rest in rows:
                score = float(text)
                if state == "dead":
                    died = s.dead.get(member)
                    if died is not None:
                        s.count("dead_merged")
                    if died is None or score > died:
                        s.dead[member] = score
                        if rest:
                            s.deaths[member] = rest
                    s.count("moved_dead_in")
                    continue
                waiting = s.store.get(member)
                fresh = state == "store" and not s.is_retry(score)
                if waiting is not None and not s.is_retry(waiting):
                    # Sent here since: merged with what it would have met, which keeps its time on range_merge topics only.
                    s.count("dropped")
                    if fresh and topic.type is TopicType.RANGE_MERGE:
                        s.store[member] = score
                elif fresh or (waiting is None and member not in s.retry):
                    _supersede_resting(s, member)
                    if waiting is not None:
                        s.count("dropped")
                    (s.retry if state == "retry" else s.store)[member] = score
                    if rest:
                        s.body[member] = rest
                else:
                    s.count("dropped")
                if failure:
                    s.failures.setdefault(member, failure)
                if rest:
                    s.body.setdefault(member, rest)
                s.count("moved_in")
            s.arrived[b"%d" % source] = b"%d" % ticket
            s.note_undrained()
            return "in"

    # --- looking, changing nothing

    def peek(
        self,
        topic: Topic,
        slot: int,
        state: str,
        *,
        after: tuple[str, bytes] | None = None,
        limit: int = 100,
        descending: bool = False,
        min_score: float = -math.inf,
        max_score: float = math.inf,
        max_bytes: int = 4_194_304,
    ) -> Page:
        """List one state by score. Entries present throughout all pages appear exactly once."""
        limit = min(limit, BATCH)
        rows = self._entries(topic, slot, state, after, descending, min_score, max_score)
        size = 0
        for i, entry in enumerate(rows[:limit], 1):
            size += _size(entry)
            if (size >= max_bytes or i == limit) and i < len(rows):
                return Page(rows[:i], (score_text(entry.score), entry.member))
        return Page(rows, None)

    def find(
        self,
        topic: Topic,
        slot: int,
        state: str,
        text: bytes,
        *,
        after: tuple[str, bytes] | None = None,
        limit: int = 100,
        scan: int = 1000,
        descending: bool = False,
        min_score: float = -math.inf,
        max_score: float = math.inf,
        max_bytes: int = 4_194_304,
        where: str = "anywhere",
    ) -> Page:
        """Look for ``text`` in member, envelope or record among the next ``scan`` entries.

        ``where`` ``error``: only for the class of the last error, whole or its last part.
        """
        scan = min(scan, BATCH)
        rows = self._entries(topic, slot, state, after, descending, min_score, max_score)
        found: list[Entry] = []
        size = 0
        for i, entry in enumerate(rows[:scan], 1):
            places = (entry.member, entry.envelope or b"", entry.record or b"")
            if any(text in place for place in places) if where == "anywhere" else _is_of_class(entry, text):
                found.append(entry)
            size += _size(entry)
            if i < len(rows) and (len(found) >= limit or size >= max_bytes or i == scan):
                return Page(found, (score_text(entry.score), entry.member))
        return Page(found, None)

    def _entries(
        self,
        topic: Topic,
        slot: int,
        state: str,
        after: tuple[str, bytes] | None,
        descending: bool,
        min_score: float,
        max_score: float,
    ) -> list[Entry]:
        """Return all entries of a state behind ``after`` with scores in bounds, in order."""
        members, records, bodies = _STATES[state]
        with self._slot(topic, slot, members, records, bodies) as s:
            rows: SortedSet = getattr(s, members)
            details: Hash = getattr(s, records)
            return [
                Entry(member, score, getattr(s, bodies).get(member), details.get(member))
                for member, score in rows.rows(descending=descending)
                if min_score <= score <= max_score and _is_behind(member, score, after, descending)
            ]

    def count(self, topic: Topic, slot: int) -> Counts:
        """Return how many messages the slot holds by state."""
        with self._slot(topic, slot, "store", "prepare", "retry", "dead", "control", "claim") as s:
            due, oldest = len(s.store), None
            if not topic.is_priority:
                due = sum(score <= s.now_ms for score in s.store.values())
                oldest = min(
                    (int(score) for score in s.store.values() if 999 < score <= s.now_ms), default=None
                )
            owner = s.control.get(b"owner", b"").decode(errors="backslashreplace")
            since = s.control.get(b"undrained_since") if topic.is_priority and s.store else None
            return Counts(
                len(s.store),
                due,
                len(s.prepare),
                len(s.retry),
                len(s.dead),
                len(s.claim),
                oldest,
                owner,
                b"paused" in s.control,
                None if since is None else int(since),
            )

    def between(
        self,
        topic: Topic,
        slot: int,
        state: str,
        min_score: float = -math.inf,
        max_score: float = math.inf,
    ) -> int:
        """Return how many messages of one state have a score in these bounds."""
        name = _STATES[state][0]
        with self._slot(topic, slot, name) as s:
            scores = getattr(s, name).values()
            return sum(min_score <= score <= max_score for score in scores)

    def look(self, topic: Topic, slot: int, members: Sequence[bytes]) -> list[Looked]:
        """Return what the slot knows of up to 100 members, in whatever states they are."""
        if len(members) > 100:
            raise ServerRefused("ERR too many members")
        names = ("store", "prepare", "retry", "dead", "claim", *RECORDS)
        with self._slot(topic, slot, *names) as s:
            return [Looked(*(getattr(s, name).get(member) for name in names)) for member in members]

    def ranks(self, topic: Topic, slot: int, state: str, members: Sequence[bytes]) -> list[int | None]:
        """Return where up to 1,000 members of a state stand among those of their score; None: not there."""
        if len(members) > 1000:
            raise ServerRefused("ERR too many members")
        name = _STATES[state][0]
        with self._slot(topic, slot, name) as s:
            scores: SortedSet = getattr(s, name)
            alike = {
                member: sorted(m for m in scores if scores[m] == scores[member])
                for member in {*members} & {*scores}
            }
            return [alike[member].index(member) if member in alike else None for member in members]

    def seek(
        self,
        topic: Topic,
        slot: int,
        digests: Sequence[bytes],
        areas: Sequence[Area],
        *,
        scan: int = 2_000,
        max_bytes: int = 3_145_728,
    ) -> Sought:
        """Find members by their SHA-1 in up to 100 areas, looking at about ``scan`` entries; all areas grow in turns."""
        if len(areas) > 100:
            raise ServerRefused("ERR too many areas")
        scan = min(scan, 2_000)
        found: dict[bytes, bytes] = {}
        entries = size = 0
        with self._slot(topic, slot, "store", "prepare", "retry", "dead", "claim") as s:
            grown = [_Grown(area, getattr(s, area.state)) for area in areas]
        step = 1
        while True:
            went_on = False
            for area in grown:
                if len(found) < len(digests) and entries < scan and size < max_bytes and area.is_left:
                    for member in area.grow(step):
                        entries, size = entries + 1, size + len(member)
                        digest = sha1(member, usedforsecurity=False).digest()
                        if digest in digests:
                            found[digest] = member
                    went_on = True
            if not went_on:
                break
            room = (max_bytes - size) * entries // max(size, 1) // 2
            step = max(1, min(step * 2, 64, room))
        left = [area.asked._replace(looked=area.looked) if area.is_left else None for area in grown]
        return Sought([found.get(digest) for digest in digests], left)

    def heads(self, topic: Topic, slots: Sequence[int], *, upkeep: bool = False) -> list[int | None]:
        """Return when each of up to 1,024 slots can next be taken from (ms; 0: now; None: nothing waits)."""
        if len(slots) > 1024:
            raise ServerRefused("ERR too many slots")
        with self._lock:
            return [self._head(topic, slot_keys(self.prefix, topic.name, slot), upkeep) for slot in slots]

    def _head(self, topic: Topic, keys: SlotKeys, upkeep: bool) -> int | None:
        store, retry, prepare, control, claimants = (
            self.keyspace.get(key)
            for key in (keys.store, keys.retry, keys.prepare, keys.control, keys.claimants)
        )
        if store is retry is prepare is claimants is None:
            return None
        foreign = any(isinstance(key, Hash) for key in (store, retry, prepare, claimants)) or isinstance(
            control, SortedSet
        )
        if foreign:
            # A slot with a foreign type reads as due: its own prepare will name the key.
            return 0
        dues: list[float] = []
        if isinstance(store, SortedSet) and not upkeep:
            head = min(store.values())
            dues.append(0 if topic.is_priority else math.ceil(head) if math.isfinite(head) else head)
        if isinstance(retry, SortedSet) and not upkeep:
            dues.append(_floor(min(retry.values())))
        if isinstance(prepare, SortedSet):
            own = control.get(b"timeout") if isinstance(control, Hash) else None
            timeout = topic.timeout if own is None else int(own)
            dues.append((_floor(min(prepare.values()) / 1000) + timeout + 1) * 1000)
        if isinstance(claimants, SortedSet):
            dues.append(_ceil(min(claimants.values())))
        due = min(dues, default=math.inf)
        return max(0, int(due)) if due < GATE and due > -math.inf else None if due > 0 else 0

    def audit(self, topic: Topic, slot: int) -> Ledger:
        """Return the slot's counters and depths, read in one instant."""
        with self._slot(topic, slot, "store", "prepare", "retry", "dead", "stats", "claim") as s:
            counters = stored.counters(slot_keys(self.prefix, topic.name, slot).stats, s.stats.items())
            return Ledger(counters, len(s.store), len(s.prepare), len(s.retry), len(s.dead), len(s.claim))

    # --- what belongs to no slot

    def definitions(self) -> Definitions:
        """Return the registered definition of every topic."""
        with self._lock:
            key = topics_key(self.prefix)
            return Definitions(key, self._open(key, Hash).items())

    def define(self, topic: Topic, *, replace: bool = False) -> dict[str, Any]:
        """Register ``topic`` unless it is registered already; return what is registered then.

        ``replace`` keeps what is noted of the topic's re-slottings.
        """
        return self.redefine(
            topic.name, lambda known: redefined(topic, known) if replace or not known else known
        )

    def redefine(self, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Replace a definition by what ``change`` makes of it (nothing is known: of an empty one); return that."""
        with self._lock:
            found = self._open(topics_key(self.prefix), Hash)
            known = stored.definition(topics_key(self.prefix), name, found.get(name.encode(), b""))
            wanted = change(known)
            if wanted != known:
                found[name.encode()] = json.dumps(wanted, sort_keys=True).encode()
                self._keep(topics_key(self.prefix), found)
            return wanted

    def undefine(self, topic: Topic) -> None:
        """Forget the definition of a topic, what it counted and its history."""
        name = topic.name.encode()
        with self._lock:
            for key in (
                *history_keys(self.prefix, topic.name),
                times_key(self.prefix, topic.name),
                limits_key(self.prefix, topic.name),
            ):
                self.keyspace.pop(key, None)
            for key in (explicit_basis_key(self.prefix), topics_key(self.prefix)):
                found = self._open(key, Hash)
                found.pop(name, None)
                self._keep(key, found)

    def note_slot_basis(self, topic: Topic) -> None:
        """Note that ``topic`` has messages whose slot nobody can compute again from what is stored."""
        with self._lock:
            key = topics_key(self.prefix) + b":explicit_basis"
            noted = self._open(key, Hash)
            noted[topic.name.encode()] = b"1"
            self._keep(key, noted)

    def has_slot_bases(self, topic: Topic) -> bool:
        """Return whether ``note_slot_basis`` was ever told of ``topic``."""
        with self._lock:
            return topic.name.encode() in self._open(topics_key(self.prefix) + b":explicit_basis", Hash)

    def ping(self) -> None:
        """Return: memory always answers."""

    def servers(self) -> list[Any]:
        """Return nothing: there is no server."""
        return []

    def refused(self, topics: Iterable[Topic]) -> list[str]:
        """Return nothing: memory refuses nobody."""
        return []

    def close(self) -> None:
        """Keep everything: there is no connection, and nobody else keeps it."""

    def now_ms(self) -> int:
        """Return the broker's clock in ms."""
        return self._clock() // 1000

    def wakeups(self, topics: Iterable[Topic]) -> Wakeups:
        """Subscribe to the wake-ups of ``topics``."""
        with self._lock:
            wakeups = Wakeups({wake_channel(self.prefix, topic.name) for topic in topics}, self._forget)
            self._listening.append(wakeups)
        return wakeups

    def _forget(self, subscription: Wakeups | Events) -> None:
        with self._lock:
            self._listening = [other for other in self._listening if other is not subscription]
            self._hearing = [other for other in self._hearing if other is not subscription]

    def publish_events(self, payload: bytes) -> int:
        """Publish what happened to messages; return how many subscribers heard it."""
        with self._lock:
            for events in self._hearing:
                events.put(events_channel(self.prefix), payload)
            return len(self._hearing)

    def events(self) -> Events:
        """Subscribe to what is published of messages."""
        with self._lock:
            events = Events({events_channel(self.prefix)}, self._forget)
            self._hearing.append(events)
        return events

    # --- workers and what is assigned to them

    def beat(
        self,
        worker: str,
        token: str,
        session_ms: int,
        *,
        record: str = "",
        known_members: str = "",
        known_number: str = "",
    ) -> Beat:
        """Renew the session of ``worker``, or join with a ``record`` that begins with ``token``."""
        with self._workers() as (sessions, workers, assignment):
            micros = self._clock()
            now_ms, name = micros // 1000, worker.encode()
            found, ends = workers.get(name), sessions.get(name)
            ours = found is not None and found.startswith(token.encode())
            if found is not None and not ours and ends is not None and ends > now_ms:
                return Beat("duplicate", rival=found)
            if not record and not (ours and ends is not None):
                return Beat("expired")
            if ends is None and len(sessions) >= 2000:
                return Beat("full")
            over = [other for other, end in sessions.rows() if end <= now_ms][:100]
            changed = ends is None or not ours
            for other in over:
                if other != name:
                    del sessions[other]
                    workers.pop(other, None)
                    changed = True
            # A session that ends in more than an hour: the clock was set back since.
            for other in [other for other, end in sessions.rows() if end >= now_ms + 3_600_000][:100]:
                sessions[other] = now_ms + session_ms
            sessions[name] = now_ms + session_ms
            if record and found != record.encode():
                workers[name] = record.encode()
                changed = True
            if changed or b"members" not in assignment:
                self._change(assignment, b"members", micros)
            members, number = assignment[b"members"].decode(), assignment.get(b"number", b"").decode()
            return Beat(
                "ok",
                members,
                number,
                int(max(0, min(*sessions.values(), now_ms + session_ms) - now_ms)),
                assignment.get(b"basis", b"").decode() if number != known_number else "",
                assignment.get(b"plan", b"") if number != known_number else None,
                {other.decode(): workers.get(other, b"") for other, _ in sessions.rows()[:2000]}
                if members != known_members
                else None,
            )

    def leave(self, worker: str, token: str) -> str:
        """End the session of ``worker``. Answers left or absent."""
        with self._workers() as (sessions, workers, assignment):
            found = workers.get(worker.encode())
            if found is None or not found.startswith(token.encode()):
                return "absent"
            sessions.pop(worker.encode(), None)
            del workers[worker.encode()]
            self._change(assignment, b"members", self._clock())
            return "left"

    def assign(self, members: str, number: str, plan: str) -> str | None:
        """Write ``plan`` if ``members`` and ``number`` are still current; return its number, else None."""
        with self._workers() as (_, _, assignment):
            known = (assignment.get(b"members", b"").decode(), assignment.get(b"number", b"").decode())
            if known != (members, number):
                return None
            assignment[b"basis"], assignment[b"plan"] = members.encode(), plan.encode()
            return self._change(assignment, b"number", self._clock())

    def roster(self) -> Roster:
        """Return all workers and what is assigned to them, without being one."""
        with self._workers() as (sessions, workers, assignment):
            members, number, basis = (
                assignment.get(name, b"").decode() for name in (b"members", b"number", b"basis")
            )
            rows = [
                Session(worker.decode(), ends, workers.get(worker, b""))
                for worker, ends in sessions.rows()[:2000]
            ]
            return Roster(self._clock() // 1000, members, number, basis, assignment.get(b"plan", b""), rows)

    def allow(
        self, topic: Topic, worker: str, *, tokens: int, in_use: int, wanted: int, lease_ms: int
    ) -> Allowance:
        """Ask for a part of what MAX_RATE and MAX_IN_FLIGHT of ``topic`` leave, and say what is in use."""
        with self._lock:
            key = limits_key(self.prefix, topic.name)
            limits, now_us = self._open(key, Hash), self._clock()
            given, wait_us = _tokens(limits, topic.max_rate, tokens, now_us)
            permits, waiting = wanted, False
            if topic.max_in_flight:
                ours, now_ms = f"worker:{worker}".encode(), now_us // 1000
                others, crew = 0, [(wanted, ours)] if wanted else []
                for name, value in list(limits.items()):
                    match = _PERMITS.fullmatch(value)
                    if match is None or name == ours:
                        continue
                    held, wants, ends = map(int, match.groups())
                    if ends <= now_ms:
                        del limits[name]
                        continue
                    others += held
                    waiting = waiting or wants > held
                    crew += [(wants, name)] if wants else []
                fair = _fair_share(topic.max_in_flight, crew, (wanted, ours), now_us // 1_000_000)
                permits = min(fair, max(0, topic.max_in_flight - others))
                held = max(in_use, permits)
                if held + wanted:
                    limits[ours] = b"%d %d %d" % (held, wanted, now_ms + lease_ms)
                else:
                    limits.pop(ours, None)
            self._keep(key, limits)
            return Allowance(given, wait_us, permits, waiting)

    def end_permits(self, topic: Topic, worker: str, ended: int, lease_ms: int = 0) -> int:
        """Count ``ended`` messages less for what ``worker`` has in flight; return what it has left."""
        with self._lock:
            key, name = limits_key(self.prefix, topic.name), f"worker:{worker}".encode()
            limits = self._open(key, Hash)
            match = _PERMITS.fullmatch(limits.pop(name, b""))
            held, wants, ends = map(int, match.groups()) if match else (0, 0, 0)
            left = max(0, held - ended)
            if left:
                until_ms = self._clock() // 1000 + lease_ms if lease_ms else ends
                limits[name] = b"%d %d %d" % (left, wants, until_ms)
            self._keep(key, limits)
            return left

    def spend(self, spender: str, each_us: float, size: int, wanted: int) -> int:
        """Spend ``wanted`` of a bucket of ``size``, or nothing (below 0: give back); return 0, or us until there is enough."""
        with self._lock:
            key = bucket_key(self.prefix, spender)
            bucket, now_us, full_us = self._open(key, Hash), self._clock(), each_us * size
            empty = float(bucket.get(b"empty", b"inf"))
            if empty > now_us + full_us:
                empty = now_us - full_us
            empty = max(empty, now_us - full_us) + each_us * wanted
            if empty > now_us:
                return math.ceil(empty - now_us)
            bucket[b"empty"] = score_text(empty).encode()
            self._keep(key, bucket)
            return 0

    # --- requests that shall be done once

    def begin_answer(self, request: str, content: str, token: str, lease_ms: int) -> tuple[str, bytes]:
        """Begin ``request`` with this ``content``. Answers new, running or other, or done with what was kept."""
        with self._lock:
            key, now_ms = answer_key(self.prefix, request), self._clock() // 1000
            answer = self._open(key, Hash)
            known = answer.get(b"print")
            if known is not None and known != content.encode():
                return "other", b""
            if b"kept" in answer:
                return "done", answer[b"kept"]
            if known is not None and now_ms < int(answer.get(b"ends", b"0")) <= now_ms + lease_ms:
                return "running", b""
            answer |= {
                b"print": content.encode(),
                b"token": token.encode(),
                b"ends": b"%d" % (now_ms + lease_ms),
            }
            self._keep(key, answer)
            return "new", b""

    def keep_answer(self, request: str, token: str, kept: bytes, keep_ms: int) -> str:
        """Keep what came of a request; empty: forget that it was begun. Answers ok or stale."""
        with self._lock:
            key = answer_key(self.prefix, request)
            answer = self._open(key, Hash)
            if answer.get(b"token") != token.encode():
                return "stale"
            for name in (b"token", b"ends") if kept else (b"print", b"token", b"ends"):
                answer.pop(name, None)
            if kept:
                answer[b"kept"] = kept
            self._keep(key, answer)
            return "ok"

    # --- history

    def sample(self, topic: Topic, slots: Sequence[int]) -> Sample:
        """Return what up to 256 slots hold and have counted, in sums."""
        if len(slots) > 256:
            raise ServerRefused("ERR too many slots")
        found: list[tuple[Counts, Ledger]] = []
        for slot in slots:
            try:
                found.append((self.count(topic, slot), self.audit(topic, slot)))
            except WrongType:
                continue
        oldest = [counts.oldest_due_ms for counts, _ in found if counts.oldest_due_ms is not None]
        undrained = [
            counts.undrained_since_ms for counts, _ in found if counts.undrained_since_ms is not None
        ]
        return Sample(
            len(found),
            sum(counts.store for counts, _ in found),
            sum(counts.due for counts, _ in found),
            sum(counts.prepare for counts, _ in found),
            sum(counts.retry for counts, _ in found),
            sum(counts.dead for counts, _ in found),
            min(oldest, default=None),
            {name: sum(ledger[name] for _, ledger in found) for name in SAMPLED},
            min(undrained, default=None),
        )

    def claim_minute(self, topic: Topic, minute: int) -> bool:
        """Return whether we are the one who samples ``topic`` in this minute (since the epoch)."""
        with self._history(topic) as (_, pending):
            claimed = int(pending.get(b"claimed", b"-1"))
            if minute <= claimed <= minute + 60:
                return False
            pending[b"claimed"] = b"%d" % minute
            return True

    def note_late(self, topic: Topic, counts: Sequence[int]) -> int:
        """Count deliveries by class of lateness; return how many classes were raised."""
        with self._history(topic) as (_, pending):
            for bucket, number in enumerate(counts[:LATENESS_BUCKETS]):
                if number:
                    name = b"late%d" % bucket
                    pending[name] = b"%d" % (int(pending.get(name, b"0")) + number)
            return sum(number > 0 for number in counts[:LATENESS_BUCKETS])

    def note_times(
        self, topic: Topic, late: Sequence[int], late_ms: int, took: Sequence[int], took_us: int
    ) -> int:
        """Count deliveries by lateness and calls by duration, for good; return how many classes were raised."""
        raised = 0
        with self._lock:
            key = times_key(self.prefix, topic.name)
            times = self._open(key, Hash)
            for name, counts, total in (("late", late, late_ms), ("took", took, took_us)):
                fields = [
                    (f"{name}{bucket}", count) for bucket, count in enumerate(counts[:LATENESS_BUCKETS])
                ]
                raised += sum(count > 0 for _, count in fields)
                for field, count in (*fields, (name, total)):
                    if count > 0:
                        times[field.encode()] = b"%d" % (int(times.get(field.encode(), b"0")) + count)
            self._keep(key, times)
        return raised

    def times(self, topic: Topic) -> Times:
        """Return all that ``note_times`` was ever told of ``topic``."""
        with self._lock:
            key = times_key(self.prefix, topic.name)
            times = self._open(key, Hash)
            return Times.of(stored.counters(key, ((name, times.get(name)) for name in TIMES)))

    def keep_minute(self, topic: Topic, minute: int, record: str, keep: int) -> str:
        """Keep the record of a minute, and so many minutes in all. Answers kept or present."""
        with self._history(topic) as (minutes, pending):
            if b"%d" % minute in minutes:
                return "present"
            first = int(pending.get(b"first", b"%d" % minute))
            first = minute - keep - 1000 if first > minute else first
            last = min(minute - keep, first + 999)
            for old in range(first, last + 1):
                minutes.pop(b"%d" % old, None)
            late = {bucket: pending.pop(b"late%d" % bucket, None) for bucket in range(LATENESS_BUCKETS)}
            shown = " ".join(f"{bucket}:{found.decode()}" for bucket, found in late.items() if found)
            minutes[b"%d" % minute] = f"{record[:500]}|{shown}".encode()
            pending[b"first"] = b"%d" % max(first, last + 1)
            return "kept"

    def minutes(self, topic: Topic, first: int, last: int) -> list[bytes | None]:
        """Return the records of the minutes ``first`` to ``last``; None: nobody sampled."""
        with self._history(topic) as (minutes, _):
            return [minutes.get(b"%d" % minute) for minute in range(first, last + 1)]

    @contextmanager
    def _history(self, topic: Topic) -> Iterator[tuple[Hash, Hash]]:
        with self._lock:
            keys = history_keys(self.prefix, topic.name)
            minutes, pending = self._open(keys.minutes, Hash), self._open(keys.pending, Hash)
            yield minutes, pending
            self._keep(keys.minutes, minutes)
            self._keep(keys.pending, pending)

    def worker_changes(self) -> Wakeups:
        """Subscribe to changes of membership and assignment: pairs of an empty text and a number."""
        with self._lock:
            changes = Wakeups({workers_channel(self.prefix)}, self._forget)
            self._listening.append(changes)
        return changes

    @contextmanager
    def _workers(self) -> Iterator[tuple[SortedSet, Hash, Hash]]:
        """Open what is known of workers and assignment."""
        with self._lock:
            keys = worker_keys(self.prefix)
            opened = (
                self._open(keys.sessions, SortedSet),
                self._open(keys.workers, Hash),
                self._open(keys.assignment, Hash),
            )
            yield opened
            values: tuple[SortedSet | Hash, ...] = opened
            for key, value in zip(keys, values, strict=True):
                self._keep(key, value)

    def _change(self, assignment: Hash, field: bytes, micros: int) -> str:
        """Give ``field`` a version that it never had, not even before all was wiped, and tell everybody."""
        try:
            version = max(micros, int(assignment.get(field, b"0")) + 1)
        except ValueError:
            version = micros
        assignment[field] = b"%d" % (version if version < 1 << 53 else micros)
        for listening in self._listening:
            listening.put(workers_channel(self.prefix), ("", int(assignment[field])))
        return assignment[field].decode()


# --- what several transitions ask -------------------------------------------------------------------


def _tokens(limits: Hash, rate: float | None, tokens: int, now_us: int) -> tuple[int, int]:
    """Take up to ``tokens`` from the bucket; return how many, and µs until there is another."""
    if not rate:
        return tokens, 0
    each = 1_000_000 / rate
    depth = max(each, 100_000)
    empty = float(limits.get(b"empty", b"inf"))
    if empty > now_us + depth:
        empty = now_us - depth
    empty = max(empty, now_us - depth)
    given = min(tokens, max(0, math.floor((now_us - empty) / each + 0.000001)))
    empty += given * each
    limits[b"empty"] = score_text(empty).encode()
    return given, max(0, math.ceil(empty + each - now_us)) if given < tokens else 0


def _fair_share(limit: int, crew: list[tuple[int, bytes]], us: tuple[int, bytes], now_s: int) -> int:
    """Return our part: who wants less than an even share gets it all, and the others share the rest."""
    left, crew = limit, sorted(crew)
    for at, (wants, _) in enumerate(crew):
        equals = crew[at:]
        share = left // len(equals)
        if wants > share:
            if us[0] <= share:
                break
            # What cannot be divided goes round, for two seconds each.
            rank = sum(name < us[1] for _, name in equals)
            turn = now_s // 2 * 40503 % 65536 // 256
            return share + ((rank + turn) % len(equals) < left - share * len(equals))
        left -= wants
    return us[0]


def _check_batch(items: Sequence[object], at_least: int = 0) -> None:
    if not at_least <= len(items) <= BATCH:
        raise ServerRefused("ERR n is out of bounds" if at_least else "ERR too many members")


def _check_lease(lease_ms: int, number: int = 1) -> None:
    if not (1 <= lease_ms <= LONGEST_LEASE_MS and 1 <= number < GATE):
        raise ServerRefused("ERR number or lease is out of bounds")


def _check_fresh(s: _Slot, scores: Sequence[float]) -> None:
    for score in scores:
        if not s.is_fresh(score):
            raise ServerRefused(f"ERR score {score} is out of bounds")


def _raise_if_moved(s: _Slot) -> None:
    if s.moved_to is not None:
        raise SlotMoved(f"the topic has {s.moved_to} slots by now")


def _holds(s: _Slot, receipt: int, member: bytes) -> bool:
    """Whether the delivery of ``member`` is still the one with this receipt."""
    return s.inflight.get(member, b"").startswith(b"%d " % receipt) and member in s.prepare


def _check_receipts(s: _Slot, receipt: int, members: Sequence[bytes]) -> list[str]:
    words = ["ok" if s.inflight.get(m, b"").startswith(b"%d " % receipt) else "stale" for m in members]
    s.count("stale", words.count("stale"))
    return words


def _mark(s: _Slot, member: bytes, mark: str, word: str) -> str:
    """Mark a delivery for its end, which only its holder or the time-out brings; return what was found."""
    waits = word in ("waiting", "retry")
    if member in s.claim and member not in s.prepare:
        # Spark goes on with what it has claimed: nothing can be marked there.
        return "in_flight_and_waiting" if waits else "in_flight"
    if member not in s.prepare:
        return word
    record = _InFlight.parse(s.inflight.get(member))
    outlived = "outlived" if waits and mark == "buried" else record.outlived
    s.inflight[member] = record._replace(mark=mark, outlived=outlived).encode()
    return "in_flight_and_waiting" if waits else "in_flight"


def _as_they_are(rows: Sequence[tuple[bytes, float]], waiting: int, max_bytes: int) -> int | None:
    """Return how many of ``rows`` a claim takes past Lua; None: each is to be looked at.

    All of them where few of the ``waiting`` ones have to be carried back, else a step.
    """
    rest = waiting - len(rows)
    if rest <= CLAIM_STEP and rest < len(rows) and len(rows) * _longest(rows) <= max_bytes:
        return len(rows)
    rows = rows[:CLAIM_STEP]
    fit = min(len(rows), min(max_bytes, CLAIM_STEP_BYTES) // _longest(rows))
    return None if fit < min(len(rows), BATCH) else fit


def _longest(rows: Sequence[tuple[bytes, float]]) -> int:
    """Return the length of the longest of a hundred, evenly spaced."""
    return max((1, *(len(member) for member, _ in rows[:: max(1, math.ceil(len(rows) / 100))])))


def _supersede_resting(s: _Slot, member: bytes) -> None:
    """Give up the resting retry of a member that a stranger's ZADD has sent again."""
    if s.retry.pop(member, None) is not None:
        s.count("dropped")


def _is_shut_by(s: _Slot, reslot: int) -> bool:
    """Whether the slot is shut, and by this very re-slotting."""
    return int(s.control.get(b"reslot", 0)) == reslot and b"moving" in s.control


def _has_lapsed(envelope: bytes, now_ms: int) -> bool:
    match = _EXPIRES.match(envelope)
    return match is not None and 0 < int(match[1]) < now_ms


def _candidates(
    s: _Slot, limit: int, receipt: int, after: tuple[str, bytes] | None
) -> tuple[list[tuple[bytes, float]], bool, tuple[bytes, float] | None]:
    """Return what prepare may take, in its order.

    Also whether that is all there is (each part of Store is read for ``limit`` entries; further, once, if
    all of these run already), and the last entry seen, busy ones included.
    """
    priority, in_flight = s.topic.is_priority, len(s.prepare) + len(s.claim)
    waiting = [row for row in s.store.rows(descending=priority) if _is_behind(*row, after, priority)]
    resting: list[tuple[bytes, float]] = []
    if not priority:
        if after is None:
            resting = [row for row in waiting if row[1] <= 999]
            waiting = [row for row in waiting if row[1] > 999]
        waiting = [row for row in waiting if row[1] <= s.now_ms]
    for scan in (limit, limit + min(in_flight, 1000)):
        rows, late = waiting[:scan], resting[:scan]
        complete = len(late) < scan and len(rows) < scan
        # Leave out what runs already: its newer copy waits for its end.
        free = [row for row in rows if not s.runs(row[0])]
        rested = [row for row in late if not s.runs(row[0])]
        if free or rested or complete:
            break
    seen = rows or late
    last = seen[-1] if seen else None
    if rested:
        # At most half of a prepare is retries while fresh messages are due; the odd one alternates.
        share = limit // 2 + limit % 2 * (receipt % 2)
        share = min(len(rested), max(share, limit - len(free)))
        complete = complete and share == len(rested)
        free = rested[:share] + free
    if priority and after is None and last and (len(free) > limit or not complete):
        # Where the limit cuts a group of equal scores, its members are taken from a random start.
        score = free[limit - 1][1] if len(free) >= limit else last[1]
        above = [row for row in free if row[1] > score]
        group = [row for row in s.store.rows(descending=True) if row[1] == score]
        start = (s.micros * 16_807 + receipt * 69_621) % 2_147_483_647 % len(group)
        want = min(len(group), limit - len(above) + min(in_flight, 1000))
        turned = (group[start:] + group[:start])[:want]
        complete = complete and len(free) <= limit
        free = above + [row for row in turned if not s.runs(row[0])]
    return free, complete, last


def _is_behind(member: bytes, score: float, after: tuple[str, bytes] | None, descending: bool) -> bool:
    if after is None:
        return True
    at = (float(after[0]), after[1])
    return (score, member) < at if descending else (score, member) > at


def _is_of_class(entry: Entry, name: bytes) -> bool:
    """Whether the last error of an entry is of a class, named whole or by its last part."""
    match = _RECORD.match(entry.record or b"")
    if not match:
        return False
    length = _DEATH_HEAD.fullmatch(match[0])
    error = (entry.record or b"")[match.end() :][: int(length[1]) if length else 1024]
    head, colon, _ = error.partition(b"\n")[0].partition(b":")
    found = _CLASS.fullmatch(head) if colon else None
    return found is not None and len(found[1]) <= 200 and (found[1] == name or found[1].endswith(b"." + name))


class _Grown:
    """An area that ``seek`` looks at, from its place on."""

    def __init__(self, asked: Area, scores: SortedSet) -> None:
        self.asked, self.looked = asked, asked.looked
        self._members = [
            member for member, score in scores.rows() if asked.score is None or score == asked.score
        ]
        self._place = max(0, min(asked.rank, len(self._members) - 1))

    @property
    def is_left(self) -> bool:
        """Whether there is something in it that was not looked at."""
        place, looked, count = self._place, self.looked, len(self._members)
        return count > 0 and (place - looked >= 0 or place + looked < count)

    def grow(self, step: int) -> list[bytes]:
        """Look so much farther in both directions, and return what is there."""
        place, near, far = self._place, self.looked, self.looked + step
        self.looked = far
        below = self._members[max(0, place - far + 1) : max(0, place - max(near, 1) + 1)]
        return self._members[place + near : place + far] + below


def _size(entry: Entry) -> int:
    return len(entry.member) + len(entry.envelope or b"") + len(entry.record or b"")


# --- pipelines and wake-ups -------------------------------------------------------------------------


class Pipeline:
    """Collects calls of any transition; each returns its index. ``execute`` runs them in order."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self.prefix = broker.prefix
        self._broker = broker
        self._calls: list[Callable[[], Any]] = []
        self._wanted: Durability | None = None
        self.confirmed: Confirmed | None = None

    def confirm(self, wanted: Durability) -> None:
        """Say afterwards that all that was wanted is reached: nothing here is less safe than that."""
        self._wanted = wanted

    def keep_order(self) -> None:
        """Do nothing: the order is kept in any case."""

    def __len__(self) -> int:
        return len(self._calls)

    def __getattr__(self, name: str) -> Callable[..., int]:
        method = getattr(self._broker, name)

        def collect(*args: Any, **kwargs: Any) -> int:
            self._calls.append(lambda: method(*args, **kwargs))
            return len(self._calls) - 1

        return collect

    def send(self) -> Self:
        """Do nothing: what was collected runs when its results are asked for."""
        return self

    def receive(self) -> list[Any]:
        """Run what was collected; return a result or an ``RmqError`` for each call, in order."""
        calls, self._calls = self._calls, []
        results: list[Any] = []
        for call in calls:
            try:
                results.append(call())
            except RmqError as error:
                results.append(error)
        if self._wanted is not None:
            self.confirmed = Confirmed(self._wanted.replicas or None, self._wanted.fsync or None)
        return results

    def execute(self) -> list[Any]:
        """Run what was collected and return a result or an ``RmqError`` for each call."""
        return self.send().receive()


class _Subscription(Generic[_Told]):
    """Channels that are listened to, between threads of this process."""

    def __init__(self, channels: set[bytes], on_close: Callable[[Any], None]) -> None:
        self._channels = channels
        self._on_close = on_close
        self._told: deque[_Told] = deque()
        self._changed = threading.Condition()

    def put(self, channel: bytes, told: _Told) -> None:
        """Hear something, if it is on a channel of ours."""
        if channel in self._channels:
            with self._changed:
                self._told.append(told)
                self._changed.notify_all()

    def fileno(self) -> int:
        """Raise ``OSError``: there is no socket to select on; call ``get`` with a time-out."""
        raise OSError("wake-ups in memory have no file descriptor")

    def get(self, timeout: float = 0.0) -> list[_Told]:
        """Return what was told, waiting at most ``timeout`` seconds for the first."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._told), timeout)
            told = list(self._told)
            self._told.clear()
        return told

    def close(self) -> None:
        """End the subscription."""
        self._on_close(self)


class Wakeups(_Subscription[tuple[str, int]]):
    """A subscription to wake-ups: (topic, slot) pairs."""


class Events(_Subscription[bytes]):
    """A subscription to what happens to messages."""


__all__ = ["Clock", "Events", "Hash", "InMemoryBroker", "Pipeline", "SortedSet", "Wakeups", "score_text"]
