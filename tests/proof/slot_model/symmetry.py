"""States that differ only in which worker or which message is called what are one."""

from tests.proof.slot_model.book import Book, State, remembered
from tests.proof.slot_model.states import NOBODY, THE_DEAD, Slot, Worker


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
