"""The nodes of the application in ZooKeeper: its owner, the workers, the topics and the assignment; how each is read and written.

When that happens, and what a worker does whose session has ended, is decided by ``coordinator``. It also looks at the stats of
nodes itself, to see what has changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from kazoo import exceptions as kazoo
from kazoo.protocol.states import ZnodeStat

from django_rmq.core.coordination import Member, Worker
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import read_workers, whose, write_record
from django_rmq.core.coordination.zookeeper.client import ZooKeeperSession
from django_rmq.core.log import safe_logger
from django_rmq.core.model.bounds import OTHER_FORM
from django_rmq.core.model.topic import Definition
from django_rmq.exceptions import ConfigurationError, RmqError, ServerRefused, ServerUnavailable

logger = safe_logger("django_rmq.coordination")

MAX_TEXT = 1 << 26
"""The maximum size in bytes of an uncompressed assignment. RMQ writes no larger one."""


def check_root(session: ZooKeeperSession) -> bool:
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
    except OTHER_FORM:
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
    if not check_root(session):
        marker = json.dumps({"rmq": 1, "key_prefix": ensemble.key_prefix}).encode()
        try:
            session.ask(client.create_async(ensemble.root, marker, acl=ensemble.acl, makepath=True))
        except kazoo.NodeExistsError:
            # Created empty by a person who set permissions, or by another worker at this moment.
            if not check_root(session):
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
    live_workers = read_workers(dict(read_texts(session, "workers", worker_ids(session))), lambda *_: None)
    return [Member(worker, session.ensemble.session_seconds) for _, worker in sorted(live_workers.items())]


def worker_ids(session: ZooKeeperSession) -> list[str]:
    """Return the ids of all workers; none if the path does not exist."""
    try:
        return sorted(session.ask(session.client.get_children_async(session.ensemble.path("workers")))[0])
    except kazoo.NoNodeError:
        return []


def read_texts(session: ZooKeeperSession, folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
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


def create_worker(session: ZooKeeperSession, worker: Worker, token: str) -> None:
    """Create the node of a worker, in place of an earlier session's, and store the session's number.

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
    # An earlier session may end just now, and take the node with it.
    if own is None:
        raise ServerUnavailable(f"this worker's node {path} disappeared while it was created")
    session.number = own.ephemeralOwner


def _take_over(session: ZooKeeperSession, path: str, record: bytes, token: str) -> None:
    """Replace a node with this id if it belongs to an earlier session of this worker."""
    try:
        ((holder, stat),) = session.ask(session.client.get_async(path))
        holder = holder or b""
        # The node belongs to an earlier session of this process, and would be deleted when that session ends.
        if holder.startswith(token.encode()):
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
        f"worker id {path.rpartition('/')[2]} is already in use ({whose(holder)}): every start of a "
        "process needs a new id"
    )


def change_worker(session: ZooKeeperSession, worker: Worker, token: str) -> bool:
    """Write the worker's record again, and a mark at the node that the others watch; return whether that succeeded."""
    transaction = session.client.transaction()
    transaction.set_data(session.ensemble.path("workers", worker.id), write_record(token, worker).encode())
    transaction.set_data(session.ensemble.path("workers"), b"")
    (answers,) = session.ask(transaction.commit_async())
    return not any(isinstance(answer, Exception) for answer in answers)


def meet_workers(session: ZooKeeperSession, worker: str) -> tuple[list[str], str]:
    """Return the ids of all workers and their version; watch the worker before ``worker``, or all if there is none."""
    client, folder = session.client, session.ensemble.path("workers")
    while True:
        ((ids, stat),) = session.ask(client.get_children_async(folder, include_data=True))
        ids = sorted(ids)
        before = ids.index(worker) if worker in ids else 0
        if before == 0:
            # The list is read again with the watch, because a worker may have joined in between.
            (ids, stat), _ = session.ask(
                client.get_children_async(folder, watch=session.watch, include_data=True),
                client.exists_async(folder, watch=session.watch),
            )
            return sorted(ids), version_of(stat)
        (watched,) = session.ask(client.exists_async(f"{folder}/{ids[before - 1]}", watch=session.watch))
        # If the worker before has ended since the list was read, there is nothing to watch: the list is read again.
        if watched is not None:
            return ids, version_of(stat)


def version_of(workers: ZnodeStat) -> str:
    """Return a version that differs for every membership: the node, its last new or lost child, its last mark."""
    return f"{workers.czxid:x}.{workers.pzxid:x}.{workers.mzxid:x}"


