"""A MariaDB of one's own for a test, on loopback: Debian's package `mariadb-server` has the programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.embedded_server import free_port
from tests.support.servers import absent, wait_until


def programs() -> tuple[str, str]:
    """Return the server of this machine, and what makes its first tables."""
    found = (
        shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin"),
        shutil.which("mariadb-install-db"),
    )
    if None in found:
        absent("MariaDB is not installed: apt-get install mariadb-server")
    server, installer = found
    assert server is not None
    assert installer is not None
    return server, installer


class MariaDB:
    """A server with an empty database `shop`."""

    def __init__(self, command: list[str], folder: Path, port: int) -> None:
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port

    @property
    def settings(self) -> dict[str, Any]:
        """Return the entry of DATABASES."""
        address = {"NAME": "shop", "USER": "root", "HOST": "127.0.0.1", "PORT": str(self.port)}
        return {"ENGINE": "django.db.backends.mysql", "OPTIONS": {"charset": "utf8mb4"}, **address}

    def query(self, text: str, database: str | None = "shop") -> list[tuple[Any, ...]]:
        """Return what the server answers to one statement."""
        import pymysql

        address = {"host": "127.0.0.1", "port": self.port, "user": "root", "database": database}
        with pymysql.connect(**address) as connection, connection.cursor() as cursor:
            cursor.execute(text)
            return list(cursor.fetchall())

    def start(self) -> None:
        """Start the server, and return when it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd="/", stdout=log, stderr=log)

        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"MariaDB has ended: {(self._folder / 'log').read_text()[-2000:]}")
            with suppress(OSError, Exception):
                return self.query("SELECT 1", None) == [(1,)]
            return False

        wait_until(answers, "MariaDB")

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)

    def restart(self) -> None:
        self.stop()
        self.start()


def use_driver() -> None:
    """Let Django use PyMySQL, which needs no compiler, in place of mysqlclient, whose interface it has."""
    import pymysql

    pymysql.version_info = (2, 2, 7, "final", 0)
    pymysql.install_as_MySQLdb()


@contextmanager
def mariadb() -> Iterator[MariaDB]:
    """Run a MariaDB while the block does. It is quick, and safe only from its own death."""
    (server, installer), folder = programs(), Path(tempfile.mkdtemp(prefix="rmq-mariadb-"))
    use_driver()
    user = []
    if os.geteuid() == 0:
        # It refuses to run as root; its package has made a user for it.
        shutil.chown(folder, "mysql")
        user = ["--user=mysql"]
    port = free_port()
    options = ["--no-defaults", *user, f"--datadir={folder / 'data'}"]
    own = [
        "--bind-address=127.0.0.1",
        f"--port={port}",
        f"--socket={folder / 'socket'}",
        f"--pid-file={folder / 'pid'}",
        "--skip-grant-tables",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=16M",
        "--skip-name-resolve",
        "--skip-log-bin",
    ]
    try:
        subprocess.run(
            [installer, *options, "--auth-root-authentication-method=normal", "--skip-test-db"],
            cwd="/",
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        found = MariaDB([server, *options, *own], folder, port)
        found.start()
        try:
            found.query("CREATE DATABASE shop CHARACTER SET utf8mb4", None)
            yield found
        finally:
            found.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["MariaDB", "mariadb", "programs", "use_driver"]
