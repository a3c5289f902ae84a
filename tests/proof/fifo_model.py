"""Every state that one strict fifo slot and two workers can reach, walked breadth first.

The scripts are atomic steps here. Messages are numbers in the order of sending; a worker takes several at once and
runs them one by one. Failures, time-outs, lost replies, kills and takers that come in between are all possible at any
time, some of them a limited number of times. `check` reports the shortest trace to each broken property:

ORDER   a listener starts a message while an earlier one of the slot has neither succeeded nor died
CHARGE  a message that was never begun has lost a retry, and was not the first in line when it timed out
STUCK   a state with work left that no sequence of steps without faults can finish
LOSS    a message is done that no listener has done

A rule switched off must be found by a property: a check that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.proof.model_walk import Verdict, walk

PROPERTIES = ("ORDER", "CHARGE", "STUCK", "LOSS")
WAITING, RESTING, FLYING, DONE, DEAD = "waiting", "resting", "flying", "done", "dead"


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that keep the order, each of which can be switched off."""

    holds: bool = True  # off: a slot hands out while a message of it rests
    alone: bool = True  # off: a slot hands out while something of it is in flight, to the same worker
    gate: bool = True  # off: also to another worker
    keeps_place: bool = True  # off: a message that failed comes back behind the others
    stops: bool = True  # off: a thread goes on behind a message that failed
    stale_stops: bool = True  # off: a thread goes on behind a message that it no longer holds
    gives_back: bool = True  # off: what was taken with a failed message is charged like it
    blames_first: bool = True  # off: a time-out charges every message that was in flight
    promotes: bool = True  # off: a back-off never ends
    is_last: bool = True  # off: what ends everything in flight also ends what was handed out later

    def without(self, rule: str) -> Rules:
        return replace(self, **{rule: False})


@dataclass(frozen=True, slots=True)
class Budget:
    """The size of the slot, and how often each fault may happen."""

    messages: int = 3
    at_once: int = 2
    retries: int = 1
    failures: int = 2
    timeouts: int = 1
    kills: int = 1
    lost: int = 1


Telling = tuple[str, tuple[tuple[int, bool], ...], bool]
"""What a worker tells Redis, messages and whether their receipts are good, and, where it ends everything that is in
flight, whether nothing was handed out since."""


class Message(NamedTuple):
    """What Redis knows of a message, and whether a listener has begun it, or has returned."""

    state: str = WAITING
    left: int = 0
    holder: int = -1  # whose delivery is in flight; 2: nobody's
    begun: bool = False
    succeeded: bool = False
    timed_out: bool = False
    behind: bool = False  # it came back behind the others


class Worker(NamedTuple):
    """What a worker has in hand: batches that have not begun, the message that runs, and what it will tell Redis."""

    hand: tuple[tuple[tuple[int, bool], ...], ...] = ()  # batches of (message, whether its receipt is good)
    is_begun: bool = False  # the first batch in hand is the rest of one that was begun
    running: tuple[int, bool] | None = None
    told: tuple[Telling, ...] = ()
    batch: tuple[int, ...] = ()  # the messages of the batch that was begun last


class State(NamedTuple):
    messages: tuple[Message, ...]
    workers: tuple[Worker, Worker] = (Worker(), Worker())
    failures: int = 0
    timeouts: int = 0
    kills: int = 0
    lost: int = 0


Step = tuple[str, State, str | None, bool]
"""What happens, the state after it, what it breaks, and whether it is no fault."""


