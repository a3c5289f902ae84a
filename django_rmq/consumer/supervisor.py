"""The supervisor: the parent of worker processes. It forks them, replaces them, and gives back what a dead one held.

It runs no listener, owns no slot and keeps no connection while it forks; what a child does is injected. A
child notes in shared memory which message each of its threads runs, so that after its death all else it
held is released at once and spends no retry; what ran is left to its time-out, for it may be the killer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from django_rmq.broker import Broker
from django_rmq.exceptions import RmqError
from django_rmq.messages import BATCH, Topic

logger = logging.getLogger("django_rmq.consumer")

RECYCLE = 75
"""Exit code of a child that asks for a successor: --max-messages or --max-memory is reached."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before a child that died is replaced; doubling while they die young."""

OLD_ENOUGH = 30.0
"""Seconds after which a child's death says nothing of the next one's."""

_OWNER = 32
_WORDS = 4
"""Per thread: topic + 1, slot, receipt, CRC-32 of the member."""


class Running(NamedTuple):
    """A message that a thread had begun."""

    topic: int
    """The topic's index in the list that parent and child share."""
    slot: int
    receipt: int
    crc: int


class Notes:
    """Memory that a child writes and its parent reads: who it is, and what each thread runs."""

    def __init__(self, threads: int) -> None:
        self._memory = mmap.mmap(-1, _OWNER + 8 * _WORDS * threads)
        self._words = memoryview(self._memory)[_OWNER:].cast("Q")

    @property
    def owner(self) -> str:
        """The owner id of the child's dispatcher; empty before it has one."""
        return self._memory[:_OWNER].rstrip(b"\0").decode()

    @owner.setter
    def owner(self, owner: str) -> None:
        self._memory[:_OWNER] = owner.encode().ljust(_OWNER, b"\0")

    def begin(self, thread: int, topic: int, slot: int, receipt: int) -> None:
        """Note that ``thread`` begins with a delivery; ``run`` says with which message."""
        at = thread * _WORDS
        self._words[at] = topic + 1
        self._words[at + 1] = slot
        self._words[at + 2] = receipt
        self._words[at + 3] = 0

    def run(self, thread: int, member: bytes) -> None:
        """Note the message that is about to run."""
        self._words[thread * _WORDS + 3] = crc32(member) + 1

    def end(self, thread: int) -> None:
        """Note that ``thread`` runs nothing."""
        self._words[thread * _WORDS] = 0

    def running(self) -> list[Running]:
        """Return what was running when the last note was made."""
        found = []
        for at in range(0, len(self._words), _WORDS):
            topic, slot, receipt, crc = self._words[at : at + _WORDS]
            if topic and crc:
                found.append(Running(topic - 1, slot, receipt, crc - 1))
        return found

    def clear(self) -> None:
        """Forget everything: a new child begins."""
        self._memory[:] = bytes(len(self._memory))


def give_back(broker: Broker, topics: list[Topic], notes: Notes) -> int:
    """Release what a dead worker held but had not begun; return how many messages.

    Topics without a gate keep no record of who holds what: there the time-out does it.
    """
    owner, running = notes.owner, set(notes.running())
    if not owner:
        return 0
    released = 0
    for index, topic in enumerate(topics):
        if not topic.serial:
            continue
        for start in range(0, topic.slots, 512):
            slots = range(start, min(start + 512, topic.slots))
            asking = broker.pipeline()
            for slot in slots:
                asking.held(topic, slot, owner, 0, BATCH)
            releasing = broker.pipeline()
            for slot, held in zip(slots, asking.execute(), strict=True):
                if isinstance(held, RmqError) or not held:
                    continue
                by_receipt: dict[int, list[bytes]] = {}
                for thing in held:
                    member = thing.delivery.member
                    if Running(index, slot, thing.receipt, crc32(member)) not in running:
                        by_receipt.setdefault(thing.receipt, []).append(member)
                for receipt, members in by_receipt.items():
                    releasing.release(topic, slot, receipt, members)
            for words in releasing.execute():
                if not isinstance(words, RmqError):
                    released += words.count("ok")
    return released


@dataclass
class _Child:
    index: int
    notes: Notes
    pid: int = 0
    started: float = 0.0
    deaths: int = 0
    """How many in a row died young."""
    not_before: float = 0.0
    retiring: bool = False
    """Told to end; its successor is to be started (SIGHUP), unless all is ending."""
    done: bool = False
    """Ended by itself and needs no successor."""


