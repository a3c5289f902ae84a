"""
Every state that one slot, its two workers and their network can reach, walked breadth first.

This is the protocol itself (states, rules, ledger), not the Lua that carries it out: scripts are atomic steps here,
and what they do to one message is written once more, as small as it can be. `check` walks all interleavings of
producers, workers, time, faults and persons within a `Budget` of those events that could go on for ever, and reports
the shortest trace to each broken property. A `Rules` with one rule switched off must be found by some property: a
check that cannot fail proves nothing.

How it stays small enough to be walked whole:

- Nothing counts upward. A receipt is only ever compared with the one in Prepare, so a delivery remembers whether its
  receipt is still the one there; an epoch is only ever compared with the highest; times are kept as "due in" and
  "taken ago". Therefore the clock may tick without a budget.
- What happens to one message, and what one worker holds, are numbered when first met and remembered, so that a step
  of the whole slot is a few look-ups. States that differ only in which worker or which message is called what are one.

Limits: two members and two workers at most, one clock that may jump forward, no Spark claims (`claim_model`), no keyed bodies, no
priorities, no re-slotting, no loss of data by Redis. Which of several due members `prepare` takes is left open, which
allows more than the real order does. Starting a listener and looking at the clock just before are one step.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

PROPERTIES = ("LOSS", "GRAVE", "EARLY", "LATE", "OVERLAP", "BUDGET", "RESURRECT", "ORPHAN", "LEDGER", "STUCK")
"""
LOSS       a send that no successful run taken after it covers, and its member is in none of Store, Retry, Prepare;
           a send that died, and its member is not in Dead
GRAVE      a member left Dead although no person took it out
EARLY      taken before the due time of its last stored send (range_merge: of the first one merged)
LATE       a fresh copy waits beyond that time
OVERLAP    two listeners of a serial slot, or of one member elsewhere, though neither delivery outlived its time-out
BUDGET     more than 1 + MAX_RETRIES deliveries of one send, or death by failures after fewer
RESURRECT  a message that a person removed or buried is taken again without a new send
ORPHAN     Prepare holds a delivery in the name of a living worker that does not know of it and will not ask
LEDGER     one transition whose counters do not balance what it moved
STUCK      a state with work left that no sequence of fault-free steps can finish
"""

FRESH = 100  # Store score of a fresh copy: FRESH + "due in"; below it the score is a retry's, as on the wire
NOBODY, THE_DEAD = 3, 2  # in `Slot.owner` and `Slot.newest`, where 0 and 1 are the two workers
WAITING, PARTING, RUNNING, SUCCEEDED, FAILED, REJECTED = range(6)  # phases of a delivery in a worker's hands
REMOVED, BURIED, OUTLIVED = 1, 2, 3  # marks; outlived: buried, and a newer copy before it


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of the protocol, each of which can be switched off to see what it is for."""

    receipts: bool = True  # off: phase two compares the member only, as in the article
    keep_newer: bool = True  # off: rollback and expire overwrite the copy that waits
    gate: bool = True  # off: whoever asks may take while another owner's deliveries are open
    fence: bool = True  # off: a prepare with an old epoch is served
    held: bool = True  # off: after a lost reply the worker simply prepares again
    held_keeps_age: bool = True  # off: the answer of `held` counts as a fresh confirmation
    skip_in_flight: bool = True  # off: prepare takes a member that Prepare holds already
    supersede: bool = True  # off: a send that meets a waiting retry merges into it
    marks: bool = True  # off: a person's remove or bury leaves no mark on what is in flight
    leave_prepare: bool = True  # off: a person takes the record straight out of Prepare
    release_refunds: bool = True  # off: a release spends a retry, as a rollback does
    release_original: bool = True  # off: a release puts back a fresh copy, whatever was taken
    release_earlier: bool = True  # off: range_merge, the released copy gives up its earlier time
    fresh_before_retry: bool = True  # off: range_merge, "the earlier score" may be a retry score
    release_is_final: bool = True  # off: a worker forgets what it released before the answer came
    expire_waits: bool = True  # off: expire does not look at the time-out
    promote_drops: bool = True  # off: promote overwrites a waiting copy
    prepare_drops_retry: bool = True  # off: a copy in Retry stays while the fresh one is taken
    start_in_time: bool = True  # off: a listener starts however old its delivery is
    one_thread: bool = True  # off: a worker starts a listener of the slot while an earlier one still runs
    owners_are_new: bool = True  # off: both workers use one owner id, as after a careless restart
    dead_apart: bool = True  # off: the end of a live copy tidies up what lies in Dead
    fenced_asks_again: bool = True  # off: acquire once per assignment, even where `fenced` came in between
    drop_is_counted: bool = True  # off: a superseding send forgets to count the copy it gives up

    def without(self, rule: str) -> "Rules":
        return replace(self, **{rule: False})


