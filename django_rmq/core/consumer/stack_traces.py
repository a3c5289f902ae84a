"""Stacks: where a thread or a task is, as text for the log."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from typing import Any


def stack_of_thread(thread: threading.Thread) -> str:
    """Return the stack of a thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(its thread has ended)"


def stack_of_task(task: asyncio.Task[Any]) -> str:
    """Return the stack of a task: its coroutine, and those that it awaits."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            lines += traceback.format_stack(frame, limit=1)
        awaited = getattr(awaited, "cr_await", None)
    return "".join(lines)


__all__ = ["stack_of_task", "stack_of_thread"]
