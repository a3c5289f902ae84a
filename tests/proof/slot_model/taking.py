"""How workers take: acquire, held, prepare."""

from collections.abc import Iterator

from tests.proof.slot_model.book import Book, State, Step
from tests.proof.slot_model.states import (
    FRESH,
    NOBODY,
    PARTING,
    RUNNING,
    THE_DEAD,
    WAITING,
    Item,
    Late,
    Slot,
    Worker,
)


def taking(book: Book, s: State, slot: Slot, j: int) -> Iterator[Step]:
    """acquire, held, prepare, and the prepare whose reply does not come."""
    n = book.n
    w: Worker = book.workers.values_[s[n + j]]
    if book.budget.serial:
        if slot.lost and slot.late is None and (w.lost or (slot.assigned == j and slot.newest != j)):
            late = Late("acquire", j, 0, False)
            number = book.slot(book.spent(s[-1], "lost"), (("late", late),))
            yield ("acquire late", j), book.with_(s, n + 2, number), None, False
        if w.lost:
            yield from recover(book, s, slot, j, w)
            return
        if (
            slot.assigned == j
            and slot.newest != j
            and (book.rules.fenced_asks_again or slot.newest == THE_DEAD)
        ):
            yield ("acquire", j), book.with_(s, n + 2, book.acquired(s[-1], j)), None, True
        if slot.newest != j and book.rules.fence:
            return
    if slot.lost and slot.late is None:
        late = Late("prepare", j if book.budget.serial else THE_DEAD, 0, slot.newest == j)
        t = book.with_(s, n + 2, book.slot(book.spent(s[-1], "lost"), (("late", late),)))
        yield ("prepare late", j), awaiting(book, t, j), None, False
    if gate_is_open(book, s, slot, j):
        yield from preparing(book, s, slot, j, w)


def preparing(book: Book, s: State, slot: Slot, j: int, w: Worker) -> Iterator[Step]:
    """A prepare of each member, with its reply and without."""
    n = book.n
    # Who lost the slot is told of it some day: nothing can be built on what it takes until then.
    fair = not book.budget.serial or slot.assigned == j
    for i in range(n):
        after = book.change("prepare", s[i])
        if after is None:
            continue
        t = taken(book, s, i, after[0], j)
        if slot.lost:
            u = awaiting(book, book.with_(t, n + 2, book.spent(t[-1], "lost")), j)
            orphan = None if book.rules.held or not book.budget.serial else "ORPHAN"
            yield ("prepare, reply lost", j, i), u, after[1] or orphan, False
        mine = w.hand[i]
        if (w.running is None or w.running[0] != i or w.running[1].phase == RUNNING) and (
            mine is None or mine.phase in {WAITING, PARTING}
        ):
            item = Item(WAITING, 0, True, True, False)
            yield ("prepare", j, i), book.with_(t, n + j, book.holding(t[n + j], i, item)), after[1], fair


def pushing(book: Book, s: State, slot: Slot, j: int) -> Iterator[Step]:
    """A send delivers its message to worker j, which sleeps and has offered that under the newest epoch."""
    n, value = book.n, book.members.values_
    if not slot.pushes or slot.late is not None:
        return
    holder = slot.newest
    if holder != j and book.rules.push_to_holder:
        return
    others = [m for m in (value[x] for x in s[:n]) if m.store or m.retry or m.record]
    if len(others) > 1 and book.rules.push_alone:
        return
    for i in range(n):
        after = book.change("prepare", s[i])
        # A new message: nothing of the slot waits but what this send brings.
        if after is None or value[s[i]].store != FRESH or value[s[i]].retry:
            continue
        t = taken(book, s, i, after[0], holder)
        t = book.with_(
            t, n + 2, book.slot(book.spent(t[-1], "pushes"), (("late", Late("push", j, i, True)),))
        )
        yield ("push", j, i), t, after[1], False


