"""
Every state that one slot and one Spark query can reach, walked breadth first: claims, checkpoint, sink and lease.

The query is what PySpark's engine makes of a source: a poll acknowledges what its checkpoint has committed and claims
more; the offset log is written, the batch runs (again after a crash, with the same number), the sink stores a batch
once by its number, the commit log is written. It may be killed between any two of these. A worker shares the slot.
Leases may end at any moment: a slow query is a query whose lease has ended. Requests may arrive after their sender
has given them up.

One message is enough: what is lost is a send that nobody has worked on since and that is nowhere any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.proof.model_walk import Verdict, walk

PROPERTIES = ("LOSS", "GATE", "STUCK")
"""
LOSS   a send that neither the sink nor the worker has seen is in none of Store, claim and Prepare
GATE   the worker and a claim that can still be read hold the slot at once
STUCK  no fault-free steps lead from here to a slot in which nothing is left
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of claims, each of which can be switched off to see what it is for."""

    same_rows: bool = True  # off: a batch whose claim is lost claims afresh when it is read again
    ack_committed: bool = True  # off: a claim is acknowledged as soon as the offset log has it
    ack_sealed: bool = True  # off: a claim is acknowledged even if it was never sealed
    lost_is_lost: bool = True  # off: the remains of a lost claim can still be acknowledged
    orphans: bool = (
        True  # off: a claim that the checkpoint does not know is left to its lease, and the next one made
    )
    gate: bool = True  # off: a claim is made while the worker holds something
    finish_ack: bool = True  # off: when its lease ends, what is left of an acknowledged claim stays

    def without(self, rule: str) -> Rules:
        return replace(self, **{rule: False})


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each event may happen that could otherwise happen for ever."""

    sends: int = 2
    crashes: int = 2
    leases: int = 2
    late: int = 1
    elsewhere: int = 1  # batches of which this slot has no part


class Claim(NamedTuple):
    """The newest claim: open, sealed, acked, lost or returned."""

    number: int
    state: str
    holds: bool
    covers: bool
    """No send came since: whoever works on it works on the last send."""


class State(NamedTuple):
    """The slot, the query with its checkpoint and sink, and what is left to happen."""

    waiting: bool
    needed: bool
    """The last send has not been worked on."""
    claim: Claim
    worker: int
    """0: holds nothing; 1: something older than the last send; 2: the last send."""
    phase: str
    """Of the query: down, idle, claimed, sealed, planned, ran."""
    batch: int
    """The number of the batch in hand."""
    logged: int
    committed: int
    stored: int
    """The newest batch that the sink has."""
    late: int
    """The number of a claim that is still on its way; 0: none."""
    budget: tuple[int, ...]


Step = tuple[str, State, bool]
FIRST = State(False, False, Claim(0, "none", False, False), 0, "idle", 0, 0, 0, 0, 0, ())


