"""The parent of worker processes, with children that do next to nothing."""

from __future__ import annotations

import atexit
import ctypes
import errno
import itertools
import logging
import multiprocessing
import os
import resource
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from django_rmq.core import forked_copies
from django_rmq.core.consumer.shared_notes import SharedNotes
from django_rmq.core.worker_processes import child_process, supervisor
from django_rmq.core.worker_processes.child_process import RECYCLE, SERVER, ChildProcess
from django_rmq.core.worker_processes.supervisor import OVERTIME_SECONDS, HealthServer, Supervisor
from django_rmq.exceptions import ConfigurationError, ServerUnavailable
from tests.e2e.processes import is_gone
from tests.support.embedded_server import free_port
from tests.support.workers import eventually


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a test that hangs; children end with their parent, or after a minute."""

    def complain(number: int, frame: object) -> None:
        raise AssertionError("the supervisor did not end")

    previous = signal.signal(signal.SIGALRM, complain)
    signal.alarm(90)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


class Diary:
    """A file to which children write a letter each time they start."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, letter: str = "s") -> int:
        """Append; return how often that was done before."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, letter.encode())
            # Up to its own letter: another child may write at the same time. Python's own `tell` counts from where the
            # file ended when it was opened.
            return self.text[: os.lseek(descriptor, 0, os.SEEK_CUR)].count(letter) - 1
        finally:
            os.close(descriptor)

    @property
    def text(self) -> str:
        return self.path.read_text() if self.path.exists() else ""


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path / "diary")


def until_sigterm(code: int = RECYCLE) -> int:
    """Wait for SIGTERM as a worker would."""
    # No event: a handler that sets it while its own thread is about to wait for it would stand still for ever.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    for _ in range(1200):
        if asked:
            return code
        time.sleep(0.05)
    return 1


def supervise(child: Callable[[SharedNotes], int], processes: int = 1, **options: Any) -> Supervisor:
    return Supervisor(child, processes, lambda: SharedNotes(1), **options)


def test_it_ends_when_all_children_have_ended_for_good(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        notes.beat(5, True)
        diary.write()
        return 0

    parent = supervise(child, 3)
    assert parent.run() == 0
    assert diary.text == "sss"
    assert parent.processed == 15
    assert parent.pids == []


def test_a_process_that_the_system_cannot_start_is_tried_again_and_ends_no_other(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fork, forks = os.fork, itertools.count(1)

    def refused_once() -> int:
        if next(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refused_once)
    monkeypatch.setattr(supervisor, "FORK_AGAIN_SECONDS", 0.05)

    def child(notes: SharedNotes) -> int:
        diary.write()
        return 0

    assert supervise(child, 2).run() == 0
    assert diary.text == "ss"
    assert "Cannot start a worker process; it is tried again" in caplog.text


def test_a_successor_counts_as_alive_however_long_its_start_was_put_off() -> None:
    child = ChildProcess(SharedNotes(1), seen=time.monotonic() - 60)
    child.fork(lambda notes: 0, lambda: None)
    assert time.monotonic() - child.seen < supervisor.FRESH_SECONDS
    eventually(lambda: child.wait() is not None, "its end")


def test_a_process_that_sigkill_does_not_end_at_once_is_not_looked_at_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of the kernel that cannot be interrupted may take seconds, and the parent sleeps until ``kill_at``."""
    sent: list[int] = []
    child = ChildProcess(SharedNotes(1), pid=os.getpid())
    monkeypatch.setattr(child, "send", sent.append)
    child.watch(10.0, 0.0, 1.0)
    child.watch(11.0, 0.0, 1.0)
    assert sent == [signal.SIGUSR1, signal.SIGKILL]
    assert child.kill_at is not None and child.kill_at > 11.0


def test_a_child_that_dies_is_replaced_and_its_notes_are_shown(diary: Diary) -> None:
    shown: list[str] = []

    def child(notes: SharedNotes) -> int:
        assert notes.owner == ""
        notes.owner = f"owner-{diary.text}"
        if diary.write() < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def died(notes: SharedNotes) -> int:
        shown.append(notes.owner)
        return 1

    began = time.monotonic()
    assert supervise(child, died=died).run() == 0
    assert shown == ["owner-", "owner-s"]
    assert time.monotonic() - began >= 0.3, "0.1 s and 0.2 s"


