"""Every step out of a state: how workers take and work, and what happens from outside and with time."""

from __future__ import annotations

from collections.abc import Iterator

from tests.proof.slot_model.states import (
    FAILED,
    FRESH,
    NOBODY,
    PARTING,
    REJECTED,
    RUNNING,
    SUCCEEDED,
    THE_DEAD,
    WAITING,
    Book,
    Item,
    Late,
    Slot,
    State,
    Step,
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


def working(book: Book, s: State, slot: Slot, j: int) -> Iterator[Step]:
    """Listeners, phase two, heartbeat."""
    n = book.n
    w: Worker = book.workers.values_[s[n + j]]
    if w.running:
        i, item = w.running
        if item.phase == RUNNING:
            yield from listening(book, s, slot, j, i, item, w)
        else:
            yield from answering(book, s, slot, j, i, item)
    for i, held in enumerate(w.hand):
        if held is None:
            continue
        item = held
        if item.phase >= SUCCEEDED:
            yield from answering(book, s, slot, j, i, item)
            continue
        yield from releasing(book, s, slot, j, i, item)
        if item.phase == WAITING:
            yield from starting(book, s, j, i, item, w)
            yield from extending(book, s, slot, j, i, item)


def listening(book: Book, s: State, slot: Slot, j: int, i: int, item: Item, w: Worker) -> Iterator[Step]:
    n = book.n
    for phase, name in ((SUCCEEDED, "ok"), (FAILED, "fails"), (REJECTED, "rejects")):
        if phase == REJECTED and not slot.rejects:
            continue
        t, broken = s, None
        if phase == SUCCEEDED:
            member, broken = book.change("succeed", s[i], int(item.covers))
            t = book.with_(s, i, member)
        if phase == REJECTED:
            t = book.with_(s, n + 2, book.spent(s[-1], "rejects"))
        # Nothing but its receipt matters from here on.
        done = Item(phase, 0, item.current, False, False)
        number = s[n + j]
        if w.hand[i] is None:
            number = book.holding(book.with_running(number, None), i, done)
        else:
            number = book.with_running(number, (i, done))
        yield ("listener", j, i, name), book.with_(t, n + j, number), broken, phase == SUCCEEDED
    if book.members.values_[s[i]].record and item.current:
        after = book.change("extend", s[i])
        if after[0] != s[i]:
            number = book.with_running(s[n + j], (i, item._replace(excused=False)))
            yield ("extend", j, i), book.with_(book.with_(s, i, after[0]), n + j, number), after[1], True
        yield from delayed(book, s, slot, "extend", j, i, item)


def answering(book: Book, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
    """commit, rollback or Reject: answered, executed without an answer, or on its way for a long time."""
    n = book.n
    kind = {SUCCEEDED: "commit", FAILED: "rollback", REJECTED: "reject"}[item.phase]
    if not book.is_valid(s, i, item.current):
        yield (kind + ": stale", j, i), done(book, s, j, i, item), None, True
        return
    yield from delayed(book, s, slot, kind, j, i, item)
    for backoff in book.budget.backoffs if item.phase == FAILED else (0,):
        member, broken = book.change(kind, s[i], backoff)
        t = book.moved(s, i, member)
        yield (kind, j, i, backoff), done(book, t, j, i, item), broken, True
        if slot.lost:
            yield (
                (kind + ", reply lost", j, i, backoff),
                book.with_(t, n + 2, book.spent(t[-1], "lost")),
                broken,
                False,
            )


def releasing(book: Book, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
    n = book.n
    if slot.releases or item.phase == PARTING:
        t, broken = s, None
        if book.is_valid(s, i, item.current):
            member, broken = book.change("release", s[i])
            t = book.moved(s, i, member)
        t = book.with_(t, n + j, book.holding(t[n + j], i, None))
        if slot.releases > 0 and item.phase == WAITING:
            t = book.with_(t, n + 2, book.spent(t[-1], "releases"))
        yield ("release", j, i), t, broken, True
    if item.phase == WAITING and slot.lost and slot.late is None and slot.releases:
        late = Late("release", j, i, item.current)
        number = book.slot(book.spent(s[-1], "lost"), (("late", late),))
        parting = Item(PARTING, 0, item.current, False, False) if book.rules.release_is_final else None
        t = book.with_(s, n + 2, number)
        yield (
            ("late", "release", j, i),
            book.with_(t, n + j, book.holding(t[n + j], i, parting)),
            None,
            False,
        )


def starting(book: Book, s: State, j: int, i: int, item: Item, w: Worker) -> Iterator[Step]:
    if book.rules.start_in_time and item.age >= book.too_old:
        return
    if w.running and (book.rules.one_thread or w.running[1].phase != RUNNING):
        return
    broken = None
    for other in (j, 1 - j):
        running = book.workers.values_[s[book.n + other]].running
        if running is None or running[1].phase != RUNNING or running[1].excused or item.excused:
            continue
        if book.budget.serial or running[0] == i:
            broken = "OVERLAP"
    if w.running and not broken:
        return
    number = book.holding(s[book.n + j], i, None)
    number = book.with_running(number, (i, item._replace(phase=RUNNING, age=0)))
    yield ("start", j, i), book.with_(s, book.n + j, number), broken, True


def extending(book: Book, s: State, slot: Slot, j: int, i: int, item: Item) -> Iterator[Step]:
    """A heartbeat while it waits in the process: a stale answer makes the worker forget it."""
    n = book.n
    if not book.is_valid(s, i, item.current):
        yield ("extend: stale", j, i), book.with_(s, n + j, book.holding(s[n + j], i, None)), None, True
        return
    after = book.change("extend", s[i])
    t = book.with_(s, i, after[0])
    t = book.with_(t, n + j, book.holding(s[n + j], i, item._replace(age=0, excused=False)))
    if t != s:
        yield ("extend", j, i), t, after[1], True
    yield from delayed(book, s, slot, "extend", j, i, item)


def delayed(book: Book, s: State, slot: Slot, kind: str, j: int, i: int, item: Item) -> Iterator[Step]:
    if slot.lost and slot.late is None:
        late = Late(kind, j, i, item.current)
        number = book.slot(book.spent(s[-1], "lost"), (("late", late),))
        yield ("late", kind, j, i), book.with_(s, book.n + 2, number), None, False


def done(book: Book, s: State, j: int, i: int, item: Item) -> State:
    """The worker has nothing more to do for this delivery."""
    number = s[book.n + j]
    in_hand = book.workers.values_[number].hand[i]
    finished = in_hand is not None and in_hand.phase == item.phase
    number = book.holding(number, i, None) if finished else book.with_running(number, None)
    return book.with_(s, book.n + j, number)


def outside(book: Book, s: State, slot: Slot) -> Iterator[Step]:
    """Producers, persons, the coordinator, crashes."""
    n, change = book.n, book.change
    for i in range(n):
        for due in (0, 1):
            if slot.sends:
                member, broken = change("send", s[i], due)
                yield ("send", i, due), book.sent(s, i, member, "sends"), broken, False
            if slot.foreign:
                member, broken = change("plain_zadd", s[i], due)
                yield ("plain ZADD", i, due), book.sent(s, i, member, "foreign"), broken, False
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
            if name == "replay" and not book.members.values_[after[0]].taken:
                t = book.sent(s, i, after[0], "persons")
            else:
                t = book.moved(s, i, after[0])
                t = book.with_(t, n + 2, book.spent(t[-1], "persons"))
            yield ("person", name, i, argument), t, after[1], False
    if slot.crashes:
        yield from (crash(book, s, slot, j) for j in (0, 1))
    if slot.handovers:
        new = 1 - slot.assigned
        number = book.acquired(book.slot(book.spent(s[-1], "handovers"), (("assigned", new),)), new)
        yield ("hand-over", new), book.with_(s, n + 2, number), None, False


def crash(book: Book, s: State, slot: Slot, j: int) -> Step:
    """A kill -9, and a new process with a new owner id in its place."""
    late = slot.late
    if late and late.kind in {"prepare", "acquire"} and late.worker == j:
        late = late._replace(worker=THE_DEAD)
    if late and late.kind == "push" and late.worker == j:
        late = None
    number = book.spent(s[-1], "crashes")
    changes = (
        ("owner", THE_DEAD if slot.owner == j else slot.owner),
        ("newest", THE_DEAD if slot.newest == j else slot.newest),
        ("late", late),
    )
    t = book.with_(s, book.n + 2, book.slot(number, changes))
    return (
        ("kill -9", j),
        book.with_(t, book.n + j, book.workers[Worker(hand=(None,) * book.n)]),
        None,
        False,
    )


def upkeep(book: Book, s: State) -> Iterator[Step]:
    """Time, and what rides along with any prepare."""
    n, change, value = book.n, book.change, book.members.values_
    slot: Slot = book.slots.values_[s[-1]]
    t = (*(change("tick", m, 1)[0] for m in s[:n]), book.older(s[n]), book.older(s[n + 1]), s[-1])
    if t != s:
        yield ("tick",), t, None, True
    if slot.jumps:
        new = [
            *(change("jump", m, book.budget.jump)[0] for m in s[:n]),
            s[n],
            s[n + 1],
            book.spent(s[-1], "jumps"),
        ]
        for i in range(n):
            record = value[new[i]].record
            if record and record.jumped:
                new[n], new[n + 1] = book.excused(new[n], i), book.excused(new[n + 1], i)
        yield ("jump", book.budget.jump), tuple(new), None, False
    for i in range(n):
        after = change("promote", s[i])
        if after:
            yield ("promote", i), book.moved(s, i, after[0]), after[1], True
        if not value[s[i]].record:
            continue
        overdue = value[s[i]].record.age > book.budget.timeout
        for backoff in book.budget.backoffs:
            after = change("time_out", s[i], backoff)
            if after:
                yield ("time_out", i, backoff), book.moved(s, i, after[0], overdue=overdue), after[1], True


def steps(book: Book, s: State) -> Iterator[Step]:
    """Return every step out of a state."""
    slot: Slot = book.slots.values_[s[-1]]
    yield from outside(book, s, slot)
    yield from upkeep(book, s)
    for j in (0, 1):
        yield from taking(book, s, slot, j)
        yield from pushing(book, s, slot, j)
        yield from working(book, s, slot, j)
    if slot.late:
        yield from arriving(book, s, slot, slot.late)
