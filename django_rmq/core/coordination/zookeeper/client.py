"""The client of ZooKeeper: its addresses and credentials, its session, and answers with a time limit.

kazoo's exceptions about connections and permissions stop here; those about nodes are left to the callers. The nodes are in
``znodes``. What a worker does whose session has ended is decided by ``coordinator``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kazoo import exceptions as kazoo
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState, KeeperState, WatchedEvent
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from django_rmq.core.log import safe_logger
from django_rmq.core.threads import start_daemon
from django_rmq.exceptions import ServerRefused, ServerUnavailable

logger = safe_logger("django_rmq.coordination")

CONNECT_SECONDS = 5.0
"""Maximum seconds for a new client to connect."""

REFUSED_SECONDS = 1.5
"""Maximum seconds for which a new client tries to connect if no server listens."""

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
