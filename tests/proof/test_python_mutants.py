"""Each rule of the worker, switched off in a process that runs tests, makes the tests fail that guard it.

These tests wait more than they compute, so a few processes work ahead; a test waits for what came of its mutant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.proof.mutants import GONE, As, If, Mutant
from tests.proof.python_mutants import (
    PYTHON_MUTANTS,
    Argument,
    Function,
    Operand,
    Switch,
    Value,
    switched_off,
)
from tests.proof.python_switch import ROOT, changed_code, files_of, marked
from tests.proof.runner import chosen, running


@pytest.fixture(scope="module")
def killers(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[str]]]]:
    """Who notices each of the mutants that were asked for."""
    asked = chosen(request)
    caught_by = {name: mutant.caught_by for name, mutant in PYTHON_MUTANTS.items() if name in asked}
    with running(3, "tests.proof.python_switch", caught_by, TEST_PATIENCE="15") as found:
        yield found


@pytest.mark.proof
@pytest.mark.parametrize("name", PYTHON_MUTANTS)
def test_the_tests_of_a_rule_fail_without_it(name: str, killers: dict[str, Future[list[str]]]) -> None:
    mutant = PYTHON_MUTANTS[name]
    noticed = dict(zip(mutant.caught_by, killers[name].result(timeout=1_500), strict=True))
    missed = {test: killer for test, killer in noticed.items() if not killer.startswith("tests/")}
    assert not missed, f"{missed} do not notice: {mutant.rule}"


@pytest.mark.proof
@pytest.mark.deep
def test_these_tests_pass_with_all_rules() -> None:
    tests = {test for mutant in PYTHON_MUTANTS.values() for test in mutant.caught_by}
    with running(1, "tests.proof.python_switch", {"": tuple(sorted(tests))}) as found:
        assert set(found[""].result()) == {""}


@pytest.mark.parametrize("name", PYTHON_MUTANTS)
def test_a_mutant_changes_one_file(name: str) -> None:
    mutant, (file,) = PYTHON_MUTANTS[name], files_of(name)
    text = (ROOT / "django_rmq" / file).read_text()
    changed = switched_off(mutant, mutant.mark or name, text)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert changed_code(name), "only functions can be changed while they are used"
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
    mark: str, switch: Switch, old: str, new: str
) -> None:
    switched = switched_off(Mutant(switch, "A rule.", ("a test",)), mark, CODE)
    assert switched == CODE.replace(old, new.format(old))


@pytest.mark.parametrize(
    "switch", [If("False"), Operand(4, "True"), Argument(2, "None"), Argument("name", "None"), Function("f")]
)
def test_what_is_not_there_cannot_be_switched(switch: Switch) -> None:
    with pytest.raises(ValueError, match="mark: line 1 has nothing for"):
        switched_off(Mutant(switch, "A rule.", ("a test",)), "mark", "a = b and c  # rule: mark")
