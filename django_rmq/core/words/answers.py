"""What scripts answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """What became of one message in its slot."""

    status: str
    """stored, merged, replaced, superseded, present, or refused (the slot is full)."""
    score: float
    """The Store score it waits with: due time in ms, or priority. NaN where refused or in flight."""


class Delivery(NamedTuple):
    """One message as handed out by prepare or held."""

    member: bytes
    score: float
    """The Store score it had: due ms, priority, or a retry score."""
    retries_left: int
    envelope: bytes | None = None
    """Keyed topics: the stored envelope; None: the member is its own body."""


class Prepared(NamedTuple):
    """The answer of prepare."""

    status: str
    """ok, empty, busy, fenced, paused, moved, or more (only busy members seen: go on at ``cursor``)."""
    next_due: int | None = None
    """When to ask again, in ms; None: nothing is waiting."""
    receipt: int = 0
    deliveries: Sequence[Delivery] = ()
    cursor: tuple[str, bytes] | None = None
    """Where to go on after ``more``: (score, member)."""
    slots: int | None = None
    """After ``moved``: the slot count that the slot has by now."""
    is_suspect: bool = False
    """It is one message, and its last end was a time-out: it may be what killed its process."""


class Acquired(NamedTuple):
    """The answer of acquire_all for one slot."""

    epoch: int | None
    """None: its control key is of a foreign type, and nobody owns it."""
    is_asleep: bool
    """Nothing waits there, and senders know to wake who owns it."""


class Held(NamedTuple):
    """The answer of held: one thing in Prepare and the receipt it was handed out with."""

    delivery: Delivery
    receipt: int
    marked: bool
    """A person has removed or buried it; whatever ends the delivery ends it for good."""


class Claimed(NamedTuple):
    """The answer of claim."""

    status: str
    """ok, busy, paused, stale (the number is no longer open), unfinished (an earlier claim is not over), moved or full."""
    taken: int = 0
    size: int = 0
    """What the claim holds in all."""
    more: bool = False
    """Something may be left that can be taken."""


class ClaimRead(NamedTuple):
    """The answer of read_claim."""

    state: str
    """open, sealed, acked, lost, returned or none."""
    number: int
    """The consumer's newest claim; 0: there was none."""
    size: int
    rows: Sequence[bytes] = ()
    """member, score, member, score, ... as Redis tells them."""
    envelopes: Sequence[bytes | None] = ()
    """Empty: each member is its own body."""


class Entry(NamedTuple):
    """One message as peek and find list it."""

    member: bytes
    score: float
    envelope: bytes | None = None
    record: bytes | None = None
    """prepare: the in-flight record; dead: the death; store and retry: the last failure."""


class Page(NamedTuple):
    """Some entries and where to go on; ``cursor`` None: the end was reached."""

    entries: Sequence[Entry]
    cursor: tuple[str, bytes] | None


class Area(NamedTuple):
    """Where ``seek`` looks in a state of a slot: from one place on, in both directions."""

    state: str
    score: float | None = None
    """Only among entries of this score; None: all of them."""
    rank: int = 1 << 53
    """The place among these; without one, from the last on."""
    looked: int = 0
    """How far from the place was looked before."""


class Sought(NamedTuple):
    """What ``seek`` has found."""

    members: list[bytes | None]
    """One for each digest; None: it was not found."""
    left: list[Area | None]
    """Each area as it is to be asked for to go on; None: nothing of it is left."""


class Row(NamedTuple):
    """One message on its way from slot to slot."""

    state: str
    """store, retry or dead."""
    member: bytes
    score: str
    """As the slot had it: no digit is lost."""
    failure: bytes = b""
    """The last failure of a live message; empty: none."""
    rest: bytes = b""
    """The envelope of a live message, or the death of a dead one; empty: none."""


class Handover(NamedTuple):
    """The answer of move_out."""

    status: str
    """moved, staged (an earlier one has to arrive first), nothing, busy (something is in flight), or stale."""
    ticket: int = 0
    target: int = 0
    """The slot that the rows go to."""
    rows: Sequence[Row] = ()


class Survey(NamedTuple):
    """How far a re-slotting is with one slot."""

    slots: int | None
    """The slot count that its callers must have; None: any, nobody was here yet."""
    reslot: int
    """The number of the last re-slotting that was here; 0: none."""
    is_shut: bool
    is_paused: bool
    deliveries: int
    """The highest receipt."""
    in_flight: int
    claims: int
    """Spark consumers that hold something of it."""
    rescheduled: int
    revived: int
    ticket: int
    """Of what has left and is not known to have arrived; 0: nothing."""


class Counts(NamedTuple):
    """How many messages a slot holds, by state."""

    store: int
    due: int
    """Of ``store``: takeable now."""
    prepare: int
    retry: int
    dead: int
    claimed: int
    oldest_due_ms: int | None
    """Time topics: the earliest due time in Store that has passed."""
    owner: str = ""
    """Who took from the slot last."""
    paused: bool = False
    undrained_since_ms: int | None = None
    """Priority topics: since when Store has not been empty; None: it is, or only strangers have sent."""

    @property
    def held(self) -> int:
        """All messages, the dead as well."""
        return self.store + self.prepare + self.retry + self.dead + self.claimed


class Looked(NamedTuple):
    """All that a slot knows of one member; None: nothing of that kind."""

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
    """Of the copy in flight."""


RECORDS = ("inflight", "deaths", "failures", "body", "claim_body", "prepare_body")
"""The hashes of a slot that say something of its messages."""


class Loose(NamedTuple):
    """Records that belong to no message, of those that were looked at."""

    cursor: str
    """Where to go on; "0": all were looked at."""
    scanned: int
    members: Sequence[bytes]
