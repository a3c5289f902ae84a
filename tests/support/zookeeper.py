"""A real ZooKeeper of one's own, on loopback, for tests.

The server comes out of the jars inside PySpark and runs on the Java that Spark would run on.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from django_rmq.exceptions import ConfigurationError
from django_rmq.spark.java import java_home
from tests.support.embedded_server import EmbeddedServer, free_port

START_SECONDS = 120.0
"""Seconds for a start. A machine that has twenty times more to do than it has cores needs more than 30."""

JARS = (
    "zookeeper-*.jar", "slf4j-api-*.jar", "metrics-core-*.jar", "snappy-java-*.jar", "log4j-api-*.jar",
    "log4j-core-*.jar", "log4j-slf4j2-impl-*.jar",
)  # fmt: skip
TLS_JARS = ("netty-*.jar",)


def spark_jars() -> Path:
    """The folder of jars inside the PySpark package."""
    wheel = find_spec("pyspark")
    for folder in (wheel.submodule_search_locations if wheel else None) or []:
        jars = Path(folder, "jars")
        if jars.is_dir():
            return jars
    raise ConfigurationError('PySpark with its jars is not installed: pip install "django-redis-rmq[spark]"')


class EmbeddedZooKeeper(EmbeddedServer):
    """One ZooKeeper process with its directory and port. Raises ConfigurationError without a Java, or its jars.

    `options` are those of zoo.cfg, by their own names. `peers` makes it one of an ensemble: the number of each
    server -> its (quorum, election) ports, and `number` is which of them this one is. `start()` returns when it
    serves clients; of an ensemble `launch()` most, then wait for each.
    """

    log_name = "zookeeper.log"

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
        super().__init__(directory, port)
        self.tick_ms = tick_ms
        self.options = dict(options or {})
        self.number = number
        self.peers = dict(peers or {})
        self.java = java_home() / "bin" / "java"
        self.jars = spark_jars()

    @property
    def hosts(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        """Where the server keeps what it is told."""
        return self.directory / "data"

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
        self._launch(
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
            ]
        )

    def wait_until_serving(self, seconds: float = START_SECONDS) -> None:
        """Return when clients are served, or raise DidNotStart with the end of the log."""
        self._wait(seconds)

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

    def wipe(self) -> None:
        """Delete all data of a server that is down."""
        if self.running:
            raise RuntimeError("The server is running.")
        shutil.rmtree(self.data, ignore_errors=True)

    def _serves(self) -> bool:
        return bool(self.mode())

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
