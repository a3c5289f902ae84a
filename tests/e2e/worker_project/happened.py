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
