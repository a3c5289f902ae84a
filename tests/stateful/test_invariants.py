"""The invariants have one list of names, in the documentation and in the machine that checks them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.stateful import test_lockstep

ROOT = Path(__file__).parents[2]


def test_the_documented_invariants_are_those_that_the_machine_requires() -> None:
    documented = re.findall(r"^\| (INV-\d+) \|", (ROOT / "docs/state_machine.md").read_text(), re.MULTILINE)
    required = re.findall(r'require\(\s*"(INV-\d+)"', Path(test_lockstep.__file__).read_text())
    assert documented == [f"INV-{n + 1}" for n in range(len(documented))]
    assert set(documented) == set(required)


def test_the_places_named_in_the_documentation_are_methods_of_the_machine() -> None:
    rows = re.findall(
        r"^\| INV-\d+ \|.*\| (.*) \|$", (ROOT / "docs/state_machine.md").read_text(), re.MULTILINE
    )
    places = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(rows) >= 15 and all(hasattr(test_lockstep.Lockstep, name) for name in places), places
