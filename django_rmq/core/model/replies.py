"""The answers of scripts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple


class Sent(NamedTuple):
    """The result of one message in its slot."""

    status: str
    """stored, merged, replaced, superseded, present, or refused (the slot is full)."""
    score: float
    """The Store score with which it waits: due time in ms, or priority. NaN if refused or in flight."""


class Delivery(NamedTuple):
    """One message as handed out by prepare or held."""

    member: bytes
    score: float
    """The Store score it had: due ms, priority, or a retry score."""
    retries_left: int
    envelope: bytes | None = None
    """Keyed topics: the stored envelope. None: the member is the body."""


class Prepared(NamedTuple):
    """The answer of prepare."""

    status: str
    """ok, empty, busy, fenced, paused, moved, or more (only busy members seen: continue at ``cursor``)."""
    next_due: int | None = None
    """When to ask again, in ms. None: nothing is waiting."""
    receipt: int = 0
    deliveries: Sequence[Delivery] = ()
    cursor: tuple[str, bytes] | None = None
    """Where to continue after ``more``: (score, member)."""
    slots: int | None = None
    """After ``moved``: the current slot count of the slot."""
    is_suspect: bool = False
    """Whether it is a single message whose last delivery timed out; it may have killed its process."""
    timeout: int | None = None
    """The shortest time-out in seconds, if messages have one of their own."""
    is_plain: bool = False
    """Whether none of the messages has failed, and none of the slot had a body of its own."""


class Acquired(NamedTuple):
    """The answer of acquire_all for one slot."""

    epoch: int | None
    """The new epoch. None: the control key has a foreign type, and the slot has no owner."""
    is_asleep: bool
    """Whether nothing waits there; senders then wake the owner."""


class HeldReply(NamedTuple):
    """One entry of the answer of held: a message in Prepare and the receipt of its delivery."""

    delivery: Delivery
    receipt: int
    marked: bool
    """Whether a person has removed or buried it; the message is gone when the delivery ends, whatever the outcome."""
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
    """The number of the consumer's newest claim. 0: there was none."""
    size: int
    rows: Sequence[bytes] = ()
    """member, score, member, score, ... as Redis writes them."""
    envelopes: Sequence[bytes | None] = ()
    """The envelope of each row. Empty: each member is its own body."""


class Driver(NamedTuple):
    """The driver that has, or had, the name of a Spark consumer."""

    name: str
    """Its own word."""
    about: str
    """Where it runs, as it has said itself."""
    since_ms: int
    until_ms: int
    """When its lease ends. 0: it has left."""

    @property
    def where(self) -> str:
        """Where it runs, and since when it has the name, for people."""
        host, pid = (*self.about.split(" "), "?", "?")[:2]
        since = datetime.fromtimestamp(self.since_ms / 1000, UTC)
        return f"host {host}, process {pid}, since {since:%Y-%m-%d %H:%M:%S} UTC"


class Entry(NamedTuple):
    """One message as peek and find list it."""

    member: bytes
    score: float
    envelope: bytes | None = None
    record: bytes | None = None
    """For prepare: the in-flight record. For dead: the death. For store and retry: the last failure."""


class Page(NamedTuple):
    """Some entries and the cursor at which to continue. ``cursor`` None: the end was reached."""

    entries: Sequence[Entry]
    cursor: tuple[str, bytes] | None


class Area(NamedTuple):
    """Where ``seek`` searches in a state of a slot: from one place on, in both directions."""

    state: str
    score: float | None = None
    """Search only entries with this score. None: all of them."""
    rank: int = 1 << 53
    """The rank among these at which to begin. Default: the last."""
    looked: int = 0
    """The distance from the place that was already searched."""


class LocateReply(NamedTuple):
    """The answer of ``seek``."""

    members: list[bytes | None]
    """One for each digest; None: it was not found."""
    left: list[Area | None]
    """Each area as it must be passed to continue. None: nothing of it is left."""


class CopyReply(NamedTuple):
    """One message on its way from one slot to another."""

    state: str
    """store, retry or dead."""
    member: bytes
    score: str
    """The score as the slot had it, with all digits."""
    failure: bytes = b""
    """The last failure of a live message. Empty: none."""
    rest: bytes = b""
    """The envelope of a live message, or the death of a dead one. Empty: none."""


class Handover(NamedTuple):
    """The answer of move_out."""

    status: str
    """moved, staged (an earlier one has to arrive first), nothing, busy (something is in flight), or stale."""
    ticket: int = 0
    target: int = 0
    """The slot to which the rows go."""
    rows: Sequence[CopyReply] = ()


class ReshardSurvey(NamedTuple):
    """How far a re-slotting has progressed in one slot."""

    slots: int | None
    """The slot count that callers must have. None: any; the slot was never re-slotted."""
    reslot: int
    """The number of the last re-slotting that reached the slot. 0: none."""
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
    """The ticket of the messages that have left and are not known to have arrived. 0: none."""


class Counts(NamedTuple):
    """The number of messages in a slot, by state."""

    store: int
    due: int
    """How many can be taken now: in Store, rested in Retry, timed out in Prepare, or lapsed."""
    prepare: int
    retry: int
    dead: int
    claimed: int
    oldest_due_ms: int | None
    """Time topics: since when the first of these can be taken."""
    owner: str = ""
    """The last consumer that took from the slot."""
    paused: bool = False
    undrained_since_ms: int | None = None
    """Priority topics: since when Store has not been empty, or something can be taken that is not in Store.

    None: nothing can be taken, or only foreign programs have sent."""
    running_since_ms: int | None = None
    """When the first delivery began that is in flight and has not timed out. No extension changes that."""
    lapsed: int = 0
    """How many are claimed under a lease that has ended: nobody has brought them back yet."""

    @property
    def held(self) -> int:
        """The number of all messages, including the dead."""
        return self.store + self.prepare + self.retry + self.dead + self.claimed


class DescribeReply(NamedTuple):
    """Everything that a slot knows about one member. None: nothing of that kind."""

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
    """What a slot knows about one message. None: nothing of that kind."""

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
    """The last consumer that took from the slot. Empty: none has."""
    outcome: bytes | None
    """What was noted last, if it is not older than OUTCOME_RETENTION: how far a delivery has got, or how the message ended."""


RECORDS = ("inflight", "deaths", "failures", "body", "claim_body", "prepare_body", "claim_failed")
"""The hashes of a slot that hold records about its messages."""


class OrphansReply(NamedTuple):
    """The records, among those examined, that belong to no message."""

    cursor: str
    """Where to continue. "0": all were examined."""
    scanned: int
    members: Sequence[bytes]