@dataclass(frozen=True, slots=True)
class Budget:
    """How often each event may happen that could otherwise happen for ever, and the size of the slot."""

    members: int = 1
    topic_type: str = "fixed_time"  # or "range_merge"
    serial: bool = True
    max_retries: int = 2
    timeout: int = 1  # ticks
    backoffs: tuple[int, ...] = (0, 1)  # ticks: 0 goes straight back to Store
    sends: int = 2
    foreign: int = 0  # plain ZADDs by an article's producer
    lost: int = 0  # replies that never came, and requests that arrive late
    crashes: int = 0
    handovers: int = 0
    persons: int = 0  # remove, bury, replay, reschedule
    rejects: int = 0
    releases: int | None = None  # None: as often as anybody likes
    jumps: int = 0  # steps of the Redis clock, which the workers' clocks do not make
    jump: int = 1  # ticks
    jump_excuses: bool = (
        True  # a delivery across a jump beyond half its time-out counts as having outlived it
    )
    max_states: int = 3_000_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a walk found: `complete` when no state was left out, `violations` maps a property to its shortest trace."""

    states: int
    steps: int
    seconds: float
    complete: bool
    violations: dict[str, list[str]]

    def __str__(self) -> str:
        head = f"{self.states:,} states, {self.steps:,} steps, {self.seconds:.1f} s"
        head += ", complete" if self.complete else ", not complete"
        return "\n".join([head, *(f"{name}: {'; '.join(trace)}" for name, trace in self.violations.items())])


class Record(NamedTuple):
    """What Prepare and the in-flight hash hold of one member. The original score follows from `left`."""

    left: int
    age: int
    mark: int
    covers: bool  # no send came since: what ends it ends the last send too
    jumped: bool  # Redis' clock jumped over more than half its time-out


class Member(NamedTuple):
    """One message: where its copies are, and what the properties have to remember of it."""

    store: int = 0
    retry: tuple[int, int] | None = None  # retries, due in
    record: Record | None = None
    dead: bool = False
    needed: bool = False  # the last send is neither done, dead nor removed
    mourned: bool = False  # it lies in Dead until a person takes it out
    early: int = 0  # the last stored send is due in so many ticks
    taken: int = 0  # deliveries of the last send
    unwanted: bool = False  # a person removed it, and nobody sent it since


class Item(NamedTuple):
    """A delivery in a worker's hands."""

    phase: int
    age: int  # ticks since its prepare or extend was asked for, by the worker's own clock
    current: bool  # its receipt is the one in Prepare
    covers: bool
    excused: bool  # it outlived its time-out by Redis' clock


class Worker(NamedTuple):
    """One worker process, which is one thread as far as this slot goes."""

    running: tuple[int, Item] | None = None  # a member and its delivery, until the listener returned
    hand: tuple[Item | None, ...] = ()
    lost: int = 0  # 0, or 1 + ticks since the prepare whose reply did not come


class Late(NamedTuple):
    """A request that is still on its way while its sender has given it up."""

    kind: str
    worker: int
    member: int
    current: bool  # its receipt, or for prepare its epoch, is still good


class Slot(NamedTuple):
    """What is not one member's or one worker's: the control hash, the coordinator, the network, what is left to happen."""

    owner: int = NOBODY
    newest: int = 0  # who holds the highest epoch
    assigned: int = 0
    late: Late | None = None
    sends: int = 0
    foreign: int = 0
    lost: int = 0
    crashes: int = 0
    handovers: int = 0
    persons: int = 0
    rejects: int = 0
    releases: int = 0
    jumps: int = 0


LIVE = {"stored": 1, "foreign": 1, "revived": 1, "committed": -1, "removed": -1, "dropped": -1, "died": -1}
DEAD = {"died": 1, "dead_merged": -1, "revived": -1, "replay_merged": -1, "removed_dead": -1}
DELIVERED = {
    "prepared": 1,
    "committed": -1,
    "failed": -1,
    "expired": -1,
    "released": -1,
    "rejected": -1,
    "ended_marked": -1,
}
SENT = {"sent": 1, "stored": -1, "merged": -1, "replaced": -1}

# The member after a transition and what it broke; None where the transition does not apply.
Change = tuple[int, str | None] | None


