"""Each rule of the worker, switched off in a copy of the package, makes the tests fail that guard it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.proof.python_mutants import PYTHON_MUTANTS, PythonMutant

ROOT = Path(__file__).parents[2]
COPIED = ("django_rmq", "example_project", "tests", "manage.py", "pyproject.toml")
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(.+?::.+?)(?: - |$)", re.MULTILINE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its tests, which a test may change and restores."""
    root = tmp_path_factory.mktemp("mutants")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, symlinks=True)
        else:
            shutil.copy2(ROOT / name, root / name)
    return root


def run(root: Path, tests: Iterable[str], redis_url: str) -> tuple[int, str]:
    """Run tests of the copy against the copy; return pytest's exit code and its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
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
def test_the_tests_of_a_rule_fail_without_it(name: str, copy: Path, redis_url: str) -> None:
    mutant = PYTHON_MUTANTS[name]
    path = copy / "django_rmq" / mutant.file
    text = path.read_text()
    path.write_text(mutant.applied_to(text))
    try:
        code, output = run(copy, mutant.caught_by, redis_url)
    finally:
        path.write_text(text)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), output[-4_000:]
    missed = [
        test for test in mutant.caught_by if not any(each.startswith(test) for each in FAILED.findall(output))
    ]
    assert not missed, f"{missed} do not notice: {mutant.rule}\n{output[-4_000:]}"


@pytest.mark.proof
def test_these_tests_pass_with_all_rules(copy: Path, redis_url: str) -> None:
    tests = {test for mutant in PYTHON_MUTANTS.values() for test in mutant.caught_by}
    code, output = run(copy, sorted(tests), redis_url)
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
