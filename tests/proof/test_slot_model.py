"""The protocol, walked whole within its budgets; and each of its rules, switched off and found."""

from dataclasses import fields

import pytest

from tests.proof.slot_model.rules import PROPERTIES, Budget, Rules
from tests.proof.slot_model.walk import Verdict, check

SMALL = {
    "one message, a lost reply, a hand-over": Budget(sends=2, lost=1, handovers=1),
    "one message of range_merge, a person": Budget(topic_type="range_merge", sends=2, handovers=1, persons=1),
    "one message without a gate": Budget(serial=False, sends=2, lost=1),
    "two messages, a hand-over": Budget(members=2, sends=2, handovers=1, max_retries=1),
    "one message, a push": Budget(sends=2, pushes=1, lost=1, handovers=1, max_retries=1),
    "two messages, a push": Budget(members=2, sends=2, pushes=1, max_retries=1, backoffs=(0,), releases=1),
    "a foreign producer": Budget(sends=1, foreign=1, handovers=1, persons=1),
    "a clock that jumps": Budget(sends=1, handovers=1, jumps=1, lost=1, timeout=2, jump=2, max_retries=1),
}

WHOLE = {
    "one message, a crash": Budget(sends=2, lost=1, crashes=1, handovers=1, rejects=1, max_retries=1),
    "one message, three sends": Budget(sends=3, lost=1, handovers=1),
    "one message, two lost replies, a crash": Budget(
        sends=2, lost=2, crashes=1, handovers=1, max_retries=1, backoffs=(0,)
    ),
    "one message, a person": Budget(sends=2, lost=1, handovers=1, persons=1),
    "one message, two persons": Budget(sends=1, crashes=1, handovers=1, persons=2, rejects=1),
    "one message of range_merge": Budget(
        topic_type="range_merge", sends=2, lost=1, handovers=1, persons=1, max_retries=1
    ),
    "one message without a gate, a crash": Budget(serial=False, sends=2, lost=1, crashes=1),
    "one message without a gate, a person": Budget(serial=False, sends=2, lost=1, persons=1),
    "two messages, everything at once": Budget(
        members=2, sends=2, lost=1, crashes=1, handovers=1, max_retries=1, backoffs=(0,)
    ),
    "one message, two pushes, a crash": Budget(
        sends=2, pushes=2, lost=1, crashes=1, handovers=1, max_retries=1, backoffs=(0,)
    ),
    "two messages, a push, a hand-over": Budget(
        members=2, sends=2, pushes=1, lost=1, handovers=1, max_retries=1, backoffs=(0,), releases=1
    ),
    "two messages, a person": Budget(
        members=2, sends=2, handovers=1, persons=1, max_retries=1, backoffs=(0,), releases=1
    ),
    "two messages without a gate": Budget(
        members=2, serial=False, sends=2, lost=1, max_retries=1, backoffs=(0,), releases=1
    ),
    "a foreign producer of range_merge": Budget(
        topic_type="range_merge", sends=1, foreign=1, lost=1, handovers=1, persons=1, max_retries=1
    ),
    "a longer time-out": Budget(
        sends=1, lost=1, crashes=1, handovers=1, timeout=4, jumps=1, jump=2, max_retries=1
    ),
}

ONE = Budget(sends=2, handovers=1, lost=1)
TWO = Budget(members=2, sends=2, handovers=1, persons=1)

