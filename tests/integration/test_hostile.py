"""A slice of the hostile requests that ``benchmarks.hostile`` asks by the ten thousand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUESTS = os.environ.get("HOSTILE_REQUESTS", "150")
"""How many of each kind are asked."""


@pytest.mark.slow
def test_whatever_is_asked_nobody_gets_a_server_error() -> None:
    command = [sys.executable, "-m", "benchmarks.hostile", "--admin", REQUESTS, "--rest", REQUESTS]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "wrong: 0" in ran.stdout
    assert " admin 200" in ran.stdout and " rest 200" in ran.stdout
