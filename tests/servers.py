"""Real servers for tests, and a TCP proxy that loses, cuts and delays what goes to them. Loopback only."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from example_project.embedded_redis import EmbeddedRedis, free_port, redis_server_binary
from example_project.embedded_zookeeper import EmbeddedZooKeeper

running_servers: list[RedisServer | ZooKeeperServer] = []
"""The servers that are up, so that a failing test can show their logs."""


class RedisServer(EmbeddedRedis):
    """A redis-server in a directory of its own, which goes away with it: `with RedisServer(appendonly=True) as server`."""

    def __init__(self, port: int = 0, *, binary: Path | None = None, **options: object):
        binary = binary or redis_server_binary()
        super().__init__(tempfile.mkdtemp(prefix="rmq-redis-"), port, binary=binary, **options)

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


class ZooKeeperServer(EmbeddedZooKeeper):
    """A ZooKeeper in a directory of its own, which goes away with it. Raises NoJava where it cannot be run."""

    def __init__(self, port: int = 0, **how: Any):
        super().__init__(tempfile.mkdtemp(prefix="rmq-zookeeper-"), port, **how)

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
        """The server that leads the others."""
        return next(server for server in self.servers if server.running and server.mode() == "leader")

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
        self._wanted: bytes | None = None
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

    def drop_reply(self, containing: bytes) -> None:
        """Lose the reply of the next request that holds `containing`: the server does it, the client never hears.

        The connection is closed once the server has answered. Replies of earlier requests that are still on
        their way on the same connection are lost with it.
        """
        if not containing:
            raise ValueError("Say which request: an empty byte string is in every one.")
        self._dropped.clear()
        with self._lock:
            self._wanted = containing

    def wait_for_drop(self, seconds: float = 10) -> None:
        """Return when the reply asked for by `drop_reply` has been lost; TimeoutError after so many seconds."""
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
                server = socket.create_connection(("127.0.0.1", self.target_port), timeout=5)
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
            if self._wanted is None:
                return False
            seam = max(0, len(before) - len(self._wanted) + 1)
            if self._wanted not in before[seam:] + piece:
                return False
            self._wanted = None
            return True

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
                if self.proxy._is_wanted(tail, piece):
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
        self.proxy._dropped.set()
