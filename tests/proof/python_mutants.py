"""Rules of the worker, each switched off by a change to one place of its Python code.

This is the counterpart of `mutants`, which does the same to the scripts in Redis. `test_python_mutants` runs the tests.
"""

from __future__ import annotations

from typing import NamedTuple


class PythonMutant(NamedTuple):
    """One rule switched off: ``find`` occurs exactly once in the file and is replaced."""

    file: str
    """Relative to the package ``django_rmq``."""
    find: str
    replace: str
    rule: str
    """The rule that is switched off, in a sentence."""
    caught_by: tuple[str, ...]
    """The tests that must fail, relative to ``tests``."""

    def applied_to(self, text: str) -> str:
        """Return the file's text with the rule switched off."""
        if text.count(self.find) != 1:
            raise ValueError(f"{self.file} contains {text.count(self.find)} times, not once: {self.find}")
        return text.replace(self.find, self.replace)


DISPATCHER = "integration/test_dispatcher.py::test_"
DEFINITIONS = "integration/test_definitions.py::test_"
FOREIGN = "integration/test_foreign_values.py::test_"
CLUSTER = "integration/test_cluster.py::test_"
EXECUTOR = "integration/test_executor.py::test_"
TRIPS = "integration/test_dispatcher_trips.py::test_"

PYTHON_MUTANTS: dict[str, PythonMutant] = {
    # --- the dispatcher
    "prepares_without_its_epoch": PythonMutant(
        "consumer/dispatcher.py",
        "topic, place.slot, self.owner, place.epoch, limit,",
        "topic, place.slot, self.owner, None, limit,",
        "A worker shows its epoch, so that a later owner of the slot fences it.",
        (DISPATCHER + "a_fenced_worker_leaves_a_slot_alone_that_another_one_holds[memory]",),
    ),
    "keeps_what_it_was_fenced_from": PythonMutant(
        "consumer/dispatcher.py",
        'place.due, place.entry = float("inf"), 0\n        self._give_back_slot(place)',
        'place.due, place.entry = float("inf"), 0',
        "A fenced worker gives back what has not begun.",
        (DISPATCHER + "a_fenced_worker_gives_back_what_has_not_begun[memory]",),
    ),
    "forgets_what_it_told_before": PythonMutant(
        "consumer/dispatcher.py",
        "kept.messages |= settlement.messages\n            kept.repeated = True",
        "kept.messages |= settlement.messages",
        "A settlement whose answer was lost is known to be a repetition.",
        (TRIPS + "a_commit_whose_answer_is_lost_is_told_again",),
    ),
    # --- the executor
    "begins_without_half_a_time_out_left": PythonMutant(
        "consumer/executor.py",
        "now > batch.confirmed + half or ",
        "",
        "Nothing begins with less than half of its time-out left.",
        (
            EXECUTOR + "what_was_confirmed_longer_than_half_a_time_out_ago_does_not_begin[None]",
            DISPATCHER + "what_was_confirmed_too_long_ago_is_given_back_and_not_begun[memory]",
        ),
    ),
    # --- the heartbeat
    "never_gives_up": PythonMutant(
        "consumer/heartbeat.py",
        "if since is not None and now - since > batch.topic.max_runtime:",
        "if False:",
        "A delivery whose listener exceeds MAX_RUNTIME is not extended.",
        (DISPATCHER + "a_hung_listener_times_out_while_the_other_slots_of_its_thread_go_on[memory]",),
    ),
    # --- slots that others have acquired
    "stays_away_from_its_own": PythonMutant(
        "consumer/fences.py",
        "if place.fenced_at < confirmed]",
        "if False]",
        "A fenced slot is acquired again when the coordinator, asked since, says that it is ours.",
        (
            "integration/test_fences.py::test_a_worker_that_missed_an_assignment_goes_on_with_its_slots[memory]",
        ),
    ),
    "takes_an_old_answer_for_a_new_one": PythonMutant(
        "consumer/fences.py",
        "if place.fenced_at < confirmed]",
        "]",
        "What was asked before a slot was fenced does not say that it is ours.",
        ("unit/test_fences.py::test_only_a_later_question_gives_a_fenced_slot_back",),
    ),
    # --- messages that timed out
    "repeated_suspects_run_together": PythonMutant(
        "consumer/suspects.py",
        "any(one.is_last or (one.is_grave and kind.is_grave) for",
        "any(one.is_last for",
        "Messages that timed out repeatedly run one at a time.",
        (
            "unit/test_suspects.py::test_several_wait_and_run_in_their_order",
            DISPATCHER + "messages_that_timed_out_repeatedly_run_one_at_a_time_and_hold_up_no_other[memory]",
        ),
    ),
    "every_suspect_waits": PythonMutant(
        "consumer/suspects.py",
        "GRAVE = 2",
        "GRAVE = 1",
        "A message that timed out once holds up no other one.",
        (DISPATCHER + "a_slow_message_that_timed_out_once_holds_up_no_other_and_nothing_behind_it[memory]",),
    ),
    "the_last_try_has_company": PythonMutant(
        "consumer/suspects.py",
        "_Kind(left == 0, ",
        "_Kind(False, ",
        "A message on its last try runs beside no suspect.",
        ("unit/test_suspects.py::test_who_waits_is_not_overtaken_by_one_that_it_is_kept_apart_from",),
    ),
    # --- what a dead process leaves
    "left_to_its_time_out": PythonMutant(
        "consumer/notes.py",
        "telling.rollback(topic, slot, receipt, failures)",
        "continue",
        "What ran in a process that is dead is charged at once.",
        (
            "unit/test_notes.py::test_what_ran_in_a_dead_process_rests_as_after_a_time_out_and_is_handed_out_alone",
        ),
    ),
    "given_back_for_nothing": PythonMutant(
        "consumer/notes.py",
        'end = "released" if is_done is None else',
        'end = "released" if not is_done else',
        "What ran in a process that is dead may have killed it, and spends a retry.",
        ("unit/test_notes.py::test_a_message_without_retries_that_ran_in_a_dead_process_is_dead",),
    ),
    # --- what strangers write
    "a_foreign_value_ends_the_process": PythonMutant(
        "broker.py",
        "except (ArithmeticError, LookupError, TypeError, ValueError) as error:",
        "except ZeroDivisionError as error:",
        "A value that cannot be read is an error of its slot.",
        (
            FOREIGN + "foreign_values_stop_their_slot_at_most_and_nothing_when_they_are_gone[before]",
            FOREIGN + "a_value_that_cannot_be_read_is_named",
        ),
    ),
    # --- definitions
    "changed_under_workers": PythonMutant(
        "definitions.py",
        "if unfollowed and serving:",
        "if False:",
        "What running workers would not follow is not applied.",
        (DEFINITIONS + "rmqtopics_does_not_apply_what_running_workers_would_not_follow[timeout]",),
    ),
    # --- a Redis Cluster
    "what_never_ran_is_refused": PythonMutant(
        "cluster.py",
        "if errand.repeat and isinstance(errand.reply, (AskError, NoScriptError)):",
        "if False:",
        "What no node has run in time may be tried again.",
        (
            CLUSTER + "scripts_that_a_node_forgets_again_and_again_are_trouble_of_that_node",
            CLUSTER + "a_slot_whose_nodes_all_say_that_it_is_elsewhere_is_trouble_of_its_node[script]",
        ),
    ),
}

__all__ = ["PYTHON_MUTANTS", "PythonMutant"]