@dataclass
class Supervisor:
    """Keeps ``processes`` children running until told to stop.

    ``child`` is called in the new process with its notes and returns its exit code. ``died`` is called in
    the parent after a child's abnormal end, with its notes. ``beat`` is called about once a second.
    """

    child: Callable[[Notes], int]
    processes: int
    threads: int
    died: Callable[[Notes], Any] = lambda notes: None
    before_fork: Callable[[], None] = lambda: None
    beat: Callable[[], None] = lambda: None
    shutdown_timeout: float = 30.0
    _children: list[_Child] = field(default_factory=list)
    _asked: list[int] = field(default_factory=list)
    _stopping_since: float | None = None
    _worst: int = 0

    def run(self) -> int:
        """Run until every child has ended for good; return the exit code: 0 clean, 1 forced, or a child's own."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        previous = {number: signal.signal(number, self._note) for number in handled}
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        try:
            self._children = [_Child(i, Notes(self.threads)) for i in range(self.processes)]
            while not all(child.done for child in self._children):
                self._heed()
                self._reap()
                self._start_due()
                self.beat()
                ready, _, _ = select.select([reader], [], [], self._pause())
                if ready:
                    os.read(reader, 4096)
            return self._worst
        finally:
            for child in self._children:
                if child.pid:
                    _signal(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            faulthandler.unregister(signal.SIGUSR1)
            os.close(reader)
            os.close(writer)

    @property
    def pids(self) -> list[int]:
        """The processes that run at present."""
        return [child.pid for child in self._children if child.pid]

    def _note(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._asked.append(number)

    def _pause(self) -> float:
        now = time.monotonic()
        waits = [child.not_before - now for child in self._children if not child.pid and not child.done]
        return max(0.0, min([1.0, *waits]))

    # --- signals

    def _heed(self) -> None:
        while self._asked:
            number = self._asked.pop(0)
            if number == signal.SIGHUP:
                logger.info("Replacing %d worker processes", len(self.pids))
                for child in self._children:
                    if child.pid:
                        child.retiring = True
                        _signal(child.pid, signal.SIGTERM)
            elif self._stopping_since is None:
                self._stop()
            else:
                logger.warning("Leaving at once")
                self._worst = 1
                self._kill()
        # A child ends by itself within its own shutdown time-out; past that it hangs.
        if self._stopping_since is not None and (
            time.monotonic() - self._stopping_since > self.shutdown_timeout + 5.0
        ):
            self._worst = 1
            self._kill()

    def _stop(self) -> None:
        self._stopping_since = time.monotonic()
        for child in self._children:
            if child.pid:
                _signal(child.pid, signal.SIGTERM)
            else:
                child.done = True

    def _kill(self) -> None:
        for child in self._children:
            if child.pid:
                _signal(child.pid, signal.SIGKILL)

    # --- children

    def _start_due(self) -> None:
        for child in self._children:
            if not child.pid and not child.done and time.monotonic() >= child.not_before:
                self._start(child)

    def _start(self, child: _Child) -> None:
        child.notes.clear()
        child.retiring = False
        self.before_fork()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._be_child(child)
        child.pid, child.started = pid, time.monotonic()
        logger.info("Worker process %d started", pid, extra={"rmq_event": "process_started", "rmq_pid": pid})

    def _be_child(self, child: _Child) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
            code = self.child(child.notes)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            logger.exception("A worker process failed")
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.pid = 0
                self._ended(child, pid, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, pid: int, code: int) -> None:
        young = time.monotonic() - child.started < OLD_ENOUGH
        clean = code in (0, RECYCLE)
        logger.log(
            logging.INFO if clean else logging.ERROR,
            "Worker process %d ended: %s",
            pid,
            f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}",
            extra={"rmq_event": "process_ended", "rmq_pid": pid, "rmq_exit_code": code},
        )
        if not clean:
            try:
                given = self.died(child.notes)
                if given:
                    logger.info("Gave back %d messages that process %d had not begun", given, pid)
            except RmqError as error:
                logger.warning("What process %d held is left to time out: %s", pid, error)
        if self._stopping_since is not None:
            child.done = True
            if code > 0 and code != RECYCLE:
                self._worst = max(self._worst, code)
            elif code < 0:
                self._worst = max(self._worst, 1)
        elif code == 0 and not child.retiring:
            child.done = True
        else:
            child.deaths = 0 if clean else child.deaths + 1 if young else 1
            pause = 0.0 if clean else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (child.deaths - 1))
            child.not_before = time.monotonic() + pause


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def started_by(parent: int) -> Callable[[], bool]:
    """Return a test that a child makes now and then: is the process that forked it still there?"""
    return lambda: os.getppid() == parent
