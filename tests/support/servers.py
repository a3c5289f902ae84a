"""Real servers for tests, and a TCP proxy that loses, cuts and delays what goes to them. Loopback only."""

from __future__ import annotations

import os
import select
import shutil
import socket
import ssl
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from example_project.demo.redis_server import NoRedisServer, redis_server_binary
from tests.support.embedded_redis import EmbeddedRedis
from tests.support.embedded_server import DidNotStart, EmbeddedServer, free_port
from tests.support.zookeeper import EmbeddedZooKeeper

running_servers: list[EmbeddedServer] = []
"""The servers that are up, so that a failing test can show their logs."""


def absent(reason: str) -> NoReturn:
    """Skip what needs something that this machine lacks. In CI nothing may be absent: there it is an error."""
    if os.environ.get("CI"):
        raise RuntimeError(f"{reason}, and CI leaves nothing out")
    pytest.skip(reason)


class Disposable(EmbeddedServer):
    """A server whose directory goes away with it."""

    def __enter__(self) -> Self:
        try:
            super().__enter__()
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        running_servers.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        running_servers.remove(self)
        super().__exit__(*exc_info)
        shutil.rmtree(self.directory, ignore_errors=True)


class RedisServer(Disposable, EmbeddedRedis):
    """A redis-server in a directory of its own: `with RedisServer(appendonly=True) as server`."""

    def __init__(self, port: int = 0, *, binary: Path | None = None, **options: object):
        try:
            binary = binary or redis_server_binary()
        except NoRedisServer as error:
            absent(str(error))
        super().__init__(tempfile.mkdtemp(prefix="rmq-redis-"), port, binary=binary, **options)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **options: Any) -> Iterator[str]:
    """Answer HTTP while the block runs, without a line for each request; yield the address."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, **options)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class ZooKeeperServer(Disposable, EmbeddedZooKeeper):
    """A ZooKeeper in a directory of its own. Raises ConfigurationError where it cannot be run."""

    def __init__(self, port: int = 0, **how: Any):
        super().__init__(tempfile.mkdtemp(prefix="rmq-zookeeper-"), port, **how)


class ZooKeeperEnsemble:
    """Three ZooKeepers that make one: `with ZooKeeperEnsemble() as ensemble`."""

    def __init__(self) -> None:
        peers = {number: (free_port(), free_port()) for number in (1, 2, 3)}
        self.servers = [ZooKeeperServer(number=number, peers=peers) for number in peers]

    @property
    def hosts(self) -> str:
        """The addresses of all three, for clients."""
        return ",".join(server.hosts for server in self.servers)

    def leader(self) -> ZooKeeperServer:
        """The server that leads the others, once there is one; TimeoutError after 30 s."""
        deadline, pause = time.monotonic() + 30, threading.Event()
        while time.monotonic() < deadline:
            for server in self.servers:
                if server.running and server.mode() == "leader":
                    return server
            pause.wait(0.02)
        raise TimeoutError("The servers of the ensemble have agreed on no leader.")

    def __enter__(self) -> Self:
        for server in self.servers:
            running_servers.append(server)
            server.launch()
        try:
            for server in self.servers:
                server.wait_until_serving()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for server in self.servers:
            running_servers.remove(server)
            server.kill()
            shutil.rmtree(server.directory, ignore_errors=True)


class TcpProxy:
    """Stands between a client and a server on loopback and does to their bytes what a bad network does.

    Passes everything on until told otherwise. All methods may be called from the test's thread at any time.
    """

    def __init__(self, target_port: int):
        self.target_port = target_port
        self.seconds_of_delay = 0.0
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._is_cut = False
        self._wanted: list[bytes] = []
        self._owed = 0
        self._dropped = threading.Event()
        self._open = threading.Event()
        self._open.set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="tcp-proxy", daemon=True)

    @property
    def url(self) -> str:
        """The Redis address of the proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        self.let_through()
        # A close alone does not wake a thread that waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect()
        self._acceptor.join(10)

    def disconnect(self) -> None:
        """Close the connections there are; new ones are let through."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()

    def cut(self) -> None:
        """Close all connections, and each new one at once, until `mend()`."""
        with self._lock:
            self._is_cut = True
        self.disconnect()

    def mend(self) -> None:
        """Let new connections through again."""
        with self._lock:
            self._is_cut = False

    def swallow(self) -> None:
        """Be a black hole until `let_through()`: connections stay and are made, and no byte passes either way."""
        self._open.clear()

    def let_through(self) -> None:
        """End `swallow()`: what was held back since then passes."""
        self._open.set()

    def delay(self, seconds: float) -> None:
        """Hold back each piece of a request by so many seconds from now on; 0 ends it."""
        self.seconds_of_delay = seconds

    def drop_reply(self, containing: bytes, *then: bytes) -> None:
        """Lose the reply of the next request that holds `containing`: the server does it, the client never hears.

        Then lose that of the next one on another connection that holds the first of `then`, and so on. A
        connection is closed once the server has answered. Replies of earlier requests that are still on
        their way on it are lost with it.
        """
        if not all([containing, *then]):
            raise ValueError("Say which request: an empty byte string is in every one.")
        self._dropped.clear()
        with self._lock:
            self._wanted = [containing, *then]
            self._owed = len(self._wanted)

    def wait_for_drop(self, seconds: float = 60) -> None:
        """Return when all replies asked for by `drop_reply` have been lost; TimeoutError after so many seconds."""
        if not self._dropped.wait(seconds):
            raise TimeoutError(f"No reply was dropped within {seconds} s.")

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refused = self._is_cut or self._closed.is_set()
            if refused:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port), timeout=60)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs.add(pair)
                cut_meanwhile = self._is_cut or self._closed.is_set()
            pair.start()
            if cut_meanwhile:
                pair.close()

    def _is_wanted(self, before: bytes, piece: bytes) -> bool:
        """Whether the wanted bytes end in this piece; they may begin in what came `before` it."""
        with self._lock:
            if not self._wanted:
                return False
            seam = max(0, len(before) - len(self._wanted[0]) + 1)
            if self._wanted[0] not in before[seam:] + piece:
                return False
            del self._wanted[0]
            return True

    def _has_dropped(self) -> None:
        with self._lock:
            self._owed -= 1
            if self._owed == 0:
                self._dropped.set()

    def _forget(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)


class _Pair:
    """One client connection and its counterpart at the server, with a thread for each direction."""

    QUIET_SECONDS = 0.05
    TAIL_BYTES = 4096

    def __init__(self, proxy: TcpProxy, client: socket.socket, server: socket.socket):
        self.proxy = proxy
        self.client = client
        self.server = server
        self.mute = threading.Event()
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for pump in (self._requests, self._replies):
            threading.Thread(target=pump, name=f"tcp-proxy{pump.__name__}", daemon=True).start()

    def close(self) -> None:
        self.proxy._forget(self)
        for connection in (self.client, self.server):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _requests(self) -> None:
        # A request may come in pieces: look for the wanted bytes across their seams.
        tail = b""
        with suppress(OSError):
            while piece := self.client.recv(65536):
                if self.proxy.seconds_of_delay:
                    self.proxy._closed.wait(self.proxy.seconds_of_delay)
                self.proxy._open.wait()
                if not self.mute.is_set() and self.proxy._is_wanted(tail, piece):
                    self.mute.set()
                tail = (tail + piece)[-self.TAIL_BYTES :]
                self.server.sendall(piece)
        if not self.mute.is_set():
            self.close()

    def _replies(self) -> None:
        with suppress(OSError):
            while piece := self.server.recv(65536):
                self.proxy._open.wait()
                if self.mute.is_set():
                    self._swallow()
                    break
                self.client.sendall(piece)
        self.close()

    def _swallow(self) -> None:
        """Read on until the server has nothing more to say: then the wanted request has surely been done."""
        self.server.settimeout(self.QUIET_SECONDS)
        with suppress(OSError):
            while self.server.recv(65536):
                pass
        self.proxy._has_dropped()


class TlsProxy:
    """Ends TLS before a server on loopback that knows none: `with TlsProxy(server.port, folder_of_certificates)`."""

    def __init__(self, target_port: int, certificates: Path):
        self.target_port = target_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing, self._close = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept, name="tls-proxy", daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close.close()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()
        self._closing.close()

    def _accept(self) -> None:
        while self._closing not in select.select([self._listener, self._closing], [], [])[0]:
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._serve, args=(client,), name="tls-proxy-pair", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        # One thread for both directions: two must not use a TLS connection at the same time.
        client.settimeout(10)
        with (
            client,
            suppress(OSError),
            self._context.wrap_socket(client, server_side=True) as talk,
            socket.create_connection(("127.0.0.1", self.target_port), timeout=10) as server,
        ):
            while True:
                ready = [talk] if talk.pending() else select.select([talk, server, self._closing], [], [])[0]
                if self._closing in ready:
                    return
                for one in ready:
                    piece = one.recv(65536)
                    if not piece:
                        return
                    (server if one is talk else talk).sendall(piece)


QUICK_SYNC: dict[str, Any] = {"repl_diskless_sync": True, "repl_diskless_sync_delay": 0}


class Together(ABC):
    """Servers that a block begins one after the other, and ends in the opposite order, also if one does not start."""

    def __enter__(self) -> Self:
        with ExitStack() as self._stack:
            self.begin(self._stack.enter_context)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @abstractmethod
    def begin(self, enter: Callable[[Any], Any]) -> None: ...


class ReplicaPair(Together):
    """A primary and its replica, which follows through a proxy: `link.cut()` parts them."""

    def __init__(self, **options: Any):
        self._options = {**QUICK_SYNC, **options}
        self.primary = RedisServer(**self._options)
        self.link = TcpProxy(0)
        self.replica: RedisServer

    def begin(self, enter: Callable[[Any], Any]) -> None:
        enter(self.primary)
        self.link.target_port = self.primary.port
        enter(self.link)
        self.replica = enter(RedisServer(replicaof=f"127.0.0.1 {self.link.port}", **self._options))
        wait_for_link(self.replica)

    def promote(self) -> RedisServer:
        """Make the replica a primary, as a fail-over does; return it."""
        ask(self.replica.port, "REPLICAOF", "NO", "ONE")
        return self.replica


class SentinelGuard(Together):
    """Three sentinels that watch a primary with one replica, and promote the replica if the primary is gone."""

    SERVICE = "rmq"

    def __init__(self, *, down_after_ms: int = 500, **options: Any):
        self._options = {**QUICK_SYNC, **options}
        self._down_after_ms = down_after_ms
        self.primary = RedisServer(**self._options)
        self.replica: RedisServer
        self.sentinels: list[RedisServer] = []

    def begin(self, enter: Callable[[Any], Any]) -> None:
        enter(self.primary)
        self.replica = enter(RedisServer(replicaof=f"127.0.0.1 {self.primary.port}", **self._options))
        wait_for_link(self.replica)
        # Called by this name, the server is a sentinel.
        binary = Path(enter(tempfile.TemporaryDirectory(prefix="rmq-sentinel-"))) / "redis-sentinel"
        binary.symlink_to(redis_server_binary())
        watch = [
            f"monitor {self.SERVICE} 127.0.0.1 {self.primary.port} 2",
            f"down-after-milliseconds {self.SERVICE} {self._down_after_ms}",
            f"failover-timeout {self.SERVICE} 5000",
        ]
        self.sentinels += [enter(RedisServer(binary=binary, sentinel=watch)) for _ in range(3)]
        wait_until(self._know_each_other, "the sentinels knowing each other")

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the sentinels are."""
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    def wait_for_promotion(self, seconds: float = 120) -> None:
        """Return when the replica has become the primary, and all sentinels say so."""
        port = str(self.replica.port).encode()
        wait_until(
            lambda: (
                ask(self.replica.port, "ROLE")[0] == b"master"
                and all(
                    ask(sentinel.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.SERVICE)[1] == port
                    for sentinel in self.sentinels
                )
            ),
            "the promotion",
            seconds,
        )

    def _know_each_other(self) -> bool:
        for sentinel in self.sentinels:
            (found,) = ask(sentinel.port, "SENTINEL", "MASTERS")
            fields = dict(zip(found[::2], found[1::2], strict=True))
            if fields[b"num-other-sentinels"] != b"2" or fields[b"num-slaves"] != b"1":
                return False
        return True


