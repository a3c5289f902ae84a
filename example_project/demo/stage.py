"""What both demos stand on: signals, child processes, a Redis, and Django set up on a folder of its own."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from django.db import connection

from django_rmq.exceptions import RmqError
from example_project.demo.redis_server import NoRedisServer, redis_server_binary

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
STEP_SECONDS = 0.2
START_SECONDS = 60.0
STOP_SECONDS = 60.0
SECONDS_PER_LINE = 2.0


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


class DemoFailed(Exception):
    """The demo cannot go on; the message says why."""


class Signals:
    """Notes the first SIGINT or SIGTERM; whoever waits looks here, so that no step is torn apart."""

    def __init__(self) -> None:
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        self.received = self.received or number

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.received:
            raise Stopped


class Child:
    """A process of its own, with its output in a log file."""

    def __init__(self, name: str, log: Path, *command: str, **environment: str) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches us alone: the consumers have to work until the traffic has stopped.
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise DemoFailed with the end of its log if it has ended."""
        if self.process.poll() is not None:
            raise DemoFailed(f"the {self.name} ended with {self.process.returncode}:\n{self.tail()}")

    def stop(self) -> int:
        """Ask it to end, and return its exit code; one that does not listen is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


class Command(Child):
    """A command of manage.py."""

    def __init__(self, name: str, log: Path, *command: str, **environment: str) -> None:
        super().__init__(name, log, sys.executable, str(ROOT / "manage.py"), *command, **environment)


class WebServer(Command):
    """Django's development server on the wanted port, on 8000 if it is free, or on any that is."""

    def __init__(self, data: Path, wanted: int | None) -> None:
        self.port = wanted or free_port(8000)
        self.address = f"http://{HOST}:{self.port}/"
        command = ("runserver", "--noreload", f"{HOST}:{self.port}")
        super().__init__("web server", data / "web.log", *command, DJANGO_DEBUG="1")

    def answers(self) -> bool:
        """Whether it takes connections by now."""
        return takes_connections(self.port)


def takes_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def free_port(wanted: int = 0) -> int:
    """Return this port if it is free, else one that is."""
    with socket.socket() as probe:
        # As the servers will: a port that waits for the end of old connections is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError:
            probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def run(demo: Callable[[Namespace, Signals, ExitStack], int], options: Namespace) -> int:
    """Run a demo, stop whatever it has started, the last first, and return the exit code."""
    signals = Signals()
    try:
        with ExitStack() as cleanup:
            return demo(options, signals, cleanup)
    except Stopped:
        print("\nStopped before its time.")
        return 128 + (signals.received or 0)
    except (DemoFailed, NoRedisServer, RmqError) as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        return 1


def start_redis(cleanup: ExitStack) -> None:
    """Start a Redis and name it in REDIS_URL, unless one is named there."""
    if os.environ.get("REDIS_URL"):
        print("Redis: the one of REDIS_URL")
        return
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="shop-redis-")))
    binary, port = redis_server_binary(), free_port()
    options = ("--bind", HOST, "--port", str(port), "--dir", str(folder), "--save", "")
    server = Child("Redis", folder / "redis.log", str(binary), *options)
    cleanup.callback(server.stop)
    until = time.monotonic() + START_SECONDS
    while not takes_connections(port):
        server.check()
        if time.monotonic() > until:
            raise DemoFailed(f"Redis did not start:\n{server.tail()}")
        time.sleep(STEP_SECONDS / 10)
    os.environ["REDIS_URL"] = f"redis://{HOST}:{port}/0"
    print(f"Redis: {binary} on port {port}")


def set_up_django(cleanup: ExitStack) -> Path:
    """Set up Django with its database, and return the folder for data, which is ours alone until the end."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    # With DEBUG every process would note every query. The web server alone has it, and serves static files.
    os.environ["DJANGO_DEBUG"] = "0"

    import django
    from django.conf import settings
    from django.core.management import call_command

    django.setup()
    data: Path = settings.SHOP_DATA
    lock = cleanup.enter_context((data / "demo.lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DemoFailed(f"another demo runs on {data}; give this one a folder in SHOP_DATA") from None
    call_command("migrate", verbosity=0)
    return data


class Source(threading.Thread):
    """Has something happen `rate` times a second until `stop()`: calls `report` with the number that is due by then."""

    def __init__(self, name: str, rate: float, report: Callable[[int], None], seconds: float) -> None:
        super().__init__(name=name)
        self.rate = rate
        self.report = report
        self.seconds = seconds
        self.error: Exception | None = None
        self._stopping = threading.Event()

    def check(self) -> None:
        """Raise DemoFailed if a call has failed."""
        if self.error is not None:
            raise DemoFailed(f"the {self.name} failed: {self.error!r}") from self.error

    def stop(self) -> None:
        """Let the call under way end, and return when it has. Harmless before the start."""
        self._stopping.set()
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        began, reported = time.monotonic(), 0
        try:
            while not self._stopping.wait(self.seconds):
                due = round((time.monotonic() - began) * self.rate)
                self.report(due - reported)
                reported = due
        except Exception as error:  # noqa: BLE001 - a thread cannot raise to its starter, which reads `error`
            self.error = error
        finally:
            connection.close()


class Watch:
    """Waits, meanwhile checks the parts of a demo, and prints a line every two seconds."""

    def __init__(self, line: Callable[[], str], *checks: Callable[[], None]) -> None:
        self.line = line
        self.checks = checks
        self._began = self._next = time.monotonic()

    def wait(self, seconds: float, ended: Callable[[], bool] = lambda: False) -> bool:
        """Return whether it has ended within so many seconds; what a check finds, it raises."""
        deadline = time.monotonic() + seconds
        while not (done := ended()) and (now := time.monotonic()) < deadline:
            time.sleep(min(STEP_SECONDS, deadline - now))
            for check in self.checks:
                check()
            if now >= self._next:
                self._next = now + SECONDS_PER_LINE
                print(f"{now - self._began:4.0f} s  {self.line()}", flush=True)
        return done


def verdict(summary: dict[str, object], complaints: list[str], service: Child, praise: str) -> int:
    """Print the summary and ``praise``, or what is wrong and how the log of ``service`` ends; return the exit code."""
    print_summary(summary)
    if not complaints:
        print(f"\n{praise}")
        return 0
    print("\nNot everything is accounted for:")
    for complaint in complaints:
        print(f"  - {complaint}")
    print(f"\nThe last lines of {service.log}:\n{service.tail()}")
    return 1


def print_summary(lines: dict[str, object]) -> None:
    """Print names and values, aligned."""
    print("\nSummary")
    for name, value in lines.items():
        print(f"  {name + ':':<24}{value}")
