"""The walk: every state within a budget, breadth first; and what it found, told with the names that the workers had."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.proof.slot_model.rules import PROPERTIES, Budget, Rules
from tests.proof.slot_model.states import Book, State, Symmetry
from tests.proof.slot_model.steps import steps


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


def trace(
    symmetry: Symmetry,
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
    s, told = symmetry.book.first, []
    for following in path[1:]:
        for step, t, _, _ in steps(symmetry.book, s):
            if symmetry.canonical(t) == following:
                told.append(tell(step))
                s = t
                break
    if label is not None:
        # The canonical state may have called them otherwise: find the same breach from the state as named here.
        told.append(
            next(
                tell(step) for step, _, b, _ in steps(symmetry.book, s) if b == broken and step[0] == label[0]
            )
        )
    return told


SAID = {
    "prepare": "prepares {1}",
    "prepare, reply lost": "prepares {1}, the reply is lost",
    "prepare late": "prepares, no reply, the request is still on its way",
    "push": "sleeps, and a send pushes {1} to it",
    "push read": "reads that {1} was pushed to it",
    "push lost": "loses its subscription, and the push of {1} with it",
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


def tell(label: tuple[Any, ...]) -> str:
    """A step as a person would say it."""
    name, *args = label
    if name in SAID:
        return f"w{args[0]} " + SAID[name].format(args[0], "ab"[args[1]] if len(args) > 1 else "", *args[2:])
    if name in {"send", "plain ZADD"}:
        return f"{name}({'ab'[args[0]]}, {'due in 1' if args[1] else 'due now'})"
    if name == "promote":
        return f"promote {'ab'[args[0]]}"
    if name == "time_out":
        return f"time out {'ab'[args[0]]} with back-off {args[1]}"
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
