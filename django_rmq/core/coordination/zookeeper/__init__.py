"""The ZooKeeper coordinator: each worker is an ephemeral node, and one of the workers assigns the slots.

    ROOT                 the owner of this path: {"rmq": 1, "key_prefix": …}
    ROOT/workers         its children are the workers; its own data is written when a worker changes its record
    ROOT/workers/<id>    ephemeral: token and record of a worker
    ROOT/topics/<name>   the definition of a topic, as it is registered
    ROOT/assignment      the membership that the assignment was made for, a line feed, the assignment compressed

A worker reads three stats about every third of a session: its own node, the workers, the assignment. They
show whether anything changed, even if watches were lost; watches only make it faster. All workers watch the
assignment, the first worker (by id) watches the workers, and each other one the worker before it: a death
wakes two, not all. The first one assigns, and writes on condition that the assignment is still the one it
read. If it does not write it, the next one does after a session, and so on.

This is the only package that imports kazoo. A client is made by the process that uses it, and is never
repaired: a worker that loses its session makes a new client. Callbacks from kazoo only set flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from django_rmq.core.coordination import Holding, Member
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.zookeeper import znodes
from django_rmq.core.coordination.zookeeper.client import CONNECT_SECONDS, Ensemble, ZooKeeperSession
from django_rmq.core.coordination.zookeeper.coordinator import ZooKeeperCoordinator


@contextmanager
def _visit(ensemble: Ensemble, seconds: float) -> Iterator[ZooKeeperSession]:
    session = ZooKeeperSession(ensemble)
    session.open(seconds)
    try:
        yield session
    finally:
        session.close(seconds)


def check(ensemble: Ensemble, seconds: float = CONNECT_SECONDS) -> None:
    """Check that workers could join; writes nothing.

    Raises ``ServerUnavailable`` if no server answers, ``ServerRefused`` for wrong credentials, and
    ``ConfigurationError`` if ``root`` belongs to another application.
    """
    with _visit(ensemble, seconds) as session:
        znodes.check_root(session)


def end_session(ensemble: Ensemble, worker: str, token: str, seconds: float = 2.0) -> None:
    """End a dead worker's session, so that others take over its slots at once. Raises ``ServerTrouble``."""
    with _visit(ensemble, seconds) as session:
        znodes.delete_worker(session, worker, token)


class ZooKeeperSurvey(NamedTuple):
    """The existing workers, by id, and the assignment."""

    members: list[Member]
    plan: AssignmentPlan

    @property
    def holdings(self) -> list[Holding]:
        """The owners and since when they own, by topic and slot."""
        return self.plan.holdings

    @property
    def flaw(self) -> str:
        """Why this cannot be the assignment of these workers; empty if it can."""
        return self.plan.flaw({member.worker.id: member.worker for member in self.members})


def survey(ensemble: Ensemble, seconds: float = CONNECT_SECONDS) -> ZooKeeperSurvey:
    """Return the workers and the assignment; needs no worker of its own. Raises ``ServerTrouble``.

    ``seconds``: for how long it tries to connect.
    """
    with _visit(ensemble, seconds) as session:
        return ZooKeeperSurvey(znodes.members(session), znodes.read_plan(session))


__all__ = ["Ensemble", "ZooKeeperCoordinator", "ZooKeeperSurvey", "check", "end_session", "survey"]