class Model:
    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules, self.budget = rules, budget
        fresh = Message(left=budget.retries)
        faults = budget.failures, budget.timeouts, budget.kills, budget.lost
        self.first = State((fresh,) * budget.messages, (Worker(), Worker()), *faults)

    # --- what Redis does

    def with_message(self, s: State, i: int, **changes: object) -> State:
        message = s.messages[i]._replace(**changes)  # type: ignore[arg-type]
        return s._replace(messages=(*s.messages[:i], message, *s.messages[i + 1 :]))

    def with_worker(self, s: State, j: int, worker: Worker) -> State:
        return s._replace(workers=(worker, s.workers[1]) if j == 0 else (s.workers[0], worker))

    def is_open(self, s: State, j: int) -> bool:
        flying = {m.holder for m in s.messages if m.state == FLYING}
        if flying - {j} and self.rules.gate:
            return False
        if j in flying and self.rules.alone:
            return False
        return not (self.rules.holds and any(m.state == RESTING for m in s.messages))

    def line(self, s: State) -> list[int]:
        waiting = [i for i, m in enumerate(s.messages) if m.state == WAITING]
        return sorted(waiting, key=lambda i: (s.messages[i].behind, i))[: self.budget.at_once]

    def failed(self, s: State, i: int, *, timed_out: bool = False) -> State:
        left = s.messages[i].left
        came = {"timed_out": s.messages[i].timed_out or timed_out, "behind": not self.rules.keeps_place}
        if left == 0:
            return self.with_message(s, i, state=DEAD, holder=-1, **came)
        return self.with_message(s, i, state=RESTING, left=left - 1, holder=-1, **came)

    def timed_out(self, s: State, i: int) -> State:
        is_first = not any(m.state == FLYING for m in s.messages[:i])
        if is_first or not self.rules.blames_first:
            return self.failed(s, i, timed_out=is_first)
        return self.with_message(s, i, state=WAITING, holder=-1)

    def stale(self, s: State, i: int) -> State:
        """Turn all receipts of message ``i`` bad."""
        workers = []
        for w in s.workers:
            hand = tuple(tuple((m, good and m != i) for m, good in batch) for batch in w.hand)
            running = w.running and (w.running[0], w.running[1] and w.running[0] != i)
            told = tuple(
                (act, tuple((m, good and m != i) for m, good in named), is_last)
                for act, named, is_last in w.told
            )
            workers.append(w._replace(hand=hand, running=running, told=told))
        return s._replace(workers=(workers[0], workers[1]))

    def told(self, s: State, act: str, named: tuple[tuple[int, bool], ...]) -> State:
        for i, good in named:
            s = self.told_of(s, act, i) if good else s
        return s

    def told_of(self, s: State, act: str, i: int) -> State:
        s = self.stale(s, i)
        if act == "commit":
            return self.with_message(s, i, state=DONE, holder=-1)
        if act == "release":
            return self.with_message(s, i, state=WAITING, holder=-1)
        return self.failed(s, i)

    def told_of_all(self, s: State, size: int, is_last: bool) -> State | None:
        """End all that is in flight, or None: they have to be named."""
        flying = tuple((i, True) for i, m in enumerate(s.messages) if m.state == FLYING)
        if len(flying) != size or not (is_last or not self.rules.is_last):
            return None
        return self.told(s, "commit", flying)

    def handed_out(self, s: State) -> State:
        """Something is handed out: what was before is no longer the last."""
        workers = [w._replace(told=tuple((act, named, False) for act, named, _ in w.told)) for w in s.workers]
        return s._replace(workers=(workers[0], workers[1]))

    # --- what happens

    def steps(self, s: State) -> Iterator[Step]:
        for j, worker in enumerate(s.workers):
            yield from self.taking(s, j)
            yield from self.working(s, j, worker)
            if worker.told:
                yield self.telling(s, j, worker)
            if s.kills and worker != Worker():
                yield from self.killed(s._replace(kills=s.kills - 1), j, worker)
        for i, message in enumerate(s.messages):
            if message.state == RESTING and self.rules.promotes:
                yield f"promote {i}", self.with_message(s, i, state=WAITING), None, True
            if message.state == FLYING and (s.timeouts or message.holder == 2):
                t = s if message.holder == 2 else s._replace(timeouts=s.timeouts - 1)
                yield (f"{i} times out", self.stale(self.timed_out(t, i), i), None, message.holder == 2)

    def telling(self, s: State, j: int, worker: Worker) -> Step:
        (act, named, is_last), rest = worker.told[0], worker.told[1:]
        t, label = (
            self.with_worker(s, j, worker._replace(told=rest)),
            f"w{j} tells: {act} {[i for i, _ in named]}",
        )
        if act != "commit all":
            return label, self.told(t, act, named), None, True
        ended = self.told_of_all(t, len(named), is_last)
        if ended is not None:
            return label, ended, None, True
        again = (("commit", named, False), *rest)
        return (
            f"{label}, and has to name them",
            self.with_worker(s, j, worker._replace(told=again)),
            None,
            True,
        )

    def taking(self, s: State, j: int) -> Iterator[Step]:
        line = self.line(s)
        if not line or not self.is_open(s, j):
            return
        t = self.handed_out(s)
        for i in line:
            t = self.with_message(t, i, state=FLYING, holder=j)
        worker = t.workers[j]
        batch = tuple((i, True) for i in line)
        yield (
            f"w{j} takes {line}",
            self.with_worker(t, j, worker._replace(hand=(*worker.hand, batch))),
            None,
            True,
        )
        if s.lost:
            for i in line:
                t = self.with_message(t, i, holder=2)
            yield f"w{j} takes {line}, the reply is lost", t._replace(lost=s.lost - 1), None, False

    def working(self, s: State, j: int, worker: Worker) -> Iterator[Step]:
        if worker.running is not None:
            yield from self.returning(s, j, worker, *worker.running)
        elif worker.hand:
            batch, rest = worker.hand[0], worker.hand[1:]
            (i, good), behind = batch[0], batch[1:]
            if good or self.budget.timeouts == 0:
                t = self.with_message(s, i, begun=True)
                hand = (behind, *rest) if behind else rest
                begun = worker.batch if worker.is_begun else tuple(m for m, _ in batch)
                worker = worker._replace(hand=hand, is_begun=bool(behind), running=(i, good), batch=begun)
                t = self.with_worker(t, j, worker)
                early = any(not m.succeeded and m.state != DEAD for m in s.messages[:i])
                yield f"w{j} starts {i}", t, "ORDER" if early else None, True
            else:
                # The heartbeat has found it stale: it is not begun.
                released = (("release", behind, False),) if behind else ()
                hand = rest if self.rules.stale_stops else ((behind, *rest) if behind else rest)
                told = (*worker.told, *released) if self.rules.stale_stops else worker.told
                is_begun = not self.rules.stale_stops and bool(behind)
                begun = worker.batch if is_begun and worker.is_begun else ()
                t = self.with_worker(
                    s, j, worker._replace(hand=hand, is_begun=is_begun, told=told, batch=begun)
                )
                yield f"w{j} drops {i}", t, None, True
            t = self.with_worker(
                s, j, Worker(rest, is_begun=False, told=(*worker.told, ("release", batch, False)))
            )
            yield f"w{j} gives back {[m for m, _ in batch]}", t, None, False

    def returning(self, s: State, j: int, worker: Worker, i: int, good: bool) -> Iterator[Step]:
        told = (*worker.told, ("commit", ((i, good),), False))
        begun = worker.batch if worker.is_begun else ()
        t = self.with_message(s, i, succeeded=True)
        done = worker._replace(running=None, told=told, batch=begun)
        yield f"{i} succeeds", self.with_worker(t, j, done), None, True
        # All messages of the batch have succeeded, and Redis has not heard of any of them.
        of_batch = tuple(named[0] for act, named, _ in told[-len(worker.batch) :] if act == "commit")
        is_plain = all(s.messages[m].left == self.budget.retries for m in worker.batch)
        if not worker.is_begun and is_plain and tuple(m for m, _ in of_batch) == worker.batch:
            whole = (*told[: -len(of_batch)], ("commit all", of_batch, all(ours for _, ours in of_batch)))
            yield f"{i} succeeds, the last", self.with_worker(t, j, done._replace(told=whole)), None, True
        if not s.failures:
            return
        told = (*worker.told, ("rollback", ((i, good),), False))
        hand, is_begun = worker.hand, worker.is_begun
        if self.rules.stops and is_begun:
            act = "release" if self.rules.gives_back else "rollback"
            told = (*told, (act, hand[0], False))
            hand, is_begun = hand[1:], False
        t = self.with_worker(s, j, Worker(hand, is_begun, None, told))
        yield f"{i} fails", t._replace(failures=s.failures - 1), None, False

    def killed(self, s: State, j: int, worker: Worker) -> Iterator[Step]:
        """A kill -9; its parent tells what its notes say, or is dead as well."""
        orphaned = self.with_worker(s, j, Worker())
        for i, message in enumerate(s.messages):
            if message.state == FLYING and message.holder == j:
                orphaned = self.with_message(orphaned, i, holder=2)
        yield f"w{j} and its parent are killed", orphaned, None, False
        # It names them: the notes say what has succeeded, and not what was to be told of it.
        told = [("commit" if act == "commit all" else act, named) for act, named, _ in worker.told]
        if worker.running is not None:
            told.append(("rollback", (worker.running,)))
        told += [("release", batch) for batch in worker.hand]
        t = self.with_worker(s, j, Worker())
        for act, named in told:
            t = self.told(t, act, named)
        yield f"w{j} is killed", t, None, False


def charged_unbegun(s: State, retries: int) -> bool:
    return any(m.left < retries and not m.begun and not m.timed_out for m in s.messages)


def check(rules: Rules, budget: Budget) -> Verdict:
    """Walk everything; return the shortest trace to each broken property."""
    model = Model(rules, budget)

    def steps(s: State) -> Iterator[Step]:
        for label, t, broken, is_fair in model.steps(s):
            if broken is None and charged_unbegun(t, budget.retries):
                broken = "CHARGE"
            if broken is None and any(m.state == DONE and not m.succeeded for m in t.messages):
                broken = "LOSS"
            yield label, t, broken, is_fair

    return walk(model.first, steps, lambda s: all(m.state in (DONE, DEAD) for m in s.messages))
