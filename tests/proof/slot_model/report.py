"""What a walk found, told with the names that the workers had from the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.proof.slot_model.book import State
from tests.proof.slot_model.steps import steps
from tests.proof.slot_model.symmetry import Symmetry


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
