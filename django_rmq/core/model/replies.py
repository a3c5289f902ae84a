"""The answers of commands as values: deliveries, outcomes, failures, counts of slots, the history, workers.

Records of failures and deaths, which scripts write as text, are parsed here. The decoders of whole replies are beside their
commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from hashlib import sha1
from typing import NamedTuple, TypeVar

from django_rmq.core.model.bounds import LARGEST, MAX_ERROR_BYTES

T = TypeVar("T")

MAX_TEXT = 200
"""The number of bytes that are kept of a listener's text about its progress."""


def digest(member: bytes) -> bytes:
    """Return the digest under which the outcome of a member is noted: a body may be long, and need not be kept."""
    return shortened(sha1(member, usedforsecurity=False).digest())


def shortened(whole: bytes) -> bytes:
    """Return the digest of a member whose SHA-1 is known."""
    return whole.hex()[:24].encode()


def packed_digests(members: Iterable[bytes]) -> bytes:
    """Return the digests of members, 12 bytes each, in one text."""
    return b"".join([sha1(member, usedforsecurity=False).digest()[:12] for member in members])


class Restored(NamedTuple):
    """What a step has brought back of that which an act has deleted from a slot."""

    cursor: str
    """Where to continue; ``0``: all was read."""
    back: int
    merged: int
    """The number of copies that were dropped for newer ones."""


class Progress(NamedTuple):
    """How far a delivery had got, as its listener reported."""

    receipt: int
    fraction: float
    """From 0 to 1."""
    reported_ms: int
    text: str


class Outcome(NamedTuple):
    """How a message ended."""

    state: str
    """done, dead, removed or cancelled."""
    reason: str
    """dead: failed, timed_out, overran, undecodable, rejected, buried or lapsed. Otherwise empty."""
    attempts: int
    """Its deliveries that failed or succeeded since it last ended."""
    delivered_ms: int | None
    """When the delivery began in which the message ended. None if it ended without a delivery, or if it is not known."""
    ended_ms: int
    error_class: str
    """The class of its last error, if that has one."""
    worker: str
    """The last consumer of the slot when the message ended; empty if it ended without a delivery."""


def parse(raw: bytes) -> Progress | Outcome:
    """Return the progress or the outcome in a record. Raises ``ValueError`` for any other record."""
    head, _, rest = raw.partition(b"\n")
    state, *parts = head.decode().split(" ")
    text = rest.decode(errors="replace")
    if state == "running":
        receipt, thousandths, reported_ms = map(int, parts)
        return Progress(receipt, thousandths / 1000, reported_ms, text)
    reason, attempts, delivered_ms, ended_ms, error_class = parts
    return Outcome(
        state,
        "" if reason == "-" else reason,
        int(attempts),
        int(delivered_ms) or None,
        int(ended_ms),
        error_class,
        text,
    )


ERROR_CLASS = r"[^\S\n]*([A-Za-z_][\w.<>]{0,199})[^\S\n]*:"
"""The pattern of the beginning of an error text with a class, which is its first group. Spark counts by it, too."""

_ERROR_CLASS = re.compile(ERROR_CLASS, re.ASCII)


def error_class(error: str) -> str:
    """Return the class in an error text of the form ``package.Error: what happened``, or an empty text if there is none.

    A single word without a colon is a person's remark, not a class.
    """
    match = _ERROR_CLASS.match(error)
    return match[1] if match else ""


def cut_error(text: str, limit: int = MAX_ERROR_BYTES) -> bytes:
    """Return at most ``limit`` bytes of ``text``, without splitting a character."""
    raw = text.encode("utf-8", "backslashreplace")
    return raw if len(raw) <= limit else raw[:limit].decode("utf-8", "ignore").encode()