def pushed(book: Book, s: State, gone: State, late: Late) -> Iterator[Step]:
    """A worker reads what was pushed to it, or its subscription breaks before."""
    n, i, j = book.n, late.member, late.worker
    w: Worker = book.workers.values_[s[n + j]]
    record = book.members.values_[s[i]].record
    age = record.age if record and late.current else book.too_old
    if book.slots.values_[s[-1]].lost:
        u = book.with_(gone, n + 2, book.spent(gone[-1], "lost"))
        if book.rules.held and book.rules.push_is_missed:
            u = book.with_(u, n + j, book.with_lost(u[n + j], True))
        orphan = None if book.rules.push_is_missed or not late.current else "ORPHAN"
        yield ("push lost", j, i), u, orphan, False
    if w.hand[i] is not None or (w.running and w.running[0] == i) or w.lost:
        return
    if not book.rules.push_keeps_age:
        age = 0
    item = Item(WAITING, age, late.current, bool(record and late.current and record.covers), False)
    yield ("push read", j, i), book.with_(gone, n + j, book.holding(gone[n + j], i, item)), None, True


def recover(book: Book, s: State, slot: Slot, j: int, w: Worker) -> Iterator[Step]:
    """Acquire again, which fences the late copy, then go on with what `list_held` answers."""
    n = book.n
    number = s[n + j]
    if slot.owner == j:
        for i in range(n):
            record = book.members.values_[s[i]].record
            mine = [w.hand[i], w.running[1] if w.running and w.running[0] == i else None]
            if record is None or any(x and x.current for x in mine):
                continue
            # Nobody knows when its time-out began, so it is extended before it starts.
            age = book.too_old if book.rules.held_is_extended else 0
            number = book.holding(number, i, Item(WAITING, age, True, record.covers, record.jumped))
    t = book.with_(s, n + 2, book.acquired(s[-1], j))
    yield ("recover", j), book.with_(t, n + j, book.with_lost(number, False)), None, True


def gate_is_open(book: Book, s: State, slot: Slot, j: int) -> bool:
    """Whether the gate lets owner j take."""
    if not (book.budget.serial and book.rules.gate) or slot.owner in {NOBODY, j}:
        return True
    return not book.rules.owners_are_new and slot.owner < THE_DEAD and j < THE_DEAD


def taken(book: Book, s: State, i: int, member: int, j: int) -> State:
    """Member i is in Prepare, in the name of owner j."""
    value = book.members.values_
    if value[s[i]].record:  # only without `skip_in_flight`: the earlier delivery's receipt is overwritten
        for position in (book.n, book.n + 1):
            s = book.with_(s, position, book.stale(s[position], i, False))
        s = book.with_(s, book.n + 2, book.ended(s[-1], i, False))
    t = book.with_(s, i, member)
    if book.budget.serial:
        t = book.with_(t, book.n + 2, book.slot(t[-1], (("owner", j),)))
    return t


def awaiting(book: Book, s: State, j: int) -> State:
    if not (book.budget.serial and book.rules.held):
        return s
    return book.with_(s, book.n + j, book.with_lost(s[book.n + j], True))


def arriving(book: Book, s: State, slot: Slot, late: Late) -> Iterator[Step]:
    """A request that its sender gave up arrives."""
    n = book.n
    gone = book.with_(s, n + 2, book.slot(s[-1], (("late", None),)))
    if late.kind == "push":
        yield from pushed(book, s, gone, late)
        return
    if late.kind == "acquire":
        # It raises the epoch, and nobody learns the new one.
        yield (
            ("arrives: epoch raised", late.worker),
            book.with_(gone, n + 2, book.acquired(gone[-1], THE_DEAD)),
            None,
            False,
        )
        return
    if late.kind != "prepare":
        i = late.member
        t, broken = gone, None
        if book.is_valid(s, i, late.current):
            member, broken = book.change(late.kind, s[i], book.budget.backoffs[0])
            t = book.moved(gone, i, member)
        yield ("arrives", late.kind, late.worker, i), t, broken, False
        return
    if book.budget.serial and book.rules.fence and not late.current:
        yield ("arrives: fenced", late.worker), gone, None, False
        return
    yield ("arrives: nothing taken", late.worker), gone, None, False
    if not gate_is_open(book, s, slot, late.worker):
        return
    for i in range(n):
        after = book.change("prepare", s[i])
        if after:
            t = taken(book, gone, i, after[0], late.worker)
            knows = (
                late.worker == THE_DEAD
                or not book.budget.serial
                or book.workers.values_[s[n + late.worker]].lost
            )
            yield ("arrives: taken", late.worker, i), t, after[1] or (None if knows else "ORPHAN"), False
