"""What listeners wrote down, line by line, and what must be true of it.

A listener appends `start` and `end` (or `fail`) of each run; a process about to kill itself appends `kill`, its last line; a test
appends `killing` with a process's id before it kills it, and `killed` once it is gone. Times are those of the machine's
monotonic clock, so lines of several processes can be compared.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """One line: `word at_ns wall_ms pid thread slot receipt name`."""

    word: str
    at: int
    wall_ms: int
    pid: int
    thread: int = 0
    slot: int = 0
    receipt: int = 0
    name: str = "-"


_writing = threading.Lock()


def write(path: Path, word: str, pid: int = 0, *rest: object) -> None:
    """Append a line in one write: a kill leaves whole lines."""
    with _writing:
        _append(path, word, pid, *rest)


def write_last(path: Path, word: str, *rest: object) -> None:
    """Append a line after which no other thread of this process appends any: it is about to die."""
    _writing.acquire()  # for ever
    _append(path, word, 0, *rest)


def _append(path: Path, word: str, pid: int = 0, *rest: object) -> None:
    fields = (word, time.monotonic_ns(), time.time_ns() // 1_000_000, pid or os.getpid(), *rest)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (" ".join(map(str, fields)) + "\n").encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Line]:
    """Return all lines by time."""
    found = []
    whole = path.read_bytes() if path.exists() else b""
    # The last line may be just being written.
    for text in whole[: whole.rfind(b"\n") + 1].decode().splitlines():
        word, at, wall, pid, *rest = text.split(" ")
        line = Line(word, int(at), int(wall), int(pid))
        if rest:
            thread, slot, receipt, name = rest
            line = line._replace(thread=int(thread), slot=int(slot), receipt=int(receipt), name=name)
        found.append(line)
    return sorted(found, key=lambda line: line.at)


@dataclass
class Findings:
    """What is wrong with a history, and what is only to be counted."""

    lost: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    early: list[Line] = field(default_factory=list)
    overlapping: list[tuple[Line, Line]] = field(default_factory=list)
    disordered: list[Line] = field(default_factory=list)
    """A receipt that is not higher than the one before it in its slot, or an end without a start."""
    doubled: Counter[str] = field(default_factory=Counter)
    """Messages that ran to their end more than once: allowed where somebody was killed."""
    runs: Counter[str] = field(default_factory=Counter)

    def clean(self) -> bool:
        """Whether nothing is wrong; doubles are no wrong by themselves."""
        return not (self.lost or self.unexpected or self.early or self.overlapping or self.disordered)


def examine(lines: Iterable[Line], due_ms: Mapping[str, int], *, poison: Iterable[str] = ()) -> Findings:
    """Compare what happened in serial slots with what was sent: name -> the earliest time it might run.

    Messages in `poison` need not end.
    """
    found = Findings()
    ended: Counter[str] = Counter()
    running: dict[int, Line] = {}
    last_receipt: dict[int, int] = {}
    dying: set[int] = set()
    for line in lines:
        if line.word == "killing":
            dying.add(line.pid)
        elif line.word in ("killed", "kill"):
            for slot, other in list(running.items()):
                if other.pid == line.pid:
                    del running[slot]
        elif line.word == "start":
            found.runs[line.name] += 1
            if line.name not in due_ms:
                found.unexpected.add(line.name)
            elif line.wall_ms < due_ms[line.name]:
                found.early.append(line)
            # Its parent may know of a death before the test does.
            if line.slot in running and running[line.slot].pid not in dying:
                found.overlapping.append((running[line.slot], line))
            if line.receipt < last_receipt.get(line.slot, 0):
                found.disordered.append(line)
            last_receipt[line.slot] = max(line.receipt, last_receipt.get(line.slot, 0))
            running[line.slot] = line
        elif line.word in ("end", "fail"):
            ended[line.name] += line.word == "end"
            begun = running.get(line.slot)
            if begun is not None and (begun.pid, begun.thread, begun.name) == (
                line.pid,
                line.thread,
                line.name,
            ):
                del running[line.slot]
            elif not any(
                both[0].name == line.name or both[1].name == line.name for both in found.overlapping
            ):
                found.disordered.append(line)
    found.lost = set(due_ms) - set(+ended) - set(poison)
    found.doubled = Counter({name: count for name, count in ended.items() if count > 1})
    return found