class Failure(NamedTuple):
    """One failed delivery, as rollback takes it."""

    member: bytes
    kind: str = "failed"
    """failed, undecodable, timed_out (its process died), overran (it exceeded HARD_TIMEOUT), cancelled, or rejected
    (Dead at once)."""
    delay_ms: int | None = None
    """The rest before the next delivery, in ms. None if the topic's exponential back-off applies."""
    error: str = ""
    """The error's text, of which at most ``MAX_ERROR_BYTES`` are stored."""

    def answered(self, word: str) -> Failure:
        """Return the failure as ``rollback`` answered it: a person may have cancelled the delivery meanwhile."""
        return self._replace(kind="cancelled") if word == "cancelled" else self


class FailureRecord(NamedTuple):
    """The diagnosis stored for a live message that failed."""

    kind: str
    times: int
    first_ms: int
    last_ms: int
    score: str
    error: bytes

    @classmethod
    def parse(cls, raw: bytes) -> FailureRecord:
        head, _, error = raw.partition(b"\n")
        kind, times, first, last, score = head.decode().split(" ")
        return cls(kind, int(times), int(first), int(last), score, error)


class Death(NamedTuple):
    """The record stored for a dead message."""

    reason: str
    """failed, timed_out, overran, undecodable, rejected, buried or lapsed."""
    times: int
    first_ms: int
    last_ms: int
    score: str
    """The score with which it was first prepared, if known."""
    error: bytes
    envelope: bytes | None

    @classmethod
    def parse(cls, raw: bytes) -> Death:
        head, _, rest = raw.partition(b"\n")
        reason, times, first, last, score, length, has_body = head.decode().split(" ")
        # Errors have several lines, and an envelope has any bytes, so only the length separates the two.
        error, body = rest[: int(length)], rest[int(length) :]
        return cls(reason, int(times), int(first), int(last), score, error, body if has_body == "1" else None)

    @property
    def first_score(self) -> float | None:
        """``score`` as a number, or None if it is not known."""
        try:
            return float(self.score)
        except ValueError:
            return None


def read_record(parse: Callable[[bytes], T], raw: bytes | None) -> T | None:
    """Return the record that ``parse`` reads, or None if there is none, or another program has written it."""
    try:
        return None if raw is None else parse(raw)
    except ValueError:
        return None


class Sample(NamedTuple):
    """Sums of the depths and counters of some slots of a topic."""

    slots: int
    """How many of the requested slots could be read."""
    store: int
    due: int
    """How many can be taken now: they are due in Store, have rested in Retry, or have timed out in Prepare. Unleased ones, which
    ``Counts.due`` has as well, are left out."""
    prepare: int
    retry: int
    dead: int
    oldest_due_ms: int | None
    """Time topics: since when the first of these can be taken."""
    counters: dict[str, int]
    """The counters in ``SAMPLED``."""
    undrained_since_ms: int | None = None
    """Priority topics: the earliest time since which a slot has had something to take."""

    def plus(self, other: Sample) -> Sample:
        """Return the sums of both."""
        oldest = [one.oldest_due_ms for one in (self, other) if one.oldest_due_ms is not None]
        undrained = [one.undrained_since_ms for one in (self, other) if one.undrained_since_ms is not None]
        return Sample(
            self.slots + other.slots,
            self.store + other.store,
            self.due + other.due,
            self.prepare + other.prepare,
            self.retry + other.retry,
            self.dead + other.dead,
            min(oldest, default=None),
            {name: value + other.counters[name] for name, value in self.counters.items()},
            min(undrained, default=None),
        )


SAMPLED = (
    "sent", "merged", "replaced", "prepared", "committed", "acked", "failed", "expired", "rejected", "died", "lapsed",
    "claimed", "claim_returned", "released", "stale", "fenced", "revived", "replay_merged", "cancelled", "overran",
)  # fmt: skip
"""The counters of the ledger that the history and the metrics use."""


LATENESS_BUCKETS = 24
"""The number of classes in which lateness, and time in listeners, are counted."""