MUTANTS = {
    "receipts": ("LOSS", ONE),
    "keep_newer": ("EARLY", ONE),
    "gate": ("OVERLAP", TWO),
    "fence": ("ORPHAN", ONE),
    "held": ("ORPHAN", ONE),
    "held_is_extended": ("OVERLAP", Budget(sends=1, lost=1, handovers=1, timeout=2)),
    "skip_in_flight": ("OVERLAP", Budget(sends=2, serial=False)),
    "supersede": ("EARLY", ONE),
    "marks": ("RESURRECT", Budget(sends=1, persons=1)),
    "leave_prepare": ("OVERLAP", TWO),
    "release_refunds": ("BUDGET", ONE),
    "release_original": ("BUDGET", ONE),
    "release_earlier": ("LATE", Budget(topic_type="range_merge")),
    "fresh_before_retry": ("EARLY", Budget(topic_type="range_merge")),
    "release_is_final": ("OVERLAP", Budget(members=2, sends=2, lost=2, handovers=1)),
    "time_out_waits": ("OVERLAP", ONE),
    "promote_drops": ("EARLY", Budget(sends=1, foreign=1)),
    "prepare_drops_retry": ("BUDGET", Budget(sends=1, foreign=1)),
    "start_in_time": ("OVERLAP", ONE),
    "one_thread": ("OVERLAP", TWO),
    "owners_are_new": ("OVERLAP", TWO),
    "dead_apart": ("GRAVE", Budget(sends=2)),
    "fenced_asks_again": ("STUCK", Budget(sends=1, lost=1, handovers=1)),
    "push_keeps_age": ("OVERLAP", Budget(sends=1, pushes=1, handovers=1, timeout=2)),
    "push_to_holder": ("OVERLAP", Budget(members=2, sends=2, pushes=1, handovers=1)),
    "push_alone": ("OVERLAP", Budget(members=2, sends=2, pushes=1, handovers=1)),
    "push_is_missed": ("ORPHAN", Budget(sends=1, pushes=1, lost=1)),
    "drop_is_counted": ("LEDGER", Budget(sends=2)),
}


def told(name: str, verdict: Verdict) -> Verdict:
    print(f"\n{name}: {verdict}")
    return verdict


@pytest.mark.parametrize("name", SMALL)
def test_no_reachable_state_of_a_small_slot_breaks_a_property(name):
    verdict = told(name, check(Rules(), SMALL[name]))
    assert verdict.violations == {}
    assert verdict.complete


@pytest.mark.proof
@pytest.mark.deep
@pytest.mark.parametrize("name", WHOLE)
def test_no_reachable_state_breaks_a_property(name):
    verdict = told(name, check(Rules(), WHOLE[name]))
    assert verdict.violations == {}
    assert verdict.complete


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_switched_off_is_found(rule):
    broken, budget = MUTANTS[rule]
    # STUCK is known only when everything has been walked; the others end the walk with their shortest trace. What the
    # counters say is left to the one rule about counters: a breach that a listener would notice is worth more.
    others = tuple(name for name in PROPERTIES if name not in {"STUCK", "LEDGER"})
    properties = (broken,) if broken in {"STUCK", "LEDGER"} else others
    verdict = told(
        rule, check(Rules().without(rule), budget, properties=properties, stop_at_first=broken != "STUCK")
    )
    assert list(verdict.violations) == [broken]


def test_every_rule_has_its_mutant():
    assert set(MUTANTS) == {field.name for field in fields(Rules)}


def test_every_property_is_broken_by_some_mutant():
    assert {broken for broken, _ in MUTANTS.values()} == set(PROPERTIES)


def test_half_a_time_out_of_slack_absorbs_a_jump_of_the_clock():
    budget = Budget(sends=1, handovers=1, jumps=1, timeout=2, jump=1, jump_excuses=False)
    verdict = told("jump of half a time-out", check(Rules(), budget))
    assert verdict.violations == {}
    assert verdict.complete


def test_a_jump_beyond_half_a_time_out_is_the_limit_of_the_promise():
    budget = Budget(sends=1, handovers=1, jumps=1, timeout=2, jump=2, jump_excuses=False)
    verdict = told("jump beyond half a time-out", check(Rules(), budget, stop_at_first=True))
    assert list(verdict.violations) == ["OVERLAP"]


def test_the_shortest_trace_of_a_lost_message_reads_as_a_story():
    verdict = check(Rules().without("receipts"), ONE, properties=("LOSS",), stop_at_first=True)
    assert verdict.violations["LOSS"] == [
        "send(a, due now)",
        "w0 prepares a",
        "send(a, due now)",
        "w1 is given the slot and acquires it; the other is not told",
        "w0 starts the listener of a",
        "w0 listener of a ok",
        "w0 commits a, the reply is lost",
        "w1 prepares a",
        "w0 commits a",
    ]


def test_a_walk_that_was_cut_short_does_not_call_itself_complete():
    assert not check(Rules(), Budget(sends=2, max_states=100)).complete
