"""The walk: every state within a budget, breadth first."""

import time
from array import array
from collections.abc import Sequence

from tests.proof.slot_model.book import Book, State
from tests.proof.slot_model.report import Verdict, trace
from tests.proof.slot_model.rules import PROPERTIES, Budget, Rules
from tests.proof.slot_model.steps import steps
from tests.proof.slot_model.symmetry import Symmetry


def check(
    rules: Rules, budget: Budget, *, properties: tuple[str, ...] = PROPERTIES, stop_at_first: bool = False
) -> Verdict:
    """
    Walk every state within the budget and report the shortest trace to each property that can be broken.

    STUCK needs every step remembered: leave it out of `properties` where memory or time matter. With `stop_at_first`
    the walk ends at the first violation, which is the shortest of all.
    """
    started = time.perf_counter()
    book = Book(rules, budget)
    symmetry = Symmetry(book)
    canonical = symmetry.canonical
    first = canonical(book.first)
    numbers: dict[State, int] = {first: 0}
    order = [first]
    parents = array("l", [-1])
    sources, targets = array("l"), array("l")
    want_stuck = "STUCK" in properties
    found: dict[str, list[str]] = {}
    walked = at = 0
    while at < len(order) and len(order) < budget.max_states:
        for label, t, broken, fair in steps(book, order[at]):
            walked += 1
            if broken is not None and broken in properties:
                if broken not in found:
                    found[broken] = trace(symmetry, order, parents, at, label, broken)
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
        stuck = cannot_finish(book, order, sources, targets)
        if stuck is not None:
            found["STUCK"] = trace(symmetry, order, parents, stuck, None, None)
    return Verdict(len(order), walked, time.perf_counter() - started, complete, found)


def cannot_finish(
    book: Book, order: list[State], sources: Sequence[int], targets: Sequence[int]
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
    todo = [i for i, s in enumerate(order) if book.idle(s)]
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
