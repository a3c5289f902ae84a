"""States by number, and what happens to them, worked out once."""

from collections.abc import Callable
from typing import Any

from tests.proof.slot_model.breaches import misplaced, unbalanced
from tests.proof.slot_model.rules import Budget, Rules
from tests.proof.slot_model.states import NOBODY, RUNNING, WAITING, Item, Member, Slot, Worker
from tests.proof.slot_model.transitions import Transitions

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
