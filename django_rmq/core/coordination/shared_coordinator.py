"""``SharedCoordinator``, the common part of the coordinators: the turns in which each worker checks, and in which one assigns.

Which worker gets which slots is decided by ``assignment``. How a server stores workers and assignment is the part of
``redis_coordinator`` and ``zookeeper.coordinator``.

The workers are ranked. The first one makes the assignment once the membership has been stable for a moment, and writes it on
condition that no other worker was faster. If it does not, the next one does after a session, and so on. All others only read.

A worker has two threads. One checks: it talks to the server. The other one (``SlotOwnership``) changes the owned slots, part by
part, to the assigned ones, and contacts no server. So the worker gives up its serial slots at the end of its session even while
the thread that checks is stuck in a connection.
"""

from __future__ import annotations

import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from django_rmq.core.clock import uptime
from django_rmq.core.coordination import Coordinator, Owned, Slots, Worker, less, pairs, topic_slots
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.log import LogThrottle, safe_logger
from django_rmq.core.model.topic import Topic

logger = safe_logger("django_rmq.coordination")

PART = 8192
"""The number of slots passed on at once. Between two parts it checks for a newer target or the end of the session."""


class SlotOwnership:
    """A thread that calls ``own`` and ``disown`` until the owned slots are those of the last ``want``.

    Serial slots are owned at most until ``until``. Ungated ones, those of topics that are not serial, belong to every worker, and
    are owned until ``end``. A callback that raises is logged and counts as done.
    """

    def __init__(self, own: Callable[[Slots], None], disown: Callable[[Slots], None]) -> None:
        self.changed = threading.Condition()
        """Notified after each change of what is owned or wanted. The owner of this object may use it for its
        own conditions too."""
        self._own = own
        self._disown = disown
        self._serial: Owned = {}
        self._ungated: Owned = {}
        self._until = 0.0
        self._owned: Owned = {}
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, or another one after it has died."""
        thread = threading.Thread(target=self._run, name="rmq-ownership", daemon=True)
        thread.start()
        self._thread = thread

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def want(self, serial: Owned, ungated: Owned, until: float) -> None:
        """Own exactly this; the serial part no longer than until ``until`` by ``uptime``."""
        with self.changed:
            self._serial, self._ungated, self._until = serial, ungated, until
            self.changed.notify_all()

    def lose(self) -> None:
        """Give up the serial slots, because the session is over."""
        with self.changed:
            self._serial = {}
            self.changed.notify_all()

    def end(self, timeout: float) -> bool:
        """Disown everything; return whether all of it was passed on within ``timeout`` seconds."""
        with self.changed:
            self._ending = True
            self.changed.notify_all()
            if not self.is_alive():
                return True
            return self.changed.wait_for(lambda: not self._owned, timeout)

    def owned(self) -> Owned:
        """Return the slots passed to ``own`` and not to ``disown``."""
        with self.changed:
            return dict(self._owned)

    def is_settled(self) -> bool:
        """Return whether nothing is left to pass on. Call it with ``changed`` held."""
        return self._owned == self._assigned_slots()

    def _run(self) -> None:
        while True:
            with self.changed:
                assigned = self._assigned_slots()
                lost, gained = less(self._owned, assigned), less(assigned, self._owned)
                if not lost and not gained:
                    if self._ending:
                        return
                    self.changed.wait(max(0.0, self._until - uptime()) if self._serial else None)
                    continue
            # Lost slots come first, because their new owner waits for them.
            part = _first(lost or gained)
            try:
                (self._disown if lost else self._own)(pairs(part))
            except Exception:
                # The dispatcher failed with a part of the slots. Without this thread it would get no other assignment.
                word = "loses" if lost else "gains"
                logger.exception("Cannot apply a new assignment: the worker %s some slots", word)
            with self.changed:
                self._owned = less(self._owned, part) if lost else _and(self._owned, part)
                self.changed.notify_all()

    def _assigned_slots(self) -> Owned:
        if self._ending:
            return {}
        # The other workers count this one as gone when its session ends, and take over its slots.
        if self._serial and uptime() >= self._until:
            logger.warning(
                "The coordinator was unreachable for a whole session; the worker gives up its serial slots",
                extra={"rmq_event": "session_lost"},
            )
            self._serial = {}
        return {**self._ungated, **self._serial}


def _first(owned: Owned) -> Owned:
    """Return the first ``PART`` slots of ``owned``."""
    room, part = PART, {}
    for topic, ranges in owned.items():
        pieces: list[range] = []
        for piece in ranges:
            if room == 0:
                break
            pieces.append(piece[:room])
            room -= len(pieces[-1])
        if pieces:
            part[topic] = tuple(pieces)
    return part


def _and(owned: Owned, more: Owned) -> Owned:
    both = dict(owned)
    for topic, ranges in more.items():
        joined: list[range] = []
        for part in sorted([*owned.get(topic, ()), *ranges], key=lambda part: part.start):
            start = joined.pop().start if joined and joined[-1].stop == part.start else part.start
            joined.append(range(start, part.stop))
        both[topic] = tuple(joined)
    return both


AUDIT_SECONDS = 5.0
"""Seconds between two full checks, whatever changes were announced."""

SETTLE_SECONDS = 0.2
"""Seconds for which a changed membership must be stable before slots are assigned: many workers start at once, and each of them
would otherwise cause an assignment."""

FULL_SECONDS = 0.2
"""Seconds per worker between two reports of one worker that its threads are busy or free: all workers read each report."""

NEVER = float("inf")


class SharedCoordinator(Coordinator):
    """See ``Coordinator``. A thread checks every ``audit_seconds``, and at once when a change is published."""

    session_seconds: float
    """Seconds after which the other workers consider a silent worker gone."""

    def __init__(
        self,
        worker: Worker,
        own: Callable[[Slots], None],
        disown: Callable[[Slots], None],
        *,
        session_seconds: float,
        audit_seconds: float,
    ) -> None:
        self.worker = worker
        self.session_seconds = session_seconds
        self._audit_seconds = audit_seconds
        self._settle_seconds = SETTLE_SECONDS
        self._announced = worker
        """This worker as the others should know it; ``worker`` is the version that they know."""
        self._members_version = ""
        """The version of the membership as this worker knows it."""
        self._basis = ""
        """The membership for which the assignment was made."""
        self._live_workers: dict[str, Worker] = {}
        self._plan: AssignmentPlan | None = None
        self._last_plan = AssignmentPlan({})
        """The last readable assignment; if it is lost, the next one starts from it and moves little."""
        self._mine: tuple[AssignmentPlan, Worker, Owned] | None = None
        """The slots of this worker, with the plan and the worker for which they were computed."""
        self._changed_at = 0.0
        self._stale_since: float | None = None
        self._is_current = False
        self._sent = float("-inf")
        """The ``uptime`` at which the last answered check was sent; the session runs from then."""
        self._confirmed = float("-inf")
        """The same for the last check whose results were passed to the worker."""
        self._next_audit = 0.0
        self._next_full = 0.0
        """The ``uptime`` from which this worker may report again for which topics it has no free thread."""
        self._stop_seconds = 1.0
        self._log_throttled = LogThrottle(logger)
        self._stopped, self._poked = threading.Event(), threading.Event()
        self._ownership = SlotOwnership(own, disown)
        self._changed = self._ownership.changed
        self._thread = self._new_thread()

    # --- the interface for the worker

    def stop(self, timeout: float = 2.0) -> None:
        """Disown everything and leave. If the server does not answer, the end of the session has the same effect later."""
        end = time.monotonic() + timeout
        self._stop_seconds = timeout / 2
        self._stopped.set()
        self._poked.set()
        self._ownership.end(timeout / 2)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, end - time.monotonic()))

    def announce(self, topics: Iterable[Topic]) -> None:
        with self._changed:
            self._announced = replace(self._announced, topics=topic_slots(topics))
            self._is_current = False
        self._poked.set()

    def note_full(self, topics: frozenset[str]) -> None:
        """Publish for which topics this worker has no free thread, unless it published such a report just before."""
        with self._changed:
            now = uptime()
            if topics == self._announced.full or now < self._next_full:
                return
            self._next_full = now + FULL_SECONDS * len(self._live_workers)
            self._announced = replace(self._announced, full=topics)
            self._is_current = False
        if topics:
            names = ", ".join(sorted(topics))
            logger.info("No thread is free for topics: %s", names, extra={"rmq_event": "full"})
        else:
            logger.info("Threads are free for all topics again", extra={"rmq_event": "has_room"})
        self._poked.set()

    def wait_settled(self, timeout: float) -> bool:
        """Return whether everything known here has been assigned and passed on; wait for it if necessary."""

        def is_settled() -> bool:
            return self._is_in_session() and self._is_current and self._ownership.is_settled()

        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or is_settled(), timeout)
            return not self._stopped.is_set() and is_settled()

    def is_alive(self) -> bool:
        """Return whether the thread that checks and the one that passes slots to the worker run, or are no longer needed.

        Without a thread for news the next check finds what has changed.
        """
        return self._stopped.is_set() or (self._ownership.is_alive() and self._thread.is_alive())

    def revive(self) -> None:
        """Replace the thread that checks and the one that passes slots to the worker, if they have died."""
        if not self._ownership.is_alive():  # rule: coordinators_are_not_revived
            self._ownership.start()
        if not self._thread.is_alive():
            fresh = self._new_thread()
            fresh.start()
            self._thread = fresh

    def owned(self) -> Owned:
        return self._ownership.owned()

    def confirmed(self) -> float:
        """Return when the last check was sent whose results have been passed to the worker in full."""
        with self._changed:
            return self._confirmed if self._ownership.is_settled() else float("-inf")

    # --- implemented for each server

    @abstractmethod
    def _try_turn(self) -> float:
        """Check once and process the result, whatever goes wrong; return after how many seconds to check again."""

    @abstractmethod
    def _leave(self) -> None:
        """Publish that this worker is gone. Never raises."""

    @abstractmethod
    def _owned_until(self) -> float:
        """Return until when, by ``uptime``, this worker owns the assigned slots if the server does not answer again."""

    @abstractmethod
    def _assign(self, why: str) -> None:
        """Recalculate, and write the new assignment if no other worker was first."""

    def _is_in_session(self) -> bool:
        return uptime() < self._sent + self.session_seconds

    def _flaw(self) -> str:
        """Return why another assignment is necessary; empty if it is not."""
        if self._plan is None:
            return "there is no assignment"
        return "workers changed" if self._basis != self._members_version else ""

    # --- the thread that checks

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="rmq-coordinator", daemon=True)

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait = self._try_turn()
            if self._poked.wait(wait) and not self._stopped.is_set():
                # Many changes at once are handled as one, and not all workers ask at the same moment.
                self._stopped.wait(random.uniform(0.03, 0.08))
            self._poked.clear()
        self._ownership.end(self._stop_seconds)
        self._leave()

    def _starts_audit(self, now: float) -> bool:
        """Return whether it is time for the next audit; if so, the audit begins with this call."""
        if now < self._next_audit:
            return False
        self._next_audit = now + self._audit_seconds * random.uniform(0.9, 1.0)
        return True

    def _read_plan(self, decode: Callable[[], AssignmentPlan]) -> AssignmentPlan | None:
        try:
            self._last_plan = decode()
        except ValueError as error:
            self._log_throttled("plan", "The assignment cannot be read and is computed again: %s", error)
            return None
        return self._last_plan

    def _apply_plan(self) -> None:
        """Make the worker own what the plan assigns to it, if there is a plan."""
        plan, worker = self._last_plan, self.worker
        if self._mine is None or self._mine[0] is not plan or self._mine[1] is not worker:
            self._mine = (plan, worker, plan.owned_by(worker))
        ungated: Owned = {topic.name: (range(topic.slots),) for topic in worker.topics if not topic.serial}
        self._ownership.want(self._mine[2], ungated, self._owned_until())
        with self._changed:
            if self._plan is not None:
                self._confirmed = self._sent
            self._is_current = not self._flaw() and self._announced is worker
            self._changed.notify_all()

    def _lose(self) -> None:
        """Own none of the assigned slots."""
        with self._changed:
            self._is_current = False
            self._ownership.lose()

    # --- the assignment

    def _lead(self, ranked: Sequence[str], now: float, audit: bool, not_before: float = 0.0) -> float:
        """Assign if it is this worker's turn; return the ``uptime`` of its turn, or ``NEVER``.

        ``ranked``: the workers in the order of their turns.
        """
        if self.worker.id not in ranked:
            return NEVER
        rank = ranked.index(self.worker.id)
        flaw = self._flaw()
        if not flaw:
            self._stale_since = None
            # A change of definitions in Redis changes neither membership nor assignment, so only the audit finds it.
            if audit and rank == 0:
                self._assign("the audit")
            return NEVER
        if self._stale_since is None:
            self._stale_since = now
        # While workers keep starting, the membership never settles, so the wait has an upper bound.
        settled = min(self._changed_at + self._settle_seconds, self._stale_since + 3 * self._settle_seconds)
        # The workers before this one may have died: each rank waits one session longer than the rank before it.
        due = max(settled, self._stale_since, not_before) + rank * self.session_seconds
        if now < due:
            return due
        self._stale_since = None
        self._assign(flaw)
        return NEVER


def log_assigned(topics: int, workers: int, why: str) -> None:
    """Log that an assignment was written."""
    logger.info(
        "Assigned the slots of %d serial topics to %d workers (%s)",
        topics,
        workers,
        why,
        extra={"rmq_event": "assigned"},
    )