def test_a_child_that_raises_or_fails_is_replaced(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        if diary.write() == 0:
            raise ValueError("no")
        if diary.text.count("s") == 2:
            raise SystemExit(3)
        return 0

    assert supervise(child).run() == 0
    assert diary.text == "sss"


def test_a_child_that_asks_for_a_successor_gets_it_at_once(diary: Diary) -> None:
    died = []

    def note(notes: SharedNotes) -> int:
        died.append(notes)
        return 0

    def child(notes: SharedNotes) -> int:
        return RECYCLE if diary.write() < 20 else 0

    began = time.monotonic()
    assert supervise(child, died=note).run() == 0
    assert diary.text == "s" * 21
    assert not died
    assert time.monotonic() - began < 60, "with pauses that double it would be minutes"


OF_C = ctypes.CDLL(None).exit


@pytest.mark.parametrize(
    ("leave", "code", "processes"),
    [
        *((os._exit, code, 1) for code in (0, 1, 2, 3, 4, 5, 75, 143)),
        (os._exit, 0, 3),
        (os._exit, 3, 3),
        (OF_C, 0, 1),
        (OF_C, 75, 3),
    ],
)
def test_an_exit_that_the_process_has_not_announced_is_a_death_whatever_its_code(
    diary: Diary, leave: Callable[[int], None], code: int, processes: int
) -> None:
    died: list[SharedNotes] = []

    def note(notes: SharedNotes) -> int:
        died.append(notes)
        return 0

    def child(notes: SharedNotes) -> int:
        if diary.write() < processes:
            leave(code)
        return 0

    assert supervise(child, processes, died=note).run() == 0
    assert diary.text == "s" * 2 * processes
    assert len(died) == processes


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_a_process_that_dies_with_a_meaningful_code_while_all_are_ending_is_a_forced_end(
    diary: Diary, code: int
) -> None:
    def child(notes: SharedNotes) -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        until_sigterm()
        os._exit(code)

    assert supervise(child).run() == 1


def test_redis_being_away_while_giving_back_does_not_end_the_parent(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        return 0 if diary.write() else 1

    def died(notes: SharedNotes) -> int:
        raise ServerUnavailable("away")

    assert supervise(child, died=died).run() == 0
    assert diary.text == "ss"


def test_a_server_that_is_away_delays_the_end_of_many_processes_once(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[SharedNotes] = []

    def child(notes: SharedNotes) -> int:
        if diary.write() == 3:
            os.kill(os.getppid(), signal.SIGTERM)
        return until_sigterm(1)

    def died(notes: SharedNotes) -> int:
        asked.append(notes)
        raise ServerUnavailable("away")

    assert supervise(child, 4, died=died).run() == 1
    assert len(asked) == 1
    lines = [one.getMessage() for one in caplog.records if "will time out" in one.getMessage()]
    assert (
        len(lines) == 4 and len([line for line in lines if line.endswith("the server is unavailable")]) == 3
    )


def test_a_child_that_cannot_be_configured_ends_everything(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        return 2 if diary.write() == 0 else until_sigterm()

    assert supervise(child, 2).run() == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_all_children_end(diary: Diary, number: int) -> None:
    def child(notes: SharedNotes) -> int:
        if diary.write() == 1:
            os.kill(os.getppid(), number)
        return until_sigterm()

    assert supervise(child, 2).run() == 0
    assert diary.text == "ss"


def test_signals_that_come_together_are_one_request(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getppid(), signal.SIGTERM)
        return until_sigterm()

    assert supervise(child).run() == 0


@pytest.mark.parametrize(("seconds", "code"), [(1.0, 0), (0.0, 1)])
def test_a_program_stops_at_one_request_and_leaves_at_the_next(
    monkeypatch: pytest.MonkeyPatch, seconds: float, code: int
) -> None:
    monkeypatch.setattr(supervisor, "SAME_REQUEST_SECONDS", seconds)
    pid = os.fork()
    if not pid:
        stops: list[bool] = []
        ask = supervisor.stopping_or_leaving(lambda: stops.append(True))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            ask(number, None)
        os._exit(0 if stops == [True] else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


def test_a_second_signal_kills_them(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SAME_REQUEST_SECONDS", 0.0)

    def child(notes: SharedNotes) -> int:
        def ignore(number: int, frame: object) -> None:
            os.kill(os.getppid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    assert supervise(child).run() == 1


def test_the_first_signal_after_the_stop_of_a_person_is_not_a_second_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "SAME_REQUEST_SECONDS", 0.0)

    def child(notes: SharedNotes) -> int:
        asked: list[int] = []

        def ask(number: int, frame: object) -> None:
            asked.append(number)
            if len(asked) == 1:
                os.kill(os.getppid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        notes.ask_for_stop()
        for _ in range(1200):
            # The parent passes the signal on.
            if len(asked) == 2:
                return RECYCLE
            time.sleep(0.05)
        return 1

    assert supervise(child).run() == 0


def test_a_child_that_does_not_end_in_time_is_killed(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    def child(notes: SharedNotes) -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    assert supervise(child, shutdown_timeout=0.5 - OVERTIME_SECONDS).run() == 1


def test_a_child_that_fails_while_all_are_ending_gives_its_exit_code(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        return until_sigterm(3)

    assert supervise(child).run() == 3


def test_sighup_replaces_all_children(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        seen = diary.write()
        if seen == 1:
            os.kill(os.getppid(), signal.SIGHUP)
        if seen == 3:
            os.kill(os.getppid(), signal.SIGTERM)
        return until_sigterm()

    assert supervise(child, 2).run() == 0
    assert diary.text == "ssss"


def test_a_child_heeds_neither_ctrl_c_nor_a_lost_terminal(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        diary.write()
        return 0

    assert supervise(child).run() == 0
    assert diary.text == "s"


def test_a_sigterm_that_was_blocked_at_the_start_ends_it(diary: Diary) -> None:
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)

    def child(notes: SharedNotes) -> int:
        os.kill(os.getppid(), signal.SIGTERM)
        return until_sigterm()

    try:
        assert supervise(child).run() == 0
        assert handled <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_exit_handlers_run_after_an_end_that_was_announced(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        atexit.register(diary.write, "e")
        return RECYCLE if diary.write() < 2 else 0

    assert supervise(child).run() == 0
    assert diary.text == "sesese"


def test_exit_handlers_that_hang_end_after_a_time_and_the_end_is_still_clean(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child_process, "FINISH_SECONDS", 1.0)
    said = logging.StreamHandler()
    logging.getLogger("django_rmq.consumer").addHandler(said)

    def child(notes: SharedNotes) -> int:
        atexit.register(time.sleep, 600)
        diary.write()
        return 0

    try:
        assert supervise(child).run() == 0
    finally:
        logging.getLogger("django_rmq.consumer").removeHandler(said)
    assert diary.text == "s"
    assert "atexit" in capfd.readouterr().err


def test_a_thread_that_does_not_end_keeps_no_exit_handler_from_running(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "JOIN_SECONDS", 0.5)

    def child(notes: SharedNotes) -> int:
        threading.Thread(target=time.sleep, args=(600,)).start()
        atexit.register(diary.write, "e")
        return 0

    assert supervise(child).run() == 0
    assert diary.text == "e"


def test_what_modules_have_made_in_the_parent_stays_when_a_process_ends(diary: Diary) -> None:
    with tempfile.TemporaryDirectory() as folder:
        helper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
        helper.start()
        assert supervise(lambda notes: RECYCLE if diary.write() < 2 else 0).run() == 0
        assert Path(folder).is_dir()
        assert helper.is_alive()
        helper.kill()
        helper.join()


def test_a_worker_process_starts_processes_beside_a_fork_server_of_the_parent(diary: Diary) -> None:
    context = multiprocessing.get_context("forkserver")  # the default since Python 3.14

    def child(notes: SharedNotes) -> int:
        process = context.Process(target=time.sleep, args=(0,))
        process.start()
        process.join()
        diary.write(str(process.exitcode))
        return 0

    try:
        # A module of the project does this while the parent imports it.
        helper = context.Process(target=time.sleep, args=(0,))
        helper.start()
        helper.join()
        assert supervise(child).run() == 0
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert diary.text == "0"


@pytest.mark.parametrize("is_daemon", [True, False])
@pytest.mark.parametrize("ignores", [False, True])
def test_processes_that_listeners_have_started_end_with_their_worker(
    diary: Diary, is_daemon: bool, ignores: bool
) -> None:
    def works_on() -> None:
        if ignores:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        diary.write()
        time.sleep(600)

    def child(notes: SharedNotes) -> int:
        forked_copies.handle_signal(signal.SIGTERM, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        process = multiprocessing.get_context("fork").Process(target=works_on, daemon=is_daemon)
        process.start()
        notes.owner = str(process.pid)
        while not diary.text:
            time.sleep(0.01)
        return 0

    kept = SharedNotes(1)
    parent = supervise(child)
    parent.make_notes = lambda: kept
    assert parent.run() == 0
    eventually(lambda: is_gone(int(kept.owner)), "the end of the listener's process")


def test_executors_that_listeners_keep_end_with_their_worker(diary: Diary) -> None:
    kept = SharedNotes(1)

    def child(notes: SharedNotes) -> int:
        executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        notes.owner = str(executor.submit(os.getpid).result())
        return 0

    parent = supervise(child)
    parent.make_notes = lambda: kept
    assert parent.run() == 0
    eventually(lambda: is_gone(int(kept.owner)), "the end of the executor's process")


def test_a_copy_of_a_worker_does_not_keep_its_signal_handler(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        forked_copies.handle_signal(signal.SIGTERM, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            time.sleep(5)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        diary.write("t" if os.waitstatus_to_exitcode(status) == -signal.SIGTERM else "?")
        return 0

    assert supervise(child).run() == 0
    assert diary.text == "t"


def test_a_server_that_forks_by_itself_and_calls_only_what_belongs_after_a_fork_meets_no_error() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            forked_copies._note_fork()
            forked_copies._let_signals_in()
            status = int(signal.pthread_sigmask(signal.SIG_BLOCK, ()) != before)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_watchdog_ends_the_only_process_and_the_command(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        diary.write()
        notes.beat(0, True)
        time.sleep(60)
        return 0

    assert supervise(child, watchdog=2.0).run() == 4
    assert diary.text == "s"


def test_the_watchdog_replaces_a_hung_process_beside_one_that_works(diary: Diary) -> None:
    def child(notes: SharedNotes) -> int:
        is_first = diary.write() == 0
        notes.beat(0, True)
        if is_first:
            time.sleep(60)
        for _ in range(600):
            notes.beat(0, True)
            time.sleep(0.05)
            if diary.text.count("s") == 3:
                return 0
        return 1

    # Generous: the one that works must never be late by so much, on a machine that is busy with other things too.
    assert supervise(child, 2, watchdog=4.0).run() == 0
    assert diary.text == "sss"


def test_the_wait_before_a_successor_doubles_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = supervise(lambda notes: 1)
    child = ChildProcess(SharedNotes(1))
    monkeypatch.setattr(time, "monotonic", lambda: 1_000.0)
    waits = []
    for _ in range(12):
        child.started = 1_000.0
        parent._ended(child, 1, 1)
        waits.append(child.not_before - 1_000)
    assert waits[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert waits[-1] == 30
    child.notes.announce(SERVER)
    parent._ended(child, 1, SERVER)
    assert child.not_before - 1_000 == 1
    child.notes.clear()
    child.started = 1_000.0 - 31
    parent._ended(child, 1, 1)
    assert child.not_before - 1_000 == pytest.approx(0.1)


def test_the_heartbeat_file_is_touched_and_must_be_touchable(diary: Diary, tmp_path: Path) -> None:
    beat = tmp_path / "beat"

    def child(notes: SharedNotes) -> int:
        for _ in range(200):
            if beat.exists():
                return 0
            time.sleep(0.05)
        return 1

    assert supervise(child, heartbeat_file=str(beat)).run() == 0
    with pytest.raises(ConfigurationError, match="heartbeat file"):
        supervise(child, heartbeat_file=str(tmp_path / "no" / "beat")).run()


def test_health_is_answered_between_forks_whatever_is_asked(diary: Diary) -> None:
    port = free_port()

    def ask(text: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(text)
            if not text.endswith(b"\r\n\r\n"):
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while more := connection.recv(4096):
                answer += more
            return answer

    def child(notes: SharedNotes) -> int:
        if not ask(b"GET /ready HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503"):
            return 2
        notes.beat(3, True)
        answer = ask(b"GET /ready/?x HTTP/1.1\r\nHost: x\r\n\r\n")
        seen = {
            "ready": answer.startswith(b"HTTP/1.1 200 OK\r\n") and b'"settled": 3' in answer,
            "live": ask(b"GET /live HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200"),
            "post": ask(b"POST /live HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405"),
            "elsewhere": ask(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 404"),
            "head": ask(b"HEAD /live HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n"),
            "broken off": ask(b"GET /li") == b"",
            "noise": ask(b"\xff\x00 \xfe\r\n\r\n").startswith(b"HTTP/1.1 405"),
        }
        for name, is_right in seen.items():
            if not is_right:
                diary.write(f" {name}")
        return 0

    assert supervise(child, health_address=f"127.0.0.1:{port}").run() == 0
    assert diary.text == ""


def test_a_probe_for_which_no_descriptor_is_free_is_answered_later_and_busies_no_core() -> None:
    server = HealthServer("127.0.0.1:0", lambda what: (True, {}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        closing(server),
        selectors.DefaultSelector() as selector,
        socket.create_connection(("127.0.0.1", server.port), 5) as probe,
    ):
        server.join(selector)
        probe.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            turns, end = 0, time.monotonic() + 0.5
            while time.monotonic() < end and selector.select(0.5):
                server.serve()
                turns += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert 1 <= turns <= 5
        server.serve()
        assert probe.recv(4096).startswith(b"HTTP/1.1 200")


def test_when_it_says_that_it_is_ready_signals_and_health_checks_are_answered() -> None:
    port, told = free_port(), []

    def ready() -> None:
        socket.create_connection(("127.0.0.1", port), 5).close()
        os.kill(os.getpid(), signal.SIGTERM)
        told.append("ready")

    assert supervise(lambda notes: 1, health_address=f"127.0.0.1:{port}", ready=ready).run() == 0
    assert told == ["ready"]


def test_while_it_prepares_no_child_starts_and_it_is_alive_and_not_ready(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FRESH_SECONDS", 0.0)
    healths: list[tuple[bool, bool]] = []

    def prepare() -> bool:
        assert diary.text == ""
        healths.append((parent.health("live")[0], parent.health("ready")[0]))
        return len(healths) == 3

    def ready() -> None:
        healths.append((True, True))

    parent = supervise(lambda notes: diary.write() and 0, prepare=prepare, ready=ready)
    assert parent.run() == 0
    assert diary.text == "s"
    assert healths == [(True, False)] * 3 + [(True, True)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_prepares_is_a_clean_end(diary: Diary, number: int) -> None:
    def prepare() -> bool:
        os.kill(os.getpid(), number)
        return False

    assert supervise(lambda notes: diary.write(), prepare=prepare).run() == 0
    assert diary.text == ""


def test_what_prepares_may_end_it_with_an_error(diary: Diary) -> None:
    def prepare() -> bool:
        raise ConfigurationError("wrong")

    with pytest.raises(ConfigurationError, match="wrong"):
        supervise(lambda notes: diary.write(), prepare=prepare).run()
    assert diary.text == ""


def test_an_address_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="cannot serve health checks"):
            supervise(lambda notes: 0, health_address=address).run()


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert supervise(lambda notes: 0).run() == 0
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
