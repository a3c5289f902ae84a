"""What the walk remembers of a message, a worker and the slot, by number, and what each script does to one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.proof.slot_model.rules import Budget, Rules

FRESH = 100  # Store score of a fresh copy: FRESH + "due in"; below it the score is a retry's, as on the wire
NOBODY, THE_DEAD = 3, 2  # in `Slot.owner` and `Slot.newest`, where 0 and 1 are the two workers
WAITING, PARTING, RUNNING, SUCCEEDED, FAILED, REJECTED = range(6)  # phases of a delivery in a worker's hands
REMOVED, BURIED, OUTLIVED = 1, 2, 3  # marks; outlived: buried, and a newer copy before it


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
    lost: bool = False  # whether a reply to its prepare, or a push, did not come: it asks what it holds


class Late(NamedTuple):
    """A request that is still on its way while its sender has given it up. Or a push that its worker has not read."""

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
    pushes: int = 0
    crashes: int = 0
    handovers: int = 0
    persons: int = 0
    rejects: int = 0
    releases: int = 0
    jumps: int = 0


class Transitions:
    """What each script does to one member. A method answers the member after, the counters raised, what it broke."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.range_merge = budget.topic_type == "range_merge"

    def send(self, m: Member, due: int) -> Any:
        """send_replace, or send_merge on a range_merge topic."""
        counters = []
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
        return sent(m._replace(store=store, retry=retry, early=early)), counters, None

    def plain_zadd(self, m: Member, due: int) -> Any:
        """A producer of the article: a bare ZADD that knows nothing of Retry."""
        counters = [] if m.store else ["foreign"]
        return sent(m._replace(store=FRESH + due, early=due)), counters, None

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
            return end_marked(m, m.record)
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
            return end_marked(m, m.record)
        m, counters = die(m, covers=m.record.covers)
        return m._replace(record=None), ["rejected", *counters], None

    def time_out(self, m: Member, backoff: int) -> Any:
        if m.record is None or (self.rules.time_out_waits and m.record.age <= self.budget.timeout):
            return None
        return self._back(m, m.record, backoff, "expired")

    def release(self, m: Member, _: int) -> Any:
        record = m.record
        if record is None:
            return None
        if record.mark:
            return end_marked(m, record)
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
        return sent(m._replace(store=FRESH, early=0)), ["revived"], None

    def bury(self, m: Member, _: int) -> Any:
        """By a person: what waits goes to Dead, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        outlived = m.store or m.retry or (m.record and m.record.mark == OUTLIVED)
        m, counters = mark_end(self.rules, m._replace(unwanted=True), OUTLIVED if outlived else BURIED)
        if m.store or m.retry:
            second = ["dropped"] if m.store and m.retry else []
            m, more = die(m, covers=True)
            m = m._replace(store=0, retry=None, early=0)
            counters += more + second
        return m, counters, None

    def remove(self, m: Member, _: int) -> Any:
        """By a person: what waits is gone, what is in flight is marked."""
        if not (m.store or m.retry or m.record):
            return None
        waiting = bool(m.store) + bool(m.retry)
        m, counters = mark_end(self.rules, m._replace(unwanted=True, needed=False), REMOVED)
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
        return later(m, by, self.budget.timeout), [], None

    def jump(self, m: Member, by: int) -> Any:
        m = later(m, by, self.budget.timeout)
        if self.budget.jump_excuses and by > self.budget.timeout // 2 and m.record:
            m = m._replace(record=m.record._replace(jumped=True))
        return m, [], None

    def _back(self, m: Member, record: Record, backoff: int, ended: str) -> Any:
        """A delivery failed: a retry of what is left, or Dead, or nothing where something newer waits."""
        if record.mark:
            return end_marked(m, record)
        m = m._replace(record=None)
        if (m.store or m.retry) and self.rules.keep_newer:
            return m, [ended, "dropped"], None
        if not record.left:
            broken = "BUDGET" if record.covers and m.taken != 1 + self.budget.max_retries else None
            m, counters = die(m, covers=record.covers)
            return m, [ended, *counters], broken
        if backoff:
            return m._replace(retry=(record.left, backoff)), [ended, *["dropped"] * bool(m.retry)], None
        return m._replace(store=record.left), [ended, *["dropped"] * bool(m.store)], None


def sent(m: Member) -> Member:
    record = m.record and m.record._replace(covers=False)
    return m._replace(record=record, needed=True, unwanted=False, taken=0)


def later(m: Member, by: int, timeout: int) -> Member:
    record = m.record and m.record._replace(age=min(m.record.age + by, timeout + 1))
    store = max(FRESH, m.store - by) if m.store >= FRESH else m.store
    retry = m.retry and (m.retry[0], max(0, m.retry[1] - by))
    return m._replace(store=store, retry=retry, record=record, early=max(0, m.early - by))


def die(m: Member, *, covers: bool) -> tuple[Member, list[str]]:
    counters = ["died", "dead_merged"] if m.dead else ["died"]
    return m._replace(dead=True, mourned=True, needed=m.needed and not covers), counters


def end_marked(m: Member, record: Record) -> Any:
    m = m._replace(record=None)
    if record.mark == REMOVED:
        return m, ["ended_marked", "removed"], None
    if record.mark == OUTLIVED and m.dead:
        # The newer copy, which was buried with it, is the one that stays.
        return m, ["ended_marked", "dropped"], None
    m, counters = die(m, covers=record.covers)
    return m, ["ended_marked", *counters], None


def mark_end(rules: Rules, m: Member, mark: int) -> tuple[Member, list[str]]:
    if m.record is None:
        return m, []
    if not rules.leave_prepare:
        return end_marked(m, m.record._replace(mark=mark))[:2]
    return (m._replace(record=m.record._replace(mark=mark)) if rules.marks else m), []


LIVE = {"stored": 1, "foreign": 1, "revived": 1, "committed": -1, "removed": -1, "dropped": -1, "died": -1}
DEAD = {"died": 1, "dead_merged": -1, "revived": -1, "replay_merged": -1, "removed_dead": -1}
DELIVERED = {
    "prepared": 1, "committed": -1, "failed": -1, "expired": -1, "released": -1, "rejected": -1,
    "ended_marked": -1,
}  # fmt: skip


def misplaced(m: Member) -> str | None:
    if m.mourned and not m.dead:
        return "GRAVE"
    if m.needed and not (m.store or m.retry or m.record):
        return "LOSS"
    return "LATE" if m.store > FRESH + m.early else None


def unbalanced(before: Member, after: Member, counters: list[str]) -> bool:
    """Whether one transition's counters disagree with what it moved. Where none ever does, the ledger always balances."""

    def live(m: Member) -> int:
        return bool(m.store) + bool(m.retry) + bool(m.record)

    def total(equation: dict[str, int]) -> int:
        return sum(equation.get(name, 0) for name in counters)

    return (
        total(LIVE) != live(after) - live(before)
        or total(DEAD) != after.dead - before.dead
        or total(DELIVERED) != bool(after.record) - bool(before.record)
    )


