"""What happens to a slot from outside, and with time."""

from collections.abc import Iterator

from tests.proof.slot_model.book import Book, State, Step
from tests.proof.slot_model.states import THE_DEAD, Slot, Worker


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
