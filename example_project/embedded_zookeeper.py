"""A real ZooKeeper of one's own, on loopback, for the demo and the tests; not for production.

The server comes out of the jars inside PySpark and runs on whatever Java `java_binary` finds.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from example_project.embedded_redis import free_port
from example_project.java import NoJava, java_binary, spark_jars

START_SECONDS = 30.0
STOP_SECONDS = 10.0

JARS = (
    "zookeeper-*.jar",
    "slf4j-api-*.jar",
    "metrics-core-*.jar",
    "snappy-java-*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar",
)
TLS_JARS = ("netty-*.jar",)


class ZooKeeperDidNotStart(RuntimeError):
    """The server ended or did not answer in time; the message ends with its log."""


class EmbeddedZooKeeper:
    """One ZooKeeper process with its directory and port; may be stopped and started again.

    `options` are those of zoo.cfg, by their own names. `peers` makes it one of an ensemble: the number of each
    server -> its (quorum, election) ports, and `number` is which of them this one is. `start()` returns when it
    serves clients; of an ensemble `launch()` most, then wait for each.
    """

    def __init__(
        self,
        directory: str | Path,
        port: int = 0,
        *,
        tick_ms: int = 500,
        options: Mapping[str, str] | None = None,
        number: int = 0,
        peers: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.port = port
        self.tick_ms = tick_ms
        self.options = dict(options or {})
        self.number = number
        self.peers = dict(peers or {})
        self.java = java_binary()
        self.jars = spark_jars()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id; an error while the server is down."""
        if self._process is None:
            raise RuntimeError("The server is not running.")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there (it may be paused)."""
        return self._process is not None and self._process.poll() is None

    @property
    def data(self) -> Path:
        """Where the server keeps what it is told."""
        return self.directory / "data"

    @property
    def log_path(self) -> Path:
        """Where the server writes its log, over all its starts."""
        return self.directory / "zookeeper.log"

    def log(self) -> str:
        """What the server has logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self) -> None:
        """Start the process and return when it serves clients. The port stays the same from the first start on."""
        self.launch()
        self.wait_until_serving()

    def launch(self) -> None:
        """Start the process and return at once."""
        if self.running:
            raise RuntimeError("The server is running already.")
        self.data.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        configuration = self.directory / "zoo.cfg"
        configuration.write_text(self._configuration())
        if self.peers:
            (self.data / "myid").write_text(f"{self.number}\n")
        patterns = JARS + (TLS_JARS if "secureClientPort" in self.options else ())
        jars = [str(jar) for pattern in patterns for jar in sorted(self.jars.glob(pattern))]
        main = "quorum.QuorumPeerMain" if self.peers else "ZooKeeperServerMain"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self.java),
                    "-Xmx128m",
                    "-XX:+UseSerialGC",
                    "-XX:TieredStopAtLevel=1",
                    "-Dlog4j2.level=WARN",
                    "-cp",
                    os.pathsep.join(jars),
                    f"org.apache.zookeeper.server.{main}",
                    str(configuration),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal goes to the whole group: the workers must be able to finish first.
                start_new_session=True,
            )

    def wait_until_serving(self, seconds: float = START_SECONDS) -> None:
        """Return when clients are served, or raise ZooKeeperDidNotStart with the end of the log."""
        deadline = time.monotonic() + seconds
        while not self.mode():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise ZooKeeperDidNotStart(
                    f"ZooKeeper on port {self.port} did not start:\n{self.log()[-4000:]}"
                )
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)

    def mode(self) -> str:
        """`standalone`, `leader` or `follower`; empty while it serves nobody."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                said = b""
                while piece := connection.recv(65536):
                    said += piece
        except OSError:
            return ""
        lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith("Mode: ")]
        return lines[0].removeprefix("Mode: ") if lines else ""

    def stop(self) -> None:
        """End the server; a paused one is resumed first. Harmless when it is down."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wipe(self) -> None:
        """Delete all data of a server that is down."""
        if self.running:
            raise RuntimeError("The server is running.")
        shutil.rmtree(self.data, ignore_errors=True)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay, answers do not come. Returns when it stands still."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        if not self.running:
            self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _configuration(self) -> str:
        options = {
            "tickTime": str(self.tick_ms),
            "dataDir": str(self.data),
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "ruok,srvr,mntr",
            "minSessionTimeout": "500",
            "maxSessionTimeout": "600000",
            "maxClientCnxns": "0",
            # Tests start and stop it many times; what a crash of the machine loses is no concern here.
            "forceSync": "no",
        }
        if self.peers:
            options |= {"initLimit": "20", "syncLimit": "10", "standaloneEnabled": "false"}
            options |= {
                f"server.{number}": f"127.0.0.1:{quorum}:{election}"
                for number, (quorum, election) in self.peers.items()
            }
        return "".join(f"{name}={value}\n" for name, value in (options | self.options).items())


__all__ = ["EmbeddedZooKeeper", "NoJava", "ZooKeeperDidNotStart"]
