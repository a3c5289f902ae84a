"""Each rule of the worker, switched off in a copy of the package, makes the tests fail that guard it.

These tests wait more than they compute, so a few copies are worked on ahead; a test waits for what came of its mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.proof import python_mutants
from tests.proof.database_mutants import DATABASE_MUTANTS
from tests.proof.python_mutants import PythonMutant

ROOT = Path(__file__).parents[2]
PYTHON_MUTANTS = python_mutants.PYTHON_MUTANTS | DATABASE_MUTANTS
COPIED = ("django_rmq", "example_project", "tests", "manage.py", "pyproject.toml")
COPIES = 3
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(.+?::.+?)(?: - |$)", re.MULTILINE)


Outcome = tuple[int, str]
"""Pytest's exit code and its output."""


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> SimpleQueue[Path]:
    """Copies of the package and its tests that nobody works on; who has changed one restores it."""
    idle: SimpleQueue[Path] = SimpleQueue()
    for _ in range(COPIES):
        root = tmp_path_factory.mktemp("mutants")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, symlinks=True)
            else:
                shutil.copy2(ROOT / name, root / name)
        idle.put(root)
    return idle


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, copies: SimpleQueue[Path], redis_url: str
) -> Iterator[dict[str, Future[Outcome]]]:
    """What will come of the mutants that were asked for."""
    items = [item for item in request.session.items if item.name.startswith("test_the_tests_of_a_rule_fail")]
    chosen = {item.callspec.params["name"] for item in items}  # type: ignore[attr-defined]

    def tried(name: str) -> Outcome:
        root = copies.get()
        try:
            return try_mutant(root, PYTHON_MUTANTS[name], redis_url)
        finally:
            copies.put(root)

    with ThreadPoolExecutor(COPIES) as pool:
        yield {name: pool.submit(tried, name) for name in PYTHON_MUTANTS if name in chosen}
        pool.shutdown(cancel_futures=True)


def try_mutant(root: Path, mutant: PythonMutant, redis_url: str) -> Outcome:
    """Run the tests that guard a rule against a copy without it."""
    path = root / "django_rmq" / mutant.file
    text = path.read_text()
    path.write_text(mutant.applied_to(text))
    try:
        return run(root, mutant.caught_by, redis_url)
    finally:
        path.write_text(text)


def run(root: Path, tests: Iterable[str], redis_url: str) -> Outcome:
    """Run tests of a copy against the copy."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:schemathesis",
            *(f"tests/{test}" for test in tests),
        ],
        check=False,
        cwd=root,
        # Without bytecode of its own, a changed file cannot be mistaken for the one before it.
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("name", PYTHON_MUTANTS)
def test_the_tests_of_a_rule_fail_without_it(name: str, outcomes: dict[str, Future[Outcome]]) -> None:
    mutant = PYTHON_MUTANTS[name]
    code, output = outcomes[name].result(timeout=1_500)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), output[-4_000:]
    missed = [
        test for test in mutant.caught_by if not any(each.startswith(test) for each in FAILED.findall(output))
    ]
    assert not missed, f"{missed} do not notice: {mutant.rule}\n{output[-4_000:]}"


@pytest.mark.proof
@pytest.mark.deep
def test_these_tests_pass_with_all_rules(copies: SimpleQueue[Path], redis_url: str) -> None:
    tests = {test for mutant in PYTHON_MUTANTS.values() for test in mutant.caught_by}
    root = copies.get()
    try:
        code, output = run(root, sorted(tests), redis_url)
    finally:
        copies.put(root)
    assert code == pytest.ExitCode.OK, output[-4_000:]


@pytest.mark.parametrize("name", PYTHON_MUTANTS)
def test_a_mutant_changes_one_place_of_its_file(name: str) -> None:
    mutant = PYTHON_MUTANTS[name]
    text = (ROOT / "django_rmq" / mutant.file).read_text()
    changed = mutant.applied_to(text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    assert mutant.caught_by
    assert re.fullmatch(r"[A-Z].*\.", mutant.rule)


def test_a_text_that_is_not_there_once_is_no_mutant() -> None:
    mutant = PythonMutant("core/consumer/notes.py", "import", "", "A rule.", ("unit/test_notes.py",))
    with pytest.raises(ValueError, match=r"notes\.py contains \d+ times, not once"):
        mutant.applied_to((ROOT / "django_rmq" / mutant.file).read_text())
