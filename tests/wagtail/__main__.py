"""Runs Wagtail's tests with the immediate backend and with RMQ's, and compares what fails.

    build/wagtail/bin/python -m tests.wagtail [TEST ...]

`make wagtail` makes the environment. Some of Wagtail's tests need files of its checkout, which its wheel lacks: they
fail with both backends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LABELS = [
    "wagtail.contrib.frontend_cache",
    "wagtail.contrib.redirects",
    "wagtail.documents",
    "wagtail.images",
    "wagtail.snippets.tests.test_usage",
    "wagtail.tests.test_reference_index",
]
"""What enqueues tasks: files that are deleted, focal points, the reference index, purges of caches."""


LONGEST = 3600
"""Seconds for the tests with one backend. They take 10 to 20 minutes; the log names the test that takes longer."""

BUILD = Path("build/wagtail")
MIGRATED = "wagtail.sqlite3"
"""A database in which all migrations are applied, which takes longer than many of the tests."""


def run_django(log: Path, *command: str, **environment: str) -> int:
    """Run a command of Django with the settings of the tests; return its exit code."""
    given = {**os.environ, **environment, "DJANGO_SETTINGS_MODULE": "tests.wagtail.settings"}
    called = [sys.executable, "-m", "django", *command]
    with log.open("w") as output:
        try:
            ran = subprocess.run(
                called, env=given, stdout=output, stderr=output, check=False, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"It did not end within {LONGEST} s: see {log}") from None
    return ran.returncode


def migrate() -> None:
    """Make the database from which all tests start, unless it is there."""
    made, log = BUILD / MIGRATED, BUILD / "migrate.log"
    if made.exists():
        return
    with TemporaryDirectory() as folder:
        if run_django(log, "migrate", BACKEND="rmq", WAGTAIL_DATA=folder):
            raise SystemExit(f"The migrations failed: see {log}")
        shutil.copy(Path(folder, MIGRATED), made)


def outcome(backend: str, labels: list[str]) -> dict[str, Any]:
    """Run the tests with a backend of tasks; return what the runner has written."""
    with TemporaryDirectory() as folder:
        path, log = Path(folder, "outcome.json"), BUILD / f"{backend}.log"
        shutil.copy(BUILD / MIGRATED, folder)
        given = {"BACKEND": backend, "OUTCOME": str(path), "WAGTAIL_DATA": folder}
        began = time.monotonic()
        run_django(log, "test", "--keepdb", "--verbosity=2", *labels, **given)
        if not path.exists():
            raise SystemExit(f"The tests with the backend {backend} did not end: see {log}")
        found: dict[str, Any] = json.loads(path.read_text())
        print(
            f"{backend}: {found['tests']} tests, {len(found['failed'])} failed, {time.monotonic() - began:.0f} s; "
            f"tasks: {found['tasks']}; {log}"
        )
        return found


def main() -> int:
    """Return 0 if the same tests fail with both backends, and tasks were run by both."""
    labels = sys.argv[1:] or LABELS
    migrate()
    before, after = outcome("immediate", labels), outcome("rmq", labels)
    more, less = set(after["failed"]) - set(before["failed"]), set(before["failed"]) - set(after["failed"])
    for name in sorted(before["failed"]):
        print(f"  fails with the immediate backend: {name}")
    for name in sorted(more):
        print(f"  fails with RMQ alone: {name}")
    for name in sorted(less):
        print(f"  does not fail with RMQ: {name}")
    ended = [sum(found["tasks"].values()) for found in (before, after)]
    is_same = not more and not less and ended[0] == ended[1] > 0 and before["tests"] == after["tests"]
    print("The same tests fail with both." if is_same else "The outcomes differ.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
