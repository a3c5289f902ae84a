"""Each rule of the worker, switched off in a copy of the package, makes the tests fail that guard it.

These tests wait more than they compute, so a few copies are worked on ahead; a test waits for what came of its mutant.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.proof import python_mutants
from tests.proof.database_mutants import DATABASE_MUTANTS
from tests.proof.mutants import GONE, As, If
from tests.proof.python_mutants import Argument, Function, Operand, PythonMutant, Value, marks, switched_off

ROOT = Path(__file__).parents[2]
PYTHON_MUTANTS = python_mutants.PYTHON_MUTANTS | DATABASE_MUTANTS
COPIED = ("django_rmq", "example_project", "tests", "manage.py", "pyproject.toml")
COPIES = 3
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(.+?::.+?)(?: - |$)", re.MULTILINE)


@cache
def marked() -> dict[str, list[str]]:
    """Return the files of the package that have each mark."""
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "django_rmq").rglob("*.py")):
        text = path.read_text()
        for mark in marks(text) if "# rule: " in text else ():
            files.setdefault(mark, []).append(path.relative_to(ROOT / "django_rmq").as_posix())
    return files


def files_of(name: str) -> list[str]:
    """Return the files that are marked for a mutant: always one."""
    return marked().get(PYTHON_MUTANTS[name].mark or name, [])


Outcome = tuple[int, str]
"""Pytest's exit code and its output."""


class Copy:
    """A copy of the package and its tests, and a process that runs tests there."""

    def __init__(self, root: Path, redis_url: str) -> None:
        self.root = root
        for name in COPIED:
            if (ROOT / name).is_dir():
                # Bytecode that others are just writing has another name a moment later.
                passing = shutil.ignore_patterns("*.pyc.*")
                shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=passing)
            else:
                shutil.copy2(ROOT / name, root / name)
        # Without bytecode of its own, a changed file cannot be mistaken for the one before it.
        ours = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "REDIS_URL": redis_url}
        ours["TEST_PATIENCE"] = "15"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.proof.copies"],
            cwd=root,
            env={**os.environ, **ours},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Iterable[str], *options: str) -> Outcome:
        """Run tests of the copy against the copy."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([*options, *(f"tests/{test}" for test in tests)]) + "\n")
        self.process.stdin.flush()
        code, output = json.loads(self.process.stdout.readline())
        return code, output

    def try_mutant(self, name: str) -> Outcome:
        """Run the tests that guard a rule against the copy without it."""
        mutant, (file,) = PYTHON_MUTANTS[name], files_of(name)
        path = self.root / "django_rmq" / file
        text = path.read_text()
        path.write_text(switched_off(mutant, mutant.mark or name, text))
        try:
            # Of one test, the first case that fails is enough.
            return self.run(mutant.caught_by, *(["-x"] if len(mutant.caught_by) == 1 else []))
        finally:
            path.write_text(text)

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[SimpleQueue[Copy]]:
    """Copies that nobody works on; who has changed one restores it."""
    made = [Copy(tmp_path_factory.mktemp("mutants"), redis_url) for _ in range(COPIES)]
    idle: SimpleQueue[Copy] = SimpleQueue()
    for copy in made:
        idle.put(copy)
    yield idle
    for copy in made:
        copy.close()


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, copies: SimpleQueue[Copy]
) -> Iterator[dict[str, Future[Outcome]]]:
    """What will come of the mutants that were asked for."""
    items = [item for item in request.session.items if item.name.startswith("test_the_tests_of_a_rule_fail")]
    chosen = {item.callspec.params["name"] for item in items}  # type: ignore[attr-defined]

    def tried(name: str) -> Outcome:
        copy = copies.get()
        try:
            return copy.try_mutant(name)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(COPIES) as pool:
        yield {name: pool.submit(tried, name) for name in PYTHON_MUTANTS if name in chosen}
        pool.shutdown(cancel_futures=True)


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
def test_these_tests_pass_with_all_rules(copies: SimpleQueue[Copy]) -> None:
    tests = {test for mutant in PYTHON_MUTANTS.values() for test in mutant.caught_by}
    copy = copies.get()
    try:
        code, output = copy.run(sorted(tests))
    finally:
        copies.put(copy)
    assert code == pytest.ExitCode.OK, output[-4_000:]


@pytest.mark.parametrize("name", PYTHON_MUTANTS)
def test_a_mutant_changes_one_file(name: str) -> None:
    mutant, (file,) = PYTHON_MUTANTS[name], files_of(name)
    text = (ROOT / "django_rmq" / file).read_text()
    changed = switched_off(mutant, mutant.mark or name, text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert mutant.caught_by
    assert re.fullmatch(r"[A-Z].*\.", mutant.rule)


def test_every_mark_has_a_mutant() -> None:
    assert set(marked()) == {mutant.mark or name for name, mutant in PYTHON_MUTANTS.items()}


CODE = """
# rule: condition
if a:
    é = f(b and c, g(d or e, key=1))  # rule: value
    # rule: lines
    # rule: function
    return g(é)[
        0
    ] if a else 1
"""


@pytest.mark.parametrize(
    ("mark", "switch", "old", "new"),
    [
        ("condition", If("False"), "if a:", "if False:"),
        ("function", If("False"), "if a else", "if False else"),
        ("value", Value("IT + IT"), "f(b and c, g(d or e, key=1))", "({0}) + ({0})"),
        ("value", GONE, "é = f(b and c, g(d or e, key=1))", "pass"),
        ("value", As("h()\nIT"), "é = f", "h()\n    {0}"),
        ("value", Operand(1, "True"), "b and c", "b and True"),
        ("value", Operand(3, "not IT"), "d or e", "d or not (e)"),
        ("value", Argument(1, "None"), "g(d or e, key=1)", "None"),
        ("value", Argument("key", "IT"), "key=1", "key=(1)"),
        ("function", Function("h"), "return g(", "return h("),
        ("lines", GONE, "return g(é)[\n        0\n    ] if a else 1", "pass"),
    ],
)
def test_a_mark_holds_for_its_statement_or_for_the_next(
    mark: str, switch: str | Operand | Argument, old: str, new: str
) -> None:
    switched = switched_off(PythonMutant(switch, "A rule.", ("a test",)), mark, CODE)
    assert switched == CODE.replace(old, new.format(old))


@pytest.mark.parametrize(
    "switch", [If("False"), Operand(4, "True"), Argument(2, "None"), Argument("name", "None"), Function("f")]
)
def test_what_is_not_there_cannot_be_switched(switch: str | Operand | Argument) -> None:
    with pytest.raises(ValueError, match="mark: line 1 has nothing for"):
        switched_off(PythonMutant(switch, "A rule.", ("a test",)), "mark", "a = b and c  # rule: mark")
