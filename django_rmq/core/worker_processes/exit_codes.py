"""The ends that a worker process announces in its notes. They are also its exit codes."""

from __future__ import annotations

DONE_FOR_GOOD, FORCED, USAGE, SERVER, WATCHDOG, HARD_TIMEOUT_EXCEEDED, RECYCLE = 0, 1, 2, 3, 4, 5, 75
"""The meanings of an end that a process announces, which are also its exit code. DONE_FOR_GOOD: it needs no successor.
FORCED: something was not settled in time. USAGE: a successor would fail too. SERVER: Redis or the coordinator was
unavailable. WATCHDOG: only of the whole command, the last process that could work hung. HARD_TIMEOUT_EXCEEDED: only the end
of the process could end a listener that exceeded HARD_TIMEOUT. RECYCLE: it was asked to end, or has reached its limit of
messages or memory, and needs a successor."""

CLEAN = (DONE_FOR_GOOD, RECYCLE)
"""The ends that leave nothing to settle. Any other end is a death."""
