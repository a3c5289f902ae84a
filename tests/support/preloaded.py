"""Python programs that start as forks of one process, which has imported what takes long.

It has imported libraries, and of this package what asks for no settings. So a command of manage.py takes a third of the
processor's time. A test of how a process starts, or of what the system tells about it, starts a real one.

    python preloaded.py ask SOCKET ARGUMENT ...       as ``python ARGUMENT ...``
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "PIL.ImageDraw",
    "PIL.ImageFont",
    "cronsim",
    "django.contrib.admin",
    "django.contrib.messages.middleware",
    "django.contrib.postgres.fields",
    "django.contrib.sessions.middleware",
    "django.contrib.staticfiles.storage",
    "django.core.cache.backends.locmem",
    "django.core.management.commands.check",
    "django.core.management.commands.makemigrations",
    "django.core.management.commands.migrate",
    "django.core.servers.basehttp",
    "django.core.wsgi",
    "django.db.backends.sqlite3.base",
    "django.middleware.clickjacking",
    "django.middleware.common",
    "django.middleware.locale",
    "django.middleware.security",
    "django.test",
    "django_tasks",
    "drf_spectacular.utils",
    "inflection",
    "jsonschema",
    "markdown",
    "prometheus_client",
    "psycopg",
    "pydantic.fields",
    "pydantic.type_adapter",
    "pygments.formatters",
    "redis.asyncio",
    "requests",
    "uritemplate",
    "yaml",
)
OURS = (
    "django_rmq.message_ids",
    "django_rmq.metrics",
    "django_rmq.operations",
    "django_rmq.worker.startup",
    "django_rmq.worker.worker_process",
)

STARTS_WITHIN = 60.0
NOBODY_ASKS = 5.0
"""Seconds after which the server looks whether the tests have ended."""


@cache
def server() -> str:
    """Start the server of this process; return the path of its socket."""
    folder = tempfile.mkdtemp(prefix="rmq-preloaded-")
    path = f"{folder}/socket"
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE")
    }
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", path],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.DEVNULL,
    )

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    until = time.monotonic() + STARTS_WITHIN
    while not Path(path).exists():
        assert process.poll() is None and time.monotonic() < until, "the server of programs does not start"
        time.sleep(0.02)
    return path


def python() -> list[str]:
    """Return what a command line begins with in the place of ``python``."""
    return [sys.executable, "-I", "-S", __file__, "ask", server()]


class Program:
    """``python ARGUMENT ...`` in a session of its own; of ``subprocess.Popen`` what tests of workers use."""

    def __init__(
        self, arguments: list[str], *, cwd: Path, env: dict[str, str], output: int, path: str = ""
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with Path(os.devnull).open("rb") as nothing:
            self.pid = begin(
                self._socket,
                path or server(),
                [arguments, str(cwd), env, True],
                [nothing.fileno(), output, output],
            )
        self.args = arguments
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = int(self._socket.recv(16))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._socket.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin(client: socket.socket, path: str, program: list[Any], streams: list[int]) -> int:
    """Ask the server for a program; return its pid."""
    client.connect(path)
    text = json.dumps(program).encode()
    socket.send_fds(client, [len(text).to_bytes(4, "big")], streams)
    client.sendall(text)
    return int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")


def ask(path: str, arguments: list[str]) -> int:
    """Run a program with the streams of this process; return its exit code. Signals are passed on to it."""
    with socket.socket(socket.AF_UNIX) as client:
        pid = begin(client, path, [arguments, str(Path.cwd()), dict(os.environ), False], [0, 1, 2])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(client.recv(16))
    if code < 0:
        # It ends as the program did: by this signal.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


# --- in the server


def serve(path: str) -> list[str]:
    """Answer until the tests have ended. Returns in each fork, with the arguments of its program."""
    tests = os.getppid()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        listening.settimeout(NOBODY_ASKS)
        while os.getppid() == tests:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            try:
                client, _ = listening.accept()
            except TimeoutError:
                continue
            with client:
                if os.fork() == 0:
                    listening.close()
                    return become_program(client)
    # The tests were killed, or ended without their own end.
    shutil.rmtree(Path(path).parent, ignore_errors=True)
    os._exit(0)


def become_program(client: socket.socket) -> list[str]:
    """Fork the program that a client asks for. The process between it and the server tells how it ends."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    text = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    arguments, folder, environment, leads_session = json.loads(text)
    pid = os.fork()
    if pid:
        watch(client, pid, streams)
    if leads_session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The client learns the pid from the program itself, so that the program leads its session by then.
    client.sendall(os.getpid().to_bytes(4, "big"))
    client.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return list(arguments)


def watch(client: socket.socket, pid: int, streams: list[int]) -> NoReturn:
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    _, status = os.waitpid(pid, 0)
    client.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def run(arguments: list[str]) -> None:
    """Do what ``python ARGUMENT ...`` does."""
    import runpy

    time.tzset()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path[:0] = [str(Path.cwd()), *paths]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif not arguments[0].startswith("-"):
        sys.argv[:] = arguments
        sys.path[:0] = [str(Path(arguments[0]).absolute().parent), *paths]
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def end(code: int) -> NoReturn:
    """End as a child of `multiprocessing` does: threads and ``atexit`` have their turn, but nothing is torn down.

    To tear down writes to every page that the fork shares with the server, and so copies it.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        # Python itself says what is wrong with its streams.
        sys.exit(code)
    os._exit(code)


def preload() -> None:
    import gc
    from importlib import import_module

    sys.path[0] = str(Path.cwd())
    for module in (*LIBRARIES, *OURS):
        import_module(module)
    del sys.path[0]
    gc.freeze()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        preload()
        code = 0
        try:
            run(serve(sys.argv[2]))
        except SystemExit as ended:
            if isinstance(ended.code, str):
                raise
            code = ended.code or 0
        end(code)
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
