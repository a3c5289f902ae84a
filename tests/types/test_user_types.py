"""Runs mypy --strict and pyright on the code of a project, and on calls. `make user-types` installs pyright and runs it."""

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
FOLDER = Path(__file__).parent
FILES = ("user.py", "calls.py")
PYRIGHT = ROOT / "build/types/node_modules/pyright/index.js"

Errors = dict[tuple[str, int], set[str]]
"""File and line → codes of the errors there."""


def wanted(checker: str) -> Errors:
    found: Errors = {}
    for name in FILES:
        for number, line in enumerate((FOLDER / name).read_text().splitlines(), 1):
            if codes := re.search(r"# mypy: (?P<mypy>[\w-]+); pyright: (?P<pyright>[\w-]+)$", line):
                found[name, number] = {codes[checker]}
    assert len(found) > 20
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
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-incremental", *FILES]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=FOLDER)
    found: Errors = defaultdict(set)
    for name, line, code in re.findall(
        r"^(\w+\.py):(\d+): error: .*\[([\w-]+)\]$", told.stdout, re.MULTILINE
    ):
        found[name, int(line)].add(code)
    assert found, told.stdout + told.stderr
    assert_found(found, "mypy")


def test_pyright_finds_what_is_wrong_in_the_code_of_a_user_and_nothing_else() -> None:
    if not PYRIGHT.exists():
        absent("pyright (make user-types)")
    command = [
        "node",
        str(PYRIGHT),
        "--pythonpath",
        sys.executable,
        "--outputjson",
        *(str(FOLDER / name) for name in FILES),
    ]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "CI": "true"}
    )
    found: Errors = defaultdict(set)
    for one in json.loads(told.stdout)["generalDiagnostics"]:
        found[Path(one["file"]).name, one["range"]["start"]["line"] + 1].add(one["rule"])
    assert_found(found, "pyright")
