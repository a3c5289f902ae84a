"""``--reload``: detects changed code, tries it out, and restarts with it.

Code that cannot be loaded replaces nothing: the worker continues with the old code, logs the error and its
place, and waits for the next change.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from django.utils import autoreload

from django_rmq.worker.listener_registry import is_library
from django_rmq.worker.startup import READY

logger = logging.getLogger("django_rmq.consumer")

TRIAL_SECONDS = 60.0
"""Maximum seconds for loading the new code."""

AGAIN_SECONDS = 10.0
"""Seconds after which code that could not be loaded is tried again without a change, because a module may
have been missing."""

_CHECK = re.compile(r"^(?:CRITICALS|ERRORS):\n(?P<first>.+)$", re.MULTILINE)
"""The first error in a report of the system checks."""

_FRAME = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


class SourceWatch:
    """Returns, when called, whether loaded Python files have changed and the command can start with them."""

    def __init__(self) -> None:
        self._seen = self._modified_times()
        self._broken = ""
        self._next_trial = 0.0

    def __call__(self) -> bool:
        now = self._modified_times()
        changed = [path for path, at in self._seen.items() if now.get(path) != at]
        # A file that is gone stays known, so that its return counts as a change: editors replace files.
        self._seen = {**now, **{path: None for path in changed if path not in now}}
        if not changed and not (self._broken and time.monotonic() >= self._next_trial):
            return False
        trouble = try_out()
        self._next_trial = time.monotonic() + AGAIN_SECONDS
        if trouble and trouble != self._broken:
            logger.error(
                "The changed code cannot be loaded, so the old code keeps running: %s",
                trouble,
                extra={"rmq_event": "reload_failed"},
            )
        self._broken = trouble
        if not trouble:
            what = changed[0] if changed else "the code"
            logger.info("%s has changed", what, extra={"rmq_event": "reload"})
        return not trouble

    @staticmethod
    def _modified_times() -> dict[Path, int | None]:
        times: dict[Path, int | None] = {}
        for path in autoreload.iter_all_python_module_files():
            try:
                times[path] = path.stat().st_mtime_ns
            # The file was deleted, or is being replaced by an editor.
            except OSError:
                continue
        return times


def try_out() -> str:
    """Load the current code in a separate process; return its error and place, or an empty text."""
    command = [*autoreload.get_child_arguments(), "--dry-run"]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TRIAL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"loading takes longer than {TRIAL_SECONDS:g} s"
    # Exit code 0 alone could be that of a module that exits while it is imported.
    if not tried.returncode and any(line.startswith(READY) for line in tried.stdout.splitlines()):
        return ""
    return _reason(tried.stderr) or f"loading ended with exit code {tried.returncode}"


def _reason(output: str) -> str:
    """Return the error at the end of ``output``, with the innermost place in its traceback that is not in a library.

    Of a report of the system checks it is the first error.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    text = lines[-1].strip() if lines else ""
    if check := _CHECK.search(output):
        text = check["first"].removeprefix("?: ").strip()
    own = [match for match in _FRAME.finditer(output) if not is_library(match["path"])]
    return f"{text} ({own[-1]['path']}, line {own[-1]['line']})" if own else text


def start_again() -> NoReturn:
    """Replace this process by one that runs the same command with the current code."""
    arguments = autoreload.get_child_arguments()
    os.execv(arguments[0], arguments)  # noqa: S606 - the very command that runs