class Times(NamedTuple):
    """Durations, counted by the classes of ``history.EDGES_MS``. Never reset."""

    late: tuple[int, ...]
    """The number of messages by their lateness."""
    late_ms: int
    """The sum of the lateness, in ms."""
    took: tuple[int, ...]
    """The number of calls of the listener by their duration."""
    took_us: int
    """The sum of the durations, in microseconds."""

    @classmethod
    def of(cls, counted: Iterable[int]) -> Times:
        """Return the counts of the fields ``TIMES``, in their order."""
        late_ms, *counts = counted
        late, (took_us, *took) = counts[:LATENESS_BUCKETS], counts[LATENESS_BUCKETS:]
        return cls(tuple(late), late_ms, tuple(took), took_us)


TIMES = tuple(
    name.encode()
    for kind in ("late", "took")
    for name in (kind, *(f"{kind}{bucket}" for bucket in range(LATENESS_BUCKETS)))
)
"""The fields that count durations."""


class Allowance(NamedTuple):
    """The share of its topic's limits that one worker may use."""

    tokens: int
    """The number of deliveries that may begin; unused ones are given back. It equals the request if the topic has no rate
    limit."""
    wait_us: int
    """The time in microseconds until the next token, if there are fewer than requested."""
    permits: int
    """The number of messages in use at which the worker must not take more."""
    others_wait: bool
    """Whether another worker could use more than it has."""


class Beat(NamedTuple):
    """The answer to a worker that renews its session."""

    status: str
    """ok, expired, duplicate or full."""
    members_version: str = ""
    """The version of the membership."""
    plan_version: str = ""
    """The version of the plan, which assigns the slots; empty if there is none."""
    first_end_ms: int = 0
    """The time in ms until the first session ends if it is not renewed."""
    basis: str = ""
    """The version of the membership for which the plan was made; only with ``plan``."""
    plan: bytes | None = None
    """The plan. None if the worker has the current one."""
    workers: dict[str, bytes] | None = None
    """Worker -> record. None if the worker has the current ones."""
    rival: bytes = b""
    """The record of the worker that has this id already (duplicate)."""


class WorkerSession(NamedTuple):
    """One worker as Redis knows it."""

    worker: str
    ends_ms: float
    record: bytes


class Roster(NamedTuple):
    """All workers and the assignment, read atomically."""

    now_ms: int
    members_version: str
    plan_version: str
    basis: str
    """The version of the membership for which the plan was made."""
    plan: bytes
    sessions: list[WorkerSession]


class Sent(NamedTuple):
    """The result of one message in its slot."""

    status: str
    """stored, merged, replaced, superseded, present, or refused (the slot is full)."""
    score: float
    """The Store score with which it waits: due time in ms, or priority. NaN if refused or in flight."""


class Delivery(NamedTuple):
    """One delivered message, as prepare and held answer it."""

    member: bytes
    score: float
    """The Store score it had: due ms, priority, or a retry score."""
    retries_left: int
    envelope: bytes | None = None
    """The stored envelope (keyed topics). None if the member is the body."""


class Prepared(NamedTuple):
    """The answer of prepare."""

    status: str
    """ok, empty, busy, fenced, paused, moved, or more (only busy members seen: continue at ``cursor``)."""
    next_due: int | None = None
    """When to ask again, in ms. None if nothing is waiting."""
    receipt: int = 0
    deliveries: Sequence[Delivery] = ()
    cursor: tuple[str, bytes] | None = None
    """Where to continue after ``more``: (score, member)."""
    slots: int | None = None
    """The current slot count of the slot, after ``moved``."""
    is_suspect: bool = False
    """Whether it is a single message whose last delivery timed out or ran for too long; it may have killed its process."""
    timeout: int | None = None
    """The shortest time-out in seconds, if messages have one of their own."""
    is_plain: bool = False
    """Whether none of the messages has failed, and none of the slot had a body of its own."""
    is_alone: bool = False
    """Whether nothing else is in flight in the slot, and it has no failures."""
    is_beside: bool = False
    """Whether something else is in flight in the slot."""
    sleeping_until: int | None = None
    """If nothing else can be taken: the ms until which the caller is woken by the script that makes something available.

    It then asks again when a delivery of the slot ends in another way than by success. None: it asks whenever one ends.
    """


