"""Programs that tests run to their end, and those that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def completed(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    seconds: float = 60,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return its exit code and what it has printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    options = {"cwd": ROOT, "env": env, "capture_output": True, **options}
    return subprocess.run(command, text=True, timeout=seconds, check=False, **options)


def output_of(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    seconds: float = 120,
    **options: Any,
) -> str:
    """Run a program to its end, which has to be a good one, and return what it has printed."""
    done = completed(command, environment, seconds, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def printed_by(code: str) -> str:
    """Return what a fresh interpreter prints that runs this."""
    return output_of([sys.executable, "-c", code]).strip()


def started(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program that adds to a file what it prints."""
    options = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, **options}
    with log.open("ab") as output:
        process: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=output, stderr=output, **options)
    return process