class Transitions:
    """What each script does to one member. A method answers the member after, the counters raised, what it broke."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.range_merge = budget.topic_type == "range_merge"

    def send(self, m: Member, due: int) -> Any:
        """send_replace, or send_merge on a range_merge topic."""
        counters = ["sent"]
        store, retry, early = FRESH + due, m.retry, due
        if m.store >= FRESH:
            counters.append("merged" if self.range_merge else "replaced")
            if self.range_merge:
                store, early = m.store, m.early
        elif m.store and not self.rules.supersede:
            store = m.store
            counters.append("merged")
        else:
            counters.append("stored")
            if m.store and self.rules.drop_is_counted:
                counters.append("dropped")
            if retry and self.rules.supersede:
                retry = None
                counters.append("dropped")
        return self._sent(m._replace(store=store, retry=retry, early=early)), counters, None

    def plain_zadd(self, m: Member, due: int) -> Any:
        """A producer of the article: a bare ZADD that knows nothing of Retry."""
        counters = [] if m.store else ["foreign"]
        return self._sent(m._replace(store=FRESH + due, early=due)), counters, None

    def prepare(self, m: Member, _: int) -> Any:
        """Phase one for this member: None where it is not due, or in flight."""
        if not m.store or m.store > FRESH or (m.record and self.rules.skip_in_flight):
            return None
        broken = None
        if m.early:
            broken = "EARLY"
        elif m.unwanted:
            broken = "RESURRECT"
        elif m.taken > self.budget.max_retries:
            broken = "BUDGET"
        left = self.budget.max_retries if m.store == FRESH else m.store - 1
        counters, retry = ["prepared"], m.retry
        if retry and self.rules.prepare_drops_retry:
            retry = None
            counters.append("dropped")
        taken = m._replace(
            store=0, retry=retry, record=Record(left, 0, 0, True, False), early=0, taken=m.taken + 1
        )
        return taken, counters, broken

    def commit(self, m: Member, _: int) -> Any:
        if m.record is None:
            return None
        if m.record.mark:
            return self._end_marked(m, m.record)
        m, counters = m._replace(record=None), ["committed"]
        if not self.rules.dead_apart and not (m.store or m.retry):
            m = m._replace(dead=False)
        return m, counters, None

    def rollback(self, m: Member, backoff: int) -> Any:
        return m.record and self._back(m, m.record, backoff, "failed")

    def reject(self, m: Member, _: int) -> Any:
        if m.record is None:
            return None
        if m.record.mark:
            return self._end_marked(m, m.record)
        m, counters = self._die(m, covers=m.record.covers)
        return m._replace(record=None), ["rejected", *counters], None

    def expire(self, m: Member, backoff: int) -> Any:
        if m.record is None or (self.rules.expire_waits and m.record.age <= self.budget.timeout):
            return None
        return self._back(m, m.record, backoff, "expired")

    def release(self, m: Member, _: int) -> Any:
        record = m.record
        if record is None:
            return None
        if record.mark:
            return self._end_marked(m, record)
        taken = m.taken - 1 if record.covers else m.taken
        if not self.rules.release_refunds:
            return self._back(m._replace(taken=taken), record, 0, "released")
        fresh = record.left == self.budget.max_retries or not self.rules.release_original
        original = FRESH if fresh else record.left + 1
        counters = ["released"]
        early, store = m.early, m.store
        if store or m.retry:
            counters.append("dropped")
            if self.range_merge and store >= FRESH and (fresh or not self.rules.fresh_before_retry):
                # Merged with what was taken before it: the first time counts, and it was due already.
                store = min(store, original) if self.rules.release_earlier else store
                early = 0 if fresh else early
        else:
            store = original
        return m._replace(store=store, record=None, early=early, taken=taken), counters, None

    def extend(self, m: Member, _: int) -> Any:
        return m.record and (m._replace(record=m.record._replace(age=0, jumped=False)), [], None)

    def promote(self, m: Member, _: int) -> Any:
        if m.retry is None or m.retry[1]:
            return None
        if m.store:
            store = m.store if self.rules.promote_drops else m.retry[0]
            return m._replace(store=store, retry=None), ["dropped"], None
        return m._replace(store=m.retry[0], retry=None), [], None

    def replay(self, m: Member, _: int) -> Any:
        if not m.dead:
            return None
        m = m._replace(dead=False, mourned=False)
        if m.store or m.retry:
            return m, ["replay_merged"], None
        return self._sent(m._replace(store=FRESH, early=0)), ["revived"], None

    def bury(self, m: Member, _: int) -> Any:
        """By a person: what waits goes to Dead, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        outlived = m.store or m.retry or (m.record and m.record.mark == OUTLIVED)
        m, counters = self._mark(m._replace(unwanted=True), OUTLIVED if outlived else BURIED)
        if m.store or m.retry:
            second = ["dropped"] if m.store and m.retry else []
            m, more = self._die(m, covers=True)
            m = m._replace(store=0, retry=None, early=0)
            counters += more + second
        return m, counters, None

    def remove(self, m: Member, _: int) -> Any:
        """By a person: what waits is gone, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        waiting = bool(m.store) + bool(m.retry)
        m, counters = self._mark(m._replace(unwanted=True, needed=False), REMOVED)
        return m._replace(store=0, retry=None, early=0), counters + ["removed"] * waiting, None

    def remove_dead(self, m: Member, _: int) -> Any:
        return (m._replace(dead=False, mourned=False), ["removed_dead"], None) if m.dead else None

    def reschedule(self, m: Member, due: int) -> Any:
        if m.store >= FRESH:
            return m._replace(store=FRESH + due, early=due), [], None
        if m.store:
            return m._replace(store=0, retry=(m.store, due)), ["dropped"] if m.retry else [], None
        return (m._replace(retry=(m.retry[0], due)), [], None) if m.retry else None

    def succeed(self, m: Member, covers: int) -> Any:
        """A listener returned well: not a script, only what the properties have to know."""
        return (m._replace(needed=False) if covers else m), [], None

    def tick(self, m: Member, by: int) -> Any:
        return self._later(m, by), [], None

    def jump(self, m: Member, by: int) -> Any:
        m = self._later(m, by)
        if self.budget.jump_excuses and by > self.budget.timeout // 2 and m.record:
            m = m._replace(record=m.record._replace(jumped=True))
        return m, [], None

    def _later(self, m: Member, by: int) -> Member:
        record = m.record and m.record._replace(age=min(m.record.age + by, self.budget.timeout + 1))
        store = max(FRESH, m.store - by) if m.store >= FRESH else m.store
        retry = m.retry and (m.retry[0], max(0, m.retry[1] - by))
        return m._replace(store=store, retry=retry, record=record, early=max(0, m.early - by))

    def _sent(self, m: Member) -> Member:
        record = m.record and m.record._replace(covers=False)
        return m._replace(record=record, needed=True, unwanted=False, taken=0)

    def _back(self, m: Member, record: Record, backoff: int, ended: str) -> Any:
        """A delivery failed: a retry of what is left, or Dead, or nothing where something newer waits."""
        if record.mark:
            return self._end_marked(m, record)
        m = m._replace(record=None)
        if (m.store or m.retry) and self.rules.keep_newer:
            return m, [ended, "dropped"], None
        if not record.left:
            broken = "BUDGET" if record.covers and m.taken != 1 + self.budget.max_retries else None
            m, counters = self._die(m, covers=record.covers)
            return m, [ended, *counters], broken
        if backoff:
            return m._replace(retry=(record.left, backoff)), [ended, *["dropped"] * bool(m.retry)], None
        return m._replace(store=record.left), [ended, *["dropped"] * bool(m.store)], None

    def _end_marked(self, m: Member, record: Record) -> Any:
        m = m._replace(record=None)
        if record.mark == REMOVED:
            return m, ["ended_marked", "removed"], None
        if record.mark == OUTLIVED and m.dead:
            # The newer copy, which was buried with it, is the one that stays.
            return m, ["ended_marked", "dropped"], None
        m, counters = self._die(m, covers=record.covers)
        return m, ["ended_marked", *counters], None

    def _die(self, m: Member, *, covers: bool) -> tuple[Member, list[str]]:
        counters = ["died", "dead_merged"] if m.dead else ["died"]
        return m._replace(dead=True, mourned=True, needed=m.needed and not covers), counters

    def _mark(self, m: Member, mark: int) -> tuple[Member, list[str]]:
        if m.record is None:
            return m, []
        if not self.rules.leave_prepare:
            return self._end_marked(m, m.record._replace(mark=mark))[:2]
        return (m._replace(record=m.record._replace(mark=mark)) if self.rules.marks else m), []


def _misplaced(m: Member) -> str | None:
    if m.mourned and not m.dead:
        return "GRAVE"
    if m.needed and not (m.store or m.retry or m.record):
        return "LOSS"
    return "LATE" if m.store > FRESH + m.early else None


def _unbalanced(before: Member, after: Member, counters: list[str]) -> bool:
    """Whether one transition's counters disagree with what it moved. Where none ever does, the ledger always balances."""

    def live(m: Member) -> int:
        return bool(m.store) + bool(m.retry) + bool(m.record)

    def total(equation: dict[str, int]) -> int:
        return sum(equation.get(name, 0) for name in counters)

    return (
        total(LIVE) != live(after) - live(before)
        or total(DEAD) != after.dead - before.dead
        or total(DELIVERED) != bool(after.record) - bool(before.record)
        or total(SENT) != 0
    )