class ClaimModel:
    """Every step out of a state, under a set of rules."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.first = FIRST._replace(
            budget=(budget.sends, budget.crashes, budget.leases, budget.late, budget.elsewhere)
        )

    def broken(self, s: State) -> str | None:
        here = s.waiting or (s.claim.holds and s.claim.covers) or s.worker == 2
        if s.needed and not here:
            return "LOSS"
        if s.worker and s.claim.holds and s.claim.state in ("open", "sealed"):
            return "GATE"
        return None

    def done(self, s: State) -> bool:
        return not (s.needed or s.waiting or s.claim.holds or s.worker)

    def steps(self, s: State) -> Iterator[Step]:
        yield from self._world(s)
        yield from self._upkeep(s)
        yield from self._worker(s)
        yield from self._query(s)

    def _spent(self, s: State, index: int) -> State:
        return s._replace(budget=tuple(n - (i == index) for i, n in enumerate(s.budget)))

    def _world(self, s: State) -> Iterator[Step]:
        sends, crashes, leases, *_ = s.budget
        if sends:
            t = self._spent(s, 0)
            claim = t.claim._replace(covers=False)
            yield "send", t._replace(waiting=True, needed=True, claim=claim, worker=min(t.worker, 1)), False
        if crashes and s.phase != "down":
            yield "the driver is killed", self._spent(s, 1)._replace(phase="down", batch=0), False
        if s.phase == "down":
            # A batch that was logged and not committed runs again, and nobody asks for an offset.
            again = s.logged > s.committed
            t = s._replace(phase="planned" if again else "idle", batch=s.logged if again else 0)
            yield "the driver starts", t, True
        if leases and s.claim.state in ("open", "sealed"):
            yield "the lease ends", self._spent(s, 2)._replace(claim=s.claim._replace(state="lost")), False
        if s.late:
            yield "a late claim arrives", self._claimed(s._replace(late=0), s.late), False

    def _returned(self, s: State) -> State:
        return s._replace(waiting=True, claim=s.claim._replace(holds=False))

    def _upkeep(self, s: State) -> Iterator[Step]:
        if s.claim.holds and s.claim.state in ("lost", "returned"):
            yield "what was lost is returned", self._returned(s), True
        if s.claim.holds and s.claim.state == "acked" and self.rules.finish_ack:
            yield "an acknowledged claim is forgotten", s._replace(claim=s.claim._replace(holds=False)), True

    def _worker(self, s: State) -> Iterator[Step]:
        if s.waiting and not s.worker and not s.claim.holds:
            yield "the worker prepares", s._replace(waiting=False, worker=2), True
        if s.worker:
            yield "the worker commits", s._replace(worker=0, needed=s.needed and s.worker != 2), True

    def _claimed(self, s: State, number: int) -> State:
        """Return the slot after `claim`: unchanged where the gate is shut or the number was used."""
        shut = s.claim.holds or (s.worker and self.rules.gate)
        if shut or not s.waiting or number <= s.claim.number:
            return s
        return s._replace(waiting=False, claim=Claim(number, "open", True, True))

    def _query(self, s: State) -> Iterator[Step]:
        number, state = s.claim.number, s.claim.state
        if s.phase == "idle":
            yield from self._poll(s)
        elif s.phase == "claimed":
            if state == "open" and number == s.batch:
                yield "seals", s._replace(phase="sealed", claim=s.claim._replace(state="sealed")), True
            else:
                yield "finds nothing to seal", s._replace(phase="idle", batch=0), True
        elif s.phase == "sealed":
            t = s._replace(phase="planned", logged=s.batch)
            if not self.rules.ack_committed and number == s.batch and state == "sealed":
                t = t._replace(claim=s.claim._replace(state="acked"))
            yield "logs the offset", t, True
        elif s.phase == "planned":
            yield "runs the batch", self._ran(s), True
        elif s.phase == "ran":
            yield "logs the commit", s._replace(phase="idle", committed=s.batch, batch=0), True

    def _poll(self, s: State) -> Iterator[Step]:
        claim, start = s.claim, s.committed
        if claim.holds and claim.number <= start:
            acknowledged = {"sealed"} | ({"open"} if not self.rules.ack_sealed else set())
            acknowledged |= {"lost"} if not self.rules.lost_is_lost else set()
            if claim.number == start and claim.state in acknowledged:
                yield "acknowledges", s._replace(claim=claim._replace(state="acked")), True
            elif claim.state in ("open", "sealed"):
                yield (
                    "gives back what was never sealed, and what this checkpoint has not recorded",
                    s._replace(claim=claim._replace(state="returned")),
                    True,
                )
            return
        if claim.holds and claim.number > s.committed and claim.state in ("open", "sealed"):
            if self.rules.orphans:
                yield (
                    "takes the orphan",
                    s._replace(phase="claimed" if claim.state == "open" else "sealed", batch=claim.number),
                    True,
                )
            return
        batch = max(start, claim.number) + 1
        t = self._claimed(s, batch)
        if t != s:
            yield "claims", t._replace(phase="claimed", batch=batch), True
        if s.budget[4]:
            u = self._spent(s, 4)._replace(phase="sealed", batch=batch)
            yield "claims elsewhere, finds nothing here", u, False
            if s.budget[3] and not s.late:
                u = self._spent(u, 3)._replace(late=batch)
                yield "claims elsewhere, here the request is still on its way", u, False

    def _ran(self, s: State) -> State:
        claim = s.claim
        whole = claim.holds and claim.number == s.batch
        reads = whole and claim.state == "sealed"
        if not reads and not self.rules.same_rows and s.waiting and not claim.holds and not s.worker:
            s = s._replace(waiting=False, claim=Claim(s.batch, "sealed", True, True))
            claim, reads = s.claim, True
        s = s._replace(phase="ran")
        if not reads:
            return s
        # The sink ignores a batch that it has.
        needed = s.needed and not (claim.covers and s.stored < s.batch)
        return s._replace(stored=max(s.stored, s.batch), needed=needed)


def check(rules: Rules, budget: Budget) -> Verdict:
    """Walk every state within the budget and report the shortest trace to each property that can be broken."""
    model = ClaimModel(rules, budget)

    def steps(s: State) -> Iterator[tuple[str, State, str | None, bool]]:
        for label, t, is_fair in model.steps(s):
            yield label, t, model.broken(t), is_fair

    return walk(model.first, steps, model.done)
