"""A PostgreSQL of one's own for a test, on loopback: Debian's package `postgresql` has the programs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.embedded_server import free_port
from tests.support.servers import absent


def programs() -> Path:
    """Return the folder of the newest PostgreSQL of this machine."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if not found:
        absent("PostgreSQL is not installed: apt-get install postgresql")
    return found[-1].parent


class Postgres:
    """A server with an empty database `shop`."""

    def __init__(self, programs: Path, port: int, run: Callable[..., None], data: Path) -> None:
        self._programs = programs
        self._run = run
        self._data = data
        self.port = port

    @property
    def settings(self) -> dict[str, Any]:
        """Return the entry of DATABASES."""
        address = {"NAME": "shop", "USER": "shop", "HOST": "127.0.0.1", "PORT": str(self.port)}
        return {"ENGINE": "django.db.backends.postgresql", "OPTIONS": {}, **address}

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-m", "fast")

    def start(self) -> None:
        """Start the server as it was started first: only a restart remembers the options."""
        self._run("pg_ctl", "restart", "-w")

    def restart(self, mode: str = "fast") -> None:
        """Stop the server and start it again; `immediate` is a crash, after which it recovers from its log."""
        self._run("pg_ctl", "restart", "-w", "-m", mode)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all processes of the server while the block runs: it accepts connections, and answers nothing."""
        main = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{main}/task/{main}/children")
        os.kill(main, signal.SIGSTOP)  # from here on it starts no other
        stopped = [main]
        try:
            for pid in map(int, children.read_text().split()):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def query(self, text: str, database: str = "shop") -> str:
        """Return what the server answers to one statement."""
        address = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "shop", "-d", database]
        command = [str(self._programs / "psql"), *address, "-At", "-c", text]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def connections(self, name: str) -> int:
        """Return how many connections the program has whose PGAPPNAME this is."""
        return int(self.query(f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'"))


@contextmanager
def postgres(fsync: str = "off") -> Iterator[Postgres]:
    """Run a PostgreSQL while the block does. ``fsync`` off: it is quick, and safe only from its own death."""
    bin_folder, folder = programs(), Path(tempfile.mkdtemp(prefix="rmq-postgres-"))
    as_owner = []
    if os.geteuid() == 0:
        # It refuses to run as root; its package has made a user for it.
        shutil.chown(folder, "postgres")
        as_owner = ["runuser", "-u", "postgres", "--"]
    port = free_port()
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync={fsync}"

    def run(program: str, *arguments: str) -> None:
        command = [*as_owner, str(bin_folder / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, cwd="/", check=True, stdout=subprocess.DEVNULL, timeout=60)

    try:
        run("initdb", "-A", "trust", "-U", "shop", "--no-sync")
        run("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            server = Postgres(bin_folder, port, run, folder / "data")
            server.query("CREATE DATABASE shop", "postgres")
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
