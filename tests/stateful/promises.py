"""What a sender and a consumer may rely on, kept beside the brokers in the simplest terms.

One promise for each waiting copy: not before when, and with how many retries left. One flight for
each delivery. Neither knows scores, keys or scripts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FULL = 1 << 30
"""All retries of the slot, however many it has when the message is taken."""

ANY = b"any"
"""Whatever body there was: a stranger sent it."""


@dataclass(frozen=True)
class Promise:
    not_before_ms: float = 0
    left: int | None = FULL
    """None: a stranger chose the score, so nothing was promised."""
    body: bytes | None = ANY
    """The envelope that it comes with; None: the member is its own body."""
    latest_ms: float = math.inf
    """When it has to be due at the latest, however often it is sent (topics with DEBOUNCE)."""


@dataclass(frozen=True)
class Flight:
    owner: str
    receipt: int
    left: int
    promise: Promise
    marked: bool = False
    since_ms: float = -math.inf
    """When it was handed out or last extended. Negative: the clock was set back since."""
    timeout: int | None = None
    """Its own time-out in seconds."""
    cancelled: bool = False
    """Whether its consumer is to be told so. A delivery that is cancelled is marked as well."""


@dataclass
class Promises:
    waiting: dict[bytes, Promise] = field(default_factory=dict)
    flying: dict[bytes, Flight] = field(default_factory=dict)
    claimed: dict[bytes, Promise] = field(default_factory=dict)

    def failed(self, member: bytes, not_before_ms: float, max_retries: int, *, absorbs: bool = False) -> None:
        """End a flight in failure: its promise lives on with a retry less, unless a newer one waits that it does not absorb."""
        flight = self.flying.pop(member)
        left = min(flight.left, max_retries)
        if left > 0 and not flight.marked and (absorbs or member not in self.waiting):
            self.waiting[member] = Promise(not_before_ms, left - 1, flight.promise.body)

    def released(self, member: bytes, *, earlier_counts: bool) -> None:
        """End a flight as if it had never been."""
        flight = self.flying.pop(member)
        if flight.marked:
            return
        newer = self.waiting.get(member)
        if newer is None:
            self.waiting[member] = flight.promise
        elif earlier_counts:
            earliest = min(newer.not_before_ms, flight.promise.not_before_ms)
            left = newer.left if newer.left == flight.promise.left else None
            self.waiting[member] = Promise(earliest, left, newer.body)

    def lost(
        self, member: bytes, not_before_ms: float, max_retries: int, *, lives: bool, absorbs: bool = False
    ) -> None:
        """End a claim whose lease ran out: its promise lives on with a retry less, unless a newer one waits."""
        promise = self.claimed.pop(member)
        if member in self.waiting and not absorbs:
            return
        if promise.left is None:
            if lives:
                self.waiting[member] = Promise(not_before_ms, None, promise.body)
        elif (left := min(promise.left, max_retries)) > 0:
            self.waiting[member] = Promise(not_before_ms, left - 1, promise.body)

    def returned(self, member: bytes, *, earlier_counts: bool) -> None:
        """End a claim as if it had never been."""
        promise = self.claimed.pop(member)
        self.flying[member] = Flight("", 0, 0, promise)
        self.released(member, earlier_counts=earlier_counts)
