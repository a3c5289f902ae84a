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
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NoReturn

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


class Trial:
    """A process that loads the current code, which may block or be wrong."""

    def __init__(self) -> None:
        self._until = time.monotonic() + TRIAL_SECONDS
        self._files = ExitStack()
        self._output, self._errors = (
            self._files.enter_context(TemporaryFile())  # noqa: SIM115 - ``end`` closes them
            for _ in range(2)
        )
        command = [*autoreload.get_child_arguments(), "--dry-run"]
        self._process = subprocess.Popen(command, stdout=self._output, stderr=self._errors)

    def result(self) -> str | None:
        """Return why the code cannot be loaded, an empty text if it can, or None if the process still loads it."""
        code = self._process.poll()
        if code is None:
            is_late = time.monotonic() >= self._until
            return f"loading takes longer than {TRIAL_SECONDS:g} s" if is_late else None
        # Exit code 0 alone could be that of a module that exits while it is imported.
        if not code and any(line.startswith(READY) for line in _text_of(self._output).splitlines()):
            return ""
        return _reason(_text_of(self._errors)) or f"loading ended with exit code {code}"

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._files.close()


class SourceWatch:
    """Returns, when called, whether loaded Python files have changed and the command can start with them.

    A call waits for nothing, because a supervisor answers no signal meanwhile. The code is tried out between calls.
    """

    def __init__(self) -> None:
        self._seen = self._modified_times()
        self._broken = ""
        self._next_trial = 0.0
        self._trial: Trial | None = None
        self._what: Path | str = "the code"

    def __call__(self) -> bool:
        now = self._modified_times()
        changed = [path for path, at in self._seen.items() if now.get(path) != at]
        # A file that is gone stays known, so that its return counts as a change: editors replace files.
        self._seen = {**now, **{path: None for path in changed if path not in now}}
        is_due = self._trial is None and self._broken and time.monotonic() >= self._next_trial
        if changed or is_due:
            # A trial that has begun before the change says nothing about it.
            self.end_trial()
            self._what = changed[0] if changed else "the code"
            self._trial = Trial()
        if self._trial is None or (trouble := self._trial.result()) is None:
            return False
        self.end_trial()
        self._next_trial = time.monotonic() + AGAIN_SECONDS
        if trouble and trouble != self._broken:
            logger.error(
                "The changed code cannot be loaded, so the old code keeps running: %s",
                trouble,
                extra={"rmq_event": "reload_failed"},
            )
        self._broken = trouble
        if not trouble:
            logger.info("%s has changed", self._what, extra={"rmq_event": "reload"})
        return not trouble

    def end_trial(self) -> None:
        """End the process that tries the code out, if there is one."""
        if self._trial is not None:
            self._trial.end()
            self._trial = None

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


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


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
