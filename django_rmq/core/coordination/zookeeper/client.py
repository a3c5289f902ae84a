"""The client of ZooKeeper: its addresses and credentials, its session, answers with a time limit, and the application's nodes.

The nodes are its owner, the workers, the topics and the assignment. kazoo's exceptions about connections and permissions stop
here; those about nodes are left to the callers. When nodes are read and written, and what a worker does whose session has ended,
is decided by ``coordinator``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState, KeeperState, WatchedEvent
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_rmq.core.coordination import Member
from django_rmq.core.coordination.stored_plan import AssignmentPlan
from django_rmq.core.coordination.worker_records import read_workers
from django_rmq.core.log import safe_logger
from django_rmq.core.model.bounds import OTHER_FORM
from django_rmq.core.threads import start_daemon
from django_rmq.exceptions import ConfigurationError, ServerRefused, ServerUnavailable

logger = safe_logger("django_rmq.coordination")

CONNECT_SECONDS = 5.0
"""Maximum seconds for a new client to connect."""

REFUSED_SECONDS = 1.5
"""Maximum seconds for which a new client tries to connect if no server listens."""

MAX_TEXT = 1 << 26
"""The maximum size in bytes of an uncompressed assignment. RMQ writes no larger one."""

_GONE = (
    kazoo.AuthFailedError,
    kazoo.ConnectionClosedError,
    kazoo.ConnectionLoss,
    kazoo.SessionExpiredError,
    kazoo.SessionMovedError,
)
"""The errors that kazoo raises for a request when its connection or session is gone."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The addresses and credentials of ZooKeeper, and the paths that belong to this application."""

    hosts: str
    """``host:port,host:port``"""
    root: str = "/rmq"
    session_seconds: float = 10.0
    auth: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(scheme, credential) pairs."""
    is_closed: bool = False
    """Whether only clients with the creator's login may use the nodes, instead of everyone."""
    tls: Mapping[str, object] | None = field(default=None, repr=False)
    """CA, CERT, KEY, KEY_PASSWORD, VERIFY, or None without TLS."""
    key_prefix: str = ""
    """The prefix of the keys in Redis. Workers with another prefix are not coordinated with these."""

    def path(self, *parts: str) -> str:
        """Return the path of one of this application's nodes."""
        return "/".join((self.root, *parts))

    @property
    def acl(self) -> list[object]:
        """The permissions of this application's nodes."""
        return list(CREATOR_ALL_ACL if self.is_closed else OPEN_ACL_UNSAFE)


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """Logs kazoo's lines at the level DEBUG, without credentials, and keeps its last warning, which explains a failure."""

    last = ""

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        self.last = str(msg) % args if args else str(msg)
        self.debug(msg, *args, **kwargs)

    def info(self, msg: object, *args: object, **kwargs: Any) -> None:
        self.debug(msg, *args, **kwargs)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not any(isinstance(argument, Auth) for argument in args):
            super().log(level, msg, *args, **kwargs)


class ZooKeeperSession:
    """One ZooKeeper session, from its client to its end. ``poke`` is called when there is something to check."""

    def __init__(self, ensemble: Ensemble, poke: Callable[[], None] = lambda: None) -> None:
        tls = ensemble.tls or {}
        verify = bool(tls.get("VERIFY", True))
        self.ensemble = ensemble
        self.is_lost = False
        self.is_connected = False
        self.connections = 0
        """The number of connections so far. On each new one kazoo forgets its watches."""
        self.number = 0
        """The session's number, as its ephemeral nodes show it."""
        self._is_refused = False
        self._poke = poke
        self._changed = threading.Condition()
        self._log = _Quiet(logging.getLogger("django_rmq.coordination.kazoo"), {})
        self.client = KazooClient(
            ensemble.hosts,
            timeout=ensemble.session_seconds,
            auth_data=list(ensemble.auth),
            default_acl=ensemble.acl,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": 1.0},
            use_ssl=ensemble.tls is not None,
            ca=tls.get("CA"),
            certfile=tls.get("CERT"),
            keyfile=tls.get("KEY"),
            keyfile_password=tls.get("KEY_PASSWORD"),
            verify_certs=verify,
            check_hostname=verify,
            logger=self._log,
        )
        self.client.add_listener(self._listen)

    def open(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect. If it raises ``ServerUnavailable``, everything is closed."""
        try:
            self.client.start_async()
            with self._changed:
                for part in (REFUSED_SECONDS, seconds - REFUSED_SECONDS):
                    if self._changed.wait_for(lambda: self.is_connected or self.is_lost, min(part, seconds)):
                        break
                    # kazoo tries without end; its last warning shows that no server listens.
                    if "refused" in self._log.last:
                        break
        except Exception:
            self.close(0.0)
            raise
        if not self.is_connected and not self._is_refused:
            # The reason is read before the close, because kazoo logs another line when it closes.
            reason = f" ({self._log.last})" if self._log.last else ""
            self.close(0.0)
            raise ServerUnavailable(f"ZooKeeper at {self.ensemble.hosts} does not answer{reason}")

    def close(self, seconds: float) -> None:
        """End the session, so that its nodes are deleted at once; wait for that for at most this many seconds."""
        self.client.remove_listener(self._listen)
        # kazoo may wait long for a server that does not answer, so a thread of its own closes the client.
        closing = start_daemon(self._close, "rmq-zookeeper-closing")
        if closing is not None:
            closing.join(seconds)

    def ask(self, *questions: Any, seconds: float = CONNECT_SECONDS) -> list[Any]:
        """Return the answers to pending requests. Raises ``ServerTrouble``, or kazoo's answer."""
        end = time.monotonic() + seconds
        try:
            return [question.get(timeout=max(0.0, end - time.monotonic())) for question in questions]
        except kazoo.NoAuthError as error:
            raise ServerRefused(
                f"ZooKeeper at {self.ensemble.hosts} denies access to {self.ensemble.root}: it belongs to "
                f"other credentials ({self._schemes()})"
            ) from error
        except (KazooTimeoutError, kazoo.OperationTimeoutError) as error:
            raise ServerUnavailable(f"ZooKeeper at {self.ensemble.hosts} does not answer in time") from error
        except _GONE as error:
            # After wrong credentials kazoo ends the session, and requests fail as with a lost connection.
            if self._is_refused:
                raise ServerRefused(
                    f"ZooKeeper at {self.ensemble.hosts} refuses the credentials ({self._schemes()})"
                ) from error
            raise ServerUnavailable(
                f"the connection to ZooKeeper at {self.ensemble.hosts} was lost ({self._log.last or error!r})"
            ) from error

    def _schemes(self) -> str:
        return f"schemes: {', '.join(sorted({scheme for scheme, _ in self.ensemble.auth})) or 'none given'}"

    def watch(self, event: WatchedEvent) -> None:
        """Handle kazoo's notification that something changed."""
        self._poke()

    def _listen(self, state: str) -> None:
        with self._changed:
            self.is_connected = state == KazooState.CONNECTED
            self.connections += self.is_connected
            self.is_lost = self.is_lost or state == KazooState.LOST
            self._is_refused = self._is_refused or self.client.client_state == KeeperState.AUTH_FAILED
            self._changed.notify_all()
        self._poke()

    def _close(self) -> None:
        try:
            self.client.stop()
            self.client.close()
        except Exception as error:  # noqa: BLE001 - nothing depends on it: the session ends by itself
            logger.debug("Cannot close a ZooKeeper client: %r", error)


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
