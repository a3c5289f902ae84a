"""Each rule of the scripts, switched off, is noticed by the test that its mutant names; a survivor is a test that is missing.

Two processes work ahead, each with a Redis of its own; a test waits for what came of its mutant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from django_rmq.core import lua
from tests.proof.mutants import GONE, MUTANTS, As, If, Mutant, marks, switched_off
from tests.proof.runner import chosen, running


@pytest.fixture(scope="module")
def killers(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[list[str]]]]:
    """Who notices each of the mutants that were asked for."""
    asked = chosen(request)
    caught_by = {name: mutant.caught_by for name, mutant in MUTANTS.items() if name in asked}
    with running(2, "tests.proof.mutants", caught_by, BROKERS="redis") as found:
        yield found


@pytest.mark.proof
@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_is_switched_off_is_noticed(name: str, killers: dict[str, Future[list[str]]]) -> None:
    for killer in killers[name].result(timeout=600):
        assert killer.startswith("tests/"), f"{killer or 'nothing notices'}: {MUTANTS[name].rule}"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_file(name: str) -> None:
    changed = [file for file, text in lua.texts().items() if switched_off(name, text) != text]
    assert len(changed) == 1
    assert re.fullmatch(r"[A-Za-z].*\.", MUTANTS[name].rule)
    assert all(("[" in test) == test.endswith("]") for test in MUTANTS[name].caught_by)


def test_every_mark_has_a_mutant_and_every_script_of_a_slot_a_mark() -> None:
    marked = {name: set(marks(text)) for name, text in lua.sources().items()}
    assert set().union(*marked.values()) == {mutant.mark or name for name, mutant in MUTANTS.items()}
    assert [name for name in lua.names() if not marked[name]] == []


def test_a_mark_holds_for_its_line_or_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "if a then -- rule: x\n  b = 1\n  -- rule: y\n  c = 1\nend"
    for name, switch, switched in [
        ("x", If("false"), "if false then -- rule: x\n  b = 1\n  -- rule: y\n  c = 1\nend"),
        ("y", As("c = 2"), "if a then -- rule: x\n  b = 1\n  -- rule: y\n  c = 2\nend"),
        ("y", GONE, "if a then -- rule: x\n  b = 1\n  -- rule: y\n\nend"),
    ]:
        monkeypatch.setitem(MUTANTS, name, Mutant(switch, "A rule.", ("a test",)))
        assert switched_off(name, text) == switched
    monkeypatch.setitem(MUTANTS, "y", Mutant(If("false"), "A rule.", ("a test",)))
    with pytest.raises(ValueError, match="no condition"):
        switched_off("y", text)