def delete_worker(session: ZooKeeperSession, worker: str, token: str) -> None:
    """Delete the node of a dead worker, so that others need not wait for the end of its session."""
    path = session.ensemble.path("workers", worker)
    try:
        ((record, stat),) = session.ask(session.client.get_async(path))
        if record and record.startswith(token.encode()):
            session.ask(session.client.delete_async(path, version=stat.version))
    except (kazoo.NoNodeError, kazoo.BadVersionError):
        # The session has ended by itself, or the worker has changed its record: it is alive.
        return


def read_plan(session: ZooKeeperSession) -> AssignmentPlan:
    """Return the assignment; an empty one if there is none that can be read."""
    try:
        ((data, _),) = session.ask(session.client.get_async(session.ensemble.path("assignment")))
        return unpack(data)[1]
    except (kazoo.NoNodeError, ValueError):
        return AssignmentPlan({})


def pack(members_version: str, plan: AssignmentPlan) -> bytes:
    """Return the data of the assignment's node: the version of the membership for which the plan was made, and the plan."""
    return members_version.encode() + b"\n" + zlib.compress(plan.encode().encode(), 6)


def unpack(data: bytes) -> tuple[str, AssignmentPlan]:
    """Read the output of ``pack``. Raises ``ValueError`` for anything else."""
    members_version, _, packed = data.partition(b"\n")
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(f"not a valid assignment: {error}") from error
    if not unpacking.eof:
        raise ValueError("not a valid assignment: it is cut off, or too large")
    return members_version.decode(errors="replace"), AssignmentPlan.decode(text)


class PublishedDefinitions:
    """The definitions of topics: ``registered`` reads them from Redis; while it raises, the published ones apply."""

    def __init__(
        self, registered: Callable[[], Mapping[str, Definition]], log_throttled: Callable[..., None]
    ) -> None:
        self._registered, self._log_throttled = registered, log_throttled
        self._published: dict[str, bytes] | None = None
        """The published definitions, or None if they have not been read in this session."""

    def forget(self) -> None:
        """Begin a new session, in which the published definitions have to be read again."""
        self._published = None

    def known(self, session: ZooKeeperSession, live_workers: Iterable[Worker]) -> Mapping[str, Definition]:
        """Return the definitions, and publish them; while Redis is unavailable, return the published ones."""
        if self._published is None:
            (names,) = session.ask(session.client.get_children_async(session.ensemble.path("topics")))
            self._published = dict(read_texts(session, "topics", names))
        try:
            registered = self._registered()
        except RmqError as error:
            self._log_throttled("definitions", "Using the definitions published in ZooKeeper: %s", error)
            return {
                name: definition
                for name, text in self._published.items()
                if (definition := _definition(text))
            }
        try:
            self._published = _publish(
                session, self._published, _wanted_definitions(registered, live_workers)
            )
        except ServerRefused as error:
            self._log_throttled("publish", "Cannot publish definitions in ZooKeeper: %s", error)
        return registered


def _wanted_definitions(
    registered: Mapping[str, Definition], live_workers: Iterable[Worker]
) -> dict[str, bytes]:
    topic_of = {topic.name: topic for worker in live_workers for topic in worker.topics}
    return {
        name: json.dumps(
            registered.get(name) or {"slots": topic_of[name].slots, "serial": topic_of[name].serial},
            sort_keys=True,
        ).encode()
        for name in {*registered, *topic_of}
    }


def _publish(
    session: ZooKeeperSession, published: Mapping[str, bytes], wanted: dict[str, bytes]
) -> dict[str, bytes] | None:
    """Publish the definitions that differ; return all published ones, or None if another worker was faster."""
    client = session.client
    for name in sorted({*wanted, *published}):
        path, text = session.ensemble.path("topics", name), wanted.get(name)
        if text == published.get(name):
            continue
        try:
            if text is None:
                session.ask(client.delete_async(path))
            elif name in published:
                session.ask(client.set_async(path, text))
            else:
                session.ask(client.create_async(path, text))
        except (kazoo.NodeExistsError, kazoo.NoNodeError):
            # Another worker publishes at the same time, so this one has to read the nodes again.
            return None
    return wanted


def _definition(text: bytes) -> Definition:
    try:
        definition = json.loads(text)
    except OTHER_FORM:
        return {}
    return definition if isinstance(definition, dict) else {}
