"""A real Redis server of one's own, on loopback, for the tests and benchmarks."""

from __future__ import annotations

import socket
from pathlib import Path

from example_project.demo.redis_server import redis_server_binary
from tests.support.embedded_server import DidNotStart, EmbeddedServer, free_port

START_SECONDS = 60.0


class EmbeddedRedis(EmbeddedServer):
    """One redis-server process with its directory, port and options.

    Options are those of redis.conf with underscores for dashes: a bool means yes or no, a list means one
    line for each item. Nothing is saved to disk unless `save` or `appendonly` asks for it.
    """

    log_name = "redis.log"
    start_seconds = START_SECONDS
    """How long a start may take, loading of data included."""

    def __init__(
        self, directory: str | Path, port: int = 0, *, binary: Path | None = None, **options: object
    ):
        super().__init__(directory, port)
        self.binary = binary or redis_server_binary()
        self.options: dict[str, object] = {"save": '""', "appendonly": False, **options}
        self._chosen_by_us = port == 0

    @property
    def url(self) -> str:
        """The address of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the process and return when it answers PING (data loaded).

        A port that was not asked for is drawn again if another process took it in between; after the first
        start it stays, so that clients find the server again.
        """
        if self.running:
            raise RuntimeError("The server is running already.")
        self.directory.mkdir(parents=True, exist_ok=True)
        attempts = 5 if self._chosen_by_us else 1
        for attempt in range(1, attempts + 1):
            if self._chosen_by_us:
                self.port = free_port()
            try:
                self._start_once()
            except DidNotStart as error:
                if attempt == attempts or "Address already in use" not in str(error):
                    raise
            else:
                self._chosen_by_us = False
                return

    def _start_once(self) -> None:
        configuration = self.directory / "redis.conf"
        configuration.write_text(self._configuration())
        log_from = len(self.log())
        self._launch([str(self.binary), str(configuration)])
        self._wait(self.start_seconds, log_from)

    def _serves(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                # With the id of the process, so that a stranger on the same port is not taken for our server.
                connection.sendall(b"INFO server\r\n")
                answer = b""
                while b"process_id:" not in answer or not answer.endswith(b"\r\n"):
                    piece = connection.recv(65536)
                    answer += piece
                    if not piece or answer.startswith(b"-"):
                        return False
                if f"process_id:{self.pid}\r\n".encode() not in answer:
                    return False
                connection.sendall(b"PING\r\n")
                return connection.recv(64) == b"+PONG\r\n"
        except OSError:
            return False

    def _configuration(self) -> str:
        lines = [
            "bind 127.0.0.1", f"port {self.port}", f'dir "{self.directory}"', "daemonize no", 'logfile ""',
        ]  # fmt: skip
        for name, value in self.options.items():
            for one in value if isinstance(value, list | tuple) else [value]:
                word = {True: "yes", False: "no"}[one] if isinstance(one, bool) else str(one)
                lines.append(f"{name.replace('_', '-')} {word}")
        return "\n".join(lines) + "\n"


def start_redis(
    directory: str | Path, port: int = 0, *, binary: Path | None = None, **options: object
) -> EmbeddedRedis:
    """Start a redis-server in `directory` on `port` (0: any free one) and return it when it answers.

    Raises NoRedisServer without a binary, DidNotStart with the server's log when it will not start.
    """
    server = EmbeddedRedis(directory, port, binary=binary, **options)
    server.start()
    return server
