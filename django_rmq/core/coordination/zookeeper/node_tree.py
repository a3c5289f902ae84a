"""The nodes at the application's path: reading and creating its owner, the workers, the topics and the assignment.

Its functions keep no state. When they are called is decided by the coordinator.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator

from kazoo import exceptions as kazoo

from django_rmq.core.coordination import Member
from django_rmq.core.coordination.stored_plan import AssignmentPlan, read_workers
from django_rmq.core.coordination.zookeeper.client import ZooKeeperSession
from django_rmq.core.log import safe_logger
from django_rmq.exceptions import ConfigurationError, ServerRefused

logger = safe_logger("django_rmq.coordination")

MAX_TEXT = 1 << 26
"""The maximum size in bytes of an uncompressed assignment. RMQ writes no larger one."""


def check(session: ZooKeeperSession) -> bool:
    """Return whether the path exists. Raises ``ConfigurationError`` if it belongs to another application."""
    ensemble = session.ensemble
    try:
        ((data, _), children) = session.ask(
            session.client.get_async(ensemble.root), session.client.get_children_async(ensemble.root)
        )
    except kazoo.NoNodeError:
        return False
    data = data or b""  # kazoo returns None for a node that was created without data
    # A person may have created the path without data, to set its permissions.
    if not data and set(children) <= {"workers", "topics", "assignment"}:
        return False
    try:
        owner = json.loads(data)
        is_ours, prefix = owner["rmq"] == 1, str(owner["key_prefix"])
    except (ValueError, KeyError, TypeError):
        is_ours, prefix = False, ""
    if not is_ours:
        raise ConfigurationError(
            f"the ZooKeeper path {ensemble.root} holds other data (data {data[:60]!r}, children "
            f'{sorted(children)[:5]}): give RMQ its own path in RMQ["ZOOKEEPER"]["ROOT"]'
        )
    if prefix != ensemble.key_prefix:
        raise ConfigurationError(
            f"the ZooKeeper path {ensemble.root} belongs to workers with KEY_PREFIX {prefix!r}, this process has "
            f'{ensemble.key_prefix!r}: give each KEY_PREFIX its own RMQ["ZOOKEEPER"]["ROOT"]'
        )
    return True


def create_nodes(session: ZooKeeperSession) -> None:
    """Create the path if it does not exist. Raises ``ConfigurationError`` if it belongs to another application."""
    ensemble, client = session.ensemble, session.client
    if not check(session):
        marker = json.dumps({"rmq": 1, "key_prefix": ensemble.key_prefix}).encode()
        try:
            session.ask(client.create_async(ensemble.root, marker, acl=ensemble.acl, makepath=True))
        except kazoo.NodeExistsError:
            # Created empty by a person who set permissions, or by another worker at this moment.
            if not check(session):
                session.ask(client.set_async(ensemble.root, marker))
    for name in ("workers", "topics", "assignment"):
        try:
            session.ask(client.create_async(ensemble.path(name), acl=ensemble.acl))
        except kazoo.NodeExistsError:
            # Another worker, or an earlier run, has created the node.
            continue
    if ensemble.is_closed:
        ((acls, _),) = session.ask(client.get_acls_async(ensemble.path("workers")))
        if any(acl.id.scheme == "world" for acl in acls):
            logger.warning(
                "%s in ZooKeeper is open to everyone. Delete it while no worker runs; it is created again "
                "for the configured credentials only",
                ensemble.root,
                extra={"rmq_event": "open_acl"},
            )


def members(session: ZooKeeperSession) -> list[Member]:
    """Return all workers, by id."""
    live_workers = read_workers(dict(texts(session, "workers", ids(session))), lambda *_: None)
    return [Member(worker, session.ensemble.session_seconds) for _, worker in sorted(live_workers.items())]


def ids(session: ZooKeeperSession) -> list[str]:
    """Return the ids of all workers; none if the path does not exist."""
    try:
        return sorted(session.ask(session.client.get_children_async(session.ensemble.path("workers")))[0])
    except kazoo.NoNodeError:
        return []


def texts(session: ZooKeeperSession, folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the data of those of the nodes that still exist; empty data for nodes that may not be read."""
    paths = list(names)
    for start in range(0, len(paths), 500):
        part = paths[start : start + 500]
        questions = [session.client.get_async(session.ensemble.path(folder, name)) for name in part]
        for name, question in zip(part, questions, strict=True):
            try:
                ((data, _),) = session.ask(question)
            except kazoo.NoNodeError:
                # The worker has ended, or the topic was removed, since the names were read.
                continue
            except ServerRefused:
                data = b""
            yield name, data or b""


def plan(session: ZooKeeperSession) -> AssignmentPlan:
    """Return the assignment; an empty one if there is none that can be read."""
    try:
        ((data, _),) = session.ask(session.client.get_async(session.ensemble.path("assignment")))
        return unpack(data)[1]
    except (kazoo.NoNodeError, ValueError):
        return AssignmentPlan({})


def leave(session: ZooKeeperSession, worker: str, token: str) -> None:
    """Delete the node of a dead worker, so that others need not wait for the end of its session."""
    path = session.ensemble.path("workers", worker)
    try:
        ((record, stat),) = session.ask(session.client.get_async(path))
        if record and record.startswith(token.encode()):
            session.ask(session.client.delete_async(path, version=stat.version))
    except (kazoo.NoNodeError, kazoo.BadVersionError):
        # The session has ended by itself, or the worker has changed its record: it is alive.
        return


def pack(members: str, plan: AssignmentPlan) -> bytes:
    """Return the data of the assignment's node."""
    return members.encode() + b"\n" + zlib.compress(plan.encode().encode(), 6)


def unpack(data: bytes) -> tuple[str, AssignmentPlan]:
    """Read the output of ``pack``. Raises ``ValueError`` for anything else."""
    members, _, packed = data.partition(b"\n")
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(f"not a valid assignment: {error}") from error
    if not unpacking.eof:
        raise ValueError("not a valid assignment: it is cut off, or too large")
    return members.decode(errors="replace"), AssignmentPlan.decode(text)
