"""The ephemeral node by which other workers know a worker."""

from __future__ import annotations

from typing import Any

from kazoo import exceptions as kazoo

from django_rmq.core.coordination import Worker
from django_rmq.core.coordination.member_records import whose, write_record
from django_rmq.core.coordination.zookeeper.session import ZooKeeperSession
from django_rmq.exceptions import ConfigurationError, ServerUnavailable


def create(session: ZooKeeperSession, worker: Worker, token: str) -> None:
    """Create the node, in place of an earlier session's, and store the session's number.

    Raises ``ConfigurationError`` if another worker has this id, ``ServerUnavailable`` if the node is just
    being deleted.
    """
    path = session.ensemble.path("workers", worker.id)
    record = write_record(token, worker).encode()
    try:
        session.ask(session.client.create_async(path, record, ephemeral=True))
    except kazoo.NodeExistsError:
        _take_over(session, path, record, token)
    (own,) = session.ask(session.client.exists_async(path))
    if own is None:
        raise ServerUnavailable(f"this worker's node {path} disappeared while it was created")
    session.number = own.ephemeralOwner


def _take_over(session: ZooKeeperSession, path: str, record: bytes, token: str) -> None:
    """Replace a node with this id if it belongs to an earlier session of this worker."""
    try:
        ((found, stat),) = session.ask(session.client.get_async(path))
        found = found or b""
        if found.startswith(token.encode()):
            transaction = session.client.transaction()
            transaction.delete(path, version=stat.version)
            transaction.create(path, record, ephemeral=True)
            (answers,) = session.ask(transaction.commit_async())
            if not any(isinstance(answer, Exception) for answer in answers):
                return
            raise ServerUnavailable(f"this worker's earlier node {path} is being deleted")
    except kazoo.NoNodeError:
        raise ServerUnavailable(f"this worker's earlier node {path} is being deleted") from None
    raise ConfigurationError(
        f"worker id {path.rpartition('/')[2]} is already in use ({whose(found)}): every start of a "
        "process needs a new id"
    )


def change(session: ZooKeeperSession, worker: Worker, token: str) -> bool:
    """Write the worker's record again, and a mark at the node that the others watch; return whether that succeeded."""
    transaction = session.client.transaction()
    transaction.set_data(session.ensemble.path("workers", worker.id), write_record(token, worker).encode())
    transaction.set_data(session.ensemble.path("workers"), b"")
    (answers,) = session.ask(transaction.commit_async())
    return not any(isinstance(answer, Exception) for answer in answers)


def meet(session: ZooKeeperSession, worker: str) -> tuple[list[str], str]:
    """Return the ids of all workers and their version; watch the worker before ``worker``, or all if there is none."""
    client, folder = session.client, session.ensemble.path("workers")
    while True:
        ((ids, stat),) = session.ask(client.get_children_async(folder, include_data=True))
        ids = sorted(ids)
        before = ids.index(worker) if worker in ids else 0
        if before == 0:
            (ids, stat), _ = session.ask(
                client.get_children_async(folder, watch=session.watch, include_data=True),
                client.exists_async(folder, watch=session.watch),
            )
            return sorted(ids), version_of(stat)
        (watched,) = session.ask(client.exists_async(f"{folder}/{ids[before - 1]}", watch=session.watch))
        if watched is not None:
            return ids, version_of(stat)


def version_of(workers: Any) -> str:
    """Return a version that differs for every membership: the node, its last new or lost child, its last mark."""
    return f"{workers.czxid:x}.{workers.pzxid:x}.{workers.mzxid:x}"