class Pushed(NamedTuple):
    """A message that its send has delivered to the owner of its slot, which was asleep: what a prepare would have answered."""

    topic: str
    slot: int
    receipt: int
    delivery: Delivery


class Acquired(NamedTuple):
    """The answer of acquire_slots for one slot."""

    epoch: int | None
    """The new epoch. None if the control key has a foreign type, so that the slot has no owner."""
    is_asleep: bool
    """Whether nothing waits there; senders then wake the owner."""


class HeldReply(NamedTuple):
    """One entry of the answer of held: a message in Prepare and the receipt of its delivery."""

    delivery: Delivery
    receipt: int
    marked: bool
    """Whether a person has removed, buried or cancelled the message. The delivery is then its last, whatever its outcome."""
    timeout: int | None = None
    """The message's own time-out in seconds, if it has one."""


class Claimed(NamedTuple):
    """The answer of claim."""

    status: str
    """ok, busy, paused, stale (the number is no longer open), unfinished (an earlier claim is not over)
    or moved."""
    taken: int = 0
    size: int = 0
    """How many messages the claim holds in all."""
    more: bool = False
    """Whether more messages may be available."""


class ClaimRead(NamedTuple):
    """The answer of read_claim."""

    state: str
    """open, sealed, acked, lost, returned or none."""
    number: int
    """The number of the consumer's newest claim; 0 if there was none."""
    size: int
    rows: Sequence[bytes] = ()
    """member, score, member, score, ... as Redis writes them."""
    envelopes: Sequence[bytes | None] = ()
    """The envelope of each row; empty if each member is its own body."""


class Driver(NamedTuple):
    """The driver that has, or had, the name of a Spark consumer."""

    name: str
    """The random word by which the driver identifies itself."""
    about: str
    """Where the driver runs, as it has reported."""
    since_ms: int
    until_ms: int
    """When its lease ends; 0 if it has left."""

    @property
    def where(self) -> str:
        """Where the driver runs, and since when it has the name, as text for people."""
        host, pid = (*self.about.split(" "), "?", "?")[:2]
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC)
        return f"host {host}, process {pid}, since {since:%Y-%m-%d %H:%M:%S} UTC"


class Entry(NamedTuple):
    """One message as ``list_messages`` and ``search_messages`` list it."""

    member: bytes
    score: float
    envelope: bytes | None = None
    record: bytes | None = None
    """The record of the message in its state: prepare has the in-flight record, dead the death, store and retry the last
    failure."""


class Page(NamedTuple):
    """Some entries, and the cursor at which to continue, or None if the end was reached."""

    entries: Sequence[Entry]
    cursor: tuple[str, bytes] | None


class DeadGroup(NamedTuple):
    """Dead messages of a slot whose errors have the same first line."""

    line: bytes
    """The first line of the error. In lines of up to 1,000 bytes, ``0`` stands for each number behind the first colon."""
    deaths: int
    first: float
    """The score of the first death."""
    hours: Sequence[tuple[int, int]]
    """The number of each hour since the epoch and how many died in it, the last one first."""
    samples: Sequence[tuple[bytes, float]]
    """The members and scores of the last deaths, the last one first."""


class DeadGroups(NamedTuple):
    """Groups of some dead messages, and how many to skip in order to continue, or 0 if the end was reached."""

    groups: Sequence[DeadGroup]
    skip: int


class Area(NamedTuple):
    """Where ``find_by_digest`` searches in a state of a slot: from one place on, in both directions."""

    state: str
    score: float | None = None
    """The score of the entries to search, or None for all of them."""
    rank: int = LARGEST
    """The rank among these entries at which to begin. The default is the last."""
    looked: int = 0
    """The distance from the place that was already searched."""


class LocateReply(NamedTuple):
    """The answer of ``find_by_digest``."""

    members: list[bytes | None]
    """The member of each digest, or None if it was not found."""
    left: list[Area | None]
    """Each area as it must be passed to continue, or None if nothing of it is left."""


