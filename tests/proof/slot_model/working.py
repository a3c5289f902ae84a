"""What workers do with what they took: listeners, phase two, heartbeat."""

from collections.abc import Iterator

from tests.proof.slot_model.book import Book, State, Step
from tests.proof.slot_model.states import (
    FAILED,
    PARTING,
    REJECTED,
    RUNNING,
    SUCCEEDED,
    WAITING,
    Item,
    Late,
    Slot,
    Worker,
)


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
