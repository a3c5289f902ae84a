"""What the drivers of backends of tasks have in common: they enqueue by ``django_tasks``, and none of them has a bulk call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BULK = "no bulk call: enqueue in a loop"


def prepare(backend: str) -> None:
    """Set up Django with this backend, here and in the workers."""
    os.environ |= {"DJANGO_SETTINGS_MODULE": "task_settings", "PEER_TASKS": backend}
    import django

    django.setup()


def manage(*command: str) -> list[str]:
    """Return the command line of a worker."""
    return [sys.executable, "-m", "django", *command]


def enqueue(count: int) -> None:
    """Enqueue tasks, one after the other."""
    import task_work

    task: Any = task_work.nothing
    for n in range(count):
        task.enqueue(n)
