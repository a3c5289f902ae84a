"""Workers come together in ZooKeeper: each is an ephemeral node there, and one of them assigns the slots.

    ROOT                 whose path this is: {"rmq": 1, "key_prefix": …}
    ROOT/workers         its children are the workers; its own data is written when one says something new of itself
    ROOT/workers/<id>    ephemeral: token and record of a worker
    ROOT/topics/<name>   the definition of a topic, as it is registered
    ROOT/assignment      the membership that the assignment was made for, a line feed, the assignment compressed

A worker looks at three stats about every third of a session: its own node, the workers, the assignment. They say whether
anything changed, whatever became of watches; watches only make it faster. All watch the assignment, the
first worker (by id) watches the workers, and each other one the worker before it: a death wakes two, not all. The
first one assigns, and writes on condition that the assignment is still what it read; if it does not, the next one does
after a session, and so on.

The only module that imports kazoo. A client is made by the process that uses it, and is never mended: whoever
loses a session makes a new client. What kazoo calls sets flags only.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kazoo import exceptions as kazoo
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState, KeeperState, WatchedEvent
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_rmq.core.coordination import (
    Holding,
    Member,
    Slots,
    Worker,
    assign,
)
from django_rmq.core.coordination.ownership import uptime
from django_rmq.core.coordination.plan import Plan
from django_rmq.core.coordination.records import served_topics, whose, write_record
from django_rmq.core.coordination.shared import AUDIT_SECONDS, SETTLE_SECONDS, SharedCoordinator, read_crew
from django_rmq.core.logs.safe import safe_logger
from django_rmq.exceptions import (
    ConfigurationError,
    RmqError,
    ServerRefused,
    ServerTrouble,
    ServerUnavailable,
)

logger = safe_logger("django_rmq.coordination")

LONGEST_BEAT = 5.0
"""Between two looks, however long the session is."""

CONNECT_SECONDS = 5.0
"""How long a new client may take."""

REFUSED_SECONDS = 1.5
"""How long it tries where no server listens."""

RETRY_SECONDS = 0.5
"""Between two attempts to join."""

REJOIN_SECONDS = 1.5
"""Who has lost its session may not be the only one: for so long it lets the others come back before it assigns."""

MAX_NODE = 700_000
"""Bytes of one node. ZooKeeper's own limit is 1 MB for a whole request."""

MAX_TEXT = 1 << 26
"""Bytes of an assignment when it is no longer compressed: what is larger was not written by us."""