class CopyReply(NamedTuple):
    """One message on its way from one slot to another."""

    state: str
    """store, retry or dead."""
    member: bytes
    score: str
    """The score as the slot had it, with all digits."""
    failure: bytes = b""
    """The last failure of a live message; empty if there is none."""
    rest: bytes = b""
    """The envelope of a live message, or the death of a dead one; empty if there is none."""


class Handover(NamedTuple):
    """The answer of move_out."""

    status: str
    """moved, staged (an earlier one has to arrive first), nothing, busy (something is in flight), or stale."""
    ticket: int = 0
    target: int = 0
    """The slot to which the rows go."""
    rows: Sequence[CopyReply] = ()


class ReslotProgress(NamedTuple):
    """How far a re-slotting has progressed in one slot."""

    slots: int | None
    """The slot count that callers must have. None if the slot has not stored one, so that any is accepted."""
    reslot: int
    """The number of the last re-slotting that reached the slot; 0 if none has."""
    is_shut: bool
    is_paused: bool
    deliveries: int
    """The highest receipt."""
    in_flight: int
    claims: int
    """The number of Spark consumers that hold messages of the slot."""
    rescheduled: int
    revived: int
    ticket: int
    """The ticket of the messages that have left and are not known to have arrived; 0 if there are none."""


class Pauses(NamedTuple):
    """Which of some slots are paused, by their places among the slots, from 0 on."""

    paused: tuple[int, ...]
    unread: tuple[int, ...]
    """The slots of which it cannot be read."""


class Counts(NamedTuple):
    """The number of messages in a slot, by state."""

    store: int
    due: int
    """How many can be taken now: they are due in Store, have rested in Retry, have timed out in Prepare, or are unleased."""
    prepare: int
    retry: int
    dead: int
    claimed: int
    oldest_due_ms: int | None
    """Since when the first of the due messages can be taken (topics of time)."""
    owner: str = ""
    """The last consumer that took from the slot."""
    paused: bool = False
    undrained_since_ms: int | None = None
    """Since when Store has not been empty, or a message outside Store can be taken (priority topics).

    None if nothing can be taken, or if only foreign programs have sent."""
    running_since_ms: int | None = None
    """When the first delivery began that is in flight and has not timed out. An extension does not change it."""
    unleased: int = 0
    """How many are claimed under a lease that has ended, and have not come back yet."""

    @property
    def held(self) -> int:
        """The number of all messages, including the dead."""
        return self.store + self.prepare + self.retry + self.dead + self.claimed


class DescribeReply(NamedTuple):
    """Everything that a slot knows about one member. A field is None if the slot has nothing of that kind."""

    store: float | None
    prepare: float | None
    retry: float | None
    dead: float | None
    claim: float | None = None
    in_flight: bytes | None = None
    death: bytes | None = None
    failure: bytes | None = None
    envelope: bytes | None = None
    claimed_envelope: bytes | None = None
    delivered_envelope: bytes | None = None
    """The envelope of the copy in flight."""
    claim_failure: bytes | None = None
    """How its Spark query has failed it: kind, line feed, error. It takes effect when the claim ends."""

    @property
    def is_held(self) -> bool:
        """Whether the slot has the message, in whatever state."""
        return any(score is not None for score in self[:5])


class FoundReply(NamedTuple):
    """What a slot knows about one message. A field is None if the slot has nothing of that kind."""

    store: float | None
    prepare: float | None
    retry: float | None
    dead: float | None
    claim: float | None
    in_flight: bytes | None
    death: bytes | None
    """The death, without the body."""
    failure: bytes | None
    owner: str
    """The last consumer that took from the slot; empty if none has."""
    outcome: bytes | None
    """The last note that is not older than OUTCOME_RETENTION: the progress of a delivery, or how the message ended."""


RECORDS = ("inflight", "deaths", "failures", "body", "claim_body", "prepare_body", "claim_failed")
"""The hashes of a slot that hold records about its messages."""


class OrphansReply(NamedTuple):
    """The records, among those examined, that belong to no message."""

    cursor: str
    """Where to continue; "0" if all records were examined."""
    scanned: int
    members: Sequence[bytes]
