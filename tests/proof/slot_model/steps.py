"""Every step out of a state."""

from collections.abc import Iterator

from tests.proof.slot_model.book import Book, State, Step
from tests.proof.slot_model.outside import outside, upkeep
from tests.proof.slot_model.states import Slot
from tests.proof.slot_model.taking import arriving, pushing, taking
from tests.proof.slot_model.working import working


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