# The member after a transition and what it broke; None where the transition does not apply.
Change = tuple[int, str | None] | None
State = tuple[int, ...]  # numbers: one per member, of the two workers, of the slot
Step = tuple[tuple[Any, ...], State, str | None, bool]  # label, state after, what it broke, fault-free


class Numbered(dict[Any, int]):
    """Values by number and numbers by value: small ints make small, fast states."""

    def __init__(self) -> None:
        self.values_: list[Any] = []

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self.values_)
        self.values_.append(value)
        return number


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Work a pure method out once per argument list, per instance."""
    name = "_memory_" + method.__name__

    def recall(self: Any, *args: Any) -> Any:
        try:
            return self.__dict__[name][args]
        except KeyError:
            answer = self.__dict__.setdefault(name, {})[args] = method(self, *args)
            return answer

    return recall


class Book:
    """The states of one slot under a set of rules and a budget, by number; and what happens to them, remembered."""

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.budget = budget
        self.n = budget.members
        self.transitions = Transitions(rules, budget)
        self.members, self.workers, self.slots = Numbered(), Numbered(), Numbered()
        self.too_old = budget.timeout // 2 + 1
        empty = self.workers[Worker(hand=(None,) * self.n)]
        slot = Slot(
            # Without a gate nobody owns anything.
            newest=0 if budget.serial else NOBODY,
            assigned=0 if budget.serial else NOBODY,
            sends=budget.sends,
            foreign=budget.foreign,
            lost=budget.lost,
            pushes=budget.pushes,
            crashes=budget.crashes,
            handovers=budget.handovers,
            persons=budget.persons,
            rejects=budget.rejects,
            releases=-1 if budget.releases is None else budget.releases,
            jumps=budget.jumps,
        )
        self.first: State = (*([self.members[Member()]] * self.n), empty, empty, self.slots[slot])

    @remembered
    def change(self, name: str, member: int, argument: int = 0) -> Change:
        before = self.members.values_[member]
        answer = getattr(self.transitions, name)(before, argument)
        if not answer:
            return None
        after, counters, broken = answer
        if broken is None:
            broken = misplaced(after)
        if broken is None and unbalanced(before, after, counters):
            broken = "LEDGER"
        return self.members[after], broken

    def _each(self, worker: int, member: int | None, turn: Callable[[Item], Item | None]) -> int:
        """The worker with every delivery (of one member, or of all) turned into another."""
        w: Worker = self.workers.values_[worker]
        running = w.running
        if running and member in {None, running[0]}:
            turned = turn(running[1])
            running = (running[0], turned) if turned else None
        hand = tuple(turn(x) if x and member in {None, i} else x for i, x in enumerate(w.hand))
        return self.workers[w._replace(running=running, hand=hand)]

    @remembered
    def stale(self, worker: int, member: int, overdue: bool) -> int:
        """The member's record left Prepare: no receipt of it is good any more."""

        def turn(x: Item) -> Item:
            late = overdue and x.current and x.phase == RUNNING
            return x._replace(current=False, excused=x.excused or late) if x.current else x

        return self._each(worker, member, turn)

    @remembered
    def uncovered(self, worker: int, member: int) -> int:
        return self._each(worker, member, lambda x: x._replace(covers=False))

    @remembered
    def older(self, worker: int) -> int:
        def turn(x: Item) -> Item:
            return x._replace(age=min(x.age + 1, self.too_old)) if x.phase == WAITING else x

        return self._each(worker, None, turn)

    @remembered
    def excused(self, worker: int, member: int) -> int:
        """The clock jumped: the member's delivery has outlived its time-out by Redis' clock."""

        def turn(x: Item) -> Item:
            return x._replace(excused=True) if x.current and x.phase in {WAITING, RUNNING} else x

        return self._each(worker, member, turn)

    @remembered
    def holding(self, worker: int, member: int, item: Item | None) -> int:
        w: Worker = self.workers.values_[worker]
        return self.workers[w._replace(hand=(*w.hand[:member], item, *w.hand[member + 1 :]))]

    @remembered
    def with_lost(self, worker: int, lost: bool) -> int:
        return self.workers[self.workers.values_[worker]._replace(lost=lost)]

    @remembered
    def with_running(self, worker: int, running: tuple[int, Item] | None) -> int:
        return self.workers[self.workers.values_[worker]._replace(running=running)]

    @remembered
    def slot(self, number: int, changes: tuple[tuple[str, Any], ...]) -> int:
        return self.slots[self.slots.values_[number]._replace(**dict(changes))]

    @remembered
    def spent(self, number: int, what: str) -> int:
        slot = self.slots.values_[number]
        return self.slots[slot._replace(**{what: getattr(slot, what) - 1})]

    @remembered
    def ended(self, number: int, member: int, prepare_empty: bool) -> int:
        """The member's record left Prepare."""
        slot: Slot = self.slots.values_[number]
        late = slot.late
        if late and late.kind not in {"prepare", "acquire"} and late.member == member:
            late = late._replace(current=False)
        return self.slots[slot._replace(late=late, owner=NOBODY if prepare_empty else slot.owner)]

    @remembered
    def acquired(self, number: int, worker: int) -> int:
        slot: Slot = self.slots.values_[number]
        late = slot.late
        if late and late.kind == "prepare":
            late = late._replace(current=False)
        return self.slots[slot._replace(newest=worker, late=late)]

    def moved(self, s: State, i: int, member: int, *, overdue: bool = False) -> State:
        """The state with member i changed; receipts, and whose deliveries the gate knows, follow."""
        n, value = self.n, self.members.values_
        new = list(s)
        new[i] = member
        if value[s[i]].record and not value[member].record:
            new[n], new[n + 1] = self.stale(s[n], i, overdue), self.stale(s[n + 1], i, overdue)
            new[-1] = self.ended(s[-1], i, not any(value[x].record for x in new[:n]))
        return tuple(new)

    def sent(self, s: State, i: int, member: int, spent: str) -> State:
        n = self.n
        new = list(s)
        new[i] = member
        new[n], new[n + 1], new[-1] = (
            self.uncovered(s[n], i),
            self.uncovered(s[n + 1], i),
            self.spent(s[-1], spent),
        )
        return tuple(new)

    def with_(self, s: State, position: int, number: int) -> State:
        return (*s[:position], number, *s[position + 1 :])

    def idle(self, s: State) -> bool:
        """Nothing waits and nothing is in flight."""
        return not any(m.store or m.retry or m.record for m in (self.members.values_[x] for x in s[: self.n]))

    def is_valid(self, s: State, i: int, current: bool) -> bool:
        return current if self.rules.receipts else self.members.values_[s[i]].record is not None


class Symmetry:
    """A state by the names that make its numbers smallest."""

    def __init__(self, book: Book) -> None:
        self.book = book

    @remembered
    def _members_swapped(self, worker: int) -> int:
        w: Worker = self.book.workers.values_[worker]
        running = w.running and (1 - w.running[0], w.running[1])
        return self.book.workers[w._replace(running=running, hand=w.hand[::-1])]

    @remembered
    def _slot_swapped(self, number: int, workers: bool, members: bool) -> int:
        slot: Slot = self.book.slots.values_[number]
        late = slot.late
        if workers:
            other = (1, 0, THE_DEAD, NOBODY)
            late = late and late._replace(worker=other[late.worker])
            slot = slot._replace(
                owner=other[slot.owner], newest=other[slot.newest], assigned=other[slot.assigned]
            )
        if members and late and late.kind not in {"prepare", "acquire"}:
            late = late._replace(member=1 - late.member)
        return self.book.slots[slot._replace(late=late)]

    def canonical(self, s: State) -> State:
        """The same state with workers and members called so that its numbers are smallest."""
        if self.book.n == 1:
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
