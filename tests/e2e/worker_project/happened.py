"""The list of what listeners did, which `tests.e2e.processes.Happened` reads."""

from __future__ import annotations

import os
import threading
from typing import Any

from tests.e2e.worker_project.settings import WORKER_DATA


def write_down(word: str, body: Any) -> None:
    """Append a line to the list of what happened; one write, so that a crash leaves whole lines."""
    line = f"{word} {body['name']} {os.getpid()} {threading.get_ident()}\n"
    descriptor = os.open(WORKER_DATA / "happened", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


_in_line: dict[int, int] = {}
"""Process -> its descriptor of the list of what happened in line."""


def write_in_line(word: str, body: Any) -> None:
    """Append a line to the list of what happened in line, in the order in which it happened."""
    pid = os.getpid()
    if pid not in _in_line:
        _in_line[pid] = os.open(WORKER_DATA / "in-line", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_in_line[pid], f"{word} {body['entity']} {body['number']}\n".encode())
