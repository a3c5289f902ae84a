"""What the coordinators have in common whose workers meet at a server: each looks there now and then, and one assigns.

The workers are ranked. The first makes the assignment once the membership has stood for a moment, and writes it on
condition that nobody else was faster. If it does not, the next one does after a session, and so on. All others read.
"""

from __future__ import annotations

import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from django_rmq.core.coordination import Coordinator, Owned, Slots, Worker, announced
from django_rmq.core.coordination.ownership import Ownership, uptime
from django_rmq.core.coordination.plan import Plan
from django_rmq.core.logs.complaints import Complaints
from django_rmq.core.logs.safe import safe_logger
from django_rmq.core.words.topics import Topic

logger = safe_logger("django_rmq.coordination")

AUDIT_SECONDS = 5.0
"""Between two looks at everything, whatever was said to have changed."""

SETTLE_SECONDS = 0.2
"""How long a changed membership must stand before it is assigned to: many workers come at once."""

NEVER = float("inf")


class SharedCoordinator(Coordinator):
    """See ``Coordinator``. A thread takes a turn whenever it is time to, or poked by news.

    ``settle_seconds`` and ``audit_seconds`` are as the constants say.
    """

    session_seconds: float
    """How long the others believe in a worker that is not heard of."""

    def __init__(
        self,
        worker: Worker,
        own: Callable[[Slots], None],
        disown: Callable[[Slots], None],
        *,
        session_seconds: float,
        audit_seconds: float,
        settle_seconds: float,
    ) -> None:
        self.worker = worker
        self.session_seconds = session_seconds
        self._audit_seconds = audit_seconds
        self._settle_seconds = settle_seconds
        self._announced = worker
        """What this worker shall be to the others; ``worker`` is what they have been told."""
        self._members = ""
        """The version of the membership as we know it."""
        self._basis = ""
        """The membership that the assignment was made for."""
        self._crew: dict[str, Worker] = {}
        self._plan: Plan | None = None
        self._last_plan = Plan({})
        """The last assignment that could be read: if it is gone, the next one moves as little as it can."""
        self._mine: tuple[Plan, Worker, Owned] | None = None
        """Which slots are ours of which plan, and as which worker."""
        self._changed_at = 0.0
        self._stale_since: float | None = None
        self._is_current = False
        self._sent = float("-inf")
        """When the last answered look was sent, by ``uptime``: our session runs from then at least."""
        self._confirmed = float("-inf")
        """When the last look was sent of which the worker has been told what follows."""
        self._next_audit = 0.0
        self._stop_seconds = 1.0
        self._complain = Complaints(logger)
        self._stopped, self._poked = threading.Event(), threading.Event()
        self._ownership = Ownership(own, disown)
        self._changed = self._ownership.changed
        self._thread = _thread_of(self._run)

    # --- what a worker asks of it

    def stop(self, timeout: float = 2.0) -> None:
        """Disown everything and leave. Where the server does not answer, the end of the session says the same later."""
        end = time.monotonic() + timeout
        self._stop_seconds = timeout / 2
        self._stopped.set()
        self._poked.set()
        self._ownership.end(timeout / 2)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, end - time.monotonic()))

    def announce(self, *, threads: int | None = None, topics: Iterable[Topic] | None = None) -> None:
        """Tell the others what this worker is from now on."""
        with self._changed:
            self._announced = announced(self._announced, threads, topics)
            self._is_current = False
        self._poked.set()

    def wait_settled(self, timeout: float) -> bool:
        """Return whether all that is known here has been assigned and told, waiting for it if need be."""

        def is_settled() -> bool:
            return self._is_in_session() and self._is_current and self._ownership.is_settled()

        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or is_settled(), timeout)
            return not self._stopped.is_set() and is_settled()

    def is_alive(self) -> bool:
        """Return whether its threads run, or need not run any more."""
        return self._stopped.is_set() or (self._ownership.is_alive() and self._thread.is_alive())

    def revive(self) -> None:
        """Replace the thread that looks and the one that tells the worker what it owns, if they have died."""
        if not self._ownership.is_alive():
            self._ownership.start()
        if not self._thread.is_alive():
            fresh = _thread_of(self._run)
            fresh.start()
            self._thread = fresh

    def owned(self) -> Owned:
        """Return what ``own`` was told and ``disown`` not yet."""
        return self._ownership.owned()

    def confirmed(self) -> float:
        """Return when the last look was sent whose outcome the worker has been told in full."""
        with self._changed:
            return self._confirmed if self._ownership.is_settled() else float("-inf")

    # --- what every server does its own way

    @abstractmethod
    def _try_turn(self) -> float:
        """Look once and do what follows, whatever goes wrong; return after how many seconds to look again."""

    @abstractmethod
    def _leave(self) -> None:
        """Tell the others that we are gone. Raises nothing."""

    @abstractmethod
    def _owned_until(self) -> float:
        """Return until when, by ``uptime``, what the assignment says is ours unless we hear of the server again."""

    @abstractmethod
    def _assign(self, why: str) -> None:
        """Recalculate, and write what is new if nobody else was first."""

    def _is_in_session(self) -> bool:
        return uptime() < self._sent + self.session_seconds

    def _flaw(self) -> str:
        """Return why there must be another assignment; empty: there need not."""
        if self._plan is None:
            return "there is no assignment"
        return "workers changed" if self._basis != self._members else ""

    # --- the thread that looks

    def _run(self) -> None:
        while not self._stopped.is_set():
            wait = self._try_turn()
            if self._poked.wait(wait) and not self._stopped.is_set():
                # Many changes that come at once are one, and not all workers ask in the same instant.
                self._stopped.wait(random.uniform(0.03, 0.08))
            self._poked.clear()
        self._ownership.end(self._stop_seconds)
        self._leave()

    def _starts_audit(self, now: float) -> bool:
        """Return whether it is time for the next audit, which begins with that."""
        if now < self._next_audit:
            return False
        self._next_audit = now + self._audit_seconds * random.uniform(0.9, 1.0)
        return True

    def _read_plan(self, decode: Callable[[], Plan]) -> Plan | None:
        try:
            self._last_plan = decode()
        except ValueError as error:
            self._complain("plan", "The assignment cannot be read and is made again: %s", error)
            return None
        return self._last_plan

    def _tell(self) -> None:
        """Let the worker own what the plan says, as far as it says anything."""
        plan, worker = self._last_plan, self.worker
        if self._mine is None or self._mine[0] is not plan or self._mine[1] is not worker:
            self._mine = (plan, worker, plan.owned_by(worker))
        shared: Owned = {topic.name: (range(topic.slots),) for topic in worker.topics if not topic.serial}
        self._ownership.want(self._mine[2], shared, self._owned_until())
        with self._changed:
            if self._plan is not None:
                self._confirmed = self._sent
            self._is_current = not self._flaw() and self._announced is worker
            self._changed.notify_all()

    def _lose(self) -> None:
        """Own nothing of what is assigned."""
        with self._changed:
            self._is_current = False
            self._ownership.lose()

    # --- the assignment

    def _lead(self, ranked: Sequence[str], now: float, audit: bool, not_before: float = 0.0) -> float:
        """Assign if it is our turn to; return when it will be. ``ranked``: who shall, then who shall if not."""
        if self.worker.id not in ranked:
            return NEVER
        rank = ranked.index(self.worker.id)
        flaw = self._flaw()
        if not flaw:
            self._stale_since = None
            if audit and rank == 0:
                self._assign("the audit")
            return NEVER
        if self._stale_since is None:
            self._stale_since = now
        settled = min(self._changed_at + self._settle_seconds, self._stale_since + 3 * self._settle_seconds)
        due = max(settled, self._stale_since, not_before) + rank * self.session_seconds
        if now < due:
            return due
        self._stale_since = None
        self._assign(flaw)
        return NEVER


def _thread_of(run: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=run, name="rmq-coordinator", daemon=True)


def log_assigned(topics: int, workers: int, why: str) -> None:
    """Log that an assignment was written."""
    logger.info(
        "Assigned %d topics to %d workers (%s)", topics, workers, why, extra={"rmq_event": "assigned"}
    )


__all__ = ["AUDIT_SECONDS", "NEVER", "SETTLE_SECONDS", "SharedCoordinator", "log_assigned"]
