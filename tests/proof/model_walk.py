"""The walk of a model: every state that its steps lead to, breadth first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

State = TypeVar("State", bound=Hashable)


class Verdict(NamedTuple):
    """What a walk found; ``violations`` maps a property to its shortest trace."""

    states: int
    violations: dict[str, list[str]]


def walk(
    first: State,
    steps: Callable[[State], Iterable[tuple[str, State, str | None, bool]]],
    is_done: Callable[[State], bool],
) -> Verdict:
    """Walk every state; STUCK is one from which no steps without faults lead to one that is done.

    A step says what happens, the state after it, the property that it breaks, and whether it is no fault. A state that
    breaks a property is not walked from.
    """
    came: dict[State, tuple[State, str] | None] = {first: None}
    before: dict[State, list[State]] = {}
    violations: dict[str, list[str]] = {}

    def trace(s: State) -> list[str]:
        labels = []
        while (step := came[s]) is not None:
            s, label = step
            labels.append(label)
        return labels[::-1]

    order = [first]
    for s in order:
        for label, t, broken, is_fair in steps(s):
            if broken is not None:
                violations.setdefault(broken, [*trace(s), label])
                continue
            if t not in came:
                came[t] = (s, label)
                order.append(t)
            if is_fair:
                before.setdefault(t, []).append(s)
    todo = [s for s in order if is_done(s)]
    finishing = set(todo)
    while todo:
        for s in before.get(todo.pop(), []):
            if s not in finishing:
                finishing.add(s)
                todo.append(s)
    stuck = next((s for s in order if s not in finishing), None)
    if stuck is not None:
        violations["STUCK"] = trace(stuck)
    return Verdict(len(order), violations)
