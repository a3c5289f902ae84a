"""The coordinator that uses ZooKeeper: when a worker joins, looks for changes and assigns, and what follows a session that ended.

The package's docstring describes the nodes and the protocol, ``znodes`` reads and writes them. ``SharedCoordinator``, the base,
has the loop, the owned slots, and the known workers and assignment (``_live_workers``, ``_plan``). Definitions of topics are
published in ZooKeeper, so that slots can be assigned while Redis is unavailable.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping

from kazoo import exceptions as kazoo

from django_rmq.core.clock import uptime
from django_rmq.core.coordination import Member, Slots, Worker
from django_rmq.core.coordination.assignment import assign, served_topics
from django_rmq.core.coordination.shared_coordinator import AUDIT_SECONDS, SharedCoordinator, log_assigned
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import read_workers
from django_rmq.core.coordination.zookeeper import znodes
from django_rmq.core.coordination.zookeeper.client import Ensemble, ZooKeeperSession
from django_rmq.core.log import safe_logger
from django_rmq.core.model.topic import Definition
from django_rmq.exceptions import (
    ConfigurationError,
    ServerRefused,
    ServerTrouble,
    ServerUnavailable,
)

logger = safe_logger("django_rmq.coordination")

LONGEST_BEAT = 5.0
"""The maximum number of seconds between two checks, however long the session is."""

RETRY_SECONDS = 0.5
"""Seconds between two attempts to join."""

REJOIN_SECONDS = 1.5
"""Seconds before a worker that has lost its session assigns, so that others can come back."""

MAX_NODE = 700_000
"""The maximum size of one node in bytes. ZooKeeper's own limit is 1 MB for a whole request."""

NO_LIMIT = 1e9
"""Seconds that stand for a session without an end."""


