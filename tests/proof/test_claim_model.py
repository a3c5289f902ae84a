"""The protocol of claims, walked whole within its budgets; and each of its rules, switched off and found."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.proof.claim_model import PROPERTIES, Budget, Rules, check

MUTANTS = {
    "same_rows": "LOSS", "ack_committed": "LOSS", "ack_sealed": "LOSS", "lost_is_lost": "LOSS",
    "orphans": "STUCK", "gate": "GATE", "finish_ack": "STUCK",
}  # fmt: skip


def test_no_reachable_state_of_claims_breaks_a_property() -> None:
    verdict = check(Rules(), Budget())
    print(f"\n{verdict.states:,} states")
    assert verdict.violations == {}
    assert verdict.states > 1_000


@pytest.mark.proof
@pytest.mark.deep
def test_nor_does_one_with_more_of_everything() -> None:
    verdict = check(Rules(), Budget(sends=3, crashes=3, leases=3, late=2))
    print(f"\n{verdict.states:,} states")
    assert verdict.violations == {}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_of_claims_switched_off_is_found(rule: str) -> None:
    verdict = check(Rules().without(rule), Budget())
    print(f"\n{rule}: {verdict.violations}")
    assert MUTANTS[rule] in verdict.violations


def test_every_rule_of_claims_has_its_mutant() -> None:
    assert set(MUTANTS) == {field.name for field in fields(Rules)}
    assert set(MUTANTS.values()) == set(PROPERTIES)
