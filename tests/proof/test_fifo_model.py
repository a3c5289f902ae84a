"""The order of a strict fifo slot, walked whole within its budgets; and each of its rules, switched off and found."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.proof.fifo_model import PROPERTIES, Budget, Rules, check

BUDGETS = {
    "failures and a lost reply": Budget(failures=2, timeouts=0, kills=0, lost=1),
    "a failure and a time-out": Budget(failures=1, timeouts=1, kills=0, lost=0),
    "a time-out and a kill": Budget(failures=0, timeouts=1, kills=1, lost=0),
    "three at once, and a failure": Budget(at_once=3, failures=2, timeouts=0, kills=1, lost=0),
}
WHOLE = {
    "everything": Budget(),
    "two time-outs": Budget(failures=1, timeouts=2, kills=0, lost=1),
    "four messages": Budget(messages=4, failures=1, timeouts=1, kills=1, lost=0),
}
MUTANTS = {
    "holds": ("ORDER", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "alone": ("ORDER", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "gate": ("ORDER", Budget(failures=0, timeouts=0, kills=0, lost=0)),
    "keeps_place": ("ORDER", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "stops": ("ORDER", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "stale_stops": ("ORDER", Budget(failures=0, timeouts=1, kills=0, lost=0)),
    "gives_back": ("CHARGE", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "blames_first": ("CHARGE", Budget(failures=0, timeouts=1, kills=0, lost=0)),
    "promotes": ("STUCK", Budget(failures=1, timeouts=0, kills=0, lost=0)),
    "is_last": ("LOSS", Budget(retries=0, failures=0, timeouts=2, kills=0, lost=0)),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_no_reachable_state_of_a_small_slot_breaks_a_property(name: str) -> None:
    verdict = check(Rules(), BUDGETS[name])
    print(f"\n{name}: {verdict.states:,} states")
    assert verdict.violations == {}


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("name", WHOLE)
def test_no_reachable_state_breaks_a_property(name: str) -> None:
    verdict = check(Rules(), WHOLE[name])
    print(f"\n{name}: {verdict.states:,} states")
    assert verdict.violations == {}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_switched_off_is_found(rule: str) -> None:
    broken, budget = MUTANTS[rule]
    assert broken in check(Rules().without(rule), budget).violations


def test_every_rule_has_its_mutant_and_every_property_is_broken_by_one() -> None:
    assert set(MUTANTS) == {field.name for field in fields(Rules)}
    assert {broken for broken, _ in MUTANTS.values()} == set(PROPERTIES)