class ZooKeeperCoordinator(SharedCoordinator):
    """See ``Coordinator``. Make it in the process that uses it.

    While ``registered`` (all registered definitions) raises ``ServerTrouble``, those published in ZooKeeper
    apply. Serial slots are given up when ZooKeeper reports the session's end or refuses the worker, and when its nodes
    are missing. With ``is_strict``, they are also given up when the connection is lost, and after a session without an
    answer.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        worker: Worker,
        own: Callable[[Slots], None],
        disown: Callable[[Slots], None],
        *,
        registered: Callable[[], Mapping[str, Definition]],
        token: str,
        is_strict: bool = False,
        audit_seconds: float = AUDIT_SECONDS,
    ) -> None:
        super().__init__(
            worker, own, disown, session_seconds=ensemble.session_seconds, audit_seconds=audit_seconds
        )
        self.ensemble = ensemble
        self._definitions = znodes.PublishedDefinitions(registered, self._log_throttled)
        self._token = token
        self._is_strict = is_strict
        self._beat_seconds = min(LONGEST_BEAT, ensemble.session_seconds / 3)
        self._session: ZooKeeperSession | None = None
        self._pid = 0
        self._ids: list[str] = []
        self._met = 0
        """The number of the session's connection on which the other workers were read: kazoo's watches end with a connection."""
        self._live_workers_of = ""
        """The membership for which ``_live_workers`` was read."""
        self._seen = (0, 0)
        """The node, and its state, from which the assignment was read."""
        self._version = -1
        """The version of the assignment's node when it was read; a write requires that it is unchanged."""
        self._rejoined_at = float("-inf")

    def start(self) -> None:
        """Join; the first slots follow soon after. Raises ``ConfigurationError`` if the path belongs to others."""
        self._pid = os.getpid()
        self._join()
        logger.info("Joined as worker %s", self.worker.id, extra={"rmq_event": "joined"})
        self._ownership.start()
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        if self._pid != os.getpid():
            return  # never started, or inherited by a fork: this process must not end the session
        super().stop(timeout)

    def _is_in_session(self) -> bool:
        session = self._session
        return session is not None and session.is_connected and super()._is_in_session()

    def members(self) -> list[Member]:
        """Ask ZooKeeper for all workers. The time left of a session is unknown: its whole length is returned."""
        return znodes.members(self._connected())

    def _try_turn(self) -> float:
        try:
            return self._turn()
        except (ServerRefused, ConfigurationError) as error:
            # The attempt is repeated even after an error that a person has to correct.
            self._give_up()
            self._log_throttled("refused", "ZooKeeper no longer accepts this worker: %s", error)
            return self.session_seconds
        except ServerTrouble as error:
            # The assignment may have changed without this worker's knowledge.
            if self._is_strict:
                self._lose()
            with self._changed:
                self._is_current = False
            self._log_throttled("zookeeper", "ZooKeeper is unavailable (%s); trying again", error)
            return RETRY_SECONDS if self._session is None else min(1.0, self._beat_seconds)
        except kazoo.NoNodeError:
            # A person has deleted the nodes at the path; joining creates them again.
            logger.warning("ZooKeeper nodes are missing; joining again", extra={"rmq_event": "expired"})
            self._give_up()
            return RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may be better
            self._log_throttled("look", "Cannot read from ZooKeeper: %s", error, exc_info=True)
            return self._beat_seconds

    def _leave(self) -> None:
        if self._session is not None:
            self._session.close(self._stop_seconds)
            logger.info("Left", extra={"rmq_event": "left"})

    def _turn(self) -> float:
        """Check once, process the result, and return after how many seconds to check again."""
        session = self._session
        # The session has ended, and ZooKeeper has deleted the worker's node with it: other workers take over its slots.
        if session is not None and session.is_lost:
            logger.warning("The ZooKeeper session expired; joining again", extra={"rmq_event": "expired"})
            self._give_up()
            session = None
        if session is None:
            session = self._join()
            self._rejoined_at = uptime()
        if not session.is_connected:
            if uptime() > self._sent + self.session_seconds:
                # The session may be unknown to all servers. A server with older data than the old client has
                # seen never accepts that client again, so a new client has to ask.
                self._drop()
            raise ServerUnavailable(f"the connection to ZooKeeper at {self.ensemble.hosts} was lost")
        if (worker := self._announced) is not self.worker and znodes.change_worker(
            session, worker, self._token
        ):
            self.worker = worker
        sent = uptime()
        if not self._process_changes(session):
            logger.warning("The worker's node is missing; joining again", extra={"rmq_event": "expired"})
            self._give_up()
            return 0.0
        self._sent = sent
        self._apply_plan()
        due = self._lead(self._ids, sent, self._starts_audit(sent), self._rejoined_at + REJOIN_SECONDS)
        next_look = min(sent + self._beat_seconds * random.uniform(0.9, 1.0), due)
        return max(0.0, min(next_look, self._next_audit) - uptime())

    def _join(self) -> ZooKeeperSession:
        """Make a client and its node. Raises ``ServerTrouble``, ``ConfigurationError``; closes the client then."""
        session = ZooKeeperSession(self.ensemble, self._poked.set)
        worker = self._announced
        try:
            session.open()
            znodes.create_nodes(session)
            znodes.create_worker(session, worker, self._token)
        except BaseException:
            session.close(0.0)
            raise
        self.worker = worker
        self._session = session
        self._members_version, self._met, self._seen, self._live_workers_of = "", 0, (0, 0), ""
        self._definitions.forget()
        return session

    def _process_changes(self, session: ZooKeeperSession) -> bool:
        """Process what changed; return whether this worker still belongs to the session."""
        client, path = session.client, self.ensemble.path
        # The number is read before the answers: after a reconnection in between, the next check meets the workers again.
        connections = session.connections
        is_first = bool(self._ids) and self._ids[0] == self.worker.id
        own, present, plan = session.ask(
            client.exists_async(path("workers", self.worker.id)),
            client.exists_async(path("workers"), watch=session.watch if is_first else None),
            client.exists_async(path("assignment"), watch=session.watch),
        )
        # The session may have ended before kazoo noticed it, or a person or another process may have deleted nodes.
        if own is None or present is None or plan is None or own.ephemeralOwner != session.number:
            return False
        if (znodes.version_of(present), connections) != (self._members_version, self._met):
            self._ids, version = znodes.meet_workers(session, self.worker.id)
            if version != self._members_version:
                self._changed_at = uptime()
            self._members_version, self._met = version, connections
        if (plan.czxid, plan.mzxid) != self._seen:
            self._read(session)
        return True

    def _read(self, session: ZooKeeperSession) -> None:
        ((data, stat),) = session.ask(
            session.client.get_async(self.ensemble.path("assignment"), watch=session.watch)
        )
        self._seen, self._version = (stat.czxid, stat.mzxid), stat.version
        self._basis, self._plan = "", None
        if not data:
            return

        def decode() -> AssignmentPlan:
            self._basis, plan = znodes.unpack(data)
            return plan

        self._plan = self._read_plan(decode)

    def _owned_until(self) -> float:
        return self._sent + (self.session_seconds if self._is_strict else NO_LIMIT)

    def _give_up(self) -> None:
        """Drop the session and everything that depends on it."""
        self._drop()
        self._lose()

    def _drop(self) -> None:
        """Close the client, and keep everything else."""
        session, self._session = self._session, None
        if session is not None:
            session.close(0.0)

    def _connected(self) -> ZooKeeperSession:
        session = self._session
        if session is None or not session.is_connected:
            raise ServerUnavailable(f"there is no connection to ZooKeeper at {self.ensemble.hosts}")
        return session

    def _assign(self, why: str) -> None:
        session = self._connected()
        if self._live_workers_of != self._members_version:
            records = dict(znodes.read_texts(session, "workers", self._ids))
            self._live_workers = read_workers(records, self._log_throttled)
            self._live_workers_of = self._members_version
        topics = served_topics(
            (worker.topics for worker in self._live_workers.values()),
            self._definitions.known(session, self._live_workers.values()),
        )
        live_workers = [worker.capacity for worker in self._live_workers.values()]
        before, now = self._last_plan, int(time.time())
        assignment = assign(topics, live_workers, before.runs())
        if (
            self._plan is not None
            and self._basis == self._members_version
            and assignment == self._plan.runs()
        ):
            return
        plan = before.renewed(assignment, now)
        data = znodes.pack(self._members_version, plan)
        if len(data) > MAX_NODE:
            # The times are dropped first, then the previous owners.
            plan = AssignmentPlan({}).renewed(assign(topics, live_workers, {}), now)
            data = znodes.pack(self._members_version, plan)
        if len(data) > MAX_NODE:
            raise ConfigurationError(
                f"the assignment of {len(topics)} topics to {len(live_workers)} workers takes {len(data)} bytes, more "
                f"than the {MAX_NODE} of a ZooKeeper node: divide topics or workers among several ROOTs"
            )
        try:
            (stat,) = session.ask(
                session.client.set_async(self.ensemble.path("assignment"), data, version=self._version)
            )
        except (kazoo.BadVersionError, kazoo.NoNodeError):
            # Another worker has written the assignment since it was read, or its node was deleted: the next turn finds out.
            self._poked.set()
            return
        log_assigned(len(assignment), len(self._live_workers), why)
        self._seen, self._version = (stat.czxid, stat.mzxid), stat.version
        self._basis, self._plan, self._last_plan = self._members_version, plan, plan
        self._apply_plan()
