"""Worker processes as an operator starts them, and what their listeners write down."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from django_rmq.core.model.topic import Topic, TopicType
from tests.support import preloaded
from tests.support.commands import ROOT, completed, started
from tests.support.workers import LONG, eventually

WORK = Topic("work", TopicType.RANGE_MERGE, slots=4, time_range_ms=1)
ONE_SLOT = replace(WORK, name="one-slot", slots=1)


def environment_of(data: Path, url: str, prefix: str, **more: str) -> dict[str, str]:
    """Return the environment of a process of the tests' project."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.e2e.worker_project.settings",
        "REDIS_URL": url,
        "RMQ_KEY_PREFIX": prefix,
        "WORKER_DATA": str(data),
        **more,
    }


def manage(environment: dict[str, str], *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of manage.py to its end, within a minute."""
    return completed([*preloaded.python(), "manage.py", *arguments], environment, **options)


def make_app(folder: Path, name: str, **modules: str) -> dict[str, str]:
    """Make an app for the tests' project; return the environment of workers that have it."""
    (folder / name).mkdir()
    for module, text in {"__init__": "", **modules}.items():
        (folder / name / f"{module}.py").write_text(text)
    return {"WORKER_APP": name, "PYTHONPATH": f"{folder}:{ROOT}"}


class WorkerProcess:
    """One `runrmqconsumers` with its children, and what they print.

    It is a fork of a process that has imported Django; with ``before``, which is a program that starts it, the one that
    an operator starts. Each has a session of its own.
    """

    def __init__(
        self,
        data: Path,
        url: str,
        prefix: str,
        *arguments: str,
        before: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self.data, self.prefix = data, prefix
        self.output_path = data / f"output-{time.monotonic_ns()}"
        command = ["-u", "manage.py", "runrmqconsumers", *arguments]
        whole = environment_of(data, url, prefix, **environment)
        self.process: subprocess.Popen[bytes] | preloaded.Program
        if before:
            whole_command = [*before, sys.executable, *command]
            self.process = started(whole_command, self.output_path, whole, start_new_session=True)
        else:
            with self.output_path.open("wb") as output:
                self.process = preloaded.Program(command, cwd=ROOT, env=whole, output=output.fileno())

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def ready(self) -> None:
        """Return when the worker says that it consumes."""
        eventually(lambda: "Consuming" in self.output or self.process.poll() is not None, "starting")
        assert self.process.poll() is None, self.output

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    @property
    def children(self) -> list[int]:
        """The worker processes that run at present."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            # State, parent, process group: after the death of the parent they are still in its group.
            if (
                fields[0] != "Z"
                and int(fields[2]) == self.process.pid
                and int(path.parent.name) != self.process.pid
            ):
                found.append(int(path.parent.name))
        return sorted(found)

    def child(self) -> int:
        eventually(lambda: len(self.children) == 1, "one child")
        return self.children[0]

    def stop(self) -> None:
        """Stop the parent, and return when it stands still or has ended."""
        self.signal(signal.SIGSTOP)
        eventually(
            lambda: stands_still(self.process.pid) or self.process.poll() is not None, "standing still"
        )

    def kill(self) -> None:
        """Kill the parent and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float = LONG) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        """Ask it to end, and check that it does so cleanly."""
        self.signal()
        assert self.wait() == 0, self.output


def probed(port: int, what: str) -> int:
    """Return the status that a worker answers a probe with; 0 if it answers nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=LONG) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def state_of(task: Path) -> str:
    """The letter that Linux gives the state of a process or a thread, by its folder under ``/proc``."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return state_of(Path(f"/proc/{pid}")) == "Z"
    except OSError:
        return True


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped by a signal."""
    try:
        return {state_of(thread) for thread in Path(f"/proc/{pid}/task").iterdir()} == {"T"}
    except OSError:  # a thread has just ended
        return False


Start = Callable[..., WorkerProcess]


class Happened:
    """What listeners have written down."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def lines(self, word: str) -> list[str]:
        """The names of the messages of which `word` (begun, done) was written down, in order."""
        path = self.data / "happened"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split(" ")[1] for line in lines if line.startswith(f"{word} ")]

    def processes(self) -> set[str]:
        """The ids of the processes that have begun something."""
        path = self.data / "happened"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line.split(" ")[2] for line in lines}

    def wait(self, word: str, count: int) -> None:
        """Return when `word` was written down so often."""
        eventually(lambda: len(self.lines(word)) >= count, f"{count} x {word}")

    def go(self) -> None:
        """Let waiting listeners return."""
        (self.data / "go").touch()


def named(*names: object, do: str = "") -> list[dict[str, Any]]:
    return [{"name": str(name), "do": do} for name in names]
