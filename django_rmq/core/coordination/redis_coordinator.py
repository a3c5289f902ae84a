"""The default coordinator: workers send heartbeats to Redis, and one of them assigns the slots.

Each worker renews its session with one small script about once a second, by the clock of Redis, and learns what changed: the
membership has a version, the assignment a number. The worker with the smallest id makes the assignment, and writes it on
condition that both are unchanged since it read them, so two workers that both believe to be the first cannot both write. If the
first worker does not write it, the next one does after a session, and so on. All others only read. Whose turn it is, is decided
by ``shared_coordinator``; here is how Redis stores it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from uuid import uuid4

from django_rmq.core.clock import uptime
from django_rmq.core.commands import membership
from django_rmq.core.commands.broker_interface import Broker
from django_rmq.core.coordination import Member, Slots, Worker
from django_rmq.core.coordination.assignment import assign, served_topics
from django_rmq.core.coordination.shared_coordinator import (
    AUDIT_SECONDS,
    SETTLE_SECONDS,
    SharedCoordinator,
    log_assigned,
)
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import members_of_roster, read_workers, whose, write_record
from django_rmq.core.log import safe_logger
from django_rmq.core.model.replies import Beat
from django_rmq.exceptions import ConfigurationError, RmqError, ServerTrouble

logger = safe_logger("django_rmq.coordination")

SESSION_SECONDS = 4.0
"""Seconds without a beat after which a worker counts as gone."""

BEAT_SECONDS = 1.3
"""Seconds between two beats. With one read of the definitions per audit, a worker then sends at most one
command per second."""

RETRY_SECONDS = 0.75 * SETTLE_SECONDS
"""Seconds between two attempts while Redis is unavailable: so few that all workers are back before slots are assigned again,
and keep theirs."""

SHORTEST_SESSION, LONGEST_SESSION = 0.2, 600.0


class RedisCoordinator(SharedCoordinator):
    """See ``Coordinator``. ``broker`` may be an ``InMemoryBroker``; workers are then threads of one process.

    ``token`` distinguishes this worker from another one with its id; any process that knows it may end the
    session (``membership.leave``). A worker that does not reach Redis for ``session_seconds`` gives up its slots,
    even if its connection is stuck, and joins again when Redis answers.
    """

    def __init__(
        self,
        broker: Broker,
        worker: Worker,
        own: Callable[[Slots], None],
        disown: Callable[[Slots], None],
        *,
        session_seconds: float = SESSION_SECONDS,
        audit_seconds: float = AUDIT_SECONDS,
        token: str = "",
    ) -> None:
        if not SHORTEST_SESSION <= session_seconds <= LONGEST_SESSION:
            raise ConfigurationError(
                f"a worker's session must last {SHORTEST_SESSION} to {LONGEST_SESSION} seconds, got {session_seconds}"
            )
        super().__init__(worker, own, disown, session_seconds=session_seconds, audit_seconds=audit_seconds)
        self.broker = broker
        self._beat_seconds = min(BEAT_SECONDS, session_seconds / 3)
        self._token = token or uuid4().hex
        self._joined = False
        self._plan_version = ""
        self._raw = b""
        self._vetted: tuple[str, str] | None = None
        """The versions of membership and plan that were recalculated and found correct."""
        self._plan_flaw = ""
        self._listening = threading.Thread(target=self._listen, name="rmq-coordinator-news", daemon=True)

    # --- the interface for the worker

    def start(self) -> None:
        sent = uptime()
        beat = self._send_beat(full=True)
        if beat.status == "duplicate":
            raise ConfigurationError(
                f"worker id {self.worker.id} is already in use ({whose(beat.rival)}): every start of a "
                "process needs a new id"
            )
        if beat.status != "ok":
            raise ConfigurationError("2000 workers are already registered, which is the maximum")
        self._process_beat(beat, sent)
        logger.info("Joined as worker %s", self.worker.id, extra={"rmq_event": "joined"})
        self._ownership.start()
        self._listening.start()
        self._thread.start()

    def members(self) -> list[Member]:
        return members_of_roster(self.broker.run(membership.roster()))

    # --- the thread that beats

    def _try_turn(self) -> float:
        try:
            return self._turn()
        except ServerTrouble as error:
            self._log_throttled("redis", "Redis is unavailable (%s); trying again", error)
            return min(RETRY_SECONDS, self._beat_seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next beat may be better
            self._log_throttled("beat", "A heartbeat failed: %s", error, exc_info=True)
            return self._beat_seconds

    def _leave(self) -> None:
        try:
            if self._joined:
                self.broker.run(membership.leave(self.worker.id, self._token))
                logger.info("Left", extra={"rmq_event": "left"})
        except RmqError as error:
            logger.warning("Cannot end the session (%s); it expires by itself", error)

    def _turn(self) -> float:
        """Beat once, process the answer, and return after how many seconds to beat again."""
        sent = uptime()
        audit = self._starts_audit(sent)
        beat = self._send_beat(full=audit)
        # The process was suspended or cut off for a whole session, or Redis failed over and lost the session.
        if beat.status == "expired":
            logger.warning("The session expired; joining again", extra={"rmq_event": "expired"})
            self._lose()
            beat = self._send_beat(full=True)
        # Another process has joined with this id meanwhile, or the maximum number of workers is reached.
        if beat.status != "ok":
            self._lose()
            self._log_throttled(
                beat.status,
                "Redis no longer accepts this worker (%s)",
                ConfigurationError(f"{beat.status}: {whose(beat.rival)}" if beat.rival else beat.status),
            )
            return self.session_seconds
        self._process_beat(beat, sent)
        if audit:
            self._vetted = None
        due = self._lead(sorted(self._live_workers), sent, audit)
        # A beat just after the end of a session ends it, so that the slots of a dead worker are assigned soon. The random factor
        # keeps workers that started together from beating together.
        ends = sent + beat.first_end_ms / 1000 + 0.005
        return max(0.0, min(sent + self._beat_seconds * random.uniform(0.95, 1.05), ends, due) - uptime())

    def _lose(self) -> None:
        self._joined = False
        super()._lose()

    def _send_beat(self, *, full: bool) -> Beat:
        with self._changed:
            worker, record = self._announced, ""
            if not self._joined or worker is not self.worker:
                record = write_record(self._token, worker)
        beat = self.broker.run(
            membership.beat(
                worker.id,
                self._token,
                int(self.session_seconds * 1000),
                record=record,
                known_members_version="" if full else self._members_version,
                known_plan_version="" if full else self._plan_version,
            )
        )
        if beat.status == "ok":
            self._joined = True
            self.worker = worker
        return beat

    def _process_beat(self, beat: Beat, sent: float) -> None:
        """Process the answer of a beat: the other workers, and the assignment."""
        if beat.workers is not None:
            if beat.members_version != self._members_version:
                self._changed_at = uptime()
            self._live_workers = read_workers(beat.workers, self._log_throttled)
        if beat.plan is not None:
            self._plan_version, self._basis = beat.plan_version, beat.basis
            if beat.plan != self._raw or self._plan is None:
                raw = self._raw = beat.plan
                self._plan = self._read_plan(lambda: AssignmentPlan.decode(raw)) if raw else None
        self._members_version = beat.members_version
        if self._plan is not None and (beat.workers is not None or beat.plan is not None):
            self._plan_flaw = self._plan.flaw(self._live_workers)
        self._sent = sent
        self._apply_plan()

    def _owned_until(self) -> float:
        return self._sent + self.session_seconds

    # --- the assignment

    def _flaw(self) -> str:
        is_vetted = self._vetted == (self._members_version, self._plan_version)
        return super()._flaw() or ("" if is_vetted else self._plan_flaw)

    def _assign(self, why: str) -> None:
        topics = served_topics(
            (worker.topics for worker in self._live_workers.values()), self.broker.definitions()
        )
        live_workers = [worker.capacity for worker in self._live_workers.values()]
        assignment = assign(topics, live_workers, self._last_plan.runs())
        is_new = self._plan is None or self._basis != self._members_version or assignment != self._plan.runs()
        if is_new:
            plan = self._last_plan.renewed(assignment, self.broker.now_ms() // 1000)
            text = plan.encode()
            plan_version = self.broker.run(membership.assign(self._members_version, self._plan_version, text))
            if plan_version is None:
                # Membership or assignment has changed since it was read: the next beat reads both again.
                self._poked.set()
                return
            log_assigned(len(assignment), len(self._live_workers), why)
            self._plan_version, self._basis, self._raw = plan_version, self._members_version, text.encode()
            self._plan = self._last_plan = plan
        self._vetted = (self._members_version, self._plan_version)
        self._apply_plan()

    # --- news

    def _listen(self) -> None:
        """Beat at once when other workers publish a change. If a notice is lost, the next beat finds the change."""
        while not self._stopped.is_set():
            changes = None
            try:
                changes = self.broker.worker_changes()
                # What changed before the subscription was not published to this worker.
                self._poked.set()
                while not self._stopped.is_set():
                    versions = {self._members_version, self._plan_version}
                    if any(str(change[1]) not in versions for change in changes.get(timeout=1.0)):
                        self._poked.set()
            except RmqError:
                self._stopped.wait(RETRY_SECONDS)
            except Exception as error:  # noqa: BLE001 - beats go on without news
                self._log_throttled("news", "The subscription failed; heartbeats continue: %s", error)
                self._stopped.wait(1.0)
            finally:
                if changes is not None:
                    changes.close()
