"""A server process of one's own, on loopback: started, paused, killed, started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

STOP_SECONDS = 20.0


class DidNotStart(RuntimeError):
    """The server ended or did not answer in time; the message ends with its log."""


def free_port(wanted: int = 0) -> int:
    """A loopback TCP port for a server that this process starts.

    Raises OSError if the wanted one is not free, OverflowError if there is no such port.

    On Linux no other process is given it while this one runs: a socket that is bound and does not listen holds it.
    Servers set SO_REUSEADDR, so they can listen there, also after a restart; while none does, connections are refused.
    """
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", wanted))
        port = int(holder.getsockname()[1])
    except (OSError, OverflowError):
        holder.close()
        raise
    if sys.platform == "linux":
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.detach()  # It stays open until the process ends.
    else:
        holder.close()
    return port


class EmbeddedServer(ABC):
    """One process with its directory and port; may be stopped and started again, also as a context manager."""

    log_name: ClassVar[str]

    def __init__(self, directory: str | Path, port: int) -> None:
        self.directory = Path(directory).absolute()
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Start the process and return when it serves clients."""

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
    def log_path(self) -> Path:
        """Where the server writes its log, over all its starts."""
        return self.directory / self.log_name

    def log(self) -> str:
        """What the server has logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self) -> None:
        """End the server in order; a paused one is resumed first. Harmless when it is down."""
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
        """End the server as a crash does: SIGKILL, nothing saved."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop the server if it is up, and start it with the same port, directory and options."""
        self.stop()
        self.start()

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

    def _launch(self, command: Sequence[str]) -> None:
        """Start the process and return at once."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal goes to the whole group: the workers must be able to finish first.
                start_new_session=True,
            )

    @abstractmethod
    def _serves(self) -> bool:
        """Whether it answers a client by now."""

    def _wait(self, seconds: float, log_from: int = 0) -> None:
        """Return when it serves; kill it and raise DidNotStart with its log if it ends, or does not in time."""
        deadline = time.monotonic() + seconds
        while not self._serves():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                raise DidNotStart(
                    f"{type(self).__name__} on port {self.port} did not start:\n{self.log()[log_from:][-4000:]}"
                )
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.01)
