"""Ends of worker processes: those that listeners cause, and what listeners leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ONE_SLOT, WORK, Happened, Start, named, state_of
from tests.support.brokers import Broker
from tests.support.commands import ROOT, completed, started
from tests.support.servers import absent
from tests.support.workers import LONG, eventually, live, send


def of_group(group: int, state: str = "") -> list[int]:
    """The processes of a group, those in a state if it is given."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and (not state or fields[0] == state):
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("do", "processes"), [("os 0", "1"), ("c 0", "3"), ("os 2", "3"), ("os 75", "1")])
def test_a_listener_that_ends_its_process_with_any_code_is_charged_at_once_and_the_service_goes_on(
    start: Start, broker: Broker, happened: Happened, do: str, processes: str
) -> None:
    send(broker, ONE_SLOT, named("x", do=do))
    worker = start("one-slot", "--processes", processes, WORKER_LISTENERS="exits")
    eventually(lambda: "Recorded a time-out for 1 messages" in worker.output, "the charge")
    send(broker, ONE_SLOT, named("y"))
    eventually(lambda: live(broker, ONE_SLOT) == 0, "everything")
    eventually(lambda: len(worker.children) == int(processes), "all processes")
    worker.end()
    assert sorted(happened.lines("done")) == ["x", "y"]


def test_as_pid_1_it_reaps_orphans_and_ends_on_sigterm(start: Start, broker: Broker) -> None:
    before = ("unshare", "--pid", "--fork", "--mount-proc")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        absent("no PID namespace can be made here")
    send(broker, WORK, named(*range(10), do="orphan"))
    worker = start("work", before=before, WORKER_LISTENERS="exits")
    eventually(lambda: of_group(worker.process.pid, "Z"), "an orphan that has ended")
    eventually(lambda: live(broker, WORK) == 0, "everything")
    eventually(lambda: not of_group(worker.process.pid, "Z"), "no orphan that has ended")
    outside = worker.process.pid
    first = int(Path(f"/proc/{outside}/task/{outside}/children").read_text())
    os.kill(first, signal.SIGTERM)
    assert worker.wait(LONG) == 0


SUBREAPER = """
import ctypes, os, signal, subprocess, time
from django_rmq.core.worker_processes import child_process
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
child_process.ORPHAN_SECONDS = 0.5
own, orphans = subprocess.Popen(["sh", "-c", "exit 7"]), child_process.Orphans()
if (middle := os.fork()) == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os.waitpid(middle, 0)
while len(ended := child_process._ended_children()) < 2:
    time.sleep(0.01)
orphans.reap([own.pid])
assert set(child_process._ended_children()) == set(ended), "somebody may still wait for them"
time.sleep(0.6)
orphans.reap([own.pid])
assert child_process._ended_children() == [own.pid]
assert own.wait() == 7
"""


def test_a_subreaper_reaps_orphans_and_leaves_its_own_children_their_status() -> None:
    done = completed([sys.executable, "-c", SUBREAPER])
    assert (done.returncode, done.stderr) == (0, "")


BLOCKED = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {15, 2, 1}); os.execvp(sys.argv[1], sys.argv[1:])"


def test_a_relay_that_was_started_with_sigterm_blocked_ends_on_sigterm(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", BLOCKED, sys.executable, "manage.py", "rmqoutbox", "--watch"]
    relay = started(command, Path(os.devnull), environment, start_new_session=True)

    def catches_sigterm() -> bool:
        status = Path(f"/proc/{relay.pid}/status").read_text()
        caught, blocked = (int(status.split(f"{name}:\t")[1][:16], 16) for name in ("SigCgt", "SigBlk"))
        return bool(caught & ~blocked & 1 << signal.SIGTERM - 1)

    try:
        eventually(catches_sigterm, "running")
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(LONG) == 0
    finally:
        relay.kill()
        relay.wait()


def test_a_worker_ends_cleanly_although_nobody_reads_any_more_what_it_prints(
    environment: dict[str, str],
) -> None:
    worker = subprocess.Popen(
        [sys.executable, "manage.py", "runrmqconsumers", "work"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=(reading := os.pipe())[1],
        stderr=reading[1],
        start_new_session=True,
    )
    os.close(reading[1])
    text = b""
    while b"Consuming" not in text:
        text += os.read(reading[0], 4096)
    os.close(reading[0])
    try:
        eventually(lambda: len(of_group(worker.pid)) == 2, "a worker process")
        eventually(lambda: state_of(Path(f"/proc/{worker.pid}")) == "S", "waiting")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LONG) == 0
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_commands_run_with_standard_streams_that_are_closed(environment: dict[str, str], closed: str) -> None:
    for arguments in ("runrmqconsumers work --burst", "rmqstats"):
        command = ["sh", "-c", f"exec {sys.executable} manage.py {arguments} {closed}"]
        done = completed(command, environment)
        assert done.returncode == 0, done.stderr
        assert "NoneType" not in done.stderr


def run_unread(arguments: str, environment: dict[str, str], unread: str) -> tuple[int, str]:
    """Run a command with ``stdout`` or ``stderr`` to a pipe that nobody reads; return the exit code and what was read."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, unread: writing}
        how = {"stdin": subprocess.DEVNULL, "capture_output": False, **streams}
        done = completed([sys.executable, "manage.py", *arguments.split()], environment, **how)
    finally:
        os.close(writing)
    return done.returncode, (done.stdout or "") + (done.stderr or "")


@pytest.mark.parametrize("unread", ["stdout", "stderr"])
def test_a_worker_runs_although_nobody_has_read_anything_of_it(
    environment: dict[str, str], unread: str
) -> None:
    code, text = run_unread("runrmqconsumers work --burst", environment, unread)
    assert code == 0, text
    assert run_unread("runrmqconsumers nonsense", environment, unread)[0] == 2


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["rmqstats", "rmqhealth"])
def test_a_command_whose_output_nobody_reads_ends_quietly_like_any_tool(
    environment: dict[str, str], command: str, buffered: bool
) -> None:
    environment |= {"PYTHONUNBUFFERED": "" if buffered else "1"}
    assert run_unread(command, environment, "stdout") == (141, "")


def test_characters_that_the_encoding_of_the_output_lacks_are_written_as_numbers(
    environment: dict[str, str], broker: Broker
) -> None:
    send(broker, WORK, ["caf\u00e9 \u2603"])
    for encoding, shown in (
        ("utf-8", "caf\u00e9 \u2603"),
        ("latin-1", "caf\u00e9 \\u2603"),
        ("ascii", "caf\\xe9 \\u2603"),
    ):
        command = [sys.executable, "manage.py", "rmqlist", "work", "--state", "waiting"]
        done = completed(command, environment | {"PYTHONIOENCODING": encoding}, encoding=encoding)
        assert (done.returncode, done.stderr) == (0, "") and shown in done.stdout


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["rmqstats", "rmqhealth"])
def test_a_command_whose_output_does_not_fit_on_the_disk_says_so(
    environment: dict[str, str], command: str, buffered: bool
) -> None:
    environment |= {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with Path("/dev/full").open("w") as full:
        how: dict[str, Any] = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        command_line = [sys.executable, "manage.py", command]
        done = completed(command_line, environment, stdin=subprocess.DEVNULL, **how)
    says = "CommandError: not all was written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, says)