NO_LIMIT = 1e9
"""Seconds: a session that no clock ends."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Where ZooKeeper is, and what is ours there."""

    hosts: str
    """``host:port,host:port``"""
    root: str = "/rmq"
    session_seconds: float = 10.0
    auth: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(scheme, credential) pairs."""
    is_closed: bool = False
    """Whether nodes are for those who log in as their creator did, instead of for everybody."""
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """CA, CERT, KEY, KEY_PASSWORD, VERIFY; None: plain."""
    key_prefix: str = ""
    """Whose queues these are: workers of another prefix in Redis are not of the same crew."""

    def path(self, *parts: str) -> str:
        """Return the path of a node of ours."""
        return "/".join((self.root, *parts))

    @property
    def acl(self) -> list[Any]:
        """Who may do what with nodes of ours."""
        return list(CREATOR_ALL_ACL if self.is_closed else OPEN_ACL_UNSAFE)


_GONE = (
    kazoo.AuthFailedError,
    kazoo.ConnectionClosedError,
    kazoo.ConnectionLoss,
    kazoo.SessionExpiredError,
    kazoo.SessionMovedError,
)
"""What kazoo raises for a request when its connection or session is no more."""


class _Quiet(logging.LoggerAdapter[logging.Logger]):
    """Takes what kazoo logs down to DEBUG, without credentials, and keeps its last warning: why nobody answers."""

    last = ""

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.last = str(msg) % args if args else str(msg)
        self.debug(msg, *args, **kwargs)

    def info(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.debug(msg, *args, **kwargs)

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if not any(isinstance(argument, Auth) for argument in args):
            super().log(level, msg, *args, **kwargs)


class _Session:
    """One ZooKeeper session, from its client to its end. ``poke`` is called when something is to be looked at."""

    def __init__(self, ensemble: Ensemble, poke: Callable[[], None] = lambda: None) -> None:
        tls = ensemble.tls or {}
        verify = bool(tls.get("VERIFY", True))
        self.ensemble = ensemble
        self.is_lost = False
        self.is_connected = False
        self.connections = 0
        """How many it has had: with each new one kazoo forgets its watches."""
        self.number = 0
        """Of the session, as its ephemeral nodes show it."""
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
        """Connect. Raises ``ServerUnavailable``, having closed what there was."""
        try:
            self.client.start_async()
            with self._changed:
                for part in (REFUSED_SECONDS, seconds - REFUSED_SECONDS):
                    if self._changed.wait_for(lambda: self.is_connected or self.is_lost, min(part, seconds)):
                        break
                    if "refused" in self._log.last:
                        break
        except Exception:
            self.close(0.0)
            raise
        if not self.is_connected and not self._is_refused:
            self.close(0.0)
            reason = f" ({self._log.last})" if self._log.last else ""
            raise ServerUnavailable(f"ZooKeeper at {self.ensemble.hosts} does not answer{reason}")

    def close(self, seconds: float) -> None:
        """End the session, so that its nodes go at once; wait for that for so many seconds at most."""
        self.client.remove_listener(self._listen)
        closing = threading.Thread(target=self._close, name="rmq-zookeeper-closing", daemon=True)
        closing.start()
        closing.join(seconds)

    def ask(self, *questions: Any, seconds: float = CONNECT_SECONDS) -> list[Any]:
        """Return the answers to requests that are under way. Raises ``ServerTrouble``, or kazoo's answer."""
        end = time.monotonic() + seconds
        try:
            return [question.get(timeout=max(0.0, end - time.monotonic())) for question in questions]
        except kazoo.NoAuthError as error:
            raise ServerRefused(
                f"ZooKeeper at {self.ensemble.hosts} does not let us use {self.ensemble.root}: it belongs to other "
                f"credentials than ours ({self._schemes()})"
            ) from error
        except (KazooTimeoutError, kazoo.OperationTimeoutError) as error:
            raise ServerUnavailable(f"ZooKeeper at {self.ensemble.hosts} does not answer in time") from error
        except _GONE as error:
            if self._is_refused:
                raise ServerRefused(
                    f"ZooKeeper at {self.ensemble.hosts} refuses our credentials ({self._schemes()})"
                ) from error
            raise ServerUnavailable(
                f"the connection to ZooKeeper at {self.ensemble.hosts} was lost ({self._log.last or error!r})"
            ) from error

    def _schemes(self) -> str:
        return f"schemes: {', '.join(sorted({scheme for scheme, _ in self.ensemble.auth})) or 'none given'}"

    def watch(self, event: WatchedEvent) -> None:
        """Be told by kazoo that something changed."""
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
            logger.debug("A ZooKeeper client did not close: %r", error)

    # --- what is at our path

    def check(self) -> bool:
        """Return whether our path is there. Raises ``ConfigurationError`` where it is somebody else's."""
        ensemble = self.ensemble
        try:
            ((data, _), children) = self.ask(
                self.client.get_async(ensemble.root), self.client.get_children_async(ensemble.root)
            )
        except kazoo.NoNodeError:
            return False
        data = data or b""  # None: made with no data at all
        if not data and set(children) <= {"workers", "topics", "assignment"}:
            return False
        try:
            found = json.loads(data)
            is_ours, prefix = found["rmq"] == 1, str(found["key_prefix"])
        except (ValueError, KeyError, TypeError):
            is_ours, prefix = False, ""
        if not is_ours:
            raise ConfigurationError(
                f"ZooKeeper holds something else at {ensemble.root} (data {data[:60]!r}, children "
                f'{sorted(children)[:5]}): give RMQ a path of its own, RMQ["ZOOKEEPER"]["ROOT"]'
            )
        if prefix != ensemble.key_prefix:
            raise ConfigurationError(
                f"{ensemble.root} in ZooKeeper belongs to workers with the KEY_PREFIX {prefix!r}, ours is "
                f'{ensemble.key_prefix!r}: give each its own RMQ["ZOOKEEPER"]["ROOT"]'
            )
        return True

    def prepare(self) -> None:
        """Make our path where it is not there. Raises ``ConfigurationError`` where it is somebody else's."""
        ensemble, client = self.ensemble, self.client
        if not self.check():
            marker = json.dumps({"rmq": 1, "key_prefix": ensemble.key_prefix}).encode()
            try:
                self.ask(client.create_async(ensemble.root, marker, acl=ensemble.acl, makepath=True))
            except kazoo.NodeExistsError:
                # Made empty by a person who gave it permissions, or by another worker at this moment.
                if not self.check():
                    self.ask(client.set_async(ensemble.root, marker))
        for name in ("workers", "topics", "assignment"):
            try:
                self.ask(client.create_async(ensemble.path(name), acl=ensemble.acl))
            except kazoo.NodeExistsError:
                continue
        if ensemble.is_closed:
            ((acls, _),) = self.ask(client.get_acls_async(ensemble.path("workers")))
            if any(acl.id.scheme == "world" for acl in acls):
                logger.warning(
                    "%s in ZooKeeper was made for everybody: delete it while no worker runs, and it is made anew for "
                    "our credentials only",
                    ensemble.root,
                    extra={"rmq_event": "open_acl"},
                )

    def members(self) -> list[Member]:
        """Return all workers, by id."""
        records = self.records(self.ids())
        return [
            Member(worker, self.ensemble.session_seconds)
            for _, worker in sorted(read_crew(records, lambda *_: None).items())
        ]

    def ids(self) -> list[str]:
        """Return the ids of all workers; none where nothing is at our path."""
        try:
            return sorted(self.ask(self.client.get_children_async(self.ensemble.path("workers")))[0])
        except kazoo.NoNodeError:
            return []

    def records(self, ids: Iterable[str]) -> dict[str, bytes]:
        """Return what those of the workers say that are still there."""
        return dict(self.texts("workers", ids))

    def texts(self, folder: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yield the data of those of the nodes that are still there; of those that we may not read, nothing."""
        wanted = list(names)
        for start in range(0, len(wanted), 500):
            part = wanted[start : start + 500]
            asked = [self.client.get_async(self.ensemble.path(folder, name)) for name in part]
            for name, question in zip(part, asked, strict=True):
                try:
                    ((data, _),) = self.ask(question)
                except kazoo.NoNodeError:
                    continue
                except ServerRefused:
                    data = b""
                yield name, data or b""

    def plan(self) -> Plan:
        """Return the assignment; an empty one where there is none that can be read."""
        try:
            ((data, _),) = self.ask(self.client.get_async(self.ensemble.path("assignment")))
            return unpack(data)[1]
        except (kazoo.NoNodeError, ValueError):
            return Plan({})

    def leave(self, worker: str, token: str) -> None:
        """Delete the node of a worker that is no more, so that others need not wait for its session."""
        path = self.ensemble.path("workers", worker)
        try:
            ((record, stat),) = self.ask(self.client.get_async(path))
            if record and record.startswith(token.encode()):
                self.ask(self.client.delete_async(path, version=stat.version))
        except (kazoo.NoNodeError, kazoo.BadVersionError):
            return


def pack(members: str, plan: Plan) -> bytes:
    """Return the data of the assignment's node."""
    return members.encode() + b"\n" + zlib.compress(plan.encode().encode(), 6)


def unpack(data: bytes) -> tuple[str, Plan]:
    """Read what ``pack`` wrote. Raises ``ValueError`` for anything else."""
    members, _, packed = data.partition(b"\n")
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(packed, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(f"no assignment: {error}") from error
    if not unpacking.eof:
        raise ValueError("no assignment: it is cut off, or too large")
    return members.decode(errors="replace"), Plan.decode(text)


class ZooKeeperCoordinator(SharedCoordinator):
    """See ``Coordinator``. Make it in the process that uses it.

    ``registered`` returns the registered definition of every topic; while it raises ``ServerTrouble`` those published in
    ZooKeeper count. With ``is_strict`` a worker gives up its serial slots as soon as the connection is lost, and when it has not
    heard of ZooKeeper for a session; without, it keeps them until ZooKeeper says that its session is over.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        worker: Worker,
        own: Callable[[Slots], None],
        disown: Callable[[Slots], None],
        *,
        registered: Callable[[], Mapping[str, Mapping[str, Any]]],
        token: str,
        is_strict: bool = False,
        audit_seconds: float = AUDIT_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        super().__init__(
            worker,
            own,
            disown,
            session_seconds=ensemble.session_seconds,
            audit_seconds=audit_seconds,
            settle_seconds=settle_seconds,
        )
        self.ensemble = ensemble
        self._registered = registered
        self._token = token
        self._is_strict = is_strict
        self._beat_seconds = min(LONGEST_BEAT, ensemble.session_seconds / 3)
        self._session: _Session | None = None
        self._pid = 0
        self._ids: list[str] = []
        self._met = 0
        """On which of the session's connections the others were learned and are watched."""
        self._crew_of = ""
        """The membership of which ``_crew`` was read."""
        self._seen = (0, 0)
        """Which node, and which state of it, the assignment was read from."""
        self._version = -1
        """Of the assignment's node when it was read: a write is on condition that it is the same."""
        self._published: dict[str, bytes] | None = None
        self._rejoined_at = float("-inf")

    # --- what a worker asks of it

    def start(self) -> None:
        """Join; the first slots come soon after. Raises ``ConfigurationError`` where our path is somebody else's too."""
        self._pid = os.getpid()
        self._join()
        logger.info("Joined as worker %s", self.worker.id, extra={"rmq_event": "joined"})
        self._ownership.start()
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Disown everything and leave."""
        if self._pid != os.getpid():
            return  # never started, or inherited by a fork: the session is not ours to end
        super().stop(timeout)

    def _is_in_session(self) -> bool:
        session = self._session
        return session is not None and session.is_connected and super()._is_in_session()

    def members(self) -> list[Member]:
        """Ask ZooKeeper for all workers. How much of a session is left it does not tell: the whole is said."""
        return self._connected().members()

    def describe(self) -> list[Holding]:
        """Ask ZooKeeper who owns what since when, by the clock of whoever assigned it."""
        return holdings(self._connected().plan())

    # --- the thread that looks

    def _try_turn(self) -> float:
        try:
            return self._turn()
        except (ServerRefused, ConfigurationError) as error:
            # What a person has to put right is tried again now and then: it may have been.
            self._give_up()
            self._complain("refused", "ZooKeeper does not take this worker any more: %s", error)
            return self.session_seconds
        except ServerTrouble as error:
            self._be_alone()
            self._complain("zookeeper", "ZooKeeper is away (%s); trying again", error)
            return RETRY_SECONDS if self._session is None else min(1.0, self._beat_seconds)
        except kazoo.NoNodeError:
            logger.warning(
                "Nodes of ours in ZooKeeper are gone; joining anew", extra={"rmq_event": "expired"}
            )
            self._give_up()
            return RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may be better
            self._complain("look", "A look at ZooKeeper failed: %s", error, exc_info=True)
            return self._beat_seconds

    def _leave(self) -> None:
        if self._session is not None:
            self._session.close(self._stop_seconds)
            logger.info("Left", extra={"rmq_event": "left"})

    def _turn(self) -> float:
        """Look once, do what follows from it, and return after how many seconds to look again."""
        session = self._session
        if session is not None and session.is_lost:
            logger.warning("The ZooKeeper session is over; joining anew", extra={"rmq_event": "expired"})
            self._give_up()
            session = None
        if session is None:
            session = self._join()
            self._rejoined_at = uptime()
        if not session.is_connected:
            if uptime() > self._sent + self.session_seconds:
                # By now no server is sure to know the session. One whose data is older than what the old client has
                # seen would never let that one in again, so another has to ask.
                self._drop()
            raise ServerUnavailable(f"the connection to ZooKeeper at {self.ensemble.hosts} was lost")
        if self._announced is not self.worker:
            self._say(session)
        sent = uptime()
        if not self._look(session):
            logger.warning("Our node in ZooKeeper is gone; joining anew", extra={"rmq_event": "expired"})
            self._give_up()
            return 0.0
        self._sent = sent
        self._tell()
        due = self._lead(self._ids, sent, self._starts_audit(sent), self._rejoined_at + REJOIN_SECONDS)
        next_look = min(sent + self._beat_seconds * random.uniform(0.9, 1.0), due)
        return max(0.0, min(next_look, self._next_audit) - uptime())

    def _join(self) -> _Session:
        """Make a client and our node. Raises ``ServerTrouble`` or ``ConfigurationError``, and leaves nothing behind then."""
        session = _Session(self.ensemble, self._poked.set)
        try:
            session.open()
            session.prepare()
            worker = self._announced
            path = self.ensemble.path("workers", worker.id)
            record = write_record(self._token, worker).encode()
            try:
                session.ask(session.client.create_async(path, record, ephemeral=True))
            except kazoo.NodeExistsError:
                self._take_over(session, path, record)
            (own,) = session.ask(session.client.exists_async(path))
            if own is None:
                raise ServerUnavailable(f"our node {path} is gone again")
            session.number = own.ephemeralOwner
        except BaseException:
            session.close(0.0)
            raise
        self.worker = worker
        self._session = session
        self._members, self._met, self._seen, self._crew_of, self._published = "", 0, (0, 0), "", None
        return session

    def _take_over(self, session: _Session, path: str, record: bytes) -> None:
        """Replace a node with our id if it is that of an earlier session of ours."""
        try:
            ((found, stat),) = session.ask(session.client.get_async(path))
            found = found or b""
            if found.startswith(self._token.encode()):
                change = session.client.transaction()
                change.delete(path, version=stat.version)
                change.create(path, record, ephemeral=True)
                (answers,) = session.ask(change.commit_async())
                if not any(isinstance(answer, Exception) for answer in answers):
                    return
                raise ServerUnavailable(f"our earlier node {path} is just going")
        except kazoo.NoNodeError:
            raise ServerUnavailable(f"our earlier node {path} is just going") from None
        raise ConfigurationError(
            f"a worker with the id {self.worker.id} is there already ({whose(found)}): every start of a "
            "process needs an id of its own"
        )

    def _say(self, session: _Session) -> None:
        """Tell the others what we are: our record, and a mark at the node that they look at."""
        with self._changed:
            worker = self._announced
        change = session.client.transaction()
        record = write_record(self._token, worker).encode()
        change.set_data(self.ensemble.path("workers", worker.id), record)
        change.set_data(self.ensemble.path("workers"), b"")
        (answers,) = session.ask(change.commit_async())
        if not any(isinstance(answer, Exception) for answer in answers):
            self.worker = worker

    def _look(self, session: _Session) -> bool:
        """Take note of what changed; return whether we are still a worker of this session."""
        client, path = session.client, self.ensemble.path
        connections = session.connections
        is_first = bool(self._ids) and self._ids[0] == self.worker.id
        own, crew, plan = session.ask(
            client.exists_async(path("workers", self.worker.id)),
            client.exists_async(path("workers"), watch=session.watch if is_first else None),
            client.exists_async(path("assignment"), watch=session.watch),
        )
        if own is None or crew is None or plan is None or own.ephemeralOwner != session.number:
            return False
        if (_version_of(crew), connections) != (self._members, self._met):
            self._meet(session)
            self._met = connections
        if (plan.czxid, plan.mzxid) != self._seen:
            self._read(session)
        return True

    def _meet(self, session: _Session) -> None:
        """Learn who the others are, and watch the one before us, or all if there is none."""
        client, folder = session.client, self.ensemble.path("workers")
        while True:
            ((ids, stat),) = session.ask(client.get_children_async(folder, include_data=True))
            ids = sorted(ids)
            before = ids.index(self.worker.id) if self.worker.id in ids else 0
            if before == 0:
                (ids, stat), _ = session.ask(
                    client.get_children_async(folder, watch=session.watch, include_data=True),
                    client.exists_async(folder, watch=session.watch),
                )
                break
            (watched,) = session.ask(client.exists_async(f"{folder}/{ids[before - 1]}", watch=session.watch))
            if watched is not None:
                break
        if _version_of(stat) != self._members:
            self._changed_at = uptime()
        self._ids, self._members = sorted(ids), _version_of(stat)

    def _read(self, session: _Session) -> None:
        """Read the assignment."""
        ((data, stat),) = session.ask(
            session.client.get_async(self.ensemble.path("assignment"), watch=session.watch)
        )
        self._seen, self._version = (stat.czxid, stat.mzxid), stat.version
        self._basis, self._plan = "", None
        if not data:
            return

        def decode() -> Plan:
            self._basis, plan = unpack(data)
            return plan

        self._plan = self._read_plan(decode)

    def _owned_until(self) -> float:
        return self._sent + (self.session_seconds if self._is_strict else NO_LIMIT)

    def _be_alone(self) -> None:
        """ZooKeeper does not answer: nobody knows who owns what."""
        if self._is_strict:
            self._lose()
        with self._changed:
            self._is_current = False

    def _give_up(self) -> None:
        """Lose the session and all that came of it."""
        self._drop()
        self._lose()

    def _drop(self) -> None:
        """Let go of the client, and of nothing else."""
        session, self._session = self._session, None
        if session is not None:
            session.close(0.0)

    def _connected(self) -> _Session:
        session = self._session
        if session is None or not session.is_connected:
            raise ServerUnavailable(f"there is no connection to ZooKeeper at {self.ensemble.hosts}")
        return session

    # --- the assignment

    def _assign(self, why: str) -> None:
        session = self._connected()
        if self._crew_of != self._members:
            self._crew = read_crew(session.records(self._ids), self._complain)
            self._crew_of = self._members
        topics = served_topics(self._crew, self._definitions(session))
        crew = [worker.capacity for worker in self._crew.values()]
        before, now = self._last_plan, int(time.time())
        assignment = assign(topics, crew, before.runs())
        if self._plan is not None and self._basis == self._members and assignment == self._plan.runs():
            return
        plan = before.renewed(assignment, now)
        data = pack(self._members, plan)
        if len(data) > MAX_NODE:
            # What it forgets first is since when, then who had what before.
            plan = Plan({}).renewed(assign(topics, crew, {}), now)
            data = pack(self._members, plan)
        if len(data) > MAX_NODE:
            raise ConfigurationError(
                f"the assignment of {len(topics)} topics to {len(crew)} workers takes {len(data)} bytes, and a node "
                f"of ZooKeeper at most {MAX_NODE}: divide topics or workers among several ROOTs"
            )
        try:
            (stat,) = session.ask(
                session.client.set_async(self.ensemble.path("assignment"), data, version=self._version)
            )
        except (kazoo.BadVersionError, kazoo.NoNodeError):
            self._poked.set()
            return
        self._log_assigned(len(assignment), why)
        self._seen, self._version = (stat.czxid, stat.mzxid), stat.version
        self._basis, self._plan, self._last_plan = self._members, plan, plan
        self._tell()

    def _definitions(self, session: _Session) -> Mapping[str, Mapping[str, Any]]:
        """Return what topics are, and publish it; while nobody can tell, what was published."""
        if self._published is None:
            (names,) = session.ask(session.client.get_children_async(self.ensemble.path("topics")))
            self._published = dict(session.texts("topics", names))
        try:
            registered = self._registered()
        except RmqError as error:
            self._complain("definitions", "The definitions published in ZooKeeper are used: %s", error)
            return {name: found for name, text in self._published.items() if (found := _definition(text))}
        try:
            self._publish(session, registered)
        except ServerRefused as error:
            self._complain("publish", "Definitions cannot be published: %s", error)
        return registered

    def _publish(self, session: _Session, registered: Mapping[str, Mapping[str, Any]]) -> None:
        said = {topic.name: topic for worker in self._crew.values() for topic in worker.topics}
        wanted: dict[str, bytes] = {}
        for name in {*registered, *said}:
            topic = registered.get(name) or {"slots": said[name].slots, "serial": said[name].serial}
            wanted[name] = json.dumps(topic, sort_keys=True).encode()
        assert self._published is not None
        for name in sorted({*wanted, *self._published}):
            path, text = self.ensemble.path("topics", name), wanted.get(name)
            if text == self._published.get(name):
                continue
            try:
                if text is None:
                    session.ask(session.client.delete_async(path))
                elif name in self._published:
                    session.ask(session.client.set_async(path, text))
                else:
                    session.ask(session.client.create_async(path, text))
            except (kazoo.NodeExistsError, kazoo.NoNodeError):
                # Somebody else was first: the next time all of it is compared.
                self._published = None
                return
        self._published = wanted


def _version_of(workers: Any) -> str:
    """Return what is another for every other membership: which node, its last new or lost child, its last mark."""
    return f"{workers.czxid:x}.{workers.pzxid:x}.{workers.mzxid:x}"


def _definition(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- looking from outside ---------------------------------------------------------------------------


@contextmanager
def _visit(ensemble: Ensemble, seconds: float) -> Iterator[_Session]:
    session = _Session(ensemble)
    session.open(seconds)
    try:
        yield session
    finally:
        session.close(seconds)


def check(ensemble: Ensemble, seconds: float = CONNECT_SECONDS) -> None:
    """Make sure that workers could join; writes nothing.

    Raises ``ServerUnavailable`` where nobody answers, ``ServerRefused`` for wrong credentials, and
    ``ConfigurationError`` where ``root`` is somebody else's.
    """
    with _visit(ensemble, seconds) as session:
        session.check()


def end_session(ensemble: Ensemble, worker: str, token: str, seconds: float = 2.0) -> None:
    """Let others take over at once what a dead worker owned. Raises ``ServerTrouble``."""
    with _visit(ensemble, seconds) as session:
        session.leave(worker, token)


class Survey(NamedTuple):
    """The workers there are, by id, and what is assigned to them."""

    members: list[Member]
    plan: Plan

    @property
    def holdings(self) -> list[Holding]:
        """Who owns what since when, by topic and slot."""
        return holdings(self.plan)

    @property
    def flaw(self) -> str:
        """Why this cannot be the assignment of these workers; empty: it can."""
        return self.plan.flaw({member.worker.id: member.worker for member in self.members})


def survey(ensemble: Ensemble, seconds: float = CONNECT_SECONDS) -> Survey:
    """Return who is there and who owns what; needs no worker of its own. Raises ``ServerTrouble``."""
    with _visit(ensemble, seconds) as session:
        return Survey(session.members(), session.plan())


def holdings(plan: Plan) -> list[Holding]:
    """Return what a plan says, by topic and slot."""
    return [Holding(name, *span) for name, spans in sorted(plan.topics.items()) for span in spans]


__all__ = ["Ensemble", "Survey", "ZooKeeperCoordinator", "check", "end_session", "survey"]