class _Numbered(dict[Any, int]):
    """Values by number and numbers by value: small ints make small, fast states."""

    def __init__(self) -> None:
        self.values_: list[Any] = []

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self.values_)
        self.values_.append(value)
        return number


def _remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Work a pure method out once per argument list, per instance."""
    name = "_memory_" + method.__name__

    def recall(self: Any, *args: Any) -> Any:
        try:
            return self.__dict__[name][args]
        except KeyError:
            answer = self.__dict__.setdefault(name, {})[args] = method(self, *args)
            return answer

    return recall


State = tuple[int, ...]  # numbers: one per member, of the two workers, of the slot
Step = tuple[tuple[Any, ...], State, str | None, bool]  # label, state after, what it broke, fault-free


class SlotModel:
    """One slot under a set of rules and a budget: its first state and every step out of a state."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.n = budget.members
        self.transitions = Transitions(rules, budget)
        self.members, self.workers, self.slots = _Numbered(), _Numbered(), _Numbered()
        self.too_old = budget.timeout // 2 + 1
        empty = self.workers[Worker(hand=(None,) * self.n)]
        slot = Slot(
            # Without a gate nobody owns anything.
            newest=0 if budget.serial else NOBODY,
            assigned=0 if budget.serial else NOBODY,
            sends=budget.sends,
            foreign=budget.foreign,
            lost=budget.lost,
            crashes=budget.crashes,
            handovers=budget.handovers,
            persons=budget.persons,
            rejects=budget.rejects,
            releases=-1 if budget.releases is None else budget.releases,
            jumps=budget.jumps,
        )
        self.first: State = (*([self.members[Member()]] * self.n), empty, empty, self.slots[slot])

    # One member

    @_remembered
    def change(self, name: str, member: int, argument: int = 0) -> Change:
        before = self.members.values_[member]
        answer = getattr(self.transitions, name)(before, argument)
        if not answer:
            return None
        after, counters, broken = answer
        if broken is None:
            broken = _misplaced(after)
        if broken is None and _unbalanced(before, after, counters):
            broken = "LEDGER"
        return self.members[after], broken

    # One worker

    def _each(self, worker: int, member: int | None, turn: Callable[[Item], Item | None]) -> int:
        """The worker with every delivery (of one member, or of all) turned into another."""
        w: Worker = self.workers.values_[worker]
        running = w.running
        if running and member in {None, running[0]}:
            turned = turn(running[1])
            running = (running[0], turned) if turned else None
        hand = tuple(turn(x) if x and member in {None, i} else x for i, x in enumerate(w.hand))
        return self.workers[w._replace(running=running, hand=hand)]

    @_remembered
    def stale(self, worker: int, member: int, overdue: bool) -> int:
        """The member's record left Prepare: no receipt of it is good any more."""

        def turn(x: Item) -> Item:
            late = overdue and x.current and x.phase == RUNNING
            return x._replace(current=False, excused=x.excused or late) if x.current else x

        return self._each(worker, member, turn)

    @_remembered
    def uncovered(self, worker: int, member: int) -> int:
        return self._each(worker, member, lambda x: x._replace(covers=False))

    @_remembered
    def older(self, worker: int) -> int:
        def turn(x: Item) -> Item:
            return x._replace(age=min(x.age + 1, self.too_old)) if x.phase == WAITING else x

        w: Worker = self.workers.values_[self._each(worker, None, turn)]
        return self.workers[w._replace(lost=w.lost and min(w.lost + 1, 1 + self.too_old))]

    @_remembered
    def excused(self, worker: int, member: int) -> int:
        """The clock jumped: the member's delivery has outlived its time-out by Redis' clock."""

        def turn(x: Item) -> Item:
            return x._replace(excused=True) if x.current and x.phase in {WAITING, RUNNING} else x

        return self._each(worker, member, turn)

    @_remembered
    def holding(self, worker: int, member: int, item: Item | None) -> int:
        w: Worker = self.workers.values_[worker]
        return self.workers[w._replace(hand=(*w.hand[:member], item, *w.hand[member + 1 :]))]

    @_remembered
    def with_lost(self, worker: int, lost: int) -> int:
        return self.workers[self.workers.values_[worker]._replace(lost=lost)]

    @_remembered
    def with_running(self, worker: int, running: tuple[int, Item] | None) -> int:
        return self.workers[self.workers.values_[worker]._replace(running=running)]

    # The slot

    @_remembered
    def slot(self, number: int, changes: tuple[tuple[str, Any], ...]) -> int:
        return self.slots[self.slots.values_[number]._replace(**dict(changes))]

    @_remembered
    def spent(self, number: int, what: str) -> int:
        slot = self.slots.values_[number]
        return self.slots[slot._replace(**{what: getattr(slot, what) - 1})]

    @_remembered
    def ended(self, number: int, member: int, prepare_empty: bool) -> int:
        """The member's record left Prepare."""
        slot: Slot = self.slots.values_[number]
        late = slot.late
        if late and late.kind not in {"prepare", "acquire"} and late.member == member:
            late = late._replace(current=False)
        return self.slots[slot._replace(late=late, owner=NOBODY if prepare_empty else slot.owner)]

    @_remembered
    def acquired(self, number: int, worker: int) -> int:
        slot: Slot = self.slots.values_[number]
        late = slot.late
        if late and late.kind == "prepare":
            late = late._replace(current=False)
        return self.slots[slot._replace(newest=worker, late=late)]

    # Steps

    def _moved(self, s: State, i: int, member: int, *, overdue: bool = False) -> State:
        """The state with member i changed; receipts, and whose deliveries the gate knows, follow."""
        n, value = self.n, self.members.values_
        new = list(s)
        new[i] = member
        if value[s[i]].record and not value[member].record:
            new[n], new[n + 1] = self.stale(s[n], i, overdue), self.stale(s[n + 1], i, overdue)
            new[-1] = self.ended(s[-1], i, not any(value[x].record for x in new[:n]))
        return tuple(new)

    def _sent(self, s: State, i: int, member: int, spent: str) -> State:
        n = self.n
        new = list(s)
        new[i] = member
        new[n], new[n + 1], new[-1] = (
            self.uncovered(s[n], i),
            self.uncovered(s[n + 1], i),
            self.spent(s[-1], spent),
        )
        return tuple(new)

    def _with(self, s: State, position: int, number: int) -> State:
        return (*s[:position], number, *s[position + 1 :])

    def steps(self, s: State) -> Iterator[Step]:
        slot: Slot = self.slots.values_[s[-1]]
        yield from self._outside(s, slot)
        yield from self._upkeep(s)
        for j in (0, 1):
            yield from self._taking(s, slot, j)
            yield from self._working(s, slot, j)
        if slot.late:
            yield from self._late(s, slot, slot.late)

    def _outside(self, s: State, slot: Slot) -> Iterator[Step]:
        """Producers, persons, the coordinator, crashes."""
        n, change = self.n, self.change
        for i in range(n):
            for due in (0, 1):
                if slot.sends:
                    member, broken = change("send", s[i], due)
                    yield ("send", i, due), self._sent(s, i, member, "sends"), broken, False
                if slot.foreign:
                    member, broken = change("plain_zadd", s[i], due)
                    yield ("plain ZADD", i, due), self._sent(s, i, member, "foreign"), broken, False
            if not slot.persons:
                continue
            for name, argument in (
                ("replay", 0),
                ("bury", 0),
                ("remove", 0),
                ("remove_dead", 0),
                ("reschedule", 0),
                ("reschedule", 1),
            ):
                after = change(name, s[i], argument)
                if after is None:
                    continue
                if name == "replay" and not self.members.values_[after[0]].taken:
                    t = self._sent(s, i, after[0], "persons")
                else:
                    t = self._moved(s, i, after[0])
                    t = self._with(t, n + 2, self.spent(t[-1], "persons"))
                yield ("person", name, i, argument), t, after[1], False
        if slot.crashes:
            yield from (self._crash(s, slot, j) for j in (0, 1))
        if slot.handovers:
            new = 1 - slot.assigned
            number = self.acquired(self.slot(self.spent(s[-1], "handovers"), (("assigned", new),)), new)
            yield ("hand-over", new), self._with(s, n + 2, number), None, False

    def _crash(self, s: State, slot: Slot, j: int) -> Step:
        """A kill -9, and a new process with a new owner id in its place."""
        late = slot.late
        if late and late.kind in {"prepare", "acquire"} and late.worker == j:
            late = late._replace(worker=THE_DEAD)
        number = self.spent(s[-1], "crashes")
        changes = (
            ("owner", THE_DEAD if slot.owner == j else slot.owner),
            ("newest", THE_DEAD if slot.newest == j else slot.newest),
            ("late", late),
        )
        t = self._with(s, self.n + 2, self.slot(number, changes))
        return (
            ("kill -9", j),
            self._with(t, self.n + j, self.workers[Worker(hand=(None,) * self.n)]),
            None,
            False,
        )

    def _upkeep(self, s: State) -> Iterator[Step]:
        """Time, and what rides along with any prepare."""
        n, change, value = self.n, self.change, self.members.values_
        slot: Slot = self.slots.values_[s[-1]]
        t = (*(change("tick", m, 1)[0] for m in s[:n]), self.older(s[n]), self.older(s[n + 1]), s[-1])
        if t != s:
            yield ("tick",), t, None, True
        if slot.jumps:
            new = [
                *(change("jump", m, self.budget.jump)[0] for m in s[:n]),
                s[n],
                s[n + 1],
                self.spent(s[-1], "jumps"),
            ]
            for i in range(n):
                record = value[new[i]].record
                if record and record.jumped:
                    new[n], new[n + 1] = self.excused(new[n], i), self.excused(new[n + 1], i)
            yield ("jump", self.budget.jump), tuple(new), None, False
        for i in range(n):
            after = change("promote", s[i])
            if after:
                yield ("promote", i), self._moved(s, i, after[0]), after[1], True
            if not value[s[i]].record:
                continue
            overdue = value[s[i]].record.age > self.budget.timeout
            for backoff in self.budget.backoffs:
                after = change("expire", s[i], backoff)
                if after:
                    yield ("expire", i, backoff), self._moved(s, i, after[0], overdue=overdue), after[1], True

    def _open(self, s: State, slot: Slot, j: int) -> bool:
        """Whether the gate lets owner j take."""
        if not (self.budget.serial and self.rules.gate) or slot.owner in {NOBODY, j}:
            return True
        return not self.rules.owners_are_new and slot.owner < THE_DEAD and j < THE_DEAD

    def _taken(self, s: State, i: int, member: int, j: int) -> State:
        """Member i is in Prepare, in the name of owner j."""
        value = self.members.values_
        if value[s[i]].record:  # only without `skip_in_flight`: the earlier delivery's receipt is overwritten
            for position in (self.n, self.n + 1):
                s = self._with(s, position, self.stale(s[position], i, False))
            s = self._with(s, self.n + 2, self.ended(s[-1], i, False))
        t = self._with(s, i, member)
        if self.budget.serial:
            t = self._with(t, self.n + 2, self.slot(t[-1], (("owner", j),)))
        return t

    def _taking(self, s: State, slot: Slot, j: int) -> Iterator[Step]:
        """acquire, held, prepare, and the prepare whose reply does not come."""
        n = self.n
        w: Worker = self.workers.values_[s[n + j]]
        if self.budget.serial:
            if slot.lost and slot.late is None and (w.lost or (slot.assigned == j and slot.newest != j)):
                late = Late("acquire", j, 0, False)
                number = self.slot(self.spent(s[-1], "lost"), (("late", late),))
                yield ("acquire late", j), self._with(s, n + 2, number), None, False
            if w.lost:
                yield from self._recover(s, slot, j, w)
                return
            if (
                slot.assigned == j
                and slot.newest != j
                and (self.rules.fenced_asks_again or slot.newest == THE_DEAD)
            ):
                yield ("acquire", j), self._with(s, n + 2, self.acquired(s[-1], j)), None, True
            if slot.newest != j and self.rules.fence:
                return
        if slot.lost and slot.late is None:
            late = Late("prepare", j if self.budget.serial else THE_DEAD, 0, slot.newest == j)
            t = self._with(s, n + 2, self.slot(self.spent(s[-1], "lost"), (("late", late),)))
            yield ("prepare late", j), self._awaiting(t, j), None, False
        if not self._open(s, slot, j):
            return
        # Who lost the slot is told of it some day: nothing can be built on what it takes until then.
        fair = not self.budget.serial or slot.assigned == j
        for i in range(n):
            after = self.change("prepare", s[i])
            if after is None:
                continue
            t = self._taken(s, i, after[0], j)
            if slot.lost:
                u = self._awaiting(self._with(t, n + 2, self.spent(t[-1], "lost")), j)
                orphan = None if self.rules.held or not self.budget.serial else "ORPHAN"
                yield ("prepare, reply lost", j, i), u, after[1] or orphan, False
            mine = w.hand[i]
            if (w.running is None or w.running[0] != i or w.running[1].phase == RUNNING) and (
                mine is None or mine.phase in {WAITING, PARTING}
            ):
                item = Item(WAITING, 0, True, True, False)
                yield ("prepare", j, i), self._with(t, n + j, self.holding(t[n + j], i, item)), after[1], fair

    def _awaiting(self, s: State, j: int) -> State:
        if not (self.budget.serial and self.rules.held):
            return s
        return self._with(s, self.n + j, self.with_lost(s[self.n + j], 1))

    def _recover(self, s: State, slot: Slot, j: int, w: Worker) -> Iterator[Step]:
        """Acquire again, which fences the late copy, then go on with what `held` answers."""
        n = self.n
        number = s[n + j]
        if slot.owner == j:
            for i in range(n):
                record = self.members.values_[s[i]].record
                mine = [w.hand[i], w.running[1] if w.running and w.running[0] == i else None]
                if record is None or any(x and x.current for x in mine):
                    continue
                age = w.lost - 1 if self.rules.held_keeps_age else 0
                number = self.holding(number, i, Item(WAITING, age, True, record.covers, record.jumped))
        t = self._with(s, n + 2, self.acquired(s[-1], j))
        yield ("recover", j), self._with(t, n + j, self.with_lost(number, 0)), None, True

    def _working(self, s: State, slot: Slot, j: int) -> Iterator[Step]:
        """Listeners, phase two, heartbeat."""
        n = self.n
        w: Worker = self.workers.values_[s[n + j]]
        if w.running:
            i, item = w.running
            if item.phase == RUNNING:
                yield from self._listening(s, slot, j, i, item, w)
            else:
                yield from self._answering(s, slot, j, i, item)
        for i, held in enumerate(w.hand):
            if held is None:
                continue
            item = held
            if item.phase >= SUCCEEDED:
                yield from self._answering(s, slot, j, i, item)
                continue
            yield from self._releasing(s, slot, j, i, item)
            if item.phase == WAITING:
                yield from self._starting(s, j, i, item, w)
                yield from self._extending(s, slot, j, i, item)

    def _listening(self, s: State, slot: Slot, j: int, i: int, item: Item, w: Worker) -> Iterator[Step]:
        n = self.n
        for phase, name in ((SUCCEEDED, "ok"), (FAILED, "fails"), (REJECTED, "rejects")):
            if phase == REJECTED and not slot.rejects:
                continue
            t, broken = s, None
            if phase == SUCCEEDED:
                member, broken = self.change("succeed", s[i], int(item.covers))
                t = self._with(s, i, member)
            if phase == REJECTED:
                t = self._with(s, n + 2, self.spent(s[-1], "rejects"))
            # Nothing but its receipt matters from here on.
            done = Item(phase, 0, item.current, False, False)
            number = s[n + j]
            if w.hand[i] is None:
                number = self.holding(self.with_running(number, None), i, done)
            else:
                number = self.with_running(number, (i, done))
            yield ("listener", j, i, name), self._with(t, n + j, number), broken, phase == SUCCEEDED
        if self.members.values_[s[i]].record and item.current:
            after = self.change("extend", s[i])
            if after[0] != s[i]:
                number = self.with_running(s[n + j], (i, item._replace(excused=False)))
                yield ("extend", j, i), self._with(self._with(s, i, after[0]), n + j, number), after[1], True
            yield from self._delayed(s, slot, "extend", j, i, item)

    def _valid(self, s: State, i: int, current: bool) -> bool:
        return current if self.rules.receipts else self.members.values_[s[i]].record is not None

    def _delayed(self, s: State, slot: Slot, kind: str, j: int, i: int, item: Item) -> Iterator[Step]:
        if slot.lost and slot.late is None:
            late = Late(kind, j, i, item.current)
            number = self.slot(self.spent(s[-1], "lost"), (("late", late),))
            yield ("late", kind, j, i), self._with(s, self.n + 2, number), None, False

    def _done(self, s: State, j: int, i: int, item: Item) -> State:
        """The worker has nothing more to do for this delivery."""
        number = s[self.n + j]
        in_hand = self.workers.values_[number].hand[i]
        finished = in_hand is not None and in_hand.phase == item.phase
        number = self.holding(number, i, None) if finished else self.with_running(number, None)
        return self._with(s, self.n + j, number)

    def _answering(self, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
        """commit, rollback or Reject: answered, executed without an answer, or on its way for a long time."""
        n = self.n
        kind = {SUCCEEDED: "commit", FAILED: "rollback", REJECTED: "reject"}[item.phase]
        if not self._valid(s, i, item.current):
            yield (kind + ": stale", j, i), self._done(s, j, i, item), None, True
            return
        yield from self._delayed(s, slot, kind, j, i, item)
        for backoff in self.budget.backoffs if item.phase == FAILED else (0,):
            member, broken = self.change(kind, s[i], backoff)
            t = self._moved(s, i, member)
            yield (kind, j, i, backoff), self._done(t, j, i, item), broken, True
            if slot.lost:
                yield (
                    (kind + ", reply lost", j, i, backoff),
                    self._with(t, n + 2, self.spent(t[-1], "lost")),
                    broken,
                    False,
                )

    def _releasing(self, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
        n = self.n
        if slot.releases or item.phase == PARTING:
            t, broken = s, None
            if self._valid(s, i, item.current):
                member, broken = self.change("release", s[i])
                t = self._moved(s, i, member)
            t = self._with(t, n + j, self.holding(t[n + j], i, None))
            if slot.releases > 0 and item.phase == WAITING:
                t = self._with(t, n + 2, self.spent(t[-1], "releases"))
            yield ("release", j, i), t, broken, True
        if item.phase == WAITING and slot.lost and slot.late is None and slot.releases:
            late = Late("release", j, i, item.current)
            number = self.slot(self.spent(s[-1], "lost"), (("late", late),))
            parting = Item(PARTING, 0, item.current, False, False) if self.rules.release_is_final else None
            t = self._with(s, n + 2, number)
            yield (
                ("late", "release", j, i),
                self._with(t, n + j, self.holding(t[n + j], i, parting)),
                None,
                False,
            )

    def _starting(self, s: State, j: int, i: int, item: Item, w: Worker) -> Iterator[Step]:
        if self.rules.start_in_time and item.age >= self.too_old:
            return
        if w.running and (self.rules.one_thread or w.running[1].phase != RUNNING):
            return
        broken = None
        for other in (j, 1 - j):
            running = self.workers.values_[s[self.n + other]].running
            if running is None or running[1].phase != RUNNING or running[1].excused or item.excused:
                continue
            if self.budget.serial or running[0] == i:
                broken = "OVERLAP"
        if w.running and not broken:
            return
        number = self.holding(s[self.n + j], i, None)
        number = self.with_running(number, (i, item._replace(phase=RUNNING, age=0)))
        yield ("start", j, i), self._with(s, self.n + j, number), broken, True

    def _extending(self, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
        """A heartbeat while it waits in the process: a stale answer makes the worker forget it."""
        n = self.n
        if not self._valid(s, i, item.current):
            yield ("extend: stale", j, i), self._with(s, n + j, self.holding(s[n + j], i, None)), None, True
            return
        after = self.change("extend", s[i])
        t = self._with(s, i, after[0])
        t = self._with(t, n + j, self.holding(s[n + j], i, item._replace(age=0, excused=False)))
        if t != s:
            yield ("extend", j, i), t, after[1], True
        yield from self._delayed(s, slot, "extend", j, i, item)

    def _late(self, s: State, slot: Slot, late: Late) -> Iterator[Step]:
        """A request that its sender gave up arrives."""
        n = self.n
        gone = self._with(s, n + 2, self.slot(s[-1], (("late", None),)))
        if late.kind == "acquire":
            # It raises the epoch, and nobody learns the new one.
            yield (
                ("arrives: epoch raised", late.worker),
                self._with(gone, n + 2, self.acquired(gone[-1], THE_DEAD)),
                None,
                False,
            )
            return
        if late.kind != "prepare":
            i = late.member
            t, broken = gone, None
            if self._valid(s, i, late.current):
                member, broken = self.change(late.kind, s[i], self.budget.backoffs[0])
                t = self._moved(gone, i, member)
            yield ("arrives", late.kind, late.worker, i), t, broken, False
            return
        if self.budget.serial and self.rules.fence and not late.current:
            yield ("arrives: fenced", late.worker), gone, None, False
            return
        yield ("arrives: nothing taken", late.worker), gone, None, False
        if not self._open(s, slot, late.worker):
            return
        for i in range(n):
            after = self.change("prepare", s[i])
            if after:
                t = self._taken(gone, i, after[0], late.worker)
                knows = (
                    late.worker == THE_DEAD
                    or not self.budget.serial
                    or self.workers.values_[s[n + late.worker]].lost
                )
                yield ("arrives: taken", late.worker, i), t, after[1] or (None if knows else "ORPHAN"), False

    # Symmetry

    @_remembered
    def _members_swapped(self, worker: int) -> int:
        w: Worker = self.workers.values_[worker]
        running = w.running and (1 - w.running[0], w.running[1])
        return self.workers[w._replace(running=running, hand=w.hand[::-1])]

    @_remembered
    def _slot_swapped(self, number: int, workers: bool, members: bool) -> int:
        slot: Slot = self.slots.values_[number]
        late = slot.late
        if workers:
            other = (1, 0, THE_DEAD, NOBODY)
            late = late and late._replace(worker=other[late.worker])
            slot = slot._replace(
                owner=other[slot.owner], newest=other[slot.newest], assigned=other[slot.assigned]
            )
        if members and late and late.kind not in {"prepare", "acquire"}:
            late = late._replace(member=1 - late.member)
        return self.slots[slot._replace(late=late)]

    def canonical(self, s: State) -> State:
        """The same state with workers and members called so that its numbers are smallest."""
        if self.n == 1:
            m, a, b, g = s
            if a < b:
                return s
            other = (m, b, a, self._slot_swapped(g, True, False))
            return min(other, s)
        m, k, a, b, g = s
        if k < m:
            m, k, a, b = k, m, self._members_swapped(a), self._members_swapped(b)
            g = self._slot_swapped(g, False, True)
        best = (m, k, a, b, g) if a <= b else (m, k, b, a, self._slot_swapped(g, True, False))
        if a == b:
            best = min(best, (m, k, b, a, self._slot_swapped(g, True, False)))
        if m == k:
            c, d, h = self._members_swapped(a), self._members_swapped(b), self._slot_swapped(g, False, True)
            best = min(best, (m, k, c, d, h), (m, k, d, c, self._slot_swapped(h, True, False)))
        return best

    def idle(self, s: State) -> bool:
        """Nothing waits and nothing is in flight."""
        return not any(m.store or m.retry or m.record for m in (self.members.values_[x] for x in s[: self.n]))


def check(
    rules: Rules,
    budget: Budget,
    *,
    properties: tuple[str, ...] = PROPERTIES,
    stop_at_first: bool = False,
) -> Verdict:
    """
    Walk every state within the budget and report the shortest trace to each property that can be broken.

    STUCK needs every step remembered: leave it out of `properties` where memory or time matter. With `stop_at_first`
    the walk ends at the first violation, which is the shortest of all.
    """
    started = time.perf_counter()
    model = SlotModel(rules, budget)
    canonical, steps = model.canonical, model.steps
    first = canonical(model.first)
    numbers: dict[State, int] = {first: 0}
    order = [first]
    parents = array("l", [-1])
    sources, targets = array("l"), array("l")
    want_stuck = "STUCK" in properties
    found: dict[str, list[str]] = {}
    walked = at = 0
    while at < len(order) and len(order) < budget.max_states:
        for label, t, broken, fair in steps(order[at]):
            walked += 1
            if broken is not None and broken in properties:
                if broken not in found:
                    found[broken] = _trace(model, order, parents, at, label, broken)
                    if stop_at_first:
                        return Verdict(len(order), walked, time.perf_counter() - started, False, found)
                continue
            t = canonical(t)
            number = numbers.get(t)
            if number is None:
                number = numbers[t] = len(order)
                order.append(t)
                parents.append(at)
            if want_stuck and fair:
                sources.append(at)
                targets.append(number)
        at += 1
    complete = at == len(order)
    if want_stuck and complete:
        stuck = _cannot_finish(model, order, sources, targets)
        if stuck is not None:
            found["STUCK"] = _trace(model, order, parents, stuck, None, None)
    return Verdict(len(order), walked, time.perf_counter() - started, complete, found)


def _cannot_finish(
    model: SlotModel, order: list[State], sources: Sequence[int], targets: Sequence[int]
) -> int | None:
    """The first state from which no fault-free steps lead to an idle one, by walking them backwards."""
    good = bytearray(len(order))
    counts = array("l", bytes(8 * (len(order) + 1)))
    for target in targets:
        counts[target + 1] += 1
    for i in range(len(order)):
        counts[i + 1] += counts[i]
    places, came_from = array("l", counts), array("l", bytes(8 * len(targets)))
    for source, target in zip(sources, targets, strict=True):
        came_from[places[target]] = source
        places[target] += 1
    todo = [i for i, s in enumerate(order) if model.idle(s)]
    for i in todo:
        good[i] = 1
    while todo:
        target = todo.pop()
        for source in came_from[counts[target] : counts[target + 1]]:
            if not good[source]:
                good[source] = 1
                todo.append(source)
    stuck = good.find(0)
    return None if stuck < 0 else stuck


def _trace(
    model: SlotModel,
    order: list[State],
    parents: Sequence[int],
    at: int,
    label: tuple[Any, ...] | None,
    broken: str | None,
) -> list[str]:
    """The steps to state `at` and the one after it, told with the names that the workers had from the start."""
    path = []
    while at >= 0:
        path.append(order[at])
        at = parents[at]
    path.reverse()
    s, told = model.first, []
    for following in path[1:]:
        for step, t, _, _ in model.steps(s):
            if model.canonical(t) == following:
                told.append(_tell(step))
                s = t
                break
    if label is not None:
        # The canonical state may have called them otherwise: find the same breach from the state as named here.
        told.append(
            next(_tell(step) for step, _, b, _ in model.steps(s) if b == broken and step[0] == label[0])
        )
    return told


SAID = {
    "prepare": "prepares {1}",
    "prepare, reply lost": "prepares {1}, the reply is lost",
    "prepare late": "prepares, no reply, the request is still on its way",
    "acquire": "acquires the slot",
    "acquire late": "acquires, no reply, the request is still on its way",
    "recover": "acquires again and asks for held",
    "start": "starts the listener of {1}",
    "listener": "listener of {1} {2}",
    "extend": "extends {1}",
    "extend: stale": "extends {1}: stale, drops it",
    "release": "releases {1}",
    "commit": "commits {1}",
    "commit: stale": "commits {1}: stale",
    "commit, reply lost": "commits {1}, the reply is lost",
    "rollback": "rolls {1} back with back-off {2}",
    "rollback: stale": "rolls {1} back: stale",
    "rollback, reply lost": "rolls {1} back with back-off {2}, the reply is lost",
    "reject": "rejects {1}",
    "reject: stale": "rejects {1}: stale",
    "reject, reply lost": "rejects {1}, the reply is lost",
    "kill -9": "is killed with -9 and restarts under a new owner id",
    "hand-over": "is given the slot and acquires it; the other is not told",
}


def _tell(label: tuple[Any, ...]) -> str:
    """A step as a person would say it."""
    name, *args = label
    if name in SAID:
        return f"w{args[0]} " + SAID[name].format(args[0], "ab"[args[1]] if len(args) > 1 else "", *args[2:])
    if name in {"send", "plain ZADD"}:
        return f"{name}({'ab'[args[0]]}, {'due in 1' if args[1] else 'due now'})"
    if name == "promote":
        return f"promote {'ab'[args[0]]}"
    if name == "expire":
        return f"expire {'ab'[args[0]]} with back-off {args[1]}"
    if name == "person":
        to = f" to {'in 1' if args[2] else 'now'}" if args[0] == "reschedule" else ""
        return f"a person: {args[0]} {'ab'[args[1]]}{to}"
    if name == "jump":
        return f"Redis' clock jumps by {args[0]}"
    if name == "late":
        return f"w{args[1]} {args[0]} {'ab'[args[2]]}, no reply, the request is still on its way"
    if name == "arrives":
        return f"the late {args[0]} {'ab'[args[2]]} of w{args[1]} arrives"
    if name.startswith("arrives: "):
        kind = "acquire" if "epoch" in name else "prepare"
        return f"the late {kind} arrives: {name[9:]}" + (f" {'ab'[args[1]]}" if len(args) > 1 else "")
    return str(name)