class RedisCluster(Together):
    """Three primaries with a replica each, of the same binary, on loopback."""

    SLOTS = 16_384

    def __init__(self, *, replicas: bool = True, node_timeout_ms: int = 1000, **options: Any):
        # Three on loopback: what takes the fewest milliseconds until the replica of a dead primary is promoted.
        common: dict[str, Any] = {
            "cluster_enabled": True,
            "cluster_config_file": "nodes.conf",
            "cluster_node_timeout": node_timeout_ms,
            "cluster_require_full_coverage": False,
            "cluster_replica_validity_factor": 0,
            **QUICK_SYNC,
            **options,
        }
        self.primaries: list[RedisServer] = [_ClusterNode(**common) for _ in range(3)]
        self.replicas: list[RedisServer] = [_ClusterNode(**common) for _ in range(3 if replicas else 0)]

    @property
    def nodes(self) -> list[RedisServer]:
        """The primaries of the beginning, then their replicas in the same order."""
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        """The address of one node; it knows the others."""
        return f"redis://127.0.0.1:{self.primaries[0].port}"

    def begin(self, enter: Callable[[Any], Any]) -> None:
        for node in self.nodes:
            enter(node)
        share = -(-self.SLOTS // 3)
        for i, node in enumerate(self.primaries):
            slots = range(i * share, min((i + 1) * share, self.SLOTS))
            ask(node.port, "CLUSTER", "ADDSLOTS", *slots)
            ask(node.port, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in self.nodes[1:]:
            ask(node.port, "CLUSTER", "MEET", "127.0.0.1", self.primaries[0].port)
        wait_until(
            lambda: all(len(cluster_nodes(node)) == len(self.nodes) for node in self.nodes),
            "the nodes knowing each other",
        )
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            ask(replica.port, "CLUSTER", "REPLICATE", cluster_id(primary))
        for replica in self.replicas:
            wait_for_link(replica)
        wait_until(self._is_whole, "the cluster being whole")
        wait_until(self._carries_messages, "every node hearing every other one")

    def _is_whole(self) -> bool:
        for node in self.nodes:
            if b"cluster_state:ok" not in ask(node.port, "CLUSTER", "INFO"):
                return False
            known = cluster_nodes(node)
            if sum(b"slave" in line for line in known) != len(self.replicas):
                return False
        return True

    def _carries_messages(self) -> bool:
        """Whether each node hears what each of them publishes: a new link between two nodes may refuse its first message."""
        ports = {b"%d" % node.port for node in self.nodes}
        with ExitStack() as stack:
            ears = []
            for node in self.nodes:
                client = stack.enter_context(redis.Redis(port=node.port, socket_timeout=60))
                ears.append(stack.enter_context(client.pubsub(ignore_subscribe_messages=True)))
                ears[-1].subscribe("ready")
                ears[-1].get_message(timeout=60)
            for node in self.nodes:
                ask(node.port, "PUBLISH", "ready", node.port)
            for ear in ears:
                missing, end = set(ports), time.monotonic() + 1
                while missing and time.monotonic() < end:
                    message = ear.get_message(timeout=0.1)
                    missing.discard(message["data"] if message else b"")
                if missing:
                    return False
        return True

    def owner(self, slot: int) -> RedisServer:
        """The node that serves a hash slot, as the first node that runs sees it."""
        seen = next(node for node in self.nodes if node.running)
        for first, last, (_, port, *_), *_ in ask(seen.port, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise LookupError(f"nobody serves hash slot {slot}")

    def begin_move(self, slot: int, target: RedisServer) -> RedisServer:
        """Begin to move a hash slot; return who has had it. Keys are moved by `move_keys`."""
        source = self.owner(slot)
        ask(target.port, "CLUSTER", "SETSLOT", slot, "IMPORTING", cluster_id(source))
        ask(source.port, "CLUSTER", "SETSLOT", slot, "MIGRATING", cluster_id(target))
        return source

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, most: int = 100_000) -> int:
        """Move up to so many keys of a slot that is being moved; return how many were moved."""
        keys = ask(source.port, "CLUSTER", "GETKEYSINSLOT", slot, most)
        if keys:
            ask(source.port, "MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Move the keys that are left, and give the slot to its new owner for good."""
        while self.move_keys(slot, source, target):
            pass
        for node in (target, source, *self.nodes):
            if node.running and ask(node.port, "ROLE")[0] == b"master":
                ask(node.port, "CLUSTER", "SETSLOT", slot, "NODE", cluster_id(target))

    def wait_for_promotion(self, replica: RedisServer, seconds: float = 120) -> None:
        """Return when a replica has taken over from its primary, and every node that runs agrees."""
        wait_until(
            lambda: (
                ask(replica.port, "ROLE")[0] == b"master"
                and all(
                    any(
                        b":%d@" % replica.port in line and b"master" in line and b"fail" not in line
                        for line in cluster_nodes(node)
                    )
                    for node in self.nodes
                    if node.running
                )
            ),
            "the promotion",
            seconds,
        )


class _ClusterNode(RedisServer):
    """A node of a cluster; its bus listens 10,000 ports higher."""

    def start(self) -> None:
        if not self._chosen_by_us:
            super().start()
            return
        self._chosen_by_us = False
        for _ in range(20):
            self.port = free_port()
            with suppress(OSError, OverflowError, DidNotStart):
                free_port(self.port + 10_000)
                super().start()
                return
        raise DidNotStart("no pair of ports was free")


def ask(port: int, *command: object) -> Any:
    """Send one command to a server on loopback over a connection of its own, and return the plain answer."""
    with redis.Redis(port=port, socket_timeout=60, retry=Retry(NoBackoff(), 0), protocol=2) as client:
        # Below the client's own callbacks: answers as they came.
        connection = client.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()


def cluster_id(node: RedisServer) -> str:
    """The name that a node has in its cluster."""
    return ask(node.port, "CLUSTER", "MYID").decode()


def cluster_nodes(node: RedisServer) -> list[bytes]:
    """The nodes that a node knows and has shaken hands with, a line each."""
    lines = ask(node.port, "CLUSTER", "NODES").splitlines()
    return [line for line in lines if b"handshake" not in line and b"noaddr" not in line]


def wait_for_link(replica: RedisServer, seconds: float = 60) -> None:
    """Return when a replica has its primary's data and follows."""
    wait_until(
        lambda: b"master_link_status:up" in ask(replica.port, "INFO", "replication"), "the link", seconds
    )


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Return as soon as the condition holds; TimeoutError after so many seconds."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come about within {seconds} s.")
        pause.wait(0.01)
