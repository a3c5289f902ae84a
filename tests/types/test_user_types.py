"""Runs mypy --strict and pyright on a project's code. `make user-types` installs pyright and runs it; `make check` calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.support.servers import absent

ROOT = Path(__file__).parents[2]
USER = Path(__file__).parent / "user.py"
PYRIGHT = ROOT / "build/types/node_modules/pyright/index.js"

Errors = dict[int, set[str]]
"""Line → codes of the errors there."""


def wanted(checker: str) -> Errors:
    found: Errors = {}
    for number, line in enumerate(USER.read_text().splitlines(), 1):
        if codes := re.search(r"# mypy: (?P<mypy>[\w-]+); pyright: (?P<pyright>[\w-]+)$", line):
            found[number] = {codes[checker]}
    assert len(found) > 15
    return found


def assert_found(found: Errors, checker: str) -> None:
    """Assert that just these lines have errors. An error may bring others of the same line with it."""
    expected = wanted(checker)
    assert found.keys() == expected.keys(), {
        "missing": sorted(expected.keys() - found.keys()),
        "too many": {line: codes for line, codes in found.items() if line not in expected},
    }
    others = {line: codes for line, codes in found.items() if not expected[line] <= codes}
    assert not others


def test_mypy_finds_what_is_wrong_in_the_code_of_a_user_and_nothing_else() -> None:
    # The settings of this project, with its plugins, are not those of a user.
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-incremental", str(USER)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=USER.parent)
    found: Errors = defaultdict(set)
    for line, code in re.findall(r"^user\.py:(\d+): error: .*\[([\w-]+)\]$", told.stdout, re.MULTILINE):
        found[int(line)].add(code)
    assert found, told.stdout + told.stderr
    assert_found(found, "mypy")


def test_pyright_finds_what_is_wrong_in_the_code_of_a_user_and_nothing_else() -> None:
    if not PYRIGHT.exists():
        absent("pyright (make user-types)")
    command = ["node", str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", str(USER)]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "CI": "true"}
    )
    found: Errors = defaultdict(set)
    for one in json.loads(told.stdout)["generalDiagnostics"]:
        found[one["range"]["start"]["line"] + 1].add(one["rule"])
    assert_found(found, "pyright")
